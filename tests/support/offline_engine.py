"""Run one vLLM engine in its own process: a job in, token ids and log-probabilities out.

The test's side is `run(python, job)`; `python` is an interpreter of an engine environment, in which
this file then runs as a script. The engine lives in that one process, so that the job may look into
it, and dies with it: no state of one engine reaches the next.

A job is a JSON object:

| key       | meaning                                                                         |
|-----------|---------------------------------------------------------------------------------|
| `model`   | a folder, from `tiny_models`                                                    |
| `engine`  | keyword arguments of `vllm.LLM`, over the ones in `ENGINE`                      |
| `batches` | lists of prompts (token ids), each list generated at once, one after the other  |
| `tokens`  | how many tokens each prompt generates, greedily                                 |
| `probe`   | optional: also ask the last prompt again with each cached page zeroed in turn   |

The answer holds the `version`, how many `preemptions` there were, and per batch its `seconds`, the
`processor` seconds of all threads, and per prompt `tokens`, `logprobs` and `cached`; and `probe`, a
list of `{"group", "kind", "boundary", "tokens"}`, one for each cached page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 4096,
    "disable_log_stats": False,
}
PASSIVE = {
    "kv_connector": "PassiveConnector",
    "kv_connector_module_path": "tests.support.passive_connector",
    "kv_role": "kv_both",
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # These models are too small to share: more threads wait for each other, pinned ones for others.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}


def run(python: Path, job: dict[str, Any], *, timeout: float = 900) -> dict[str, Any]:
    """Run `job` under the interpreter `python`; a failure shows what the engine wrote last."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        process = subprocess.run(
            [python, "-P", __file__, answer.name],
            input=json.dumps(job),
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        tail = "\n".join(process.stdout.splitlines()[-30:])
        assert process.returncode == 0, f"{python} ended with {process.returncode}:\n{tail}"
        return json.loads(Path(answer.name).read_bytes())


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    import vllm

    llm = vllm.LLM(model=job["model"], **ENGINE | job.get("engine", {}))
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=job["tokens"], logprobs=0, detokenize=False
    )

    def generate(prompts: list[list[int]]) -> list[dict[str, Any]]:
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

    result: dict[str, Any] = {"version": vllm.__version__, "batches": []}
    for prompts in job["batches"]:
        started, used = time.perf_counter(), time.process_time()
        answers = generate(prompts)
        seconds, processor = time.perf_counter() - started, time.process_time() - used
        result["batches"].append({"seconds": seconds, "processor": processor, "answers": answers})
    result["preemptions"] = next(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    if job.get("probe"):
        result["probe"] = _probe(llm, lambda: generate([job["batches"][-1][-1]])[0]["tokens"])
    return result


def _probe(llm, ask) -> list[dict[str, Any]]:
    """Zero each page that the prefix cache holds, ask, and put its bytes back."""
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context
    groups = manager.kv_cache_config.kv_cache_groups
    count = manager.kv_cache_config.num_blocks
    found = []
    for block in manager.block_pool.blocks[1:]:
        if block.block_hash is None:
            continue
        group = int.from_bytes(block.block_hash[-4:], "big")
        pages = []
        for name in groups[group].layer_names:
            cache = layers[name].kv_cache
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                ratio = tensor.shape[0] // count  # kernel blocks per manager block
                pages.append(tensor[block.block_id * ratio : (block.block_id + 1) * ratio])
        kept = [page.clone() for page in pages]
        for page in pages:
            page.zero_()
        tokens = ask()
        for page, bytes_before in zip(pages, kept, strict=True):
            page.copy_(bytes_before)
        kind = type(groups[group].kv_cache_spec).__name__
        boundary = block.block_hash_num_tokens
        found.append({"group": group, "kind": kind, "boundary": boundary, "tokens": tokens})
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_serve(json.load(sys.stdin))))
