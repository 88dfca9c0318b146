"""The connector on a real scheduler, with ranks that stall: the right bytes or nothing.

The worker's physics are modelled (``overlay/boundary_harness.py``): a recurrent block holds
the state of one exact prefix, anything else is garbage and is counted. Ranks copy and load
as late as they like, while requests are preempted, aborted, finish, slide their windows and
fight for a small pool.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine environment (`make engine`)")

import boundary_harness as harness
from vllm.v1.outputs import KVConnectorOutput

from sparkcache_connector import connector as adapter
from sparkcache_connector.messages import (
    LoadOrder,
    LoadReport,
    PublicationReport,
    PublishOrder,
    RankReport,
)
from sparkcache_connector.pages import RECURRENT
from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.scheduler.quorum import Journal

pytestmark = pytest.mark.engine

harness.SparkCacheConnector = adapter.SparkCacheConnector  # type: ignore[attr-defined]

HYBRID = harness.Geometry((harness.Group("full", 16), harness.Group("mamba", 64)), 16, 64)
TWO_STATES = harness.Geometry(
    (harness.Group("mamba", 64), harness.Group("full", 16), harness.Group("mamba", 32)), 16, 64
)
WINDOW = harness.Geometry((harness.Group("full", 16), harness.Group("sliding", 16)), 16, 16)


@dataclass
class StallingRank:
    """A rank whose copies and loads happen when the test says so."""

    engine: harness.Engine
    chance: random.Random
    failures: float = 0.0
    stored: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    copies: list[PublishOrder] = field(default_factory=list)
    storing: list[tuple[PublishOrder, bool]] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    ended_requests: set[str] = field(default_factory=set)
    report: dict[str, list[Any]] = field(default_factory=dict)
    copied: int = 0
    loaded: int = 0

    def __post_init__(self) -> None:
        self.journal = Journal(0, "life")
        self.shapes = self.engine.connector._shapes
        self._inner = self.engine.scheduler.update_from_output
        self.engine.scheduler.update_from_output = self._update  # type: ignore[method-assign]
        introduction = adapter.Introduction(tuple(self.journal.drain()))
        self.engine.connector.set_xfer_handshake_metadata({0: introduction})

    def _update(self, output: Any, result: Any) -> Any:
        """The end of one step on this rank: take its orders, do some of the work, report."""
        orders = output.kv_connector_metadata.orders
        self.copies += orders.publications
        self.loads += orders.loads
        self.ended_requests |= output.finished_req_ids
        for root in orders.withdrawals:
            self.stored.pop(root, None)
            self.journal.remove(root)
        result.kv_connector_output = self._work(everything=False)
        return self._inner(output, result)

    def _work(self, *, everything: bool) -> KVConnectorOutput:
        copied, ended, failed = [], [], []
        received: set[str] = set()
        invalid: set[int] = set()
        for order in [o for o in self.copies if everything or self.chance.random() < 0.3]:
            self.copies.remove(order)
            right = self._copy(order)
            copied.append(order.number)
            self.storing.append((order, right))
        for order, right in [s for s in self.storing if everything or self.chance.random() < 0.5]:
            self.storing.remove((order, right))
            if self.chance.random() < self.failures:
                ended.append(PublicationReport(order.number, Result.FAILED, "injected"))
                continue
            ended.append(PublicationReport(order.number, Result.STORED))
            self.stored[order.root] = self._tokens(order.request)[: order.boundary]
            self.journal.add(order.root)
        for load in [o for o in self.loads if everything or self.chance.random() < 0.3]:
            self.loads.remove(load)
            received.add(load.request)
            if load.request in self.ended_requests or self.chance.random() < self.failures:
                failed.append(LoadReport(load.request, load.root, "injected", False))
                invalid |= load.blocks
            else:
                self._load(load)
        inventory = self.journal.next_report()
        report = RankReport(
            0, (inventory,) if inventory else (), tuple(copied), tuple(ended), tuple(failed)
        )
        return KVConnectorOutput(
            finished_recving=received or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=adapter.StepReports((report,)),
        )

    def _tokens(self, request: str) -> tuple[int, ...]:
        return tuple(self.engine.requests[request]._all_token_ids)

    def _copy(self, order: PublishOrder) -> bool:
        """Read every source block now, however late that is."""
        self.copied += 1
        prefix = self._tokens(order.request)[: order.boundary]
        for group in order.groups:
            for offset, block in enumerate(group.blocks):
                where = f"{order.request}@{order.boundary} group {group.group} block {block}"
                assert self.engine.block(block).ref_cnt > 0, where
                content = self.engine.worker.content.get(block)
                if self.shapes[group.group].kind == RECURRENT:
                    expected = ("state", group.group, order.boundary, hash(prefix))
                    assert content == expected, where
                else:
                    kind, of, owner, slot = content
                    assert (kind, of, slot) == ("kv", group.group, group.first + offset), where
                    end = min((slot + 1) * 16, order.boundary)
                    assert self._tokens(owner)[:end] == prefix[:end], where
        return True

    def _load(self, load: LoadOrder) -> None:
        """Write every destination now, which must still be this request's own."""
        self.loaded += 1
        assert not load.refused
        prefix = self._tokens(load.request)[: load.boundary]
        assert self.stored[load.root] == prefix
        tables = self.engine.manager.get_block_ids(load.request)
        for group in load.groups:
            for offset, block in enumerate(group.blocks):
                assert self.engine.block(block).ref_cnt == 1
                assert tables[group.group][group.first + offset] == block
                slot = group.first + offset
                self.engine.worker.content[block] = (
                    ("state", group.group, load.boundary, hash(prefix))
                    if self.shapes[group.group].kind == RECURRENT
                    else ("kv", group.group, load.request, slot)
                )

    def finish(self) -> None:
        """Let everything end that is under way, and step the idle engine until it is told."""
        for _ in range(50):
            if not self.engine.connector.has_pending_push_work() and not self.loads:
                return
            self.engine.step()
            self.engine.drain()
        raise AssertionError("publications are never reported")


