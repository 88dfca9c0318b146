"""Members of a wheel, read without trusting what the archive says about itself.

Installers disagree about which of a zip file's two descriptions of a member counts: some
read the central directory, some stream the local headers. An archive is well formed here
only when both say the same and every byte of the file belongs to one of them.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from verify.digest import CHUNK, Digest, Progress, ReadError, digest_all
from verify.errors import ConfigError
from verify.holders import READ_LIMIT, Defect, Item
from verify.holders.directory import kind_of
from verify.manifest import path_problem

MEMBER_LIMIT = 8 << 30
TOTAL_LIMIT = 32 << 30

_CHECK = "PKG-1"
_LOCAL = struct.Struct("<2xHHHHIIIHH")
_LOCAL_MARK = b"PK\x03\x04"
_LOCAL_SIZE = len(_LOCAL_MARK) + _LOCAL.size
_END_MARK = b"PK\x05\x06"
_END_SIZE = 22
_ZIP64 = struct.Struct("<QQ")
_UTF8 = 0x800
_LEVEL = 0x006  # how hard the compressor tried; means nothing to a reader
_BEST_RATIO = 1032  # no deflate stream expands further (zlib's documentation)


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a member's compressed bytes are, and what they must become."""

    offset: int
    packed: int
    size: int
    crc: int
    deflated: bool


