"""The ZIP container of a wheel, read without trust.

Reading maps an archive to its members and to where their compressed bytes lie, so that a
repacker can copy them unseen. The standard reader forgives too much for that: it takes the
central directory's word and ignores what lies between members. Here every byte of the file
belongs to exactly one structure, and both directories agree, or the archive is refused.

Steps of :func:`read_members` (APPNOTE.TXT 6.3.10 is the format):

1. the file ends with the end record; no comment, nothing after it, one disk;
2. the central directory ends where the end record begins, and holds the counted entries;
3. every entry is a regular file with a safe, unique name, stored or deflated, not encrypted;
4. local headers repeat what the central directory says, data descriptors included;
5. members follow one another from the first byte to the central directory, without gaps.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from builder.errors import BuildError
from verify.manifest import path_problem

STORED = 0
DEFLATED = 8

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")

_ENCRYPTED = 1 << 0
_DESCRIPTOR = 1 << 3
_UTF8 = 1 << 11
_KNOWN_FLAGS = 0b110 | _DESCRIPTOR | _UTF8  # bits 1 and 2 tell the deflate level

_ZIP64_EXTRA = 0x0001
_UNICODE_PATH_EXTRA = 0x7075
_LIMIT16 = 0xFFFF
_LIMIT32 = 0xFFFF_FFFF

_UNIX = 3
_REGULAR = 0o100000
_DIRECTORY = 0o040000


class WheelFormatError(BuildError):
    """A wheel's container is not one that can be repacked without guessing.

    Attributes:
        wheel: the file.
        member: the member, or "" for the archive as a whole.
        problem: a short name of the oddity, such as ``encrypted`` or ``trailing data``.
    """

    def __init__(self, wheel: str, member: str, problem: str, detail: str) -> None:
        self.wheel = wheel
        self.member = member
        self.problem = problem
        place = f"{wheel}: {member}" if member else wheel
        super().__init__(
            f"{place}: {problem}: {detail}; a wheel with this cannot be a base: compare its "
            "SHA-256 with the pinned one and fetch it again"
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive, and where its compressed bytes lie in the archive's file."""

    path: str
    executable: bool
    method: int
    crc: int
    compressed_size: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Central:
    """What the central directory says of one entry."""

    name: bytes
    path: str
    flags: int
    method: int
    crc: int
    compressed_size: int
    size: int
    header: int
    attributes: int


def read_members(file: BinaryIO, wheel: str) -> tuple[Member, ...]:
    """Return the regular files of an archive, in the order in which they lie in it.

    Empty directory entries are accepted and left out; a wheel needs none.

    Args:
        file: the archive, seekable.
        wheel: its name, for errors.

    Raises:
        WheelFormatError: for anything that the module's steps do not allow.
    """
    return _Reader(file, wheel).members()


def read_member(file: BinaryIO, member: Member, wheel: str) -> bytes:
    """Return the bytes of one member, checked against its size and CRC.

    Raises:
        WheelFormatError: when they do not match, or the stream is not deflate.
    """
    file.seek(member.offset)
    data = file.read(member.compressed_size)
    if member.method == DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflater.decompress(data, member.size + 1)
        except zlib.error as error:
            raise WheelFormatError(wheel, member.path, "damaged", str(error)) from error
        if not inflater.eof or inflater.unused_data:
            raise WheelFormatError(
                wheel, member.path, "damaged", "the deflate stream does not end where it should"
            )
    if len(data) != member.size or zlib.crc32(data) != member.crc:
        raise WheelFormatError(
            wheel,
            member.path,
            "damaged",
            f"expected {member.size} bytes with CRC {member.crc:08x}, "
            f"found {len(data)} with {zlib.crc32(data):08x}",
        )
    return data


