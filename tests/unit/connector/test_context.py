import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.context import (
    ContentItem,
    ContextChain,
    Scope,
    Uncacheable,
    UncacheableError,
)

CHUNK = 4
SCOPE = Scope(CHUNK)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def digests(tokens, scope=SCOPE, items=()):
    chain = ContextChain(scope, items)
    chain.extend(tokens)
    return [chain.digest(b) for b in range(scope.chunk_tokens, chain.tokens + 1, CHUNK)]


@given(tokens, st.lists(st.integers(0, 40), max_size=4))
def test_however_tokens_arrive_the_digests_are_the_same(whole, cuts):
    chain = ContextChain(SCOPE)
    edges = [0, *sorted(cuts), len(whole)]
    for start, end in itertools.pairwise(edges):
        chain.extend(whole[start:end])
    assert chain.seen_tokens == len(whole)
    assert [chain.digest(b) for b in range(CHUNK, chain.tokens + 1, CHUNK)] == digests(whole)


@given(tokens, tokens)
def test_shared_prefix_has_shared_digests_and_nothing_else_has(one, other):
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(one), len(other))
    for index, (a, b) in enumerate(zip(digests(one), digests(other), strict=False)):
        assert (a == b) == ((index + 1) * CHUNK <= shared)


def test_digests_are_pinned_so_that_a_change_of_encoding_cannot_pass_unnoticed():
    items = [ContentItem(2, 3, "image", b"\x01" * 32)]
    assert [d.hex()[:16] for d in digests(range(8), Scope(4, "salt", b"a"), items)] == PINNED


def test_two_tenants_with_different_salts_never_meet():
    salts = [None, "", "a", "b", "a\0"]
    seen = [digests(range(8), Scope(CHUNK, salt))[-1] for salt in salts]
    assert len(set(seen)) == len(salts)


def test_salt_and_adapter_cannot_be_traded_for_each_other():
    assert Scope(4, "x", None).digest() != Scope(4, None, b"x").digest()
    assert Scope(4, "", b"x").digest() != Scope(4, "x", b"").digest()


def test_adapters_differ_by_their_files_digest():
    assert len({Scope(CHUNK, None, a).digest() for a in (None, b"\0" * 32, b"\1" * 32)}) == 3


def test_chunk_size_is_part_of_the_scope():
    assert Scope(4).digest() != Scope(8).digest()


@pytest.mark.parametrize(
    ("item", "first_changed_chunk"),
    [
        (ContentItem(0, 1, "image", b"d"), 0),
        (ContentItem(3, 2, "image", b"d"), 0),
        (ContentItem(4, 1, "image", b"d"), 1),
        (ContentItem(11, 30, "image", b"d"), 2),
        (ContentItem(40, 1, "image", b"d"), None),
    ],
)
def test_item_changes_every_digest_from_the_first_chunk_it_overlaps(item, first_changed_chunk):
    plain, with_item = digests(range(12)), digests(range(12), items=[item])
    changed = [a != b for a, b in zip(plain, with_item, strict=True)]
    expected = 3 if first_changed_chunk is None else first_changed_chunk
    assert changed == [False] * expected + [True] * (3 - expected)


@pytest.mark.parametrize(
    "other",
    [
        ContentItem(1, 2, "image", b"e"),
        ContentItem(1, 3, "image", b"d"),
        ContentItem(2, 2, "image", b"d"),
        ContentItem(1, 2, "audio", b"d"),
    ],
)
def test_items_differ_by_content_length_position_and_kind(other):
    assert digests(range(4), items=[ContentItem(1, 2, "image", b"d")]) != digests(
        range(4), items=[other]
    )


def test_order_in_which_items_are_given_does_not_matter():
    items = [ContentItem(0, 1, "image", b"d"), ContentItem(2, 1, "image", b"e")]
    assert digests(range(4), items=items) == digests(range(4), items=items[::-1])


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_token_that_is_not_an_unsigned_32_bit_number_is_uncacheable(bad):
    chain = ContextChain(SCOPE)
    chain.extend([1, 2])
    with pytest.raises(UncacheableError) as caught:
        chain.extend([3, bad])
    assert caught.value.reason is Uncacheable.TOKEN_OUT_OF_RANGE
    assert chain.seen_tokens == 2


@pytest.mark.parametrize("arguments", [(-1, 1, "i", b"d"), (0, 0, "i", b"d"), (0, 1, "i", b"")])
def test_item_without_position_or_digest_is_uncacheable(arguments):
    with pytest.raises(UncacheableError):
        ContentItem(*arguments)


@pytest.mark.parametrize("boundary", [0, -4, 3, 5, 12])
def test_boundary_that_is_not_of_this_chain_is_an_error(boundary):
    chain = ContextChain(SCOPE)
    chain.extend(range(9))
    with pytest.raises(ValueError, match=f"boundary {boundary} is not a multiple of 4 in 1..8"):
        chain.digest(boundary)


PINNED = ["6e9c299b1a02c35d", "2501b9af9fb44da6"]
