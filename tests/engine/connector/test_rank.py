"""What a rank tells in a step: nothing that is not counted in the same step."""

from __future__ import annotations

import errno
import os
import time
from types import SimpleNamespace

import pytest
import rank_harness

from sparkcache_connector.config import Config
from sparkcache_connector.messages import Orders
from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.store import core, durable
from sparkcache_connector.store.store import Store
from sparkcache_connector.telemetry.metrics import Counts
from sparkcache_connector.worker.rank import Rank

A, B = b"a" * 32, b"b" * 32
BOUNDARY = 48
OFF = "sparkcache_switched_off"
RETRY = 600.0


class SlowCounts(Counts):
    """Takes its time, so that whoever does not wait for it is seen."""

    def add(self, name, *labels, by=1):
        time.sleep(0.05)
        super().add(name, *labels, by=by)


@pytest.fixture
def counts():
    return SlowCounts()


@pytest.fixture
def harness(rank):
    """The memory and the orders of `rank_harness`, without its workers."""
    rank.restore.close()
    rank.capture.close()
    rank.store.close()
    return rank


@pytest.fixture
def whole(harness, counts, tmp_path):
    options = core.Options(workers=2, retry_seconds=RETRY)
    store = Store.open(tmp_path / "rank-0", identity=b"i" * 32, options=options)
    geometry = SimpleNamespace(shapes=rank_harness.SHAPES, layout=harness.placement.layout)
    whole = Rank(
        store,
        harness.placement,
        geometry,
        0,
        Config(root=str(tmp_path)),
        counts,
        weights_changed=lambda: False,
        page=None,
    )
    yield whole
    whole.close()


def step(whole, counts, orders=None):
    """One step in the engine's order: what was said, and what was counted by then."""
    orders = orders or Orders()
    whole.before_forward(orders, lambda: None)
    whole.after_forward(orders, lambda: None)
    ended = whole.ended_loads()
    whole.collect()
    counted = {(name, *labels): value for name, labels, value in counts.take()}
    return ended, whole.report(), counted


def steps_until(whole, counts, done, orders=None):
    """Steps until one says what is waited for; everything counted up to that very step."""
    deadline = time.monotonic() + 20
    total = {}
    while True:
        assert time.monotonic() < deadline, "it is never said"
        ended, report, counted = step(whole, counts, orders)
        orders = None
        for series, value in counted.items():
            total[series] = value if series[0] == OFF else total.get(series, 0) + value
        if done(ended, report):
            return ended, report, total
        time.sleep(0.002)


def publish(harness, number, root):
    order = harness.publish_order(number, root, BOUNDARY, state_block=1, blocks=(2, 3, 4))
    return Orders(publications=(order,))


def reported(_ended, report):
    return bool(report.publications)


def test_publication_is_counted_by_the_step_that_reports_it(whole, counts, harness):
    _, report, total = steps_until(whole, counts, reported, publish(harness, 1, A))
    assert [(p.number, p.result) for p in report.publications] == [(1, Result.STORED)]
    assert total["sparkcache_publications_total", "stored"] == 1
    assert total["sparkcache_published_bytes_total",] > 0
    assert total["sparkcache_publication_seconds_total",] > 0
    assert total["sparkcache_store_bytes", "0"] > 0


def test_load_is_counted_by_the_step_that_reports_it(whole, counts, harness):
    steps_until(whole, counts, reported, publish(harness, 1, A))
    load = harness.load_order("r", A, BOUNDARY, state_block=10, blocks=(11, 12, 13))
    bad = harness.load_order("s", B, BOUNDARY, state_block=14, blocks=(15, 16, 17))
    for order, outcome in ((load, "received"), (bad, "failed")):
        ended, _, total = steps_until(
            whole, counts, lambda ended, _: bool(ended.requests), Orders(loads=(order,))
        )
        assert ended.requests == {order.request}
        assert total["sparkcache_restores_total", outcome] == 1
        assert total["sparkcache_restore_seconds_total",] > 0


def test_dead_capture_thread_is_off_by_the_step_that_reports_its_publication(
    whole, counts, harness, monkeypatch
):
    def killed(*_arguments):
        raise SystemExit("the thread is killed")

    monkeypatch.setattr(whole._capture, "_gather", killed)
    _, _, before = steps_until(whole, counts, reported, publish(harness, 1, A))
    whole._capture._thread.join(20)
    _, report, total = steps_until(whole, counts, reported, publish(harness, 2, B))
    assert [(p.number, p.reason) for p in report.publications] == [(2, "worker_ended")]
    assert total["sparkcache_publication_failures_total", "worker_ended"] == 1
    assert (before | total)[OFF, "publish", "worker_ended", "0"] == 1


def test_full_disk_is_off_by_the_step_that_reports_it_and_on_when_it_is_tried_again(
    whole, counts, harness, monkeypatch
):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(durable.Files, "allocate", full)
        _, report, total = steps_until(whole, counts, reported, publish(harness, 1, A))
    assert [(p.number, p.reason) for p in report.publications] == [(1, "disk-full")]
    assert total[OFF, "publish", "disk-full", "0"] == 1
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + RETRY)
    with monkeypatch.context() as patched:
        patched.setattr(core, "time", later)
        counted = step(whole, counts)[2]
    assert counted[OFF, "publish", "disk-full", "0"] == 0
