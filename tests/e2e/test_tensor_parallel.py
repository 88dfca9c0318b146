"""Two ranks with a store each restore the same root or none, and never one of a single rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.restarting import cached, findings, live, model_of, options, prompt, tokens

pytestmark = [pytest.mark.engine, pytest.mark.full]

BOUNDARY = 512
PROMPT = prompt(40, BOUNDARY + 16)
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, root = model_of("granite"), tmp_path_factory.mktemp("cache")
    here = options(root)
    broken = {"acts": [["flip", str(root / "rank-1")]], "forget": True, "prompts": [PROMPT]}
    single = live(model, {"first": [PROMPT]}, options=here, roots=1, kill=True)
    two = {"options": here, "engine": TWO}
    return {
        "single": single,
        "killed": live(model, {"first": [PROMPT], "own": [PROMPT]}, roots=1, kill=True, **two),
        "after": live(
            model, {"first": [PROMPT], "broken": broken, "next": broken | {"acts": []}}, **two
        ),
    }


def test_roots_of_one_rank_are_not_found_by_two(lives):
    assert cached(lives["single"], "first") == cached(lives["killed"], "first") == [0]
    assert tokens(lives["killed"], "first") == tokens(lives["single"], "first")


def test_two_ranks_continue_after_the_kill_as_their_own_prefix_hit_would(lives):
    (own,), (ours,) = lives["killed"]["batches"]["own"], lives["after"]["batches"]["first"]
    assert own["cached"] == ours["cached"] == BOUNDARY
    assert ours["tokens"] == own["tokens"]
    assert ours["logprobs"] == own["logprobs"]
    assert lives["after"]["metrics"]["sparkcache_restores_total received"] >= 2


def test_wrong_bytes_on_one_rank_are_a_miss_on_both_and_the_reason_is_told(lives):
    after = lives["after"]
    assert cached(after, "broken") == [0]
    assert tokens(after, "broken") == tokens(lives["single"], "first")
    assert after["metrics"]["sparkcache_restore_failures_total page-mismatch"] == 1
    told = findings(after)
    assert "rank-1: restores that failed" in told
    assert "1 page-mismatch" in told
    assert "rank-1: 1 roots with wrong bytes are in quarantine" in told


def test_root_is_stored_again_on_both_ranks_and_hits(lives):
    assert cached(lives["after"], "next") == [BOUNDARY]
    assert tokens(lives["after"], "next") == tokens(lives["single"], "first")
