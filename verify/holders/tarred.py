"""Files of a source distribution: a gzip-compressed tar with one top directory.

Compressed tars can only be read from front to back, so everything is hashed in one pass.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from verify.digest import CHUNK, Digest, Progress, ReadError, digest
from verify.errors import ConfigError
from verify.forward import Forward
from verify.holders import READ_LIMIT, Defect, Item
from verify.manifest import path_problem

TOTAL_LIMIT = 8 << 30
MEMBER_COUNT_LIMIT = 200_000

_ERRORS = (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, RecursionError)


class _Unpacked(Forward):
    """What a gzip stream unpacks to."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        super().__init__(READ_LIMIT, TOTAL_LIMIT)
        self._stream = stream

    def _take(self, size: int) -> bytes:
        return self._stream.read(size)


class SdistHolder:
    """The files of the archive at ``file``, without their top directory.

    Everything is read by the constructor, once.

    Raises:
        ConfigError: when the file cannot be opened at all.
    """

    archive = True

    def __init__(self, file: Path, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self._top: str | None = None
        self._items: dict[str, Item] = {}
        self._digests: dict[str, Digest | ReadError] = {}
        self._defects: list[Defect] = []
        try:
            with self._open() as stream:
                self._list(stream)
        except _ERRORS as error:
            self._damaged(error)

    @property
    def items(self) -> Mapping[str, Item]:
        """The plain files."""
        return self._items

    @property
    def defects(self) -> Sequence[Defect]:
        """Links, devices, duplicates, unusual names, and a damaged archive."""
        return self._defects

    @property
    def top(self) -> str | None:
        """The name of the top directory."""
        return self._top

    def digests(self, git: Collection[str], progress: Progress) -> Mapping[str, Digest | ReadError]:
        """Return what the constructor hashed: every file, with its git blob id."""
        return self._digests

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield one item's bytes, whole; raises :class:`~verify.digest.ReadError`."""
        yield self.read(path)

    def read(self, path: str) -> bytes:
        """Return one file's bytes, by reading the archive again up to it.

        Raises:
            ReadError: when it cannot be read, or is larger than ``READ_LIMIT``.
        """
        try:
            with self._open() as stream, _archive(stream) as archive:
                for member in archive:
                    if member.name == f"{self._top}/{path}":
                        content = archive.extractfile(member)
                        if content is not None and member.size <= READ_LIMIT:
                            return content.read()
        except _ERRORS as error:
            raise ReadError(path, "a readable file", str(error)) from error
        raise ReadError(path, f"a file of at most {READ_LIMIT} bytes", "none")

    def _open(self) -> gzip.GzipFile:
        try:
            return gzip.open(self._file, "rb")
        except OSError as error:
            raise ConfigError(f"{self._file}: cannot be opened: {error.strerror}") from error

    def _list(self, stream: gzip.GzipFile) -> None:
        with _archive(stream) as archive:
            for count, member in enumerate(archive, start=1):
                if count > MEMBER_COUNT_LIMIT:
                    raise tarfile.ReadError(f"more than {MEMBER_COUNT_LIMIT} members")
                plain = member.isreg() and not member.issparse()
                self._add(member, archive.extractfile(member) if plain else None)
        while stream.read(CHUNK):
            pass  # the checksum stands behind the last member

    def _damaged(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        message = "the archive cannot be read to its end"
        self._defects.append(Defect("PKG-1", None, message, "a gzip-compressed tar", reason))

    def _add(self, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        top, _, path = member.name.partition("/")
        if self._top is None:
            self._top = top
        problem = path_problem(member.name)
        if problem is not None:
            self._defect("TREE-5", member.name, "an ordinary name", problem)
        elif top != self._top:
            self._defect("PKG-1", member.name, f"one top directory, {self._top}", top)
        elif member.isdir():
            return
        elif content is None or not path:
            self._defect("TREE-5", path or top, "a regular file", _kind(member))
        elif path in self._items:
            self._defect("PKG-1", path, "each name once", "two members of this name")
        else:
            chunks = iter(lambda: content.read(CHUNK), b"")
            found = digest(chunks, member.size, git=True, progress=self._progress)
            self._items[path] = Item(member.size, member.mode & 0o7777)
            self._digests[path] = found

    def _defect(self, check: str, path: str, expected: str, actual: str) -> None:
        self._defects.append(
            Defect(check, path, f"expected {expected}, found {actual}", expected, actual)
        )


def _archive(stream: gzip.GzipFile) -> tarfile.TarFile:
    return tarfile.TarFile(fileobj=_Unpacked(stream), mode="r")


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym():
        return "a symbolic link"
    if member.islnk():
        return "a hard link"
    if member.issparse():
        return "a sparse file"
    return f"an entry of type {member.type!r}"
