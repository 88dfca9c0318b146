"""Boundaries inside blocks, any shared prefix, and harm that must show or must not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, live, model_of, options, tokens
from tests.support import tiny_models

pytestmark = pytest.mark.engine

INTERVAL = 512
TAIL = 16


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(tiny_models.VOCABULARY), k=length)


@pytest.mark.parametrize("family", ["granite", "llama"])
def test_boundaries_inside_a_block_continue_as_the_engine_itself_would(
    family: str, tmp_path: Path
) -> None:
    unit = 32
    model = model_of(family)
    lengths = (671, 672, 673, 700)
    prompts = [[prompt(length, length)] for length in lengths]
    fine: dict[str, Any] = {"engine": {"prefix_match_unit": unit}} if family == "granite" else {}
    small = options(
        tmp_path,
        spark_cache_chunk_tokens=unit,
        spark_cache_checkpoint_interval_tokens=INTERVAL,
        spark_cache_min_span_tokens=unit,
    )
    recomputed = live(model, [*prompts, *prompts], **fine)
    live(model, prompts, options=small, roots=2 * len(lengths), kill=True, **fine)
    after = live(model, prompts, options=small, **fine)

    step = unit if fine else 128  # the engine's own hash block without the finer one
    for index, length in enumerate(lengths):
        assert cached(after, index) == [(length - 1) // step * step]
        assert tokens(after, index) == tokens(recomputed, index)
        own = recomputed["batches"][len(lengths) + index][0]
        if own["cached"] == cached(after, index)[0]:
            assert after["batches"][index][0]["logprobs"] == own["logprobs"]


def test_any_shared_prefix_is_reused_up_to_one_interval(tmp_path: Path) -> None:
    model, first = model_of("granite"), prompt(1, 1_500)
    shares = (300, 700, 1_100, 1_400)
    batches = [[first[:s] + prompt(100 + s, 1_500 - s)] for s in shares]
    dense = options(tmp_path, spark_cache_checkpoint_interval_tokens=INTERVAL)
    live(model, [[first]], options=dense, roots=3, kill=True)
    after = live(model, batches, options=dense, forget=True)
    recomputed = live(model, batches)

    for index, shared in enumerate(shares):
        (found,) = cached(after, index)
        assert shared - INTERVAL <= found <= shared
        assert tokens(after, index) == tokens(recomputed, index)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root, model, asked = tmp_path_factory.mktemp("c"), model_of("granite"), prompt(2, 1_040)
    dense = options(root, spark_cache_checkpoint_interval_tokens=INTERVAL)
    first = live(model, [[asked]], options=dense, roots=2, kill=True)
    return {"model": model, "options": dense, "prompt": asked, "right": tokens(first)}


@pytest.mark.parametrize(
    "tamper", [["zero", 0, 0], ["other_boundary", 0, 0], ["zero", 3, 7], ["swap", 0, 0]]
)
def test_harm_below_the_authentication_changes_the_answer(
    stored: dict[str, Any], tamper: list[Any]
) -> None:
    after = live(stored["model"], [[stored["prompt"]]], options=stored["options"], tamper=tamper)
    assert cached(after) == [1_024]
    assert tokens(after) != stored["right"]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"engine": {"dtype": "bfloat16"}},
        {"engine": {"hf_overrides": {"rope_theta": 20_000.0}}},
        {"options": {"spark_cache_namespace": "other"}},
    ],
    ids=["weights", "dtype", "rope", "namespace"],
)
def test_other_weights_dtype_rope_or_namespace_find_nothing(
    stored: dict[str, Any], other: dict[str, Any]
) -> None:
    model = model_of("granite", other.get("seed", 0))
    after = live(
        model,
        [[stored["prompt"]]],
        options=stored["options"] | other.get("options", {}),
        engine=other.get("engine", {}),
    )
    assert cached(after) == [0]
