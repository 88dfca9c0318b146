import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkcache_connector.store.errors import Miss, Reason
from sparkcache_connector.store.keys import Key, KeyRing
from sparkcache_connector.store.manifest import (
    MANIFEST_LIMIT,
    Group,
    GroupKind,
    Manifest,
    PackRef,
    Run,
    RunList,
    authenticate,
    digest_of_name,
    key_id_of,
    manifest_name,
)
from sparkcache_connector.store.pack import ALIGNMENT, MAX_PACK, stride

KEYS = KeyRing((Key(b"\1" * 32), Key(b"\2" * 32)))
digests32 = st.binary(min_size=32, max_size=32)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests as publications make them: runs merged, packs in the order of their use."""
    table = RunList()
    ids = draw(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4, unique=True))
    sizes = [draw(st.integers(1 << 30, MAX_PACK)) // ALIGNMENT * ALIGNMENT for _ in ids]
    packs = [PackRef(pack_id, size) for pack_id, size in zip(ids, sizes, strict=True)]
    groups = []
    for _ in range(draw(st.integers(0, 4))):
        page_bytes = draw(st.integers(1, 1 << 20))
        runs: list[Run] = []
        for _ in range(draw(st.integers(0, 4))):
            offset = draw(st.integers(1, 1000)) * ALIGNMENT
            count = draw(st.integers(1, 5))
            table.extend(runs, draw(st.sampled_from(packs)), offset, count, stride(page_bytes))
        pages = sum(run.count for run in runs)
        content = draw(st.binary(min_size=32 * pages, max_size=32 * pages))
        kind = draw(st.sampled_from(list(GroupKind)))
        first = draw(st.integers(0, (1 << 63) - 1))
        groups.append(Group(kind, page_bytes, first, tuple(runs), content))
    return Manifest(
        draw(digests32),
        draw(digests32),
        draw(st.integers(1, (1 << 63) - 1)),
        draw(st.integers(0, (1 << 32) - 1)),
        draw(st.integers(0, (1 << 64) - 1)),
        tuple(table.packs),
        tuple(groups),
    )


@given(manifests(), st.sampled_from(KEYS.keys))
def test_manifests_round_trip(manifest: Manifest, key: Key) -> None:
    data = manifest.encode(key)
    assert Manifest.parse(data, KEYS) == manifest
    assert key_id_of(data) == key.key_id
    assert authenticate(data, KEYS) == key


@given(manifests(), st.data())
def test_no_single_changed_byte_is_accepted(manifest: Manifest, data: st.DataObject) -> None:
    encoded = bytearray(manifest.encode(KEYS.current))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Miss):
        Manifest.parse(bytes(encoded), KEYS)


@given(manifests(), st.data())
def test_no_truncation_or_extension_is_accepted(manifest: Manifest, data: st.DataObject) -> None:
    encoded = manifest.encode(KEYS.current)
    shorter = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    longer = encoded + data.draw(st.binary(min_size=1, max_size=64))
    for changed in (shorter, longer):
        with pytest.raises(Miss):
            Manifest.parse(changed, KEYS)


@settings(max_examples=300)
@given(manifests(), st.data())
def test_authenticated_nonsense_is_malformed_or_canonical(
    manifest: Manifest, data: st.DataObject
) -> None:
    """Whoever has the key still cannot write a second encoding, or make the parser misbehave."""
    encoded = bytearray(manifest.encode(KEYS.current)[:-32])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(24, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    forged = bytes(encoded) + KEYS.current.tag(bytes(encoded))
    outcome: bytes | Reason
    try:
        outcome = Manifest.parse(forged, KEYS).encode(KEYS.current)
    except Miss as miss:
        outcome = miss.reason
    assert outcome in (Reason.MALFORMED, forged)


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_parser(data: bytes) -> None:
    for candidate in (data, b"SPKVroot\1\0\0\0" + data):
        with pytest.raises(Miss):
            Manifest.parse(candidate, KEYS)


RUN = Run(0, ALIGNMENT, 2)
GROUP = Group(GroupKind.FULL_ATTENTION, 4096, 0, (RUN,), b"d" * 64)
PACK = PackRef(b"p" * 16, 3 * ALIGNMENT)
GOOD = Manifest(b"i" * 32, b"c" * 32, 256, 0, 1, (PACK,), (GROUP,))


def with_group(**changes: object) -> Manifest:
    return dataclasses.replace(GOOD, groups=(dataclasses.replace(GROUP, **changes),))


@pytest.mark.parametrize(
    ("manifest", "found"),
    [
        (dataclasses.replace(GOOD, boundary=0), "a field is outside its limits"),
        (dataclasses.replace(GOOD, boundary=1 << 63), "a field is outside its limits"),
        (dataclasses.replace(GOOD, packs=(PackRef(b"p" * 16, 0),)), "a pack's size"),
        (dataclasses.replace(GOOD, packs=(PackRef(b"p" * 16, MAX_PACK + 1),)), "a pack's size"),
        (dataclasses.replace(GOOD, packs=(PACK, PACK)), "names a pack twice"),
        (dataclasses.replace(GOOD, packs=(PACK, PackRef(b"q" * 16, 8192))), "does not use"),
        (with_group(page_bytes=0), "a group is outside its limits"),
        (with_group(page_bytes=(1 << 30) + 1), "a group is outside its limits"),
        (with_group(kind=9), "a group is outside its limits"),
        (with_group(first=1 << 63), "a group is outside its limits"),
        (with_group(runs=(Run(1, ALIGNMENT, 2),)), "not listed in the order of their use"),
        (with_group(runs=(Run(0, 0, 2),)), "a run lies outside its pack"),
        (with_group(runs=(Run(0, 2 * ALIGNMENT, 2),)), "a run lies outside its pack"),
        (with_group(runs=(Run(0, ALIGNMENT, 0), RUN)), "a run lies outside its pack"),
        (
            with_group(runs=(Run(0, ALIGNMENT, 1), Run(0, 2 * ALIGNMENT, 1))),
            "two runs are really one",
        ),
        (with_group(runs=(Run(0, ALIGNMENT, 1),)), "runs do not hold its pages"),
    ],
)
def test_an_authenticated_manifest_that_contradicts_itself_is_malformed(
    manifest: Manifest, found: str
) -> None:
    with pytest.raises(Miss, match=found) as caught:
        Manifest.parse(manifest.encode(KEYS.current), KEYS)
    assert caught.value.reason is Reason.MALFORMED


def test_the_example_that_the_malformed_ones_differ_from_is_accepted() -> None:
    assert Manifest.parse(GOOD.encode(KEYS.current), KEYS) == GOOD


def test_counts_that_promise_more_than_there_is_are_refused_before_anything_is_allocated() -> None:
    data = bytearray(GOOD.encode(KEYS.current)[:-32])
    # The group's page count: prefix 24, body 92, one pack 24, then kind, size and first.
    data[24 + 92 + 24 + 16 : 24 + 92 + 24 + 20] = b"\xff\xff\xff\xff"
    forged = bytes(data) + KEYS.current.tag(bytes(data))
    with pytest.raises(Miss, match="counts do not add up"):
        Manifest.parse(forged, KEYS)
    assert len(forged) < MANIFEST_LIMIT


def test_a_key_that_is_not_in_the_ring_vouches_for_nothing() -> None:
    data = GOOD.encode(Key(b"\3" * 32))
    with pytest.raises(Miss) as caught:
        Manifest.parse(data, KEYS)
    assert caught.value.reason is Reason.UNKNOWN_KEY


def test_a_tag_by_another_key_under_a_known_id_is_forged() -> None:
    data = GOOD.encode(KEYS.current)
    with pytest.raises(Miss) as caught:
        Manifest.parse(data[:-32] + KEYS.keys[1].tag(data[:-32]), KEYS)
    assert caught.value.reason is Reason.FORGED


def test_a_later_version_is_left_alone_whatever_follows() -> None:
    data = bytearray(GOOD.encode(KEYS.current))
    data[8] = 2
    with pytest.raises(Miss, match="manifest version 2") as caught:
        Manifest.parse(bytes(data), KEYS)
    assert caught.value.reason is Reason.NEWER_FORMAT


@given(digests32)
def test_names_spell_contexts(context: bytes) -> None:
    assert digest_of_name(manifest_name(context)) == context
    assert digest_of_name(context.hex(), "") == context


@pytest.mark.parametrize("name", ["", ".root", "0" * 64, "0" * 63 + ".root", "A" * 64 + ".root"])
def test_other_names_spell_nothing(name: str) -> None:
    assert digest_of_name(name) is None
