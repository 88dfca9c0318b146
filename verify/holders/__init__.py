"""Where the bytes of a subject live: a directory, a zip archive, a compressed tar.

One role, :class:`Holder`, and one class per place. A holder lists plain files and reads
them; whatever is not a plain file with an ordinary name becomes a :class:`Defect`, never an
exception. Holders never decide what should be there. Called by :mod:`verify.judge`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from verify.digest import Digest, Progress, ReadError

READ_LIMIT = 64 << 20
"""No file that is read whole (sources, RECORD, JSON) is larger."""


@dataclass(frozen=True, slots=True)
class Item:
    """A plain file: its size in bytes, permission bits, and time of change where one counts."""

    size: int
    mode: int
    mtime: int = 0


@dataclass(frozen=True, slots=True)
class Defect:
    """An entry that no build of ours contains, and the check that it fails."""

    check: str
    path: str | None
    message: str
    expected: str | None = None
    actual: str | None = None


def hidden(holder: Holder, path: str) -> bool:
    """Whether a missing ``path`` is explained by a defect: its own, or a directory's above it.

    A defect without a path, such as a damaged archive, explains every missing file.
    """
    broken = {defect.path for defect in holder.defects}
    if None in broken:
        return True
    parts = path.split("/")
    return any("/".join(parts[:length]) in broken for length in range(1, len(parts) + 1))


def collect(chunks: Iterable[bytes], path: str) -> bytes:
    """Return the bytes of a file that is read whole.

    Raises:
        ReadError: when there are more than :data:`READ_LIMIT`; ``path`` names the file.
    """
    parts: list[bytes] = []
    seen = 0
    for chunk in chunks:
        seen += len(chunk)
        if seen > READ_LIMIT:
            raise ReadError(path, f"at most {READ_LIMIT} bytes", "more")
        parts.append(chunk)
    return b"".join(parts)


def no_path(_path: str) -> bool:
    """Choose no path."""
    return False


class Holder(Protocol):
    """The files of a subject by POSIX path."""

    archive: bool
    """Whether an unreadable file means a damaged archive."""

    @property
    def items(self) -> Mapping[str, Item]:
        """The plain files."""

    @property
    def defects(self) -> Sequence[Defect]:
        """Everything else that was found."""

    def digests(self, git: Collection[str], progress: Progress) -> Mapping[str, Digest | ReadError]:
        """Hash every item; those in ``git`` get their git blob id, too."""

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield one item's bytes; raises :class:`~verify.digest.ReadError`."""

    def read(self, path: str) -> bytes:
        """Return one item's bytes.

        Raises:
            ReadError: when it cannot be read, or is larger than :data:`READ_LIMIT`.
        """
