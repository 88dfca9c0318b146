"""Shared prefixes of any length, prompts around boundaries, salts, harm below authentication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, live, model_of, options, prompt, tokens

pytestmark = pytest.mark.engine

UNIT = 256
INTERVAL = 512
LENGTH = 2_500
ASKED, SALTED, FIRST = prompt(2, 1_040), prompt(3, 700), prompt(1, LENGTH)
LENGTHS = (5 * UNIT - 1, 5 * UNIT, 5 * UNIT + 1)
SHARES = (300, 700, 1_100, 1_600, 2_100, 2_400)
TAMPERS = (["zero", 0, 0], ["other_boundary", 0, 0], ["zero", 3, 7], ["swap", 0, 0])


def sharing(shares: tuple[int, ...]) -> dict[str, Any]:
    """Prompts that share so many tokens with the first one, and not one more."""
    other = [(token + 1) % 512 for token in FIRST]
    return {
        f"share {s}": [FIRST[:s] + other[s : s + 1] + prompt(s, LENGTH - s - 1)] for s in shares
    }


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, root = model_of("granite"), tmp_path_factory.mktemp("cache")
    dense = options(root, spark_cache_checkpoint_interval_tokens=INTERVAL)
    lengths = {f"length {n}": [prompt(n, n)] for n in LENGTHS}
    told = {"told": {"prompts": [ASKED], "sampling": {"prompt_logprobs": 0}}}
    salts = {f"salt {s}": {"prompts": [SALTED], "salt": s} for s in ("other", "theirs")}
    unsalted = {"unsalted": [SALTED]}
    tampered = {
        f"tamper {index}": {"acts": [["switch", "tamper", tamper]], "prompts": [ASKED]}
        for index, tamper in enumerate(TAMPERS)
    }
    stored = {"first": [FIRST], "asked": [ASKED], "theirs": {"prompts": [SALTED], "salt": "theirs"}}
    return {
        "model": model,
        "options": dense,
        "recomputed": live(
            model,
            sharing(SHARES) | lengths | told | unsalted | {"asked": [ASKED]},
            forget=True,
        ),
        "killed": live(model, stored | lengths, options=dense, roots=15, kill=True),
        "after": live(
            model,
            sharing(SHARES) | lengths | told | unsalted | salts | {"asked": [ASKED]} | tampered,
            options=dense,
            forget=True,
            harm=[["faulty"]],
        ),
    }


@pytest.mark.parametrize("shared", SHARES)
def test_any_shared_prefix_is_reused_up_to_one_interval(lives: dict[str, Any], shared: int) -> None:
    _assert_reused(lives["after"], lives["recomputed"], shared)


def _assert_reused(after: dict[str, Any], recomputed: dict[str, Any], shared: int) -> None:
    name = f"share {shared}"
    (found,) = cached(after, name)
    assert shared - max(INTERVAL, UNIT) <= found <= shared
    assert tokens(after, name) == tokens(recomputed, name)


@pytest.mark.full
@pytest.mark.parametrize("family", ["granite", "llama", "sliding"])
def test_a_fine_grid_of_shared_prefixes_is_reused_up_to_one_interval(
    family: str, tmp_path: Path
) -> None:
    model, grid = model_of(family), tuple(range(INTERVAL, LENGTH, 97))
    dense = options(tmp_path, spark_cache_checkpoint_interval_tokens=INTERVAL)
    live(model, [[FIRST]], options=dense, roots=5, kill=True)
    after = live(model, sharing(grid), options=dense, forget=True)
    recomputed = live(model, sharing(grid), forget=True)
    for shared in grid:
        _assert_reused(after, recomputed, shared)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_around_a_boundary_hits_the_last_one_below_its_end(
    lives: dict[str, Any], length: int
) -> None:
    name = f"length {length}"
    assert cached(lives["after"], name) == [(length - 1) // UNIT * UNIT]
    assert tokens(lives["after"], name) == tokens(lives["recomputed"], name)


def test_prompt_log_probabilities_are_computed_not_restored(lives: dict[str, Any]) -> None:
    ours, theirs = (lives[life]["batches"]["told"][0] for life in ("after", "recomputed"))
    assert ours["cached"] == 0
    assert len(ours["prompt_logprobs"]) == len(ASKED) - 1
    assert ours["prompt_logprobs"] == pytest.approx(theirs["prompt_logprobs"], abs=1e-4)
    assert ours["tokens"] == theirs["tokens"]


def test_a_salt_meets_its_own_roots_and_nobody_elses(lives: dict[str, Any]) -> None:
    after = lives["after"]
    hits = {name: cached(after, name) for name in ("unsalted", "salt other", "salt theirs")}
    assert hits == {"unsalted": [0], "salt other": [0], "salt theirs": [512]}
    for name in hits:
        assert tokens(after, name) == tokens(lives["recomputed"], "unsalted")


@pytest.mark.parametrize("index", range(len(TAMPERS)), ids=lambda i: " ".join(map(str, TAMPERS[i])))
def test_harm_below_the_authentication_changes_the_answer(
    lives: dict[str, Any], index: int
) -> None:
    after = lives["after"]
    right = tokens(lives["recomputed"], "asked")
    assert (cached(after, "asked"), tokens(after, "asked")) == ([1_024], right)
    assert cached(after, f"tamper {index}") == [1_024]
    assert tokens(after, f"tamper {index}") != right


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"seed": 1}, id="weights"),
        pytest.param({"engine": {"dtype": "bfloat16"}}, id="dtype", marks=pytest.mark.full),
        pytest.param(
            {"engine": {"hf_overrides": {"rope_theta": 20_000.0}}},
            id="rope",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"options": {"spark_cache_namespace": "other"}},
            id="namespace",
            marks=pytest.mark.full,
        ),
    ],
)
def test_other_weights_dtype_rope_or_namespace_find_nothing(
    lives: dict[str, Any], other: dict[str, Any]
) -> None:
    after = live(
        model_of("granite", other.get("seed", 0)),
        [[ASKED]],
        options=lives["options"] | other.get("options", {}),
        engine=other.get("engine", {}),
    )
    assert cached(after) == [0]


@pytest.mark.parametrize("family", ["granite", pytest.param("llama", marks=pytest.mark.full)])
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
