import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.scheduler.planner import RestorePlan, candidates
from sparkcache_connector.scheduler.quorum import Quorum, Report


def digest(index):
    return index.to_bytes(32, "little")


def quorum_of(*inventories):
    quorum = Quorum(len(inventories))
    for rank, roots in enumerate(inventories):
        quorum.absorb(Report(rank, f"g{rank}", 0, True, tuple(digest(r) for r in roots)))
    return quorum


def plan(prompt=2_000, chunk=256, unit=256, **keywords):
    digests = [digest(i * chunk) for i in range(1, prompt // chunk + 1)]
    return RestorePlan(
        candidates(digests, chunk_tokens=chunk, unit=unit, prompt_tokens=prompt), **keywords
    )


def boundary(offer):
    return offer.boundary if offer else 0


def test_longest_boundary_that_every_rank_holds_is_offered():
    quorum = quorum_of([256, 512, 1_536, 1_792], [256, 512, 1_536])
    offer = plan().longest(quorum, computed=0)
    assert (offer.boundary, offer.root) == (1_536, digest(1_536))


@pytest.mark.parametrize(("prompt", "expected"), [(1_536, 1_280), (1_537, 1_536)])
def test_last_token_of_the_prompt_is_never_offered(prompt, expected):
    quorum = quorum_of([1_280, 1_536])
    assert boundary(plan(prompt).longest(quorum, computed=0)) == expected


@pytest.mark.parametrize(("computed", "expected"), [(0, 512), (511, 512), (512, 0), (900, 0)])
def test_only_what_goes_beyond_the_local_prefix_is_offered(computed, expected):
    assert boundary(plan().longest(quorum_of([512]), computed=computed)) == expected


def test_failed_root_is_excluded_and_the_next_longest_is_offered():
    quorum = quorum_of([512, 1_024, 1_536])
    request = plan()
    assert boundary(request.longest(quorum, computed=0)) == 1_536
    request.exclude(digest(1_536))
    assert boundary(request.longest(quorum, computed=0)) == 1_024
    request.exclude(digest(1_024))
    request.exclude(digest(512))
    assert request.longest(quorum, computed=0) is None
    assert len(request.excluded) == 3
    assert boundary(plan().longest(quorum, computed=0)) == 1_536  # others are not affected


def test_quarantined_root_disappears_for_everyone():
    quorum = quorum_of([512, 1_536])
    request = plan()
    request.longest(quorum, computed=0)
    quorum.discard(0, digest(1_536))
    assert boundary(request.longest(quorum, computed=0)) == 512


def test_root_that_appears_while_the_request_waits_is_offered():
    quorum = quorum_of([512])
    request = plan()
    assert boundary(request.longest(quorum, computed=0)) == 512
    quorum.absorb(Report(0, "g0", 1, False, (digest(1_024),)))
    assert boundary(request.longest(quorum, computed=0)) == 1_024


def test_boundaries_that_are_not_multiples_of_the_unit_are_no_candidates():
    quorum = quorum_of([256, 512, 768, 1_280])
    assert boundary(plan(unit=512).longest(quorum, computed=0)) == 512


def test_short_spans_are_not_worth_a_restore():
    quorum = quorum_of([256, 512])
    assert plan(min_span=1_024).longest(quorum, computed=0) is None


@given(
    st.sets(st.integers(1, 12)),
    st.sets(st.integers(1, 12)),
    st.integers(0, 2_600),
    st.integers(0, 2_600),
)
def test_offer_equals_the_definition(one, two, prompt, computed):
    quorum = quorum_of([256 * i for i in one], [256 * i for i in two])
    both = [256 * i for i in one & two]
    expected = max((b for b in both if b < prompt), default=0)
    got = plan(prompt).longest(quorum, computed=computed)
    assert boundary(got) == (expected if expected > computed else 0)


def test_asking_again_is_cheap_even_for_a_long_prompt_that_hits_nothing():
    quorum = quorum_of(range(100_000))
    request = plan(131_072, chunk=256)
    for root in range(256, 131_072, 256):
        quorum.discard(0, digest(root))
    request.longest(quorum, computed=0)
    started = time.perf_counter()
    for _ in range(1_000):
        request.longest(quorum, computed=0)
    assert time.perf_counter() - started < 0.1  # 100 µs each would be 100 times too slow
