"""Images: what stands behind equal tokens is content, and what the engine does not digest is not.

The prompts are equal token for token, and so are the images' sizes; only pixels differ.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.restarting import cached, findings, live, model_of, options, prompt, tokens
from tests.support import tiny_models

pytestmark = [pytest.mark.engine, pytest.mark.full]

BOUNDARY = 1_024
# The image begins in the second chunk and ends in it: one boundary lies before the image.
BEFORE_IMAGE, HEAD = 256, 300
TAIL = BOUNDARY + 16 - HEAD - tiny_models.IMAGE_TOKENS
TEXT = [token % tiny_models.IMAGE for token in prompt(80, HEAD + TAIL)]
PROMPT = [*TEXT[:HEAD], tiny_models.IMAGE, *TEXT[HEAD:]]


def asked(seed: int, **more: str) -> dict[str, Any]:
    """The prompt with an image that is drawn from a seed."""
    image = {"seed": seed, "pixels": tiny_models.IMAGE_PIXELS, **more}
    return {"prompts": [PROMPT], "images": [image]}


A, B = asked(1), asked(2)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, root = model_of("idefics"), tmp_path_factory.mktemp("cache")
    given = options(root, spark_cache_checkpoint_interval_tokens=256)
    trusting = given | {"spark_cache_trust_multimodal_ids": True}
    job: dict[str, Any] = {"options": trusting, "forget": True}
    named = {"a": A, "named": asked(1, id="picture")}
    # B comes before anything of its own is stored.
    after = {"b": B, "a": A, "b again": B, "renamed": asked(2, id="picture")}
    # A prefix cache that is off cannot be emptied, and need not be.
    numbering = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    brighter = {"mm_processor_kwargs": {"image_mean": [0.25, 0.25, 0.25]}}
    return {
        "plain": live(model, {"a": A, "b": B}, forget=True),
        "killed": live(model, named, roots=7, kill=True, **job),
        "after": live(model, after, **job),
        "untrusted": live(model, {"a": A}, options=given),
        "numbered": live(model, {"a": A, "b": B}, options=trusting, engine=numbering),
        "brighter": live(model, {"a": A}, engine=brighter, **job),
    }


def test_answers_depend_on_the_image(lives: dict[str, Any]) -> None:
    assert tokens(lives["plain"], "a") != tokens(lives["plain"], "b")


def test_same_image_continues_its_root_after_a_kill(lives: dict[str, Any]) -> None:
    killed, after = lives["killed"], lives["after"]
    assert (cached(killed, "a"), cached(after, "a")) == ([0], [BOUNDARY])
    assert tokens(killed, "a") == tokens(after, "a") == tokens(lives["plain"], "a")
    assert findings(after) == ""


def test_other_image_behind_equal_tokens_shares_what_comes_before_it(lives: dict[str, Any]) -> None:
    after = lives["after"]
    assert (cached(after, "b"), cached(after, "b again")) == ([BEFORE_IMAGE], [BOUNDARY])
    assert tokens(after, "b") == tokens(after, "b again") == tokens(lives["plain"], "b")


def test_trusted_id_stands_for_the_image_even_where_the_caller_breaks_it(
    lives: dict[str, Any],
) -> None:
    # This is what an identity without the pixels would answer, and why trust is asked for.
    assert cached(lives["after"], "renamed") == [BOUNDARY]
    assert tokens(lives["after"], "renamed") == tokens(lives["plain"], "a")
    assert tokens(lives["after"], "renamed") != tokens(lives["plain"], "b")


def test_images_are_not_cached_without_trust(lives: dict[str, Any]) -> None:
    untrusted = lives["untrusted"]
    assert cached(untrusted, "a") == [0]
    assert tokens(untrusted, "a") == tokens(lives["plain"], "a")
    assert untrusted["metrics"]["sparkcache_uncacheable_total caller_supplied_id"] == 1


def test_images_that_the_engine_numbers_are_not_cached(lives: dict[str, Any]) -> None:
    numbered = lives["numbered"]
    assert (cached(numbered, "a"), cached(numbered, "b")) == ([0], [0])
    for name in ("a", "b"):
        assert tokens(numbered, name) == tokens(lives["plain"], name)
    assert numbered["metrics"]["sparkcache_uncacheable_total item_without_digest"] == 2


def test_other_preparation_of_images_is_another_identity(lives: dict[str, Any]) -> None:
    assert cached(lives["brighter"], "a") == [0]
    assert tokens(lives["brighter"], "a") != tokens(lives["plain"], "a")
