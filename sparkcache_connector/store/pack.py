"""Packs: immutable files of pages, and the arithmetic of where a page lies.

A pack is one header block followed by pages, each starting at a multiple of
:data:`ALIGNMENT` and padded with zeros to the next one. The header is as long as a block, so
that everything after it can be read and written past the page cache. What a page *is* stands
in the manifests; the header only says which pack this is and how long it must be.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from sparkcache_connector.store.errors import Miss, Reason

ALIGNMENT: Final = 4096
"""Page starts are multiples of this many bytes; also the header's length."""
MAX_PAGE: Final = 1 << 30
"""Largest page in bytes."""
MAX_PACK: Final = ALIGNMENT << 32
"""Packs stay below this, so that an offset in alignment units fits 32 bits."""
PACK_ID_BYTES: Final = 16
PACK_SUFFIX: Final = ".pack"

PACK_MAGIC: Final = b"SPKVpack"
PACK_VERSION: Final = 1

PAGE_CONTEXT: Final = "SparkCache store v1 page"
"""BLAKE3 key derivation context of page digests."""
_HEADER_CONTEXT: Final = "SparkCache store v1 pack header"

_HEADER: Final = struct.Struct("<8sHHI16sQ")
_DIGEST_BYTES: Final = 32


def page_digest(page: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte digest of a page, in the pages' own domain."""
    return blake3(page, derive_key_context=PAGE_CONTEXT).digest()


def stride(page_bytes: int) -> int:
    """Return how far apart pages of this size lie in a pack."""
    return (page_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def pack_name(pack_id: bytes) -> str:
    """Return the file name of a pack."""
    return pack_id.hex() + PACK_SUFFIX


def pack_id_of(name: str) -> bytes | None:
    """Return the pack id that a file name stands for; None if it is no pack's name."""
    stem = name.removesuffix(PACK_SUFFIX)
    if stem == name or len(stem) != 2 * PACK_ID_BYTES or stem != stem.lower():
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


@dataclass(frozen=True)
class PackHeader:
    """What the first block of a pack says: which pack this is and how long it is."""

    pack_id: bytes
    size: int
    """Length of the whole file in bytes, header included."""

    def encode(self) -> bytes:
        """Return the header block."""
        fields = _HEADER.pack(PACK_MAGIC, PACK_VERSION, 0, ALIGNMENT, self.pack_id, self.size)
        digest = blake3(fields, derive_key_context=_HEADER_CONTEXT).digest()
        return (fields + digest).ljust(ALIGNMENT, b"\0")

    @classmethod
    def parse(cls, block: bytes, subject: str = "pack") -> PackHeader:
        """Return the header that a pack's first :data:`ALIGNMENT` bytes hold.

        Raises:
            Miss: ``newer-format`` for a later version, ``malformed`` for anything else.
        """
        if len(block) != ALIGNMENT or not block.startswith(PACK_MAGIC):
            raise Miss(Reason.MALFORMED, subject, "does not begin as a pack does")
        _, version, flags, alignment, pack_id, size = _HEADER.unpack_from(block)
        if version > PACK_VERSION or flags:
            raise Miss(Reason.NEWER_FORMAT, subject, f"pack version {version}, flags {flags}")
        if block != cls(pack_id, size).encode():
            found = f"damaged header (version {version}, alignment {alignment})"
            raise Miss(Reason.MALFORMED, subject, found)
        return cls(pack_id, size)


HEADER_DIGEST_END: Final = _HEADER.size + _DIGEST_BYTES
"""Bytes of the header block that carry information; the rest are zeros."""
