"""One engine in a process of its own, stepped between commands; run inside an engine environment.

Reads JSON lines from standard input, the job first and then commands, and writes JSON lines to
the open file descriptor that the command line names. `tests/support/engine_process.py` is the
other side. The engine is stepped only here, so that a request can be aborted between any two
steps, and everything that the process holds can be counted while nothing runs.

| job       | meaning                                                                     |
|-----------|-----------------------------------------------------------------------------|
| `model`   | a folder, from `tiny_models`                                                |
| `engine`  | keyword arguments of `vllm.LLM`, over the ones in `offline_engine.ENGINE`   |
| `options` | `kv_connector_extra_config`; absent for an engine without the connector     |

| command                                 | answered by                                   |
|-----------------------------------------|-----------------------------------------------|
| –                                       | `ready`, once the engine has started          |
| `ask`: `id`, `prompt`, `tokens`         | `answer`, when the last token is there        |
| `abort`: `id`                           | `aborted`, unless it was answered before      |
| `forget`                                | `forgotten`: idle blocks left the prefix cache|
| `settle`                                | `settled`, once nothing runs or is owed       |
| `interval`: `tokens`                    | `changed`: checkpoints lie so far apart       |
| `harm`: `name`, out of `HARM`           | `harmed`: from now on this goes wrong         |
| `end`, or the end of the input          | `ended`; the engine is shut down in order     |
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

from tests.support import offline_engine

TRANSFER = {
    "kv_connector": "SparkCacheConnector",
    "kv_connector_module_path": "sparkcache_connector.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
SETTLE_SECONDS = 60


@dataclass
class Asked:
    """A request under way."""

    began: float
    times: list[float] = field(default_factory=list)


class Commands:
    """Lines of standard input, taken without waiting while the engine has work."""

    def __init__(self) -> None:
        self._rest = b""
        self.closed = False

    def take(self, wait: float | None) -> list[dict[str, Any]]:
        while not self.closed and select.select([0], [], [], wait)[0]:
            data = os.read(0, 1 << 20)
            self.closed = not data
            self._rest += data
            wait = 0
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


class SteppedEngine:
    """The engine, what it was asked, and what it says."""

    def __init__(self, job: dict[str, Any], say: Callable[..., None]) -> None:
        import vllm

        self._sampling = vllm.SamplingParams
        self._say = say
        self._asked: dict[str, Asked] = {}
        arguments = offline_engine.ENGINE | job.get("engine", {})
        if "options" in job:
            arguments["kv_transfer_config"] = TRANSFER | {
                "kv_connector_extra_config": job["options"]
            }
        self._llm = vllm.LLM(model=job["model"], **arguments)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._pool = self._core.scheduler.kv_cache_manager.block_pool
        connector = self._core.scheduler.connector
        self._side = getattr(connector, "_side", None)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        owed = self._side is not None and self._side.coordinator.has_work
        return self._engine.has_unfinished_requests() or owed

    def step(self) -> None:
        for output in self._engine.step():
            asked = self._asked.get(output.request_id)
            if asked is None:
                continue
            completion = output.outputs[0]
            if len(completion.token_ids) > len(asked.times):
                asked.times.append(time.monotonic() - asked.began)
            if output.finished:
                del self._asked[output.request_id]
                self._answer(output, completion, asked)
        if not self._core.scheduler.running:
            # As the loop of a served engine does: what it waits for, a thread has to do.
            time.sleep(0.001)

    def _answer(self, output: Any, completion: Any, asked: Asked) -> None:
        tokens = list(completion.token_ids)
        chosen = [s[t].logprob for s, t in zip(completion.logprobs, tokens, strict=True)]
        ranked = [
            sorted((o.logprob for o in s.values()), reverse=True)[:2] for s in completion.logprobs
        ]
        self._say(
            "answer",
            id=output.request_id,
            tokens=tokens,
            logprobs=chosen,
            margins=[first - second for first, second in ranked],
            cached=output.num_cached_tokens,
            began=asked.began,
            times=asked.times,
        )

    def ask(self, command: dict[str, Any]) -> None:
        self._asked[command["id"]] = Asked(time.monotonic())
        sampling = self._sampling(
            temperature=0, max_tokens=command["tokens"], logprobs=2, detokenize=False
        )
        prompt = {"prompt_token_ids": command["prompt"]}
        self._engine.add_request(command["id"], prompt, sampling)

    def abort(self, command: dict[str, Any]) -> None:
        if self._asked.pop(command["id"], None):
            self._engine.abort_request([command["id"]])
            self._say("aborted", id=command["id"])

    def forget(self, command: dict[str, Any]) -> None:
        """What other traffic would do to the engine's own prefix cache."""
        idle = {b.block_id for b in self._pool.blocks[1:] if b.block_hash and not b.ref_cnt}
        self._pool.evict_blocks(idle)
        self._say("forgotten", blocks=len(idle))

    def interval(self, command: dict[str, Any]) -> None:
        """Another checkpoint interval, for a bench that compares them in one process."""
        coordinator = self._side.coordinator
        coordinator._policy = replace(coordinator._policy, interval=command["tokens"])
        self._say("changed")

    def harm(self, command: dict[str, Any]) -> None:
        HARM[command["name"]](self._pool)
        self._say("harmed", name=command["name"])

    def settle(self, command: dict[str, Any]) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.busy and time.monotonic() < deadline:
            self.step()
        # One more step frees what the last report released.
        self.step()
        gc.collect()
        self._say("settled", **self.measure())

    def measure(self) -> dict[str, Any]:
        """Everything that must not grow, and what the metrics say."""
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        pins = self._core.scheduler.kv_cache_manager._partial_tail_pins
        return {
            "busy": self.busy,
            "blocks": self._pool.num_gpu_blocks - 1,
            "free": self._pool.get_num_free_blocks(),
            "pinned": sum(map(len, pins.values())),
            "held": len(self._side._held) if self._side else 0,
            "memory": int(status["RssAnon"].split()[0]) << 10,
            "processor": time.process_time(),
            "threads": int(status["Threads"]),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "metrics": _metrics(),
        }


