"""Faults in the live engine: every request is answered right, and the reason can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, findings, live, model_of, options, prompt, tokens

pytestmark = pytest.mark.engine

A, B, C, D, E, F, G = (prompt(seed, 1_040) for seed in range(20, 27))
BOUNDARY = 1_024


def switch(name: str, value: Any, prompts: list[list[int]], *more: list[Any]) -> dict[str, Any]:
    return {"acts": [["switch", name, value], *more], "prompts": prompts, "forget": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def here(root: Path) -> dict[str, Any]:
    return options(root, spark_cache_restore_deadline_seconds=3)


@pytest.fixture(scope="module")
def model() -> Path:
    return model_of("granite")


@pytest.fixture(scope="module")
def right(model: Path) -> Callable[..., list[list[int]]]:
    """The answers of an engine without the connector."""
    asked = [A, B, C, D, E, F, G]
    answers = tokens(live(model, [asked]))
    return lambda *prompts: [answers[asked.index(each)] for each in prompts]


@pytest.fixture(scope="module")
def suffering(model: Path, root: Path, here: dict[str, Any]) -> dict[str, Any]:
    """One life with a fault after the other, killed at the end."""
    kept, key = root / "key.kept", root / "rank-0" / "keys"
    batches = {
        "oldest": [F, G],
        "stored": [A],
        # Store full, then not any more. Evicting the oldest roots made no room.
        "full": switch("disk_full", True, [B]),
        "full, hit": switch("disk_full", True, [A]),
        "room": switch("disk_full", False, [B], ["pause", 0.6]),
        "room, hit": switch("disk_full", False, [B]),
        # A disk that is slower than the deadline, then not any more.
        "slow": switch("read_seconds", 4.0, [A]),
        "fast": switch("read_seconds", 0.0, [A]),
        # The restore thread ends in the middle, then no more of them.
        "restore dies": switch("restore_dies", True, [A]),
        "restore lives": switch("restore_dies", False, [A]),
        # The key's file goes; this engine knows the key.
        "key gone": switch("restore_dies", False, [A], ["copy", str(key), str(kept)])
        | {"acts": [["copy", str(key), str(kept)], ["remove", str(key)]]},
        # The capture thread ends in the middle of C, with D behind it; then E comes.
        "capture dies": switch("capture_dies", True, [C, D]),
        "capture dead": switch("capture_dies", False, [E]),
        "capture dead, hit": switch("capture_dies", False, [A]),
    }
    return live(model, batches, options=here, harm=[["faulty"]], kill=True)


@pytest.fixture(scope="module")
def key_lost(model: Path, here: dict[str, Any], suffering: dict[str, Any]) -> dict[str, Any]:
    """The next life makes a new key: what the lost one vouched for is nobody's."""
    return live(model, {"A": [A], "E": [E]}, options=here, roots=2, kill=True)


@pytest.fixture(scope="module")
def key_replaced(
    model: Path, root: Path, here: dict[str, Any], key_lost: dict[str, Any]
) -> dict[str, Any]:
    """The first key is back, and the second one is lost."""
    (root / "key.kept").replace(root / "rank-0" / "keys")
    return live(model, {"E": [E], "B": [B]}, options=here)


def test_every_request_is_answered_right_whatever_happens(
    suffering, key_lost, key_replaced, right
) -> None:
    others = {
        "oldest": [F, G],
        "full": [B],
        "room": [B],
        "room, hit": [B],
        "capture dies": [C, D],
        "capture dead": [E],
    }
    for name in suffering["batches"]:
        assert tokens(suffering, name) == right(*others.get(name, [A])), name
    assert [tokens(key_lost, name) for name in ("A", "E")] == [right(A), right(E)]
    assert [tokens(key_replaced, name) for name in ("E", "B")] == [right(E), right(B)]


def test_full_disk_stops_publishing_and_nothing_else_until_there_is_room(suffering) -> None:
    assert cached(suffering, "full, hit") == [BOUNDARY]
    assert cached(suffering, "room") == [0]
    assert cached(suffering, "room, hit") == [BOUNDARY]
    metrics = suffering["metrics"]
    assert metrics["sparkcache_publication_failures_total disk-full"] >= 1
    assert metrics.get("sparkcache_switched_off publish disk-full 0", 0) == 0
    assert "disk-full" in findings(suffering)


def test_slow_disk_is_given_up_at_the_deadline_and_hits_once_it_is_fast(suffering) -> None:
    assert (cached(suffering, "slow"), cached(suffering, "fast")) == ([0], [BOUNDARY])
    assert suffering["metrics"]["sparkcache_restore_failures_total deadline"] == 1
    assert "1 deadline" in findings(suffering)


def test_restore_thread_that_ends_costs_one_recomputation(suffering) -> None:
    assert cached(suffering, "restore dies") == [0]
    assert cached(suffering, "restore lives") == [BOUNDARY]
    assert suffering["metrics"]["sparkcache_restore_failures_total worker_ended"] == 1


def test_capture_thread_that_ends_stops_publishing_frees_its_blocks_and_says_so(suffering) -> None:
    assert cached(suffering, "capture dead") == [0]
    assert cached(suffering, "capture dead, hit") == [BOUNDARY]
    metrics = suffering["metrics"]
    assert metrics["sparkcache_publication_failures_total worker_ended"] == 3
    assert metrics["sparkcache_switched_off publish worker_ended 0"] == 1
    assert "rank-0: publish is off" in findings(suffering)
    free, every_block, held = suffering["free_blocks"]
    assert (free, held) == (every_block, 0)


def test_key_that_is_lost_or_replaced_makes_misses_and_the_doctor_names_it(
    suffering, key_lost, key_replaced
) -> None:
    assert cached(suffering, "key gone") == [BOUNDARY]
    for life, miss in ((key_lost, "A"), (key_replaced, "E")):
        assert cached(life, miss) == [0]
        assert life["metrics"]["sparkcache_unusable_roots_total unknown-key"] == 2
        assert "2 unknown-key" in findings(life)
    # Stored under the first key, which is back.
    assert cached(key_replaced, "B") == [BOUNDARY]
