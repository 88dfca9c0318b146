"""The ZIP container of a wheel, written in one way only.

:class:`ArchiveWriter` writes regular files in the order given, with one timestamp, modes 0644
or 0755 "made by" Unix, sizes known beforehand (no data descriptors) and no extra field but
ZIP64's where a value needs it. New members are stored, not deflated: what a compressor makes
of them depends on its version, what they are does not. Members of another archive are copied
as they lie there, compressed, without a look inside.

It only ever appends, so its output can be digested on the way.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import BinaryIO, Protocol

from builder.wheel_read import STORED, Member

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")

_LIMIT16 = 0xFFFF
_LIMIT32 = 0xFFFF_FFFF
_ZIP64_EXTRA = 0x0001
_UTF8 = 1 << 11
_MADE_BY_UNIX = 3 << 8
_NEEDS_DEFLATE = 20  # "2.0": the version that every reader of wheels has
_NEEDS_ZIP64 = 45
_DOS_DATE = (1 << 5) | 1  # 1980-01-01, the earliest that the format can say; the time is 0
_CHUNK = 1 << 20


class Sink(Protocol):
    """Where bytes go, in order; a binary file is one."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Take all of ``data``."""


class ArchiveWriter:
    """Appends members to a new archive.

    ``prefix`` are bytes before the first member, such as the first line of a zip application.
    """

    def __init__(self, sink: Sink, *, prefix: bytes = b"") -> None:
        self._sink = sink
        self._size = 0
        self._central: list[bytes] = []
        self._write(prefix)

    def store(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Add a new member, uncompressed."""
        size = len(data)
        self._header(Member(path, executable, STORED, zlib.crc32(data), size, size, 0))
        self._write(data)

    def copy(self, member: Member, source: BinaryIO, path: str | None = None) -> None:
        """Add a member of the archive ``source`` as it lies there, under ``path`` if given.

        Raises:
            EOFError: when ``source`` ends within the member.
        """
        self._header(member if path is None else replace(member, path=path))
        source.seek(member.offset)
        buffer = memoryview(bytearray(min(_CHUNK, member.compressed_size)))
        left = member.compressed_size
        while left:
            count = source.readinto(buffer[: min(len(buffer), left)])  # type: ignore[attr-defined]
            if not count:
                raise EOFError(f"{member.path}: the archive ends {left} bytes too early")
            self._write(buffer[:count])
            left -= count

    def finish(self) -> None:
        """Write the central directory; nothing can be added afterwards."""
        start, count = self._size, len(self._central)
        self._write(b"".join(self._central))
        size = self._size - start
        if count >= _LIMIT16 or start >= _LIMIT32 or size >= _LIMIT32:
            at = self._size
            self._write(
                _END64.pack(
                    b"PK\x06\x06",
                    _END64.size - 12,
                    _MADE_BY_UNIX | _NEEDS_ZIP64,
                    _NEEDS_ZIP64,
                    0,
                    0,
                    count,
                    count,
                    size,
                    start,
                )
            )
            self._write(_END64_LOCATOR.pack(b"PK\x06\x07", 0, at, 1))
        short = min(count, _LIMIT16)
        self._write(
            _END.pack(
                b"PK\x05\x06", 0, 0, short, short, min(size, _LIMIT32), min(start, _LIMIT32), 0
            )
        )

    def _header(self, member: Member) -> None:
        """Write the local header and remember the entry of the central directory."""
        name = member.path.encode("utf-8")
        flags = 0 if name.isascii() else _UTF8
        mode = 0o100755 if member.executable else 0o100644
        sizes = (member.size, member.compressed_size)
        # saturated values stand in the ZIP64 field; a local header must have both sizes there
        wide: tuple[int, ...] = sizes if max(sizes) >= _LIMIT32 else ()
        local_extra = _zip64(wide)
        central_extra = _zip64((*wide, self._size) if self._size >= _LIMIT32 else wide)
        short = (_LIMIT32, _LIMIT32) if wide else (member.compressed_size, member.size)
        needs = _NEEDS_ZIP64 if central_extra else _NEEDS_DEFLATE
        common = (flags, member.method, 0, _DOS_DATE, member.crc, *short, len(name))
        self._central.append(
            _CENTRAL.pack(
                b"PK\x01\x02",
                _MADE_BY_UNIX | needs,
                needs,
                *common,
                len(central_extra),
                0,
                0,
                0,
                mode << 16,
                min(self._size, _LIMIT32),
            )
            + name
            + central_extra
        )
        self._write(_LOCAL.pack(b"PK\x03\x04", needs, *common, len(local_extra)))
        self._write(name + local_extra)

    def _write(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._size += len(data)


def _zip64(values: tuple[int, ...]) -> bytes:
    """Return the ZIP64 extra field that holds ``values``, or nothing for none."""
    if not values:
        return b""
    return struct.pack(f"<HH{len(values)}Q", _ZIP64_EXTRA, 8 * len(values), *values)
