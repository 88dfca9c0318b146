"""What a soak holds an engine to, over plain values: right answers, nothing leaked, no growth.

Answers are compared with those of an engine that has no connector and computes every prompt from
its first token. The two chunk a prompt differently, which moves log-probabilities by less than
`CLOSE`; where the model's own choice was closer than `CLEAR`, either token is right, and the
comparison of that answer ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

CLOSE = 1e-3
CLEAR = 1e-2

MEMORY_BYTES = 64 << 20
"""Growth of a life's private memory between its first and last measurement: buffers that reach
their size, such as the one that publications are gathered in."""
LAZY_THREADS = 10
"""Threads of the pools that read, write and restore: started when there is work for them."""
LAZY_DESCRIPTORS = 4
"""Files of the catalog, opened when it is first written."""
STORE_SLACK_BYTES = 1 << 20
"""What a publication that was killed had begun to write."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities, and how clear each choice was."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Answer:
        """Read an engine's event."""
        return cls(tuple(event["tokens"]), tuple(event["logprobs"]), tuple(event["margins"]))


def difference(expected: Answer, found: Answer) -> str:
    """Why an answer is wrong; empty if it is right."""
    for index, (right, token) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        if right != token:
            if expected.margins[index] < CLEAR:
                return ""
            return f"token {index} is {token}, recomputed {right}"
        apart = abs(expected.logprobs[index] - found.logprobs[index])
        if not apart <= CLOSE:
            return f"log-probability of token {index} is off by {apart:.2g}"
    if len(expected.tokens) != len(found.tokens):
        return f"{len(found.tokens)} tokens, recomputed {len(expected.tokens)}"
    return ""


def leaks(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, str]:
    """What grew or was left behind between two quiet moments of one life, by kind."""
    found: dict[str, str] = {}
    if last["busy"]:
        found["work"] = "the engine does not come to rest"
    missing = last["blocks"] - last["free"]
    if missing or last["held"] or last["pinned"]:
        found["blocks"] = (
            f"{missing} blocks in use, {last['held']} publications held, {last['pinned']} pins"
        )
    grown = last["memory"] - first["memory"]
    if grown > MEMORY_BYTES:
        found["memory"] = f"{grown / (1 << 20):.0f} MiB more"
    for kind, lazy in (("threads", LAZY_THREADS), ("descriptors", LAZY_DESCRIPTORS)):
        if last[kind] > first[kind] + lazy:
            found[kind] = f"{last[kind]}, before {first[kind]}"
    if extra := set(last["shared memory"]) - set(first["shared memory"]):
        found["shared memory"] = ", ".join(sorted(extra))
    return found


@dataclass
class Tally:
    """What happened in a soak. `NEEDED` says what must have happened for it to count."""

    checked: int = 0
    cached: int = 0
    restored: int = 0
    restored_first: int = 0
    aborted: int = 0
    preempted: int = 0
    evicted: int = 0
    lives: int = 0
    killed: int = 0
    grown_bytes: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    NEEDED: ClassVar[Mapping[str, str]] = {
        "checked": "no answer was checked",
        "restored": "nothing was restored",
        "restored_first": "nothing was restored of what an earlier life had left",
        "aborted": "no request was aborted",
        "preempted": "no request was preempted",
        "evicted": "the quota never evicted a root",
        "killed": "no engine was killed",
    }

    def missing(self) -> list[str]:
        """What this soak did not exercise."""
        return [text for name, text in self.NEEDED.items() if not getattr(self, name)]

    def kinds(self) -> set[str]:
        """Kinds of what was wrong."""
        return {kind for kind, _ in self.wrong}

    def add(self, other: Tally) -> None:
        """Take another one's counts."""
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.wrong += other.wrong

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.checked} answers checked ({self.restored} restores, {self.restored_first} of "
            f"what an earlier life left), {self.lives} lives, {self.killed} kills, "
            f"{self.aborted} aborts, {self.preempted} preemptions, {self.evicted} evicted roots, "
            f"memory {self.grown_bytes / (1 << 20):+.1f} MiB"
        )


def metric(measured: Mapping[str, Any], name: str, *labels: str) -> int:
    """One sample of a measurement; what was never counted is 0."""
    return int(measured["metrics"].get(",".join((name, *labels)), 0))
