"""The context digest: everything that determines KV content up to a boundary, chained.

A prompt is cut into chunks of a fixed number of tokens. Link ``i`` of the chain hashes link
``i - 1``, the token ids of chunk ``i`` and the content items that overlap it; link 0 hashes
the request's scope (chunk size, cache salt, adapter). The digest at a boundary is the link
that ends there, so a shared prefix has shared digests and nothing else has. The digest does
not contain the identity: a root is the pair of both, and only the ranks know theirs.

Encoding of link ``i >= 1``, BLAKE3 in key-derivation mode under the context string below::

    previous link (32 bytes) | token count u32 | token ids u32 each
    | item count u32 | per item: offset u64, length u64, kind length u32, kind,
      digest length u32, digest            (all little-endian; items in order of offset)
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from blake3 import blake3

DIGEST_BYTES: Final = 32
_LINK_CONTEXT: Final = "sparkcache 2026-11 context chain link v1"
_SCOPE_CONTEXT: Final = "sparkcache 2026-11 context chain scope v1"
_TOKEN_BYTES: Final = 4


class Uncacheable(StrEnum):
    """Why a request's content has no digest; the value is a counter label."""

    TOKEN_OUT_OF_RANGE = "token_out_of_range"  # noqa: S105 - a reason, not a secret
    ADAPTER_WITHOUT_FILES = "adapter_without_files"
    ADAPTER_CHANGED = "adapter_changed"
    ADAPTER_LOADED_IN_PLACE = "adapter_loaded_in_place"
    CALLER_SUPPLIED_ID = "caller_supplied_id"
    ITEM_WITHOUT_DIGEST = "item_without_digest"
    EMBEDDINGS_WITHOUT_DIGEST = "embeddings_without_digest"


class UncacheableError(Exception):
    """This request's content cannot be digested, so it is neither stored nor looked up."""

    def __init__(self, reason: Uncacheable) -> None:
        self.reason = reason
        super().__init__(reason.value)


@dataclass(frozen=True, slots=True, order=True)
class ContentItem:
    """Content that stands behind placeholder tokens: an image, audio, prompt embeddings.

    Attributes:
        offset: first placeholder token.
        length: placeholder tokens; at least one.
        kind: the engine's word for it, e.g. ``image``.
        digest: digest of the content itself, never a name that a caller chose.
    """

    offset: int
    length: int
    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1 or not self.digest:
            raise UncacheableError(Uncacheable.ITEM_WITHOUT_DIGEST)


@dataclass(frozen=True, slots=True)
class Scope:
    """What separates requests before their first token.

    Attributes:
        chunk_tokens: tokens per link.
        cache_salt: the tenant's salt; None, the empty string and each text all differ.
        adapter: digest of the LoRA adapter's files, or None without an adapter.
    """

    chunk_tokens: int
    cache_salt: str | None = None
    adapter: bytes | None = None

    def digest(self) -> bytes:
        """Link 0 of every chain in this scope."""
        hasher = blake3(derive_key_context=_SCOPE_CONTEXT)
        hasher.update(struct.pack("<Q", self.chunk_tokens))
        salt = None if self.cache_salt is None else self.cache_salt.encode("utf-8", "surrogatepass")
        for part in (salt, self.adapter):
            hasher.update(b"\0" if part is None else b"\1" + struct.pack("<Q", len(part)) + part)
        return hasher.digest()


class ContextChain:
    """The digests of one request's boundaries; grows as tokens arrive.

    Only whole chunks have a link: tokens past the last full chunk wait for more.
    """

    def __init__(self, scope: Scope, items: Iterable[ContentItem] = ()) -> None:
        self._chunk = scope.chunk_tokens
        self._links: list[bytes] = [scope.digest()]
        self._pending = array("I")
        self._items = sorted(items)

    @property
    def tokens(self) -> int:
        """Tokens covered by whole chunks."""
        return (len(self._links) - 1) * self._chunk

    @property
    def seen_tokens(self) -> int:
        """Tokens that were added, including those that do not fill a chunk yet."""
        return self.tokens + len(self._pending)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens in order.

        Raises:
            UncacheableError: a token id does not fit 32 bits; the chain is unchanged.
        """
        try:
            added = array("I", token_ids)
        except (OverflowError, TypeError):
            raise UncacheableError(Uncacheable.TOKEN_OUT_OF_RANGE) from None
        if added.itemsize != _TOKEN_BYTES:
            raise RuntimeError(f"this platform's unsigned int has {added.itemsize} bytes, not 4")
        if sys.byteorder == "big":
            added.byteswap()
        self._pending.extend(added)
        buffered = self._pending
        view = memoryview(buffered).cast("B")
        step = self._chunk * _TOKEN_BYTES
        whole = len(view) // step
        for index in range(whole):
            self._append_link(view[index * step : (index + 1) * step])
        view.release()
        if whole:
            self._pending = buffered[whole * self._chunk :]

    def digest(self, boundary: int) -> bytes:
        """The context digest at a boundary of at most ``tokens`` tokens, a multiple of the chunk.

        Raises:
            ValueError: the boundary is not one of this chain.
        """
        index, rest = divmod(boundary, self._chunk)
        if rest or not 0 < index < len(self._links):
            raise ValueError(
                f"boundary {boundary} is not a multiple of {self._chunk} in 1..{self.tokens}"
            )
        return self._links[index]

    def _append_link(self, chunk: memoryview) -> None:
        start, end = self.tokens, self.tokens + self._chunk
        items = self._overlapping(start, end)
        hasher = blake3(derive_key_context=_LINK_CONTEXT)
        hasher.update(self._links[-1])
        hasher.update(struct.pack("<I", self._chunk))
        hasher.update(chunk)
        hasher.update(struct.pack("<I", len(items)))
        for item in items:
            kind = item.kind.encode()
            hasher.update(struct.pack("<QQI", item.offset, item.length, len(kind)))
            hasher.update(kind)
            hasher.update(struct.pack("<I", len(item.digest)))
            hasher.update(item.digest)
        self._links.append(hasher.digest())

    def _overlapping(self, start: int, end: int) -> list[ContentItem]:
        if not self._items:
            return []
        return [i for i in self._items if i.offset < end and i.offset + i.length > start]
