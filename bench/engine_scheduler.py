"""What the connector's scheduler hooks cost per step; run inside an engine environment.

Reads ``{"rounds": N}``, writes per model kind the microseconds that all hooks of one step take
together, on vLLM's own scheduler with 64 running requests, of which one in ten steps ends and gives
way to a new one of 1,500 tokens. ``step`` is the median step, which only decodes; ``mean`` has the
digests, lookups and publications of the admitted ones in it. Best and median of the rounds, in the
thread's processor time: other people's work on the machine does not count. ``whole`` is vLLM's own
step with the harness around it.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engine" / "overlay")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import boundary_harness as harness  # noqa: E402

from sparkcache_connector import connector as adapter  # noqa: E402
from sparkcache_connector.messages import PublicationReport, RankReport  # noqa: E402
from sparkcache_connector.scheduler.ledger import Result  # noqa: E402
from sparkcache_connector.scheduler.quorum import Journal  # noqa: E402

harness.SparkCacheConnector = adapter.SparkCacheConnector  # type: ignore[attr-defined]

RUNNING = 64
STEPS = 300
HOOKS = (
    "build_connector_meta",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "get_recurrent_publication_boundaries",
    "has_pending_push_work",
    "on_new_request",
    "request_finished",
    "request_finished_all_groups",
    "take_captured_recurrent_boundaries",
    "update_connector_output",
    "update_state_after_alloc",
)
GEOMETRIES = {
    "hybrid": harness.Geometry((harness.Group("full", 128), harness.Group("mamba", 128)), 128, 128),
    "dense": harness.Geometry((harness.Group("full", 16),), 16, 16),
}


class Clock:
    """Adds up the time inside hooks; a hook that calls another one is counted once."""

    def __init__(self, connector: Any) -> None:
        self.spent = 0.0
        self._inside = False
        for name in HOOKS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return hook(*arguments, **keywords)
            self._inside = True
            start = time.thread_time()
            try:
                return hook(*arguments, **keywords)
            finally:
                self.spent += time.thread_time() - start
                self._inside = False

        return timed

    def take(self) -> float:
        """Seconds since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent


class PromptRank:
    """A rank that has always just stored what it was told to store."""

    def __init__(self, engine: harness.Engine) -> None:
        self._journal = Journal(0, "life")
        self._update = engine.scheduler.update_from_output
        engine.scheduler.update_from_output = self._report  # type: ignore[method-assign]
        introduction = adapter.Introduction(tuple(self._journal.drain()))
        engine.connector.set_xfer_handshake_metadata({0: introduction})

    def _report(self, output: Any, result: Any) -> Any:
        orders = output.kv_connector_metadata.orders
        numbers = tuple(order.number for order in orders.publications)
        for order in orders.publications:
            self._journal.add(order.root)
        report = self._journal.next_report()
        ended = tuple(PublicationReport(number, Result.STORED) for number in numbers)
        inventory = (report,) if report else ()
        reports = adapter.StepReports((RankReport(0, inventory, numbers, ended),))
        result.kv_connector_output = harness.KVConnectorOutput(kv_connector_worker_meta=reports)
        return self._update(output, result)


def measure(geometry: harness.Geometry) -> tuple[list[float], float]:
    """Seconds in hooks per step, and the mean of a whole step of the scheduler."""
    with tempfile.TemporaryDirectory() as root:
        engine = harness.make_engine(
            geometry,
            "SparkCacheConnector",
            extra={"spark_cache_root": root},
            blocks=60_000,
            max_seqs=RUNNING,
        )
        PromptRank(engine)
        clock = Clock(engine.connector)
        for number in range(RUNNING):
            engine.add(f"r{number}", harness.token_ids(f"r{number}", 1_500), max_tokens=2_000)
        while len(engine.scheduler.running) < RUNNING or engine.scheduler.waiting:
            engine.step()
        clock.take()
        spent, whole = [], 0.0
        for number in range(STEPS):
            if number % 10 == 0:
                engine.abort(engine.scheduler.running[0].request_id)
                name = f"n{number}"
                engine.add(name, harness.token_ids(name, 1_500), max_tokens=2_000)
            start = time.thread_time()
            engine.step()
            whole += time.thread_time() - start
            spent.append(clock.take())
        return spent, whole / STEPS


def main() -> None:
    """Measure both kinds and write the rows."""
    rounds = json.load(sys.stdin)["rounds"]
    rows = {}
    for name, geometry in GEOMETRIES.items():
        runs = [measure(geometry) for _ in range(rounds)]
        steps = [statistics.median(spent) * 1e6 for spent, _ in runs]
        means = [statistics.mean(spent) * 1e6 for spent, _ in runs]
        rows[name] = {
            "step": [min(steps), statistics.median(steps)],
            "mean": [min(means), statistics.median(means)],
            "whole": min(whole for _, whole in runs) * 1e6,
        }
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
