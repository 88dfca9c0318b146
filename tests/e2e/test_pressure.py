"""Overlapping batches, chunked prefill, preemption and drafts, over a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, live, model_of, options, prompt, tokens

pytestmark = pytest.mark.engine

# Together the prompts need more blocks than there are, and most need several chunks.
SMALL = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 256, "prefix_match_unit": 32}
OVERLAPPING = {"async_scheduling": True}


def _prompts() -> list[list[int]]:
    roots = [prompt(50, 512), prompt(51, 300)]
    return [root + prompt(count, count) for root in roots for count in (1, 32, 127, 129)]


@pytest.mark.parametrize(
    "scheduling", ["overlapping", pytest.param("step by step", marks=pytest.mark.full)]
)
def test_preempted_chunked_requests_answer_as_without_the_connector(
    scheduling: str, tmp_path: Path
) -> None:
    model, asked = model_of("granite"), _prompts()
    overlapping = scheduling == "overlapping"
    small: dict[str, Any] = {"engine": SMALL, "tokens": 40}
    if overlapping:
        small |= {"engine": SMALL | OVERLAPPING, "harm": [["overlap"]]}
    fine = options(
        tmp_path,
        spark_cache_chunk_tokens=32,
        spark_cache_checkpoint_interval_tokens=128,
        spark_cache_min_span_tokens=32,
    )
    recomputed = live(model, [asked], engine=SMALL, tokens=40)
    killed = live(model, [asked], options=fine, roots=2, kill=True, **small)
    after = live(model, [asked, asked], options=fine, **small)

    assert (killed["async_scheduling"], after["async_scheduling"]) == (overlapping, overlapping)
    assert killed["preemptions"] > 0
    assert after["preemptions"] > 0
    assert tokens(killed) == tokens(after, 0) == tokens(after, 1) == tokens(recomputed)
    assert sum(hit >= 128 for hit in cached(after)) >= len(asked) // 2
    assert after["metrics"]["sparkcache_restores_total received"] >= 2
    free, every_block, held = after["free_blocks"]
    assert (free, held) == (every_block, 0)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "sliding"])
def test_drafts_of_a_speculating_engine_are_never_stored(family: str, tmp_path: Path) -> None:
    # A text that repeats itself is what n-grams can guess, so that drafts are right and wrong.
    words = [prompt(seed, 7) for seed in range(12)]
    text = [token for word in random.Random(8).choices(words, k=150) for token in word]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    guessing = {"engine": {"speculative_config": drafts}, "tokens": 300}
    model, here = model_of(family), options(tmp_path)

    recomputed = live(model, [[text]], tokens=300)
    continued = [[*text, *tokens(recomputed)[0]]]
    expected = live(model, [continued], tokens=300)
    killed = live(model, [[text]], options=here, roots=2, kill=True, **guessing)
    after = live(model, [[text], continued], options=here, forget=True, **guessing)

    assert tokens(killed) == tokens(after, 0) == tokens(recomputed)
    assert cached(after, 0) == [len(text) // 256 * 256]
    # The answer's own tokens were stored at its finish, over accepted tokens only.
    assert cached(after, 1) == [(len(text) + 299) // 256 * 256]
    assert tokens(after, 1) == tokens(expected)
    assert killed["drafts"] > 0 < killed["accepted"] < killed["drafts"]
