"""The errors of :mod:`verify`: every one names the thing, what was expected and what was found."""

from __future__ import annotations


class VerifyError(Exception):
    """Base of everything that this package raises on purpose."""


class FormatError(VerifyError):
    """Bytes that are not what their format allows.

    Attributes:
        what: the thing that was read, usually a file's path.
        where: the place inside it (a line, a key), or "" for the whole.
        problem: what was expected and what was found.
    """

    def __init__(self, what: str, where: str, problem: str) -> None:
        self.what = what
        self.where = where
        self.problem = problem
        place = f"{what}: {where}" if where else what
        super().__init__(f"{place}: {problem}")


class ConfigError(VerifyError):
    """A call, an option or a file beside the subject that leaves nothing to judge with."""
