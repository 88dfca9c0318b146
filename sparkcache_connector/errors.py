"""What can be wrong before serving starts, each error with its thing, finding and next step.

Startup refuses; serving never does. Errors of this module therefore reach the operator at
start (or a command's user) and nothing else: while the engine runs, the callers turn every
failure into a miss with a counted reason.
"""

from __future__ import annotations


class SparkCacheError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        thing: what was examined: an option, a file, a field.
        expected: what would have been accepted.
        found: what was there instead.
        next_step: what the reader can do about it, as a sentence without its full stop.
    """

    def __init__(self, thing: str, *, expected: str, found: str, next_step: str) -> None:
        self.thing = thing
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(f"{thing}: expected {expected}, found {found}; {next_step}")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (workers to engine core) by pickle, and the
        # default protocol would call the constructor with the message alone.
        return (_rebuild, (type(self), self.thing, self.expected, self.found, self.next_step))


def _rebuild(
    kind: type[SparkCacheError], thing: str, expected: str, found: str, next_step: str
) -> SparkCacheError:
    return kind(thing, expected=expected, found=found, next_step=next_step)


class ConfigError(SparkCacheError):
    """An option is unknown, malformed, contradictory or would be silently wrong."""


class IdentityError(SparkCacheError):
    """Something that decides whether bytes are reusable is not known."""


class ContractError(SparkCacheError):
    """The installed vLLM is not one coherent tree that this connector knows."""


class GeometryError(SparkCacheError):
    """The engine's KV cache layout is one whose bytes cannot be told apart safely."""
