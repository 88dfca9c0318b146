"""Threads that end in the middle: everything under way is answered, and so is what comes later."""

from __future__ import annotations

import threading
import time

import pytest

from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.store.store import Store

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
BOUNDARY = 48


def orders(rank, *roots):
    return [
        rank.publish_order(number, root, BOUNDARY, state_block=1, blocks=(2, 3, 4))
        for number, root in enumerate(roots, 1)
    ]


def killed(*_arguments, **_keywords):
    raise SystemExit("the thread is killed")


def test_capture_thread_that_ends_reports_its_publication_the_queued_and_the_later_ones(
    rank, monkeypatch
):
    first, second, third = orders(rank, A, B, C)
    begun, go = threading.Event(), threading.Event()

    def stalled(*_arguments, **_keywords):
        begun.set()
        assert go.wait(20)
        raise SystemExit("the thread is killed")

    monkeypatch.setattr(rank.capture, "_gather", stalled)
    rank.capture.submit(first, None)
    assert begun.wait(20)
    rank.capture.submit(second, None)
    go.set()
    copied, reports = rank.wait_reports(2)
    rank.capture._thread.join(20)
    assert rank.capture.ended
    rank.capture.submit(third, None)
    reports += rank.wait_reports(1)[1]

    assert copied == []
    assert [(r.number, r.result, r.reason) for r in reports] == [
        (1, Result.FAILED, "worker_ended"),
        (2, Result.SKIPPED, "worker_ended"),
        (3, Result.SKIPPED, "worker_ended"),
    ]
    assert rank.store.inventory() == frozenset()


def test_thread_that_ends_in_a_restore_fails_that_load_and_serves_the_next(rank, monkeypatch):
    rank.published(orders(rank, A))
    order = rank.load_order("r", A, BOUNDARY, state_block=10, blocks=(11, 12, 13))
    with monkeypatch.context() as patched:
        patched.setattr(Store, "plan", killed)
        rank.restore.submit(order, None)
        requests, failed, blocks = rank.ended()
    assert requests == ["r"]
    assert [(f.reason, f.quarantined) for f in failed] == [("worker_ended", False)]
    assert blocks == order.blocks
    rank.restore.submit(order, None)
    assert rank.ended() == (["r"], [], set())


@pytest.mark.parametrize("finished_before", [True, False])
def test_loads_that_are_given_up_fail_even_if_they_had_arrived(rank, monkeypatch, finished_before):
    rank.published(orders(rank, A))
    order = rank.load_order("r", A, BOUNDARY, state_block=10, blocks=(11, 12, 13))
    reading, go = threading.Event(), threading.Event()
    read = Store.read

    def stalled(self, *arguments, **keywords):
        reading.set()
        assert go.wait(20)
        return read(self, *arguments, **keywords)

    monkeypatch.setattr(Store, "read", stalled)
    rank.restore.submit(order, None)
    assert reading.wait(20)
    if finished_before:
        go.set()
        deadline = time.monotonic() + 20
        while rank.restore._running:
            assert time.monotonic() < deadline, "the load never ends"
            time.sleep(0.005)
    rank.restore.give_up("weights_changed")
    go.set()
    requests, failed, blocks = rank.ended()
    assert requests == ["r"]
    assert [f.reason for f in failed] == ["weights_changed"]
    assert blocks == order.blocks
