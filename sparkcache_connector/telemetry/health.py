"""What keeps a rank from storing or restoring, on one page of disk for ``sparkcache doctor``.

The page is written whole when the engine starts and in place afterwards, so that a full disk
can still say that it is full. It outlives the engine: what a killed one suffered is there to
be read. A reader that meets a page being written sees none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

SCHEMA: Final = "sparkcache-health/v1"
DIRECTORY: Final = "health"
_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One rank's state.

    Attributes:
        pid: the engine process that wrote it.
        off: why ``publish`` or ``restore`` does nothing at present.
        failures: since the engine started, reasons and how often: of ``restores``, of
            ``publications``, and of ``roots`` that were there at the start and cannot be served.
    """

    pid: int
    off: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """One page: JSON, filled up with blanks."""
        document = {"schema": SCHEMA, **asdict(self)}
        data = json.dumps(document, sort_keys=True).encode("ascii")
        if len(data) > _BYTES:
            raise ValueError(f"a state of {len(data)} bytes is larger than its page of {_BYTES}")
        return data.ljust(_BYTES)

    @classmethod
    def parse(cls, data: bytes) -> Health | None:
        """Read a page; None if it is torn, or of another release."""
        try:
            document = json.loads(data)
            if document.pop("schema") != SCHEMA:
                return None
            state = cls(**document)
            wanted = {
                "pid": int(state.pid),
                "off": {str(what): str(why) for what, why in state.off.items()},
                "failures": {
                    str(what): {str(why): int(times) for why, times in reasons.items()}
                    for what, reasons in state.failures.items()
                },
            }
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None
        return state if asdict(state) == wanted else None


class HealthPage:
    """The file of one rank, kept open by the engine that runs.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._written: Health | None = None

    def write(self, health: Health) -> None:
        """Replace the page unless it says the same already.

        Raises:
            OSError: the disk does not take it.
        """
        if health != self._written:
            os.pwrite(self._file, health.to_bytes(), 0)
            self._written = health

    def close(self) -> None:
        """Close the file; the page stays."""
        os.close(self._file)


def read_health(path: Path) -> Health | None:
    """What a rank left there; None if there is nothing that can be read."""
    try:
        with path.open("rb") as file:
            return Health.parse(file.read(_BYTES))
    except OSError:
        return None
