"""After a power cut at any moment, what was promised is there and nothing else is served.

Every sync of the store is needed: without it, some state breaks a promise. That is shown for
each by leaving it out of the recording, which is what a store without it would have done.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from sparkcache_connector.store import StoreError
from tests.crash.power import Event, Promise, Recording, Sync, rebuild
from tests.crash.story import Audience, check_survivors, tell_story

STATES = 20_000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 640
PARTS = 8
TRIES_WITHOUT = 4000
SITES = [
    "root-dir",
    "layout-dir",
    "identity-dir",
    "keys-data",
    "new-keys-data",
    "new-keys-dir",
    "pack-data",
    "pack-dir",
    "manifest-data",
    "manifest-dir",
    "evict-dir",
    "compact-data",
    "compact-dir",
    "rewrite-data",
    "rewrite-dir",
]


@pytest.fixture(scope="module")
def events(scratch: Path) -> list[Event]:
    root = scratch / "parent" / "root"
    root.parent.mkdir(mode=0o700)
    recording = Recording(root)
    tell_story(root, Audience(recording.hear), recording)
    shutil.rmtree(root.parent)
    return recording.events


def holds(events: list[Event], scratch: Path, seed: int) -> None:
    """Cut the power at a random moment and hold what is left to what was promised."""
    chance = random.Random(seed)
    past = events[: chance.randrange(len(events) + 1)]
    audience = Audience()
    for event in past:
        if isinstance(event, Promise):
            audience.hear(event.line)
    root = scratch / "parent" / "root"
    shutil.rmtree(root.parent, ignore_errors=True)
    rebuild(past, root, chance)
    check_survivors(root, audience.promised).close()


@pytest.mark.parametrize("part", range(PARTS))
def test_any_state_after_a_power_cut_keeps_the_promises(
    events: list[Event], scratch: Path, part: int
) -> None:
    for seed in range(part, STATES, PARTS):
        holds(events, scratch, seed)


def test_the_list_of_syncs_is_complete(events: list[Event]) -> None:
    assert {event.site for event in events if isinstance(event, Sync)} == set(SITES)


@pytest.mark.parametrize("site", SITES)
def test_without_this_sync_a_promise_is_broken(
    events: list[Event], scratch: Path, site: str
) -> None:
    without = [event for event in events if not (isinstance(event, Sync) and event.site == site)]
    for seed in range(TRIES_WITHOUT):
        try:
            holds(without, scratch, seed)
        except (AssertionError, StoreError):
            return
    pytest.fail(f"nothing shows what the sync {site!r} is for")
