"""One life of an engine with the connector, in its own process; run inside an engine environment.

Reads a job (JSON) from standard input, writes answers to the file named on the command line,
and ends as the job says: by itself, or killed on the spot with nothing flushed or closed.

| key          | meaning                                                                      |
|--------------|------------------------------------------------------------------------------|
| `model`      | a folder                                                                     |
| `engine`     | keyword arguments of `vllm.LLM`                                              |
| `options`    | `kv_connector_extra_config`; absent for an engine without the connector      |
| `batches`    | what is asked, one after the other: a list of prompts (token ids), or an     |
|              | object with `prompts` and its own values for the keys marked *               |
| `acts` *     | what is done before the prompts are asked: see `harm.ACTS`                   |
| `forget` *   | empty the engine's own prefix cache before                                   |
| `tokens` *   | how many tokens each prompt generates, greedily                              |
| `sampling` * | further sampling parameters                                                  |
| `salt` *     | the requests' `cache_salt`                                                   |
| `adapter` *  | `[number, folder]` of a LoRA adapter                                         |
| `images` *   | for each prompt the image behind its image token: the `seed` of its pixels,  |
|              | drawn one by one; `pixels` of a side; and, where the caller names it, `id`   |
| `roots`      | roots that every rank must hold before the end                               |
| `harm`       | harm done to the connector before the engine starts: see `harm.HARM`         |
| `kill`       | end by SIGKILL, with every process of the engine                             |
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e import harm

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
    "disable_log_stats": False,
}
TRANSFER = {
    "kv_connector": "SparkCacheConnector",
    "kv_connector_module_path": "sparkcache_connector.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main() -> None:
    job = json.load(sys.stdin)
    for name, *arguments in job.get("harm", ()):
        harm.HARM[name](*arguments)
    import vllm

    arguments = ENGINE | job.get("engine", {})
    if "options" in job:
        arguments["kv_transfer_config"] = TRANSFER | {"kv_connector_extra_config": job["options"]}
    llm = vllm.LLM(model=job["model"], **arguments)
    answers: dict[str, Any] = {"batches": []}
    for batch in job["batches"]:
        own = batch if isinstance(batch, dict) else {"prompts": batch}
        answers["batches"].append(_ask(llm, job | own))
    theirs = _metrics("vllm:")
    answers["preemptions"] = theirs["vllm:num_preemptions_total"]
    answers["drafts"] = theirs.get("vllm:spec_decode_num_draft_tokens_total", 0)
    answers["accepted"] = theirs.get("vllm:spec_decode_num_accepted_tokens_total", 0)
    answers["async_scheduling"] = _core(llm).vllm_config.scheduler_config.async_scheduling
    if "options" in job:
        answers["free_blocks"] = _settle(llm)
        held = len(_side(llm).coordinator.quorum)
        assert held >= job.get("roots", 0), f"{held} roots on every rank"
        answers["roots"] = held
        answers["metrics"] = _metrics("sparkcache_")
        answers["doctor"] = _doctor(job["options"]["spark_cache_root"])
        answers["placements"] = [_placement(rank) for rank in _ranks_here()]
    Path(sys.argv[1]).write_text(json.dumps(answers))
    if job.get("kill"):
        os.killpg(0, signal.SIGKILL)


def _ask(llm: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    import vllm
    from vllm.lora.request import LoRARequest

    if "options" in job and (job.get("forget") or job.get("acts")):
        _settle(llm)
    for name, *arguments in job.get("acts", ()):
        harm.ACTS[name](llm, *arguments)
    if job.get("forget"):
        assert llm.reset_prefix_cache(), "blocks are still in use"

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=job.get("tokens", 16),
        logprobs=0,
        detokenize=False,
        **job.get("sampling", {}),
    )
    adapter = job.get("adapter")
    lora = LoRARequest("adapter", adapter[0], adapter[1]) if adapter else None
    salt = {"cache_salt": job["salt"]} if "salt" in job else {}
    requests = [{"prompt_token_ids": prompt, **salt} for prompt in job["prompts"]]
    for request, image in zip(requests, job.get("images", ()), strict="images" in job):
        request["multi_modal_data"] = {"image": _image(image["seed"], image["pixels"])}
        if "id" in image:
            request["multi_modal_uuids"] = {"image": [image["id"]]}
    answers = llm.generate(requests, sampling, use_tqdm=False, lora_request=lora)
    return [_plain(answer) for answer in answers]


def _image(seed: int, pixels: int) -> Any:
    import numpy
    from PIL import Image

    drawn = numpy.random.default_rng(seed).integers(0, 256, (pixels, pixels, 3), numpy.uint8)
    return Image.fromarray(drawn)


def _plain(answer: Any) -> dict[str, Any]:
    (output,) = answer.outputs
    plain = {
        "tokens": list(output.token_ids),
        "logprobs": [
            step[token].logprob
            for token, step in zip(output.token_ids, output.logprobs, strict=True)
        ],
        "cached": answer.num_cached_tokens,
    }
    if answer.prompt_logprobs is not None:
        # The first token has none.
        told = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        plain["prompt_logprobs"] = [step[token].logprob for token, step in told]
    return plain


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _side(llm: Any) -> Any:
    return _core(llm).scheduler.connector._side


def _ranks_here() -> list[Any]:
    """The connector's rank, if it lives in this process: several ranks have one each."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return [get_kv_transfer_group()._rank] if has_kv_transfer_group() else []


def _placement(rank: Any) -> dict[str, Any]:
    """Which placement serves, from which connector, and what it moved."""
    import sparkcache_connector

    moved = rank._placement.stats()
    return {
        "name": rank._placement.name,
        "connector": sparkcache_connector.__file__,
        "restored": moved.pages_restored,
        "captured": moved.pages_captured,
    }


def _settle(llm: Any) -> list[int]:
    """Step the idle engine until every publication is reported; count blocks in use."""
    side = _side(llm)
    deadline = time.monotonic() + 60
    while side.coordinator.has_work:
        assert time.monotonic() < deadline, "publications are never reported"
        llm.llm_engine.step()
    pool = _core(llm).scheduler.kv_cache_manager.block_pool
    return [pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, len(side._held)]


def _metrics(prefix: str) -> dict[str, float]:
    """What the engine's own Prometheus registry holds, by name and our labels."""
    from prometheus_client import REGISTRY

    told = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if metric.name.startswith(prefix) and not sample.name.endswith("_created"):
                theirs = {"model_name", "engine"}
                labels = [value for name, value in sample.labels.items() if name not in theirs]
                told[" ".join([sample.name, *labels])] = sample.value
    return told


def _doctor(root: str) -> dict[str, Any]:
    """What the command says beside the running engine."""
    ranks = _ranks_here()
    for rank in ranks:
        rank._watch.look()
    if not ranks:
        time.sleep(harm.HEALTH_SECONDS)
    command = [sys.executable, "-P", "-m", "sparkcache_connector.cli"]
    done = subprocess.run(
        [*command, "doctor", "--format", "json", root],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


if __name__ == "__main__":
    main()
