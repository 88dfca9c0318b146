"""Pages out of real memory, into a real store, and back: the right bytes or none."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("torch", reason="needs the engine environment (`make engine`)")

from rank_harness import BLOCK, STATE

from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.store.store import Store

pytestmark = pytest.mark.engine

ROOT, OTHER = b"a" * 32, b"b" * 32
SOURCES = list(range(1, 9))
TARGETS = list(range(31, 39))


def bytes_of(rank, boundary, state_block, blocks):
    """What a root at a boundary must hold, by definition."""
    count, kept = -(-boundary // BLOCK), boundary % BLOCK or BLOCK
    pages = [rank.attention[b].clone() for b in blocks[:count]]
    pages[-1][:, kept:] = 0
    return [bytes(rank.recurrent[state_block, :STATE].numpy())] + [
        bytes(p.numpy().tobytes()) for p in pages
    ]


def publish(rank, root=ROOT, boundary=100, state_block=20, **more):
    order = rank.publish_order(1, root, boundary, state_block=state_block, blocks=SOURCES, **more)
    copied, reports = rank.published([order])
    assert [(r.number, r.result) for r in reports] == [(1, Result.STORED)], reports
    assert copied == [1]


def load(rank, request="q", root=ROOT, boundary=100, **more):
    order = rank.load_order(request, root, boundary, state_block=50, blocks=TARGETS, **more)
    rank.restore.submit(order, None)
    return order


def spoil(path):
    """Flip one bit in every page: pages begin at multiples of 4096 bytes after the header."""
    data = bytearray(path.read_bytes())
    for offset in range(4096, len(data), 4096):
        data[offset] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("boundary", [1, 15, 16, 17, 100, 128])
def test_what_was_captured_comes_back_with_zeros_past_the_boundary(rank, boundary):
    expected = bytes_of(rank, boundary, 20, SOURCES)
    publish(rank, boundary=boundary)
    load(rank, boundary=boundary)
    assert rank.ended() == (["q"], [], set())
    assert bytes_of(rank, 10_000_000 // BLOCK * BLOCK, 50, TARGETS)[0] == expected[0]
    count = -(-boundary // BLOCK)
    got = [bytes(rank.attention[b].numpy().tobytes()) for b in TARGETS[:count]]
    assert got == expected[1:]


def test_nothing_but_the_destinations_is_written(rank):
    publish(rank)
    before = rank.recurrent.clone(), rank.attention.clone()
    load(rank)
    rank.ended()
    changed = (rank.recurrent != before[0]).any(dim=1).nonzero().flatten().tolist()
    assert changed == [50]
    assert (rank.recurrent[50, STATE:] == before[0][50, STATE:]).all()
    others = [b for b in range(64) if b not in TARGETS[:7]]
    assert (rank.attention[others] == before[1][others]).all()


def test_stored_bytes_are_those_of_the_moment_of_capture(rank):
    expected = bytes_of(rank, 100, 20, SOURCES)
    publish(rank)
    rank.attention.zero_()
    rank.recurrent.zero_()
    load(rank)
    rank.ended()
    assert bytes(rank.recurrent[50, :STATE].numpy()) == expected[0]


def test_extension_references_the_pages_of_its_base(rank):
    publish(rank, boundary=64)
    longer = rank.publish_order(2, OTHER, 100, state_block=21, blocks=SOURCES, base=ROOT)
    rank.published([longer])
    with rank.store.plan(OTHER) as plan:
        assert len(plan.manifest.packs) == 2
    expected = bytes_of(rank, 100, 21, SOURCES)
    load(rank, root=OTHER)
    assert rank.ended() == (["q"], [], set())
    assert bytes(rank.recurrent[50, :STATE].numpy()) == expected[0]


def test_root_that_is_held_is_neither_read_nor_written_again(rank):
    publish(rank)
    again = rank.publish_order(2, ROOT, 100, state_block=20, blocks=SOURCES)
    _, reports = rank.published([again])
    assert [r.result for r in reports] == [Result.ALREADY_HELD]


def test_flipped_byte_is_a_failure_that_names_every_destination_and_quarantines(rank):
    publish(rank)
    (pack,) = (rank.root / "packs").glob("*.pack")
    spoil(pack)
    order = load(rank)
    requests, failed, blocks = rank.ended()
    assert requests == ["q"]
    assert [(f.reason, f.quarantined) for f in failed] == [("page-mismatch", True)]
    assert blocks == order.blocks
    assert ROOT not in rank.store.inventory()


def test_absent_root_is_a_failure(rank):
    load(rank)
    _, failed, _ = rank.ended()
    assert [f.reason for f in failed] == ["absent"]


def test_refused_order_writes_nothing(rank):
    publish(rank)
    before = rank.attention.clone()
    load(rank, refused="destination_shared")
    _, failed, _ = rank.ended()
    assert (len(failed), failed[0].quarantined) == (1, False)
    assert (rank.attention == before).all()
    assert ROOT in rank.store.inventory()


def test_authentic_root_at_another_boundary_than_ordered_is_never_placed(rank):
    publish(rank, boundary=100)
    before = rank.attention.clone()
    load(rank, boundary=112)
    _, failed, _ = rank.ended()
    assert [f.reason for f in failed] == ["geometry"]
    assert (rank.attention == before).all()


class Gate:
    """Lets a store's reads through only when opened."""

    def __init__(self, monkeypatch):
        self.open, self.entered = threading.Event(), threading.Event()
        read = Store.read

        def gated(store, plan, destinations, **keywords):
            self.entered.set()
            self.open.wait(20)
            return read(store, plan, destinations, **keywords)

        monkeypatch.setattr(Store, "read", gated)


