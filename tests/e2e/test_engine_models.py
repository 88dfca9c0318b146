"""The tiny models are a fair test: every page and state of a context shows in what they answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import engine_env, offline_engine, tiny_models

pytestmark = pytest.mark.engine

BLOCK = 128
BOUNDARY = 5 * BLOCK
PROMPT = random.Random(7).choices(range(tiny_models.VOCABULARY), k=BOUNDARY + 10)
# Pages that the ten tokens past the boundary can see, by group kind; a window is 256 tokens.
SEEN = {
    "FullAttentionSpec": {128, 256, 384, 512, 640},
    "SlidingWindowSpec": {512, 640},
    "MambaSpec": {640},
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("granite", "sliding") else pytest.mark.full)
        for family in sorted(tiny_models.FAMILIES)
    ],
)
def test_a_zeroed_page_changes_the_answer_and_its_bytes_restore_it(family: str) -> None:
    python = engine_env.interpreter("stock")
    model = engine_env.tiny_model(family, python)
    job = {"model": str(model), "batches": [[PROMPT], [PROMPT]], "tokens": 24, "probe": True}

    result = offline_engine.run(python, job)

    computed, hit = (batch["answers"][0] for batch in result["batches"])
    assert (computed["cached"], hit["cached"]) == (0, BOUNDARY)
    assert hit["tokens"] == computed["tokens"]
    seen = [page for page in result["probe"] if page["boundary"] in SEEN[page["kind"]]]
    unseen = [page for page in result["probe"] if page not in seen]
    groups = {page["group"] for page in seen}
    assert groups == set(range(len(groups)))
    assert [page for page in seen if page["tokens"] == computed["tokens"]] == []
    # The probe itself does no harm: a page out of the window is zeroed and nothing changes.
    assert [page for page in unseen if page["tokens"] != computed["tokens"]] == []


def test_two_seeds_are_two_models_of_one_shape(tmp_path: Path) -> None:
    python = engine_env.interpreter("stock")
    first, second = (engine_env.tiny_model("llama", python, seed=seed) for seed in (0, 1))

    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    weights = [(model / "model.safetensors").read_bytes() for model in (first, second)]
    assert len(weights[0]) == len(weights[1])
    assert weights[0] != weights[1]


def test_a_seed_makes_the_same_bytes_again(tmp_path: Path) -> None:
    python = engine_env.interpreter("stock")
    known = engine_env.tiny_model("granite", python)
    again = engine_env.tiny_model("granite", python, cache=tmp_path)

    assert again != known
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (known / name).read_bytes()
