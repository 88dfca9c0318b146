"""A rank's workers, stopped at every stage by everything that can stop them: one report each.

Stages and events are few, so every pair is run. A load that is reported as failed has written
nothing afterwards, one that is reported as received has written everything.
"""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("torch", reason="needs the engine environment (`make engine`)")

from rank_harness import BLOCK, STATE

from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.store.store import Store

pytestmark = pytest.mark.engine

ROOT = b"a" * 32
BOUNDARY = 100
SOURCES = list(range(1, 9))
TARGETS = list(range(31, 39))
DEADLINE = 0.4


class Stage:
    """Holds a worker's thread at one call, before or after it, until the test lets it go."""

    def __init__(self, monkeypatch, owner, name, *, after=False):
        self.reached, self.go = threading.Event(), threading.Event()
        inner = getattr(owner, name)

        def held(*arguments, **keywords):
            if after:
                result = inner(*arguments, **keywords)
                self._hold()
                return result
            self._hold()
            return inner(*arguments, **keywords)

        monkeypatch.setattr(owner, name, held)

    def _hold(self):
        self.reached.set()
        assert self.go.wait(20)


def load_stage(name, monkeypatch, rank):
    if name == "opening":
        return Stage(monkeypatch, Store, "plan")
    if name == "opened":
        return Stage(monkeypatch, rank.placement, "begin_restore")
    if name == "reading":
        return Stage(monkeypatch, Store, "read")
    return Stage(monkeypatch, Store, "read", after=True)


def happens(event, rank, stage):
    """Let it happen while the thread is held; then let the thread go."""
    ending = None
    if event == "cancel":
        rank.restore.cancel(["q"])
    elif event == "deadline":
        time.sleep(DEADLINE + 0.1)
    elif event == "close":
        ending = threading.Thread(target=rank.restore.close)
        ending.start()
        # Closing cancels first and waits then.
        time.sleep(0.05)
    elif event == "cancel twice and close":
        rank.restore.cancel(["q"])
        rank.restore.cancel(["q"])
        ending = threading.Thread(target=rank.restore.close)
        ending.start()
    stage.go.set()
    if ending is not None:
        ending.join(20)
        assert not ending.is_alive()


def published(rank):
    order = rank.publish_order(1, ROOT, BOUNDARY, state_block=20, blocks=SOURCES)
    _, reports = rank.published([order])
    assert [r.result for r in reports] == [Result.STORED]


EVENTS = ["nothing", "cancel", "deadline", "close", "cancel twice and close"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", ["opening", "opened", "reading", "verified"])
def test_a_load_ends_once_whatever_happens_at_whatever_stage(
    make_rank, monkeypatch, stage, event
) -> None:
    rank = make_rank(deadline=DEADLINE if event == "deadline" else 20.0)
    published(rank)
    before = rank.recurrent.clone(), rank.attention.clone()
    held = load_stage(stage, monkeypatch, rank)
    order = rank.load_order("q", ROOT, BOUNDARY, state_block=50, blocks=TARGETS)
    rank.restore.submit(order, None)
    assert held.reached.wait(20)
    assert rank.restore.take().requests == frozenset()
    happens(event, rank, held)
    requests, failed, blocks = rank.ended()
    assert requests == ["q"]
    at_report = rank.recurrent.clone(), rank.attention.clone()
    time.sleep(0.1)
    assert (rank.recurrent == at_report[0]).all()
    assert (rank.attention == at_report[1]).all()
    assert rank.restore.take() == type(rank.restore.take())(frozenset(), (), frozenset())
    if failed:
        assert blocks == order.blocks
        expected = "deadline" if event == "deadline" else "cancelled"
        assert [(f.request, f.reason, f.quarantined) for f in failed] == [("q", expected, False)]
    else:
        assert event == "nothing" or stage == "verified"
        count = -(-BOUNDARY // BLOCK)
        assert (rank.recurrent[50, :STATE] == before[0][20, :STATE]).all()
        whole = TARGETS[: count - 1]
        assert (rank.attention[whole] == before[1][SOURCES[: count - 1]]).all()
    assert ROOT in rank.store.inventory()


def capture_stage(name, monkeypatch, rank):
    if name == "gathering":
        return Stage(monkeypatch, rank.placement, "begin_capture")
    if name == "gathered":
        return Stage(monkeypatch, Store, "publish")
    return Stage(monkeypatch, Store, "publish", after=True)


@pytest.mark.parametrize("event", ["nothing", "close", "the store closes", "the disk fails"])
@pytest.mark.parametrize("stage", ["gathering", "gathered", "stored"])
def test_a_publication_is_reported_once_whatever_happens_at_whatever_stage(
    rank, monkeypatch, stage, event
) -> None:
    if event == "the disk fails":

        def failing(*arguments, **keywords):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Store, "publish", failing)
    held = capture_stage(stage, monkeypatch, rank)
    orders = [
        rank.publish_order(i, bytes([i]) * 32, BOUNDARY, state_block=20, blocks=SOURCES)
        for i in (1, 2)
    ]
    for order in orders:
        rank.capture.submit(order, None)
    ending = None
    if stage == "stored" and event == "the disk fails":
        held.go.set()  # never stored: nothing to hold
    else:
        assert held.reached.wait(20)
    if event == "close":
        ending = threading.Thread(target=rank.capture.close)
        ending.start()
        time.sleep(0.05)
    elif event == "the store closes":
        ending = threading.Thread(target=rank.store.close)
        ending.start()
        time.sleep(0.05)
    held.go.set()
    copied, reports = rank.wait_reports(2)
    if ending is not None:
        ending.join(20)
        assert not ending.is_alive()
    assert sorted(r.number for r in reports) == [1, 2]
    assert len(copied) == len(set(copied))
    time.sleep(0.05)
    assert rank.capture.take() == ((), ())
    stored = {r.number for r in reports if r.result is Result.STORED}
    assert stored <= set(copied)
    if event in ("nothing", "close"):
        assert stored == {1, 2}
    if event == "the disk fails":
        assert stored == set()
