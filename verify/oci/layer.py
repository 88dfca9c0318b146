"""One layer: hashed once from front to back while its entries are listed, then read anywhere.

A layer is a tar archive, as it is or gzip-compressed. Compressed bytes can only be inflated
from a known state, so every so often the inflater's state is kept: a file's bytes are then
found by inflating a few megabytes, and nothing has to be unpacked to a disk.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from verify.digest import CHUNK, Progress, ReadError, quiet
from verify.errors import VerifyError
from verify.forward import Forward

TOTAL_LIMIT = 256 << 30
"""No layer expands further."""

ENTRY_LIMIT = 1_000_000
"""No layer has more entries."""

HEADER_LIMIT = 1 << 20
"""No extended header is larger: a path has at most 4 KiB, attributes at most 64 KiB."""

COMPRESSION: Mapping[str, str] = {
    "application/vnd.oci.image.layer.v1.tar": "none",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "none",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}

_STEP = 32 << 20  # bytes between two states that are kept, about 40 KiB each
_PACKED = 1 << 16
_PIECE = 1 << 18
_GZIP = 16 + zlib.MAX_WBITS
_ERRORS = (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, OverflowError)
_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "named pipe",
}


class DamagedError(VerifyError):
    """A layer whose entries cannot all be listed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the archive, as it is written there. ``kind`` is a word for people."""

    name: str
    kind: str
    mode: int
    size: int
    mtime: int
    target: str
    offset: int


@dataclass(frozen=True, slots=True)
class _State:
    """The inflater where ``packed`` bytes have gone in and ``plain`` bytes have come out."""

    packed: int
    plain: int
    inflate: zlib._Decompress
    begun: bool = False


class Layer:
    """The layer in ``file``; use it as a context manager.

    Args:
        file: the blob.
        compression: ``none`` or ``gzip``.

    Raises:
        ReadError: when the file cannot be opened.
    """

    def __init__(self, file: Path, compression: str) -> None:
        self._gzip = compression == "gzip"
        try:
            self._descriptor = os.open(
                file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
            self.packed_size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise ReadError(file.name, "a readable file", error.strerror or str(error)) from error
        self.sha256 = ""
        self.diff_id = ""
        self._states: list[_State] = []
        self._idle: _Inflated | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._descriptor)

    def entries(self, progress: Progress = quiet) -> Iterator[Entry]:
        """Yield the entries in their order, once; then ``sha256`` and ``diff_id`` are known.

        Raises:
            DamagedError: when the archive cannot be read to its end, or could be read in two
                ways. The digest of the blob is known all the same.
        """
        source = _Packed(self._descriptor, 0, hashlib.sha256(), progress)
        plain: _Packed | _Inflated = source
        if self._gzip:
            plain = _Inflated(source, _State(0, 0, zlib.decompressobj(_GZIP)), self._states)
        stream = _Hashed(plain)
        try:
            yield from _entries(stream)
            self.diff_id = stream.finish()
        except _ERRORS as error:
            raise DamagedError(str(error) or type(error).__name__) from error
        except RecursionError as error:
            raise DamagedError("headers of headers without end") from error
        finally:
            self.sha256 = source.finish()

    def chunks(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield ``size`` plain bytes from ``offset`` on; ``name`` names them in errors.

        Raises:
            ReadError: when they are not there.
        """
        left = size
        try:
            for chunk in self._from(offset, size):
                left -= len(chunk)
                yield chunk
        except _ERRORS as error:
            raise ReadError(name, "bytes of a layer", str(error)) from error
        if left:
            raise ReadError(name, f"{size} bytes", f"{size - left}")

    def _from(self, offset: int, size: int) -> Iterator[bytes]:
        if not self._gzip:
            source = _Packed(self._descriptor, offset)
            while size and (chunk := source.read(min(size, CHUNK))):
                size -= len(chunk)
                yield chunk
            return
        # files are asked for in the order of their bytes: most often the last reader goes on
        reader, self._idle = self._idle, None
        if reader is None or not 0 <= offset - reader.at < _STEP:
            state = next(each for each in reversed(self._states) if each.plain <= offset)
            reader = _Inflated(_Packed(self._descriptor, state.packed), state)
        while reader.at < offset and reader.read(min(CHUNK, offset - reader.at)):
            pass
        while size and (chunk := reader.read(min(size, CHUNK))):
            size -= len(chunk)
            yield chunk
        self._idle = reader


