"""Restart the engine and continue: real engine, real SIGKILL, tokens equal to a recompute."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.restarting import cached, findings, live, model_of, options, prompt, tokens

pytestmark = pytest.mark.engine

BOUNDARY = 1_280
PROMPT = prompt(3, BOUNDARY + 20)
FAMILIES = [
    "granite",
    "sliding",
    pytest.param("lfm2", marks=pytest.mark.full),
    pytest.param("llama", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=FAMILIES)
def restarted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Reference without connector, a life that is killed, and the life after it."""
    model, root = model_of(request.param), tmp_path_factory.mktemp(request.param)
    tails = [[*PROMPT[:BOUNDARY], *prompt(i, 9)] for i in range(8)]
    flipped = {"acts": [["flip", str(root / "rank-0")]], "forget": True, "prompts": [PROMPT]}
    return {
        # The second ask is the same engine's own prefix hit.
        "recomputed": live(model, {"first": [PROMPT], "tails": tails, "own": [PROMPT]}),
        "killed": live(model, [[PROMPT]], options=options(root), roots=1, kill=True),
        "after": live(
            model, {"first": [PROMPT], "tails": tails, "flipped": flipped}, options=options(root)
        ),
    }


def test_first_request_after_the_kill_hits_and_its_tokens_are_those_of_a_recompute(restarted):
    recomputed, killed, after = (restarted[k] for k in ("recomputed", "killed", "after"))
    assert cached(killed) == [0]
    assert tokens(killed) == tokens(recomputed, "first")
    assert cached(after, "first") == [BOUNDARY]
    assert tokens(after, "first") == tokens(recomputed, "first")


def test_log_probabilities_are_those_of_the_engines_own_prefix_hit(restarted):
    (own,) = restarted["recomputed"]["batches"]["own"]
    (ours,) = restarted["after"]["batches"]["first"]
    (computed,) = restarted["recomputed"]["batches"]["first"]
    assert own["cached"] == BOUNDARY
    assert ours["logprobs"] == own["logprobs"]
    assert ours["logprobs"] == pytest.approx(computed["logprobs"], abs=1e-4)


def test_eight_requests_with_distinct_tails_continue_one_root(restarted):
    assert tokens(restarted["after"], "tails") == tokens(restarted["recomputed"], "tails")
    assert cached(restarted["after"], "tails") == [BOUNDARY] * 8


def test_flipped_bits_are_a_miss_and_the_answer_is_right(restarted):
    after = restarted["after"]
    assert cached(after, "flipped") == [0]
    assert tokens(after, "flipped") == tokens(restarted["recomputed"], "first")
    assert after["metrics"]["sparkcache_restore_failures_total page-mismatch"] == 1
    assert "rank-0: restores that failed" in findings(after)
    assert "1 page-mismatch" in findings(after)


def test_no_block_stays_in_use_once_everything_is_reported(restarted):
    free, all_blocks, held = restarted["after"]["free_blocks"]
    assert (free, held) == (all_blocks, 0)
