"""What the soak asks: conversations of several turns that share their beginnings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

VOCABULARY = 512
LONGEST = 1_700
"""Tokens of the longest prompt."""
SYSTEM_PROMPTS = 4
DISTINCT_TURNS = 400
"""Turns that are remembered: older ones are not asked again."""


@dataclass(frozen=True)
class Turn:
    """One prompt, which is everything said so far and a new question."""

    conversation: int
    prompt: tuple[int, ...]
    answer_tokens: int


@dataclass
class Conversations:
    """An endless supply of turns; `answered` continues the conversation of a turn.

    The random numbers are the only input: one seed asks the same questions in every run.
    """

    chance: random.Random
    _systems: list[list[int]] = field(default_factory=list)
    _waiting: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        self._systems = [self._say(self.chance.randrange(300, 700)) for _ in range(SYSTEM_PROMPTS)]

    def turn(self) -> Turn:
        """The next turn: of a conversation that goes on, or of a new one."""
        if self._waiting and self.chance.random() < 0.6:
            chosen = self.chance.randrange(len(self._waiting))
            conversation, said = self._waiting.pop(chosen)
        else:
            conversation, self._next = self._next, self._next + 1
            said = tuple(self.chance.choice(self._systems))
        question = self._say(self.chance.randrange(20, 240))
        return Turn(conversation, (*said, *question), self.chance.randrange(4, 25))

    def answered(self, turn: Turn, answer: Sequence[int]) -> None:
        """What the model said in a turn; the conversation goes on from there, unless too long."""
        said = (*turn.prompt, *answer)
        if len(said) < LONGEST - 240:
            self._waiting.append((turn.conversation, said))

    def _say(self, tokens: int) -> list[int]:
        return self.chance.choices(range(VOCABULARY), k=tokens)
