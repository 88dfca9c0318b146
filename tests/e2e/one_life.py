"""One life of an engine with the connector, in its own process; run inside an engine environment.

Reads a job (JSON) from standard input, writes answers to the file named on the command line,
and ends as the job says: by itself, or killed on the spot with nothing flushed or closed.

| key          | meaning                                                                      |
|--------------|------------------------------------------------------------------------------|
| `model`      | a folder                                                                     |
| `engine`     | keyword arguments of `vllm.LLM`                                              |
| `options`    | `kv_connector_extra_config`; absent for an engine without the connector      |
| `batches`    | lists of prompts (token ids), each list at once, one list after the other    |
| `forget`     | empty the engine's own prefix cache before each list                         |
| `tokens`     | how many tokens each prompt generates, greedily                              |
| `sampling`   | further sampling parameters                                                  |
| `roots`      | wait until so many roots are stored before ending                            |
| `tamper`     | `[kind, group, page]`: harm done to restored bytes after they were verified  |
| `kill`       | end by SIGKILL                                                               |
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
}
TRANSFER = {
    "kv_connector": "SparkCacheConnector",
    "kv_connector_module_path": "sparkcache_connector.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main() -> None:
    job = json.load(sys.stdin)
    if job.get("tamper"):
        _tamper(*job["tamper"])
    import vllm

    arguments = ENGINE | job.get("engine", {})
    if "options" in job:
        arguments["kv_transfer_config"] = TRANSFER | {"kv_connector_extra_config": job["options"]}
    llm = vllm.LLM(model=job["model"], **arguments)
    answers = {"batches": [_ask(llm, job, batch) for batch in job["batches"]]}
    if "options" in job:
        _wait_for_roots(job.get("roots", 0))
        answers["free_blocks"] = _settle(llm)
    Path(sys.argv[1]).write_text(json.dumps(answers))
    if job.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)


def _ask(llm: Any, job: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    import vllm

    if job.get("forget"):
        if "options" in job:
            _settle(llm)
        assert llm.reset_prefix_cache(), "blocks are still in use"

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=job.get("tokens", 16),
        logprobs=0,
        detokenize=False,
        **job.get("sampling", {}),
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(
                    answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True
                )
            ],
            "cached": answer.num_cached_tokens,
        }
        for answer in llm.generate(requests, sampling, use_tqdm=False)
    ]


def _rank() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._rank


def _wait_for_roots(number: int) -> None:
    deadline = time.monotonic() + 30
    while len(_rank()._store.inventory()) < number:
        assert time.monotonic() < deadline, f"{len(_rank()._store.inventory())} roots"
        time.sleep(0.01)


def _settle(llm: Any) -> list[int]:
    """Step the idle engine until every publication is reported; count blocks in use."""
    core = llm.llm_engine.engine_core.engine_core
    side = core.scheduler.connector._side
    deadline = time.monotonic() + 30
    while side.coordinator.has_work:
        assert time.monotonic() < deadline, "publications are never reported"
        core.step_fn()
    pool = core.scheduler.kv_cache_manager.block_pool
    return [pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, len(side._held)]


def _tamper(kind: str, group: int, page: int) -> None:
    """Harm verified bytes on their way to the engine: below the authentication."""
    from sparkcache_connector.store.store import Store

    read = Store.read

    def harmful_read(self, plan, destinations, **keywords):
        size = read(self, plan, destinations, **keywords)
        victim = destinations[group][page]
        if victim is None:
            return size
        if kind == "zero":
            victim[:] = bytes(len(victim))
        elif kind == "swap":
            other = destinations[group + 1][page]
            victim[:], other[:] = bytes(other), bytes(victim)
        elif kind == "other_boundary":
            victim[:] = _state_of_another_boundary(self, plan, group)
        return size

    Store.read = harmful_read


def _state_of_another_boundary(store: Any, plan: Any, group: int) -> bytes:
    for context in store.inventory() - {plan.manifest.context}:
        with store.plan(context) as other:
            view = memoryview(bytearray(other.manifest.groups[group].page_bytes))
            wanted = [[None] * g.count for g in other.manifest.groups]
            wanted[group][0] = view
            store._core.reader.read(other, wanted, _no_stop(), None)
            return bytes(view)
    raise AssertionError("only one root is stored")


def _no_stop() -> Any:
    from sparkcache_connector.store.workers import Stop

    return Stop()


if __name__ == "__main__":
    main()