def test_aborted_load_is_reported_only_once_nothing_can_be_written(rank, monkeypatch):
    publish(rank)
    gate = Gate(monkeypatch)
    before = rank.attention.clone()
    load(rank)
    assert gate.entered.wait(10)
    rank.restore.cancel(["q", "unknown"])
    assert rank.restore.take().requests == frozenset()
    gate.open.set()
    requests, failed, _ = rank.ended()
    assert (requests, failed[0].reason) == (["q"], "cancelled")
    # From here on the blocks are someone else's.
    time.sleep(0.1)
    assert (rank.attention == before).all()


def test_load_past_its_deadline_fails_and_keeps_the_root(make_rank, monkeypatch):
    rank = make_rank(deadline=0.3)
    publish(rank)
    gate = Gate(monkeypatch)
    load(rank)
    assert gate.entered.wait(10)
    time.sleep(0.4)
    gate.open.set()
    _, failed, _ = rank.ended()
    assert [(f.reason, f.quarantined) for f in failed] == [("deadline", False)]
    assert ROOT in rank.store.inventory()


def test_every_load_ends_exactly_once_whatever_happens_to_it(rank):
    publish(rank)
    for i in range(12):
        order = rank.load_order(
            f"q{i}", ROOT if i % 3 else OTHER, 100, state_block=50, blocks=TARGETS
        )
        rank.restore.submit(order, None)
        if i % 4 == 0:
            rank.restore.cancel([f"q{i}"])
    requests, _, _ = rank.ended(12)
    assert sorted(requests) == sorted(f"q{i}" for i in range(12))
    time.sleep(0.1)
    assert rank.restore.take().requests == frozenset()


def test_every_publication_is_reported_exactly_once_and_its_blocks_are_freed(rank, monkeypatch):
    orders = [
        rank.publish_order(i, bytes([i]) * 32, 16 * i, state_block=20, blocks=SOURCES)
        for i in range(1, 6)
    ]
    publish_root = Store.publish

    def sometimes(store, context, *arguments, **keywords):
        if context[0] % 2:
            raise RuntimeError("injected")
        return publish_root(store, context, *arguments, **keywords)

    monkeypatch.setattr(Store, "publish", sometimes)
    copied, reports = rank.published(orders)
    assert sorted(r.number for r in reports) == [1, 2, 3, 4, 5]
    assert {r.number: (r.result, r.reason) for r in reports} == {
        1: (Result.FAILED, "internal"),
        2: (Result.STORED, ""),
        3: (Result.FAILED, "internal"),
        4: (Result.STORED, ""),
        5: (Result.FAILED, "internal"),
    }
    assert copied == [1, 2, 3, 4, 5]
    assert rank.capture.take() == ((), ())


def test_publication_after_the_worker_has_ended_is_skipped_with_a_reason(rank):
    rank.capture.close()
    order = rank.publish_order(1, ROOT, 100, state_block=20, blocks=SOURCES)
    _, reports = rank.published([order])
    assert [(r.result, r.reason) for r in reports] == [(Result.SKIPPED, "worker_ended")]


def test_load_after_the_worker_has_ended_fails_with_a_reason(rank):
    rank.restore.close()
    load(rank)
    _, failed, _ = rank.ended()
    assert [f.reason for f in failed] == ["worker_ended"]


def test_concurrent_loads_of_one_root_all_get_the_right_bytes(make_rank):
    rank = make_rank(threads=4)
    expected = bytes_of(rank, 16, 20, SOURCES)
    publish(rank, boundary=16)
    for i in range(8):
        order = rank.load_order(f"q{i}", ROOT, 16, state_block=40 + i, blocks=[30 + i])
        rank.restore.submit(order, None)
    assert rank.ended(8)[1] == []
    for i in range(8):
        assert bytes(rank.recurrent[40 + i, :STATE].numpy()) == expected[0]
        assert bytes(rank.attention[30 + i].numpy().tobytes()) == expected[1]