def _metrics() -> dict[str, float]:
    """Samples of vLLM's own registry: name and our labels, the engine's left out."""
    from prometheus_client import REGISTRY

    return {
        ",".join(
            [s.name, *(v for k, v in s.labels.items() if k not in ("engine", "model_name"))]
        ): (s.value)
        for metric in REGISTRY.collect()
        for s in metric.samples
        if s.name.startswith(("sparkcache_", "vllm:num_preemptions"))
        and not s.name.endswith("_created")
    }


# Harm. Each name is one thing that the soak looks for; none can be asked of the product.


def _wrong_answer(pool: Any) -> None:
    """Zero what was read, below the authentication: one page of every group."""
    from sparkcache_connector.store.store import Store

    read = Store.read

    def harmful_read(self: Any, plan: Any, destinations: Any, **keywords: Any) -> int:
        size = read(self, plan, destinations, **keywords)
        for group in destinations:
            for page in [page for page in group if page is not None][-1:]:
                page[:] = bytes(len(page))
        return size

    Store.read = harmful_read


def _with_publications(action: Callable[[Any], None], number: int = 16) -> None:
    from sparkcache_connector.scheduler_side import SchedulerSide

    hold, left = SchedulerSide._hold, iter(range(number))

    def harmful_hold(self: Any, order: Any) -> None:
        hold(self, order)
        if next(left, None) is not None:
            action(order)

    SchedulerSide._hold = harmful_hold


_KEPT: list[Any] = []


def _leaked_block(pool: Any) -> None:
    _with_publications(lambda order: pool.touch([pool.blocks[order.groups[0].blocks[0]]]), 2)


def _growing_memory(pool: Any) -> None:
    _with_publications(lambda order: _KEPT.append(bytearray(b"\1") * (32 << 20)))


def _leaked_thread(pool: Any) -> None:
    def park(order: Any) -> None:
        for _ in range(4):
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    _with_publications(park)


def _leaked_descriptor(pool: Any) -> None:
    def keep(order: Any) -> None:
        _KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(4))

    _with_publications(keep)


def _leaked_shared_memory(pool: Any) -> None:
    """Shared memory that outlives the process, as of one that had no time to unlink it."""

    def keep(order: Any) -> None:
        segment = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(segment._name, "shared_memory")
        _KEPT.append(segment)

    _with_publications(keep)


HARM: dict[str, Callable[[Any], None]] = {
    "answer": _wrong_answer,
    "blocks": _leaked_block,
    "memory": _growing_memory,
    "threads": _leaked_thread,
    "descriptors": _leaked_descriptor,
    "shared memory": _leaked_shared_memory,
}


def main() -> None:
    events = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def say(event: str, **what: Any) -> None:
        events.write(json.dumps({"event": event, **what}) + "\n")

    commands = Commands()
    waiting = commands.take(None)
    engine = SteppedEngine(waiting.pop(0), say)
    say("ready")
    while not commands.closed:
        for command in waiting or commands.take(0 if engine.busy else None):
            if command["do"] == "end":
                commands.closed = True
                break
            getattr(engine, command["do"])(command)
        waiting = []
        if engine.busy:
            engine.step()
    engine._core.shutdown()
    say("ended")


if __name__ == "__main__":
    main()