class _Reader:
    """Walks one archive; every method checks one step."""

    def __init__(self, file: BinaryIO, wheel: str) -> None:
        self._file = file
        self._wheel = wheel
        self._size = file.seek(0, 2)

    def members(self) -> tuple[Member, ...]:
        start, size, count = self._end()
        entries = list(self._central(start, size))
        if len(entries) != count:
            self._fail("", "entry count", f"the end record counts {count}, found {len(entries)}")
        self._check_names(entries)
        found: list[Member] = []
        position = 0
        for entry in sorted(entries, key=lambda entry: entry.header):
            if entry.header != position:  # (5)
                self._fail(
                    entry.path,
                    "gap or overlap",
                    f"expected its header at byte {position}, the directory says {entry.header}",
                )
            offset, position = self._local(entry, start)
            if not entry.path.endswith("/"):
                executable = bool(entry.attributes >> 16 & 0o100)
                found.append(
                    Member(
                        entry.path,
                        executable,
                        entry.method,
                        entry.crc,
                        entry.compressed_size,
                        entry.size,
                        offset,
                    )
                )
        if position != start:
            self._fail("", "gap or overlap", f"bytes {position} to {start} belong to no member")
        return tuple(found)

    def _end(self) -> tuple[int, int, int]:
        """(1) Return the start, size and entry count of the central directory."""
        at = self._size - _END.size
        signature, disk, cd_disk, here, count, size, start, comment = self._unpack(_END, at)
        if signature != b"PK\x05\x06" or comment:
            self._fail(
                "",
                "trailing data",
                "expected a ZIP end record without comment as the last 22 bytes",
            )
        end = at
        if _LIMIT16 in (here, count) or _LIMIT32 in (size, start):
            locator = self._unpack(_END64_LOCATOR, at - _END64_LOCATOR.size)
            end = locator[2]
            if locator[0] != b"PK\x06\x07" or end != at - _END64_LOCATOR.size - _END64.size:
                self._fail("", "ZIP64", "expected the ZIP64 end record right before its locator")
            record = self._unpack(_END64, end)
            if record[0] != b"PK\x06\x06" or record[1] != _END64.size - 12:
                self._fail("", "ZIP64", "expected a ZIP64 end record without extensions")
            disk, cd_disk, here, count, size, start = record[4:]
        if disk or cd_disk or here != count:
            self._fail("", "several disks", "expected an archive in one piece")
        if start + size != end:  # (2)
            self._fail(
                "",
                "trailing data",
                f"the central directory ends at byte {start + size}, the end record is at {end}",
            )
        return start, size, count

    def _central(self, start: int, size: int) -> Iterator[_Central]:
        """(2), (3) Yield the entries of the central directory."""
        directory = self._read(start, size)
        at = 0
        while at < size:
            if size - at < _CENTRAL.size or directory[at : at + 4] != b"PK\x01\x02":
                self._fail("", "central directory", f"no entry at byte {start + at}")
            fields = _CENTRAL.unpack_from(directory, at)
            made_by, flags, method, crc = fields[1], fields[3], fields[4], fields[7]
            compressed_size, plain_size, name_size, extra_size, comment_size = fields[8:13]
            disk, attributes, header = fields[13], fields[15], fields[16]
            at += _CENTRAL.size
            if at + name_size + extra_size + comment_size > size:
                self._fail("", "central directory", "an entry reaches past the end")
            name = directory[at : at + name_size]
            extra = directory[at + name_size : at + name_size + extra_size]
            at += name_size + extra_size + comment_size
            path = self._path(name, flags)
            wide = self._zip64(extra, path, (plain_size, compressed_size, header))
            entry = _Central(name, path, flags, method, crc, wide[1], wide[0], wide[2], attributes)
            self._check_entry(entry, made_by >> 8, disk)
            yield entry

    def _path(self, name: bytes, flags: int) -> str:
        try:
            path = name.decode("utf-8" if flags & _UTF8 else "ascii")
        except UnicodeDecodeError:
            self._fail(repr(name), "name", "expected ASCII, or UTF-8 with its flag set")
        problem = path_problem(path.removesuffix("/"))
        if problem is not None:
            self._fail(repr(path), "unsafe name", problem)
        return path

    def _zip64(self, extra: bytes, path: str, short: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``short`` with its saturated values taken from the ZIP64 extra field."""
        if not extra and _LIMIT32 not in short:
            return short
        wide = b""
        at = 0
        while at < len(extra):
            if len(extra) - at < 4:
                self._fail(path, "extra field", "cut short")
            kind, length = struct.unpack_from("<HH", extra, at)
            body = extra[at + 4 : at + 4 + length]
            if len(body) != length:
                self._fail(path, "extra field", "cut short")
            if kind == _UNICODE_PATH_EXTRA:
                self._fail(path, "second name", "an extra field names the member differently")
            if kind == _ZIP64_EXTRA:
                wide = body
            at += 4 + length
        wanted = sum(value == _LIMIT32 for value in short)
        if len(wide) < 8 * wanted:
            self._fail(path, "ZIP64", "a size of 4 GiB or more without its ZIP64 field")
        values = iter(struct.unpack_from(f"<{wanted}Q", wide))
        return tuple(next(values) if value == _LIMIT32 else value for value in short)

    def _check_entry(self, entry: _Central, system: int, disk: int) -> None:
        """(3) Refuse by name what cannot be copied blindly."""
        kind = entry.attributes >> 16 & 0o170000
        permissions = entry.attributes >> 16 & 0o7777
        folder = entry.path.endswith("/")
        if entry.flags & _ENCRYPTED:
            self._fail(entry.path, "encrypted", "expected plain members")
        if entry.flags & ~_KNOWN_FLAGS:
            self._fail(entry.path, "flags", f"unknown general purpose bits {entry.flags:#06x}")
        if entry.method not in (STORED, DEFLATED):
            self._fail(entry.path, "compression", f"expected stored or deflate, not {entry.method}")
        if disk:
            self._fail(entry.path, "several disks", "expected an archive in one piece")
        if system != _UNIX:
            self._fail(entry.path, "system", f"expected modes made by Unix (3), found {system}")
        if kind not in ((0, _DIRECTORY) if folder else (0, _REGULAR)):
            self._fail(entry.path, "file type", f"expected a regular file, found {kind:#o}")
        if permissions & 0o7000:
            self._fail(entry.path, "mode", f"setuid, setgid or sticky: {permissions:#o}")
        if folder and entry.size:
            self._fail(entry.path, "file type", "a directory entry with content")
        if entry.method == STORED and entry.size != entry.compressed_size:
            self._fail(entry.path, "sizes", "a stored member with two different sizes")

    def _check_names(self, entries: list[_Central]) -> None:
        """(3) Each name once, and no file where another member needs a directory."""
        files: set[str] = set()
        for entry in entries:
            if entry.path in files:
                self._fail(entry.path, "duplicate name", "the archive holds it twice")
            files.add(entry.path)
        for path in files:
            parent = path.removesuffix("/").rpartition("/")[0]
            while parent:
                if parent in files:
                    self._fail(path, "file type", f"{parent} is a file and a directory")
                parent = parent.rpartition("/")[0]

    def _local(self, entry: _Central, limit: int) -> tuple[int, int]:
        """(4) Return where the member's bytes begin, and where the next header must be."""
        fields = self._unpack(_LOCAL, entry.header)
        flags, method, crc, compressed_size, size, name_size, extra_size = (
            *fields[2:4],
            *fields[6:11],
        )
        after = self._read(entry.header + _LOCAL.size, name_size + extra_size)
        if fields[0] != b"PK\x03\x04" or after[:name_size] != entry.name:
            self._fail(entry.path, "local header", "it names another member, or is none")
        wide = self._zip64(after[name_size:], entry.path, (size, compressed_size))
        told = (flags, method, crc, wide[1], wide[0])
        expected = (entry.flags, entry.method, entry.crc, entry.compressed_size, entry.size)
        unknown_yet = (entry.flags, entry.method, 0, 0, 0)
        if told != expected and not (entry.flags & _DESCRIPTOR and told == unknown_yet):
            self._fail(entry.path, "local header", "it contradicts the central directory")
        offset = entry.header + _LOCAL.size + name_size + extra_size
        end = offset + entry.compressed_size
        if end > limit:
            self._fail(entry.path, "gap or overlap", "its bytes reach into the central directory")
        if entry.flags & _DESCRIPTOR:
            end += self._descriptor(entry, end, limit)
        return offset, end

    def _descriptor(self, entry: _Central, at: int, limit: int) -> int:
        """(4) Return the size of the data descriptor, which must repeat the directory."""
        found = self._read(at, min(24, limit - at))
        sizes = (entry.compressed_size, entry.size)
        forms = [struct.pack("<LQQ", entry.crc, *sizes)]
        if max(sizes) < _LIMIT32:
            forms.append(struct.pack("<LLL", entry.crc, *sizes))
        for form in forms:
            for spelling in (b"PK\x07\x08" + form, form):
                if found.startswith(spelling):
                    return len(spelling)
        raise WheelFormatError(
            self._wheel, entry.path, "data descriptor", "it contradicts the central directory"
        )

    def _unpack(self, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        return layout.unpack(self._read(at, layout.size))

    def _read(self, at: int, size: int) -> bytes:
        if at < 0 or size < 0 or at + size > self._size:
            self._fail("", "truncated", f"expected {size} bytes at byte {at} of {self._size}")
        self._file.seek(at)
        data = self._file.read(size)
        if len(data) != size:
            self._fail("", "truncated", f"expected {size} bytes at byte {at}, read {len(data)}")
        return data

    def _fail(self, member: str, problem: str, detail: str) -> NoReturn:
        raise WheelFormatError(self._wheel, member, problem, detail)
