"""Parsers of option values: each takes what JSON or an environment gave and returns one type.

They accept the usual spellings of a value and refuse everything else: an option that is
quietly read as its opposite costs more than a start that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class RefusedValueError(Exception):
    """The value is not one of those accepted; ``expected`` says which are."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        super().__init__(expected)


def boolean(raw: object) -> bool:
    """``true``/``yes``/``on``/``1`` and their opposites in any case, or JSON's own."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw in (0, 1):
        return bool(raw)
    if isinstance(raw, str):
        folded = raw.strip().casefold()
        if folded in _TRUE:
            return True
        if folded in _FALSE:
            return False
    raise RefusedValueError("true or false (also yes/no, on/off, 1/0)")


def auto_or_switch(raw: object) -> str:
    """``auto``, or a boolean in any of its spellings as ``on`` or ``off``."""
    if isinstance(raw, str) and raw.strip().casefold() == "auto":
        return "auto"
    try:
        return "on" if boolean(raw) else "off"
    except RefusedValueError:
        raise RefusedValueError("auto, or true or false (also yes/no, on/off, 1/0)") from None


def integer(low: int, high: int) -> Callable[[object], int]:
    """Whole numbers from ``low`` to ``high``, as JSON numbers or decimal text."""

    def parse(raw: object) -> int:
        value = _whole_number(raw)
        if value is None or not low <= value <= high:
            raise RefusedValueError(f"a whole number from {low} to {high}")
        return value

    return parse


def one_of_integers(*allowed: int) -> Callable[[object], int]:
    """Exactly one of a few whole numbers."""

    def parse(raw: object) -> int:
        value = _whole_number(raw)
        if value is None or value not in allowed:
            raise RefusedValueError("one of " + ", ".join(map(str, allowed)))
        return value

    return parse


def one_of(*allowed: str) -> Callable[[object], str]:
    """Exactly one of a few words; underscores and case are forgiven."""

    def parse(raw: object) -> str:
        if isinstance(raw, str):
            folded = raw.strip().casefold().replace("_", "-")
            if folded in allowed:
                return folded
        raise RefusedValueError("one of " + ", ".join(allowed))

    return parse


def text(raw: object) -> str:
    """Free text of at most 256 characters without control characters."""
    if isinstance(raw, str) and len(raw) <= 256 and raw.isprintable():
        return raw
    raise RefusedValueError("text of at most 256 printable characters")


def absolute_path(raw: object) -> str:
    """An absolute path without ``..``; empty means that none is given."""
    if isinstance(raw, str) and "\0" not in raw:
        path = PurePosixPath(raw)
        if not raw or (path.is_absolute() and ".." not in path.parts):
            return str(path) if raw else ""
    raise RefusedValueError("an absolute path without '..'")


def sha256(raw: object) -> str:
    """Sixty-four lower-case hexadecimal digits; empty means that none is given."""
    if isinstance(raw, str) and (not raw or _SHA256.fullmatch(raw)):
        return raw
    raise RefusedValueError("64 lower-case hexadecimal digits")


def _whole_number(raw: object) -> int | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and _INTEGER.fullmatch(raw.strip()):
        return int(raw)
    return None
