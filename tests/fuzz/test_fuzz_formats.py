"""No bytes crash a parser, make it slow or make it allocate what they promise.

The corpus is made here, from real publications' manifests; a grammar of edits is applied
to it: bytes set, integers set to their limits, parts cut out, doubled and spliced. Half of the
inputs get a valid tag again, because an attacker who has the key must not get further either.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkcache_connector.store.delta import GroupShape, compose_groups, pack_size
from sparkcache_connector.store.errors import Miss, Reason, Unusable
from sparkcache_connector.store.keys import Key, KeyRing
from sparkcache_connector.store.manifest import (
    DIGEST_BYTES,
    GroupKind,
    Manifest,
    PackRef,
    parse_unauthenticated,
)
from sparkcache_connector.store.pack import PackHeader

EXAMPLES = 50_000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 1500
KEYS = KeyRing((Key(b"k" * 32),))
INTERESTING = [0, 1, 2, 3, 4095, 4096, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1]
REFUSALS = frozenset({Reason.MALFORMED, Reason.NEWER_FORMAT, Reason.UNKNOWN_KEY, Reason.FORGED})


def published(counts: list[int], base: Manifest | None, number: int) -> Manifest:
    """A manifest as a publication composes it."""
    kinds = [GroupKind.FULL_ATTENTION, GroupKind.RECURRENT, GroupKind.SLIDING_WINDOW]
    shapes = [GroupShape(kinds[i % 3], 4096 + 904 * i, i, n) for i, n in enumerate(counts)]
    kept = [0] * len(shapes)
    if base is not None:
        kept[0] = min(shapes[0].count, base.groups[0].count)
    pack = PackRef(bytes([number]) * 16, max(pack_size(shapes, kept), 8192))
    digests = [bytes([number]) * DIGEST_BYTES * n for n in counts]
    packs, groups = compose_groups(shapes, digests, kept, base, pack)
    return Manifest(b"i" * 32, bytes([number]) * 32, 256, 0, 1, packs, groups)


def corpus() -> list[bytes]:
    """Manifests small and large, alone and as deltas of deltas."""
    manifests = [published([1], None, 1), published([5, 1, 2], None, 2)]
    for number in range(3, 8):
        manifests.append(published([number * 2, 1, 2], manifests[-1], number))
    manifests.append(published([200], None, 9))
    return [manifest.encode(KEYS.current) for manifest in manifests]


CORPUS = corpus()


@st.composite
def edited(draw: st.DrawFn, corpus: list[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        size = draw(st.sampled_from([1, 2, 4, 8, 12, 24, 32]))
        match draw(st.sampled_from(["byte", "integer", "cut", "double", "splice", "truncate"])):
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "integer":
                at -= at % 4
                value = draw(st.sampled_from(INTERESTING))
                width = draw(st.sampled_from("HIQ"))
                packed = struct.pack(f"<{width}", value % (1 << 8 * struct.calcsize(width)))
                data[at : at + len(packed)] = packed
            case "cut":
                del data[at : at + size]
            case "double":
                data[at:at] = data[at : at + size]
            case "splice":
                other = draw(st.sampled_from(corpus))
                data[at:] = other[at:]
            case "truncate":
                del data[at:]
    return bytes(data)


def signed_again(data: bytes) -> bytes:
    """The same bytes with their length and tag made right."""
    body = bytearray(data[:-32])
    if len(body) >= 24:
        body[:8] = b"SPKVroot"
        body[8:12] = b"\1\0\0\0"
        body[12:16] = struct.pack("<I", len(data))
        body[16:24] = KEYS.current.key_id
    return bytes(body) + KEYS.current.tag(bytes(body))


@settings(max_examples=EXAMPLES)
@given(edited(CORPUS), st.booleans())
def test_manifests(data: bytes, sign: bool) -> None:
    if sign:
        data = signed_again(data)
    outcome: bytes | Reason
    try:
        outcome = Manifest.parse(data, KEYS).encode(KEYS.current)
    except Miss as miss:
        outcome = miss.reason
    # An accepted manifest has one encoding, and it is the one that was read.
    assert outcome in REFUSALS or outcome == data
    if data.startswith(b"SPKVroot\1\0\0\0") and len(data) >= 56:
        with suppress(Miss):
            parse_unauthenticated(data)


@settings(max_examples=EXAMPLES // 5)
@given(edited(CORPUS))
def test_memory_is_bounded_by_the_input_not_by_what_it_promises(data: bytes) -> None:
    data = signed_again(data)
    tracemalloc.start()
    try:
        Manifest.parse(data, KEYS)
    except Miss:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 * len(data) + 65536


HEADERS = [PackHeader(bytes([n]) * 16, 4096 * (n + 2)).encode() for n in range(4)]


@settings(max_examples=EXAMPLES // 3)
@given(edited(HEADERS))
def test_pack_headers(data: bytes) -> None:
    outcome: bytes | Reason
    try:
        outcome = PackHeader.parse(data).encode()
    except Miss as miss:
        outcome = miss.reason
    assert outcome in {Reason.MALFORMED, Reason.NEWER_FORMAT} or outcome == data


RINGS = [KeyRing(tuple(Key(bytes([n + m]) * 32) for m in range(n + 1))).encode() for n in range(4)]


@settings(max_examples=EXAMPLES // 3)
@given(edited(RINGS))
def test_key_rings(data: bytes) -> None:
    with suppress(Unusable):
        assert KeyRing.parse(data, "keys").encode().strip() == data.strip()
