"""Weights that change in the running engine: nothing stored before is served, nothing is stored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.restarting import cached, findings, live, model_of, options, prompt, tokens

pytestmark = pytest.mark.engine

BOUNDARY = 1_024
A, B = prompt(30, BOUNDARY + 16), prompt(31, BOUNDARY + 16)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    old, new, root = model_of("granite"), model_of("granite", 1), tmp_path_factory.mktemp("cache")
    reload = [["call", "reload_weights", {"weights_path": str(new)}]]
    ask_new = {"acts": reload, "prompts": [A], "forget": True}
    again = {"prompts": [B], "forget": True}
    reset = {"acts": [["reset"]], "prompts": [A], "forget": True}
    return {
        "new": live(new, {"A": [A], "B": [B]}),
        "updated": live(
            old,
            {"A": [A], "new A": ask_new, "new B": again, "new B again": again},
            options=options(root),
            kill=True,
        ),
        "restarted": live(old, {"A": [A], "B": [B], "reset A": reset}, options=options(root)),
    }


def test_updated_engine_answers_by_its_new_weights_and_neither_restores_nor_publishes(lives):
    updated = lives["updated"]
    assert tokens(updated, "new A") == tokens(lives["new"], "A") != tokens(updated, "A")
    assert tokens(updated, "new B") == tokens(updated, "new B again") == tokens(lives["new"], "B")
    for name in ("A", "new A", "new B", "new B again"):
        assert cached(updated, name) == [0]
    assert updated["roots"] == 1
    assert updated["metrics"]["sparkcache_switched_off restore weights_changed 0"] == 1
    assert "rank-0: restore is off" in findings(updated)
    assert "weights_changed" in findings(updated)


def test_restart_knows_its_weights_again_and_serves_only_what_they_made(lives):
    restarted = lives["restarted"]
    assert cached(restarted, "A") == [BOUNDARY]
    assert tokens(restarted, "A") == tokens(lives["updated"], "A")
    assert cached(restarted, "B") == [0]


def test_reset_of_the_connectors_cache_switches_off_until_the_restart(lives):
    restarted = lives["restarted"]
    assert cached(restarted, "reset A") == [0]
    assert tokens(restarted, "reset A") == tokens(restarted, "A")
    assert restarted["metrics"]["sparkcache_switched_off restore engine_reset all"] == 1
    assert "engine_reset" in findings(restarted)
