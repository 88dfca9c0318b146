"""Restart the engine and continue: real engine, real SIGKILL, tokens equal to a recompute."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, flip_a_bit_of_every_page, live, model_of, options, tokens
from tests.support import tiny_models

pytestmark = pytest.mark.engine

BOUNDARY = 1_280
PROMPT = random.Random(3).choices(range(tiny_models.VOCABULARY), k=BOUNDARY + 20)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=sorted(tiny_models.FAMILIES))
def restarted(request: pytest.FixtureRequest, cache: Path) -> dict[str, Any]:
    """Reference without connector, a life that is killed, and the life after it."""
    family = request.param
    model, root = model_of(family), cache / family
    tails = [[*PROMPT[:BOUNDARY], *random.Random(i).choices(range(512), k=9)] for i in range(8)]
    batches = [[PROMPT], tails]
    return {
        "model": model,
        "root": root,
        # The second ask is the same engine's own prefix hit.
        "recomputed": live(model, [*batches, [PROMPT]]),
        "killed": live(model, [[PROMPT]], options=options(root), roots=1, kill=True),
        "after": live(model, batches, options=options(root)),
    }


def test_first_request_after_the_kill_hits_and_its_tokens_are_those_of_a_recompute(restarted):
    recomputed, killed, after = (restarted[k] for k in ("recomputed", "killed", "after"))
    assert cached(killed) == [0]
    assert tokens(killed) == tokens(recomputed)
    assert cached(after) == [BOUNDARY]
    assert tokens(after) == tokens(recomputed)


def test_log_probabilities_are_those_of_the_engines_own_prefix_hit(restarted):
    own, ours = restarted["recomputed"]["batches"][2][0], restarted["after"]["batches"][0][0]
    assert own["cached"] == BOUNDARY
    assert ours["logprobs"] == own["logprobs"]


def test_eight_requests_with_distinct_tails_continue_one_root(restarted):
    assert tokens(restarted["after"], 1) == tokens(restarted["recomputed"], 1)
    assert cached(restarted["after"], 1) == [BOUNDARY] * 8


def test_no_block_stays_in_use_once_everything_is_reported(restarted):
    free, all_blocks, held = restarted["after"]["free_blocks"]
    assert (free, held) == (all_blocks, 0)


def test_flipped_bits_are_a_miss_and_the_answer_is_right(restarted):
    for pack in (restarted["root"] / "rank-0" / "packs").glob("*.pack"):
        flip_a_bit_of_every_page(pack)
    after = live(restarted["model"], [[PROMPT]], options=options(restarted["root"]))
    assert cached(after) == [0]
    assert tokens(after) == tokens(restarted["recomputed"])
