"""LoRA adapters: an adapter's roots are its own, and those of the very bytes of its files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, findings, live, model_of, options, prompt, tokens
from tests.support import engine_env

pytestmark = [pytest.mark.engine, pytest.mark.full]

BOUNDARY = 1_024
PROMPT = prompt(60, BOUNDARY + 16)
ENGINE = {"enable_lora": True, "max_lora_rank": 8}


def adapter(place: Path, seed: int) -> Path:
    """A LoRA adapter for the tiny Llama whose weights are drawn from `seed`."""
    script = Path(__file__).with_name("tiny_adapter.py")
    python = engine_env.interpreter("patched")
    subprocess.run([python, "-P", script, place, str(seed)], check=True)
    return place


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, root = model_of("llama"), tmp_path_factory.mktemp("cache")
    place = adapter(tmp_path_factory.mktemp("adapter"), 1)
    other = adapter(tmp_path_factory.mktemp("other"), 2)
    file = "adapter_model.safetensors"
    exchange = ["copy", str(other / file), str(place / file)]
    job: dict[str, Any] = {"engine": ENGINE, "options": options(root), "forget": True}
    base = {"prompts": [PROMPT]}
    adapted = {"prompts": [PROMPT], "adapter": [1, str(place)]}
    again = adapted | {"acts": [exchange]}
    return {
        "killed": live(model, {"base": base, "adapted": adapted}, roots=2, kill=True, **job),
        # The files change under the running engine, which goes on with what it has read.
        "after": live(model, {"base": base, "adapted": adapted, "changed": again}, **job),
        "other": live(model, {"adapted": adapted, "base": base}, **job),
    }


def test_adapter_never_meets_the_roots_of_the_base_model(lives: dict[str, Any]) -> None:
    killed = lives["killed"]
    assert (cached(killed, "base"), cached(killed, "adapted")) == ([0], [0])
    assert tokens(killed, "base") != tokens(killed, "adapted")


def test_base_and_adapter_each_continue_their_own_root(lives: dict[str, Any]) -> None:
    for name in ("base", "adapted"):
        assert cached(lives["after"], name) == [BOUNDARY]
        assert tokens(lives["after"], name) == tokens(lives["killed"], name)


def test_files_that_change_under_a_loaded_adapter_are_not_cached(lives: dict[str, Any]) -> None:
    after = lives["after"]
    assert cached(after, "changed") == [0]
    assert tokens(after, "changed") == tokens(after, "adapted")
    assert after["metrics"]["sparkcache_uncacheable_total adapter_changed"] == 1
    assert findings(after) == ""


def test_other_files_at_the_same_path_find_nothing(lives: dict[str, Any]) -> None:
    assert cached(lives["other"], "adapted") == [0]
    assert tokens(lives["other"], "adapted") != tokens(lives["killed"], "adapted")
    assert cached(lives["other"], "base") == [BOUNDARY]
