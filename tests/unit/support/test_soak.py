"""The soak's own judgement: it must see a wrong answer and a leak, and nothing else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.soak.conversations import LONGEST, Conversations, Turn
from tests.soak.judge import CLEAR, CLOSE, MEMORY_BYTES, Answer, Tally, difference, leaks

RIGHT = Answer((5, 6, 7), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0))


def other(tokens=RIGHT.tokens, logprobs=RIGHT.logprobs) -> Answer:
    return Answer(tokens, logprobs, (1.0,) * len(tokens))


def test_the_same_answer_is_right_and_so_is_one_chunked_differently() -> None:
    assert difference(RIGHT, other()) == ""
    assert difference(RIGHT, other(logprobs=(-0.1, -0.2 + CLOSE / 2, -0.3))) == ""


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (other(tokens=(5, 9, 7)), "token 1 is 9, recomputed 6"),
        (other(logprobs=(-0.1, -0.2, -0.31)), "log-probability of token 2 is off"),
        (other(logprobs=(-0.1, float("nan"), -0.3)), "log-probability of token 1 is off"),
        (other(tokens=(5, 6), logprobs=(-0.1, -0.2)), "2 tokens, recomputed 3"),
        (other(tokens=(), logprobs=()), "0 tokens, recomputed 3"),
    ],
)
def test_another_answer_is_wrong(found: Answer, why: str) -> None:
    assert why in difference(RIGHT, found)


def test_where_the_choice_was_close_either_token_is_right_and_the_rest_is_not_compared() -> None:
    close = Answer(RIGHT.tokens, RIGHT.logprobs, (1.0, CLEAR / 2, 1.0))
    assert difference(close, other(tokens=(5, 9, 9))) == ""
    assert difference(close, other(tokens=(9, 9, 9))) != ""


QUIET: dict[str, Any] = {
    "busy": False,
    "blocks": 71,
    "free": 71,
    "held": 0,
    "pinned": 0,
    "memory": 500 << 20,
    "threads": 54,
    "descriptors": 66,
    "shared memory": ["/dev/shm/a"],
}


def test_a_life_that_holds_what_it_held_leaks_nothing() -> None:
    assert leaks(QUIET, QUIET) == {}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"busy": True}, "work"),
        ({"free": 70}, "blocks"),
        ({"held": 1}, "blocks"),
        ({"pinned": 1}, "blocks"),
        ({"memory": QUIET["memory"] + MEMORY_BYTES + 1}, "memory"),
        ({"threads": QUIET["threads"] + 11}, "threads"),
        ({"descriptors": QUIET["descriptors"] + 5}, "descriptors"),
        ({"shared memory": ["/dev/shm/a", "/dev/shm/b"]}, "shared memory"),
    ],
)
def test_whatever_a_life_keeps_is_named(change: dict[str, Any], kind: str) -> None:
    assert list(leaks(QUIET, QUIET | change)) == [kind]


def test_a_soak_that_exercised_nothing_does_not_count() -> None:
    everything = dict.fromkeys(Tally.NEEDED, 1)
    assert Tally(**everything).missing() == []
    for name, text in Tally.NEEDED.items():
        assert Tally(**everything | {name: 0}).missing() == [text]


def test_tallies_add_up() -> None:
    tally = Tally(checked=1, wrong=[("answer", "a")])
    tally.add(Tally(checked=2, killed=1, wrong=[("blocks", "b")]))
    assert (tally.checked, tally.killed, tally.kinds()) == (3, 1, {"answer", "blocks"})


def turns(seed: int, number: int = 200) -> list[Turn]:
    conversations = Conversations(random.Random(seed))
    found = []
    for _ in range(number):
        turn = conversations.turn()
        found.append(turn)
        conversations.answered(turn, range(turn.answer_tokens))
    return found


def test_one_seed_asks_the_same_questions() -> None:
    assert turns(1) == turns(1)
    assert turns(1) != turns(2)


def test_conversations_continue_share_beginnings_and_fit_the_engine() -> None:
    asked = turns(3)
    by_conversation: dict[int, list[Turn]] = {}
    for turn in asked:
        by_conversation.setdefault(turn.conversation, []).append(turn)
    several = [found for found in by_conversation.values() if len(found) > 1]
    assert len(several) > 10
    for found in several:
        for before, after in itertools.pairwise(found):
            said = (*before.prompt, *range(before.answer_tokens))
            assert after.prompt[: len(said)] == said
    beginnings = {turn.prompt[:300] for turn in asked}
    assert len(beginnings) == 4
    assert max(len(turn.prompt) for turn in asked) <= LONGEST
