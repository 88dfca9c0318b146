"""The soak in its CI form; `make soak` is the same for half an hour."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import main

pytestmark = pytest.mark.engine


def test_two_minutes_of_random_lives_hold_and_every_harm_is_noticed() -> None:
    assert main(["--minutes", "2"]) == 0