class _Packed:
    """The bytes of the blob from ``at`` on, hashed on the way when a hash is given."""

    def __init__(
        self,
        descriptor: int,
        at: int,
        sha256: hashlib._Hash | None = None,
        progress: Progress = quiet,
    ) -> None:
        self._descriptor = descriptor
        self._sha256 = sha256
        self._progress = progress
        self.at = at

    def read(self, limit: int) -> bytes:
        """Return at most ``limit`` bytes; none at the end."""
        data = os.pread(self._descriptor, limit, self.at)
        self.at += len(data)
        if self._sha256 is not None:
            self._sha256.update(data)
            self._progress(len(data))
        return data

    def finish(self) -> str:
        """Read what is left; return the digest of the whole blob, empty when unreadable."""
        try:
            while self.read(CHUNK):
                pass
        except OSError:
            return ""
        return self._sha256.hexdigest() if self._sha256 is not None else ""


class _Inflated:
    """The plain bytes of a gzip stream of one or more members, from a state on.

    States on the way are added to ``states``.
    """

    def __init__(
        self, source: _Packed, state: _State, states: MutableSequence[_State] | None = None
    ) -> None:
        self._source = source
        self._inflate = state.inflate.copy()
        self._states = states
        self._rest = b""
        self._begun = state.begun
        self.at = state.plain
        if states is not None:
            states.append(state)

    def read(self, limit: int) -> bytes:
        """Return at most ``limit`` bytes; none at the end.

        Raises:
            zlib.error: for bytes that are no gzip stream, also behind the last member.
            EOFError: when the stream is cut short.
        """
        while True:
            if not self._rest:
                self._keep()
                self._rest = self._source.read(_PACKED)
                if not self._rest and not self._begun:
                    return b""  # between two members
            ended = not self._rest
            data = self._inflate.decompress(self._rest, limit)
            self._begun = True
            if self._inflate.eof:
                self._rest = self._inflate.unused_data
                self._inflate = zlib.decompressobj(_GZIP)
                self._begun = False
            else:
                self._rest = self._inflate.unconsumed_tail
                if ended and not data:
                    raise EOFError("the compressed stream is cut short")
            self.at += len(data)
            if data:
                return data

    def _keep(self) -> None:
        if self._states is not None and self.at - self._states[-1].plain >= _STEP:
            self._states.append(_State(self._source.at, self.at, self._inflate.copy(), self._begun))


class _Hashed(Forward):
    """A layer's archive, hashed on the way."""

    def __init__(self, plain: _Packed | _Inflated) -> None:
        super().__init__(HEADER_LIMIT, TOTAL_LIMIT)
        self._plain = plain
        self._sha256 = hashlib.sha256()
        self._last = b""
        self._buffer = b""
        self._used = 0

    def _take(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size and (data := self._piece(size)):
            parts.append(data)
            size -= len(data)
        self._last = b"".join(parts)
        return self._last

    def _piece(self, limit: int) -> bytes:
        if self._used == len(self._buffer):
            self._buffer, self._used = self._plain.read(_PIECE), 0
            self._sha256.update(self._buffer)
        data = self._buffer[self._used : self._used + limit]
        self._used += len(data)
        return data

    def finish(self) -> str:
        """Read what stands behind the last entry, which is padding; return the digest.

        tarfile ends quietly at anything that is no header: it must be an empty block, or nothing.
        """
        if self._last not in (b"", bytes(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError("a header that is damaged or cut short")
        while data := self.read(CHUNK):
            if data.count(0) != len(data):
                raise tarfile.ReadError("bytes behind the end of the archive")
        return self._sha256.hexdigest()


def _entries(stream: _Hashed) -> Iterator[Entry]:
    archive = tarfile.TarFile(fileobj=stream, mode="r", encoding="utf-8", errors="surrogateescape")
    count = 0
    while (member := archive.next()) is not None:
        setattr(archive, "members", [])  # noqa: B010 - it would keep every one
        count += 1
        if count > ENTRY_LIMIT:
            raise tarfile.ReadError(f"more than {ENTRY_LIMIT} entries")
        if archive.pax_headers.keys() - {"comment"}:
            # some readers give them to every entry that follows, others to none
            raise tarfile.ReadError("a global extended header")
        if member.size < 0:
            raise tarfile.ReadError("an entry of a negative size")
        kind = _KINDS.get(member.type, f"an entry of type {member.type!r}")
        yield Entry(
            name=member.name,
            kind="sparse file" if member.issparse() else kind,
            mode=member.mode & 0o7777,
            size=member.size,
            mtime=int(member.mtime),
            target=member.linkname,
            offset=member.offset_data,
        )
