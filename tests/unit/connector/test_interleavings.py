"""Every interleaving of what two ranks say and what befalls the request: one word each, one end.

The small state space is enumerated, not sampled: two ranks that copy and then end a publication
with every pair of results, and a request that is preempted and finishes somewhere in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from test_coordinator import DENSE, HYBRID, PROMPT, Engine, private

from sparkcache_connector.messages import LoadReport, PublicationReport, RankReport
from sparkcache_connector.scheduler.ledger import Result

HELD = {Result.STORED, Result.ALREADY_HELD}
Event = tuple[str, int]


def interleavings(*sequences: Sequence[Event]) -> Iterator[tuple[Event, ...]]:
    """Every order of all events that keeps each sequence's own."""
    if not any(sequences):
        yield ()
    for index, sequence in enumerate(sequences):
        if sequence:
            rest = [*sequences[:index], sequence[1:], *sequences[index + 1 :]]
            for tail in interleavings(*rest):
                yield (sequence[0], *tail)


def rank_says(rank: int, result: Result) -> list[list[Event]]:
    """A rank that stores must have copied; one that skips or fails may not have come so far."""
    both = [("copied", rank), ("ended", rank)]
    return [both] if result is Result.STORED else [both, both[1:]]


SCHEDULES = [
    (results, order)
    for results in itertools.product(Result, repeat=2)
    for first in rank_says(0, results[0])
    for second in rank_says(1, results[1])
    for order in interleavings(first, second, [("preempted", -1), ("finished", -1)])
]


def test_the_state_space_is_the_whole_one() -> None:
    # 90 orders of three pairs, 30 of two pairs and one event, 12 of a pair and two events.
    stored_twice = [order for results, order in SCHEDULES if results == (Result.STORED,) * 2]
    assert len(stored_twice) == len(set(stored_twice)) == 90
    assert len(SCHEDULES) == 90 + 6 * (90 + 30) + 9 * (90 + 30 + 30 + 12)


@pytest.mark.parametrize("shapes", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("repeated", [1, 2], ids=["said once", "said twice"])
def test_a_publication_is_released_once_settled_once_and_withdrawn_only_where_it_must_be(
    shapes, repeated
) -> None:
    for results, schedule in SCHEDULES:
        _one_publication(shapes, results, schedule, repeated)


def _one_publication(shapes, results, schedule, repeated) -> None:
    # The last boundary only, so that there is one publication to follow.
    engine = Engine(shapes, ranks=2, checkpoint_interval_tokens=4_096)
    engine.holds()
    engine.add()
    proof = {"r": [(0, 77, 1_280)]} if shapes is HYBRID else None
    engine.step(0, 1_280 if shapes is HYBRID else 1, engine.table(1_300))
    _, new = engine.step(1, 1_299, None, proof)
    coordinator = engine.coordinator
    if shapes is HYBRID:
        assert [order.boundary for order in new] == [1_280]
    (order,) = new
    spoken: set[int] = set()
    released: list[int] = []
    for what, rank in schedule:
        for _ in range(repeated):
            if what == "copied":
                coordinator.absorb(RankReport(rank, copied=(order.number,)))
            elif what == "ended":
                said = PublicationReport(order.number, results[rank], "x")
                coordinator.absorb(RankReport(rank, publications=(said,)))
            elif what == "preempted":
                engine.step(preempted=["r"])
            else:
                coordinator.finished("r", PROMPT, computed=0, in_flight=0, tables=[[], []])
        spoken |= {rank} - {-1}
        released += coordinator.held.take_released()
        assert released == ([order.number] if spoken == {0, 1} else []), (results, schedule)
    holders = sum(result in HELD for result in results)
    withdrawn = engine.step()[0].withdrawals
    assert withdrawn in ((), (order.root,))
    # The very step of an interleaving may have carried the withdrawal away.
    counted = engine.counted()
    assert counted.get(("sparkcache_withdrawals_total",), 0) == (holders == 1)
    assert counted[("sparkcache_publications_held",)] == 0
    assert not coordinator.has_work, (results, schedule)


LOADS = [
    (failed, order)
    for failed in itertools.product([False, True], repeat=2)
    for order in interleavings(
        [("said", 0), ("ended", -1)],
        [("said", 1)],
        [("aborted", -1)],
    )
    # The engine hears that a load has ended only when every rank has reported it.
    if order.index(("ended", -1)) > max(order.index(("said", 0)), order.index(("said", 1)))
]


@pytest.mark.parametrize(("failed", "schedule"), LOADS)
def test_a_load_keeps_its_place_until_every_rank_has_reported_it_and_failed_roots_are_left_out(
    failed, schedule
) -> None:
    engine = Engine(HYBRID, ranks=2, max_pending_restores=1)
    engine.holds(1_024, 1_280)
    coordinator = engine.coordinator
    for request in ("r", "next"):
        engine.add(request)
    external = coordinator.lookup("r", 0)
    coordinator.allocated("r", external, engine.table(1_280), private)
    (load,) = engine.step()[0].loads
    aborted = ended = False
    for what, rank in schedule:
        if what == "said" and failed[rank]:
            report = LoadReport("r", load.root, "x", False)
            coordinator.absorb(RankReport(rank, failed_loads=(report,)))
        elif what == "ended":
            coordinator.loads_ended(["r"])
            ended = True
        elif what == "aborted":
            coordinator.finished("r", PROMPT, computed=0, in_flight=0, tables=[[], []])
            aborted = True
        assert coordinator.lookup("next", 0) == (1_280 if ended else 0)
        offered = coordinator.lookup("r", 0)
        if not ended or aborted:
            assert offered == 0
        else:
            assert offered == (1_024 if any(failed) else 1_280)
    assert engine.step()[0].loads == ()