def start(geometry: Any, seed: int, tmp_path: Any, **more: Any) -> StallingRank:
    failures = more.pop("failures", 0.0)
    options = {
        "spark_cache_root": str(tmp_path),
        "spark_cache_chunk_tokens": 16,
        "spark_cache_checkpoint_interval_tokens": 64,
        "spark_cache_min_span_tokens": 16,
        "spark_cache_max_delayed_stores": 4,
    }
    engine = harness.make_engine(geometry, "SparkCacheConnector", extra=options, **more)
    return StallingRank(engine, random.Random(seed), failures)


def prompt(chance: random.Random, trunk: int) -> list[int]:
    """Prompts of a few families that share beginnings."""
    family = chance.randrange(3)
    shared = [(family * 131 + i * 7) % 500 for i in range(chance.randrange(trunk))]
    return [*shared, *(chance.randrange(500) for _ in range(chance.randrange(2, 60)))]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("geometry", [HYBRID, TWO_STATES, WINDOW], ids=["hybrid", "two", "window"])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_copy_the_right_bytes_load_into_their_own_blocks_and_leak_nothing(
    geometry: Any, seed: int, depth: int, tmp_path: Any
) -> None:
    failures, blocks = (0.2 if seed % 2 else 0.0), 60
    rank = start(
        geometry,
        seed,
        tmp_path,
        budget=128,
        blocks=blocks,
        depth=depth,
        asynchronous=depth > 1,
        failures=failures,
    )
    engine, chance = rank.engine, random.Random(seed)
    for number in range(60):
        engine.add(f"r{number}", prompt(chance, 300), max_tokens=chance.randrange(1, 40))
        for _ in range(chance.randrange(1, 8)):
            engine.step()
        if chance.random() < 0.5:
            # What other traffic would do to the engine's own prefix cache.
            idle = [b for b in engine.pool.blocks[1:] if b.block_hash and not b.ref_cnt]
            engine.pool.evict_blocks({b.block_id for b in idle})
        if chance.random() < 0.15 and engine.scheduler.running:
            engine.preempt(chance.choice(engine.scheduler.running).request_id)
        if chance.random() < 0.15:
            alive = [r for r in engine.requests if r in engine.scheduler.requests]
            if alive:
                engine.abort(chance.choice(alive))
    engine.run(4_000)
    rank.finish()
    assert engine.worker.garbage == 0
    assert engine.free_blocks == blocks - 1
    assert rank.copied > 10
    assert rank.loaded > 3


def test_stalled_copy_outlives_preemption_finish_and_an_exhausted_pool(tmp_path: Any) -> None:
    rank = start(HYBRID, 0, tmp_path, budget=128, blocks=40)
    engine = rank.engine
    stall, rank.chance = rank.chance, _Never()
    engine.add("r", 200, max_tokens=4)
    engine.steps_until("r", 200)
    assert rank.copies
    engine.preempt("r")
    held = {b for order in rank.copies for group in order.groups for b in group.blocks}
    engine.add("big", 300, max_tokens=4)  # wants nearly every block that is not held
    engine.run()
    assert all(engine.block(b).ref_cnt > 0 for b in held)
    rank.chance = stall
    for order in list(rank.copies):
        assert rank._copy(order)  # asserts that the bytes are still those of the boundary
    rank.finish()
    assert engine.free_blocks == 39


class _Never(random.Random):
    def random(self) -> float:
        return 1.0