class ZipHolder:
    """The members of the zip file at ``file``; use it as a context manager.

    Raises:
        ConfigError: when the file cannot be opened at all.
    """

    archive = True

    def __init__(self, file: Path) -> None:
        self._items: dict[str, Item] = {}
        self._defects: list[Defect] = []
        self._members: dict[str, _Member] = {}
        try:
            self._descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be opened: {error.strerror}") from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise ConfigError(f"{file}: expected a file, found {kind_of(found.st_mode)}")
        self._size = found.st_size
        try:
            with (
                os.fdopen(os.dup(self._descriptor), "rb") as stream,
                zipfile.ZipFile(stream) as archive,
            ):
                self._list(archive)
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            struct.error,
            ValueError,
            OverflowError,
            IndexError,
            EOFError,
            OSError,
        ) as error:
            self._items.clear()
            self._members.clear()
            self._defects.append(
                Defect(
                    _CHECK,
                    None,
                    "the file is not a zip archive that can be listed",
                    "a zip archive",
                    str(error),
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._descriptor)

    @property
    def items(self) -> Mapping[str, Item]:
        """The plain files."""
        return self._items

    @property
    def defects(self) -> Sequence[Defect]:
        """Everything that two readers could understand differently, or not at all."""
        return self._defects

    def digests(self, git: Collection[str], progress: Progress) -> Mapping[str, Digest | ReadError]:
        """Hash every item; those in ``git`` get their git blob id, too."""
        sizes = {path: item.size for path, item in self._items.items()}
        return digest_all(sizes, self.chunks, git, progress)

    def read(self, path: str) -> bytes:
        """Return one member's bytes.

        Raises:
            ReadError: when it cannot be read, or is larger than ``READ_LIMIT``.
        """
        size = self._items[path].size
        if size > READ_LIMIT:
            raise ReadError(path, f"at most {READ_LIMIT} bytes", f"{size}")
        return b"".join(self.chunks(path))

    def _list(self, archive: zipfile.ZipFile) -> None:
        """List the members, in the order of their bytes.

        1. The archive ends with its directory: no comment, nothing in front.
        2. Each member has one ordinary name, an ordinary kind and a known compression.
        3. Its local header says the same as the directory.
        4. Members follow each other without gap or overlap.
        5. What they declare to expand to is possible, and bounded.
        """
        # (1)
        end_record = os.pread(self._descriptor, _END_SIZE, max(0, self._size - _END_SIZE))
        if archive.comment or end_record[:4] != _END_MARK:
            self._defect(None, "the end of the directory at the end of the file", "more bytes")
        end, total = 0, 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            # (2)
            path = info.orig_filename
            problem = self._entry_problem(info)
            if problem is not None:
                self._defect(path, *problem)
            # (3)
            length = self._local_header(info)
            # (4)
            if info.header_offset != end:
                place = f"byte {info.header_offset}"
                self._defect(path, f"the member at byte {end}", place)
            end = info.header_offset + length + info.compress_size
            # (5)
            total += info.file_size
            if info.file_size > min(MEMBER_LIMIT, info.compress_size * _BEST_RATIO + CHUNK):
                size = f"{info.file_size} bytes from {info.compress_size}"
                self._defect(path, "a size that its bytes can expand to", size)
            elif problem is None and length:
                self._members[path] = _Member(
                    info.header_offset + length,
                    info.compress_size,
                    info.file_size,
                    info.CRC,
                    info.compress_type == zipfile.ZIP_DEFLATED,
                )
                self._items[path] = Item(info.file_size, stat.S_IMODE(info.external_attr >> 16))
        if end != archive.start_dir:
            self._defect(None, f"the directory at byte {end}", f"byte {archive.start_dir}")
        if total > TOTAL_LIMIT:
            self._defect(None, f"at most {TOTAL_LIMIT} bytes in all", f"{total}")
            self._items.clear()
            self._members.clear()

    def _entry_problem(self, info: zipfile.ZipInfo) -> tuple[str, str] | None:
        path = info.orig_filename
        kind = (info.external_attr >> 16) & 0xF000
        if path in self._items:
            return "each name once", "two members of this name"
        if path.endswith("/"):
            return "files only", "a directory entry"
        problem = path_problem(path)
        if problem is not None:
            return "an ordinary name", problem
        if not path.isascii() and not info.flag_bits & _UTF8:
            return "a name in UTF-8", "a name in an unknown encoding"
        if kind not in (0, stat.S_IFREG):
            return "a regular file", kind_of(kind)
        if info.flag_bits & ~(_UTF8 | _LEVEL):
            return "no encryption, no sizes after the data", f"flags {info.flag_bits:#06x}"
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return "stored or deflated bytes", f"compression method {info.compress_type}"
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            return f"{info.file_size} stored bytes", f"{info.compress_size}"
        return None

    def _local_header(self, info: zipfile.ZipInfo) -> int:
        """Compare the local header with the directory; return its length, 0 when unusable."""
        path = info.orig_filename
        data = os.pread(self._descriptor, _LOCAL_SIZE, info.header_offset)
        if len(data) < _LOCAL_SIZE or data[:4] != _LOCAL_MARK:
            self._defect(path, "a local header", "other bytes")
            return 0
        fields: tuple[int, ...] = _LOCAL.unpack(data[4:])
        flags, method, _, _, crc, packed, size, name_length, extra_length = fields
        rest = os.pread(
            self._descriptor, name_length + extra_length, info.header_offset + _LOCAL_SIZE
        )
        encoding = "utf-8" if flags & _UTF8 else "cp437"
        name = rest[:name_length].decode(encoding, "surrogateescape")
        packed, size = _sizes(rest[name_length:], packed, size)
        local = (name, flags, method, crc, packed, size)
        central = (
            path,
            info.flag_bits,
            info.compress_type,
            info.CRC,
            info.compress_size,
            info.file_size,
        )
        what = ("name", "flags", "compression method", "CRC-32", "packed size", "size")
        for label, expected, actual in zip(what, central, local, strict=True):
            if expected != actual:
                self._defect(path, f"{label} {expected} as in the directory", f"{actual}")
        return _LOCAL_SIZE + name_length + extra_length

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield one item's bytes; raises :class:`~verify.digest.ReadError`."""
        member = self._members[path]
        inflate = zlib.decompressobj(-zlib.MAX_WBITS) if member.deflated else None
        crc, seen = 0, 0
        for packed in self._packed(path, member):
            data = packed
            while data:
                if inflate is None:
                    chunk, data = data, b""
                else:
                    chunk, data = _inflate(inflate, data, path)
                seen += len(chunk)
                if seen > member.size:
                    raise ReadError(path, f"{member.size} bytes", "more")
                crc = zlib.crc32(chunk, crc)
                yield chunk
        if inflate is not None and not inflate.eof:
            raise ReadError(path, "a whole compressed stream", "one that is cut short")
        if seen != member.size:
            raise ReadError(path, f"{member.size} bytes", f"{seen}")
        if crc != member.crc:
            raise ReadError(path, f"CRC-32 {member.crc:08x}", f"{crc:08x}")

    def _packed(self, path: str, member: _Member) -> Iterator[bytes]:
        at, end = member.offset, member.offset + member.packed
        while at < end:
            try:
                data = os.pread(self._descriptor, min(CHUNK, end - at), at)
            except OSError as error:
                raise ReadError(path, "readable bytes", error.strerror or str(error)) from error
            if not data:
                raise ReadError(path, f"{member.packed} packed bytes", "the end of the file")
            at += len(data)
            yield data

    def _defect(self, path: str | None, expected: str, actual: str) -> None:
        self._defects.append(
            Defect(_CHECK, path, f"expected {expected}, found {actual}", expected, actual)
        )


def _inflate(inflate: zlib._Decompress, data: bytes, path: str) -> tuple[bytes, bytes]:
    """Return at most one chunk, and the packed bytes that are left for the next call."""
    try:
        chunk = inflate.decompress(data, CHUNK)
    except zlib.error as error:
        raise ReadError(path, "a compressed stream", str(error)) from error
    if inflate.unused_data:
        raise ReadError(path, "the end of the stream at the end of the member", "more bytes")
    return chunk, inflate.unconsumed_tail


def _sizes(extra: bytes, packed: int, size: int) -> tuple[int, int]:
    """Take 64-bit sizes from a local header's extra field where the header has none."""
    if 0xFFFFFFFF not in (packed, size):
        return packed, size
    while len(extra) >= 4:
        tag, length = struct.unpack_from("<HH", extra)
        if tag == 1 and length >= _ZIP64.size and len(extra) >= 4 + _ZIP64.size:
            size, packed = _ZIP64.unpack_from(extra, 4)
            return packed, size
        extra = extra[4 + length :]
    return packed, size
