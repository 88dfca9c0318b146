"""All publication attempts of the running requests: bounded in number and age.

Holds one :class:`~sparkcache_connector.scheduler.publication.Attempt` per request and target
and passes events to them. It decides nothing about proof; it decides what is forgotten.
A step that brings neither evidence nor a boundary costs one dictionary lookup.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from sparkcache_connector.scheduler.publication import (
    Attempt,
    Evidence,
    Publication,
    Refusal,
    State,
    Topology,
)

_NEVER: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Granted:
    """A publication that the proof allows, with the root it would make."""

    publication: Publication
    root: bytes


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did to one request's attempts."""

    granted: tuple[Granted, ...] = ()
    refused: tuple[Refusal, ...] = ()
    retired: int = 0


_NOTHING: Final = StepResult()


@dataclass(slots=True)
class _Tracked:
    attempts: list[Attempt]
    roots: dict[int, bytes]
    admitted_at: float
    next_reach: int

    def keep_live(self, attempts: list[Attempt]) -> None:
        live = (State.PENDING, State.LATCHED)
        self.attempts = [a for a in attempts if a.state in live]
        self.next_reach = min(
            (a.target for a in self.attempts if a.state is State.LATCHED), default=_NEVER
        )


class AttemptTracker:
    """The attempts of every request.

    Args:
        topology: the engine's groups.
        max_attempts: attempts alive at the same time, over all requests.
        max_age: seconds after which attempts that are still waiting are dropped.
    """

    def __init__(self, topology: Topology, *, max_attempts: int, max_age: float) -> None:
        self._topology = topology
        self._max_attempts = max_attempts
        self._max_age = max_age
        self._requests: dict[str, _Tracked] = {}
        self._alive = 0

    @property
    def requests(self) -> Collection[str]:
        """Requests with attempts that may still publish."""
        return self._requests.keys()

    @property
    def alive(self) -> int:
        """Attempts that may still publish."""
        return self._alive

    def admit(
        self,
        request: str,
        targets: Sequence[tuple[int, bytes]],
        *,
        last_target: int,
        now: float,
    ) -> int:
        """Start attempts at ascending ``(boundary, root)`` targets.

        Returns:
            How many were refused because too many are alive: the deepest ones are kept,
            because they save the most.
        """
        self.forget(request)
        kept = list(targets)[max(len(targets) - (self._max_attempts - self._alive), 0) :]
        if kept:
            tracked = _Tracked([], dict(kept), now, _NEVER)
            tracked.keep_live(
                [Attempt.begin(self._topology, target, last_target) for target, _ in kept]
            )
            self._requests[request] = tracked
            self._alive += len(kept)
        return len(targets) - len(kept)

    def step(
        self,
        request: str,
        evidence: Evidence | None,
        reached: int,
        holds: Callable[[bytes], bool],
    ) -> StepResult:
        """One scheduled step of a request.

        Args:
            request: its id; unknown ones have no attempts.
            evidence: what the step handed over.
            reached: computed plus scheduled tokens.
            holds: whether every rank holds a root already.
        """
        tracked = self._requests.get(request)
        if tracked is None or (evidence is None and tracked.next_reach > reached):
            return _NOTHING
        granted: list[Granted] = []
        refused: list[Refusal] = []
        after: list[Attempt] = []
        retired = 0
        # Without evidence an attempt beyond what is reached cannot change.
        end = len(tracked.attempts)
        if evidence is None:
            end = bisect.bisect_right(tracked.attempts, reached, key=lambda a: a.target)
        for attempt in tracked.attempts[:end]:
            root = tracked.roots[attempt.target]
            if holds(root):
                retired += 1
                continue
            attempt, publication = attempt.observe(self._topology, evidence).reach(reached)
            if publication:
                granted.append(Granted(publication, root))
            if attempt.refusal:
                refused.append(attempt.refusal)
            after.append(attempt)
        self._alive -= len(tracked.attempts)
        tracked.keep_live(after + tracked.attempts[end:])
        self._alive += len(tracked.attempts)
        if not tracked.attempts:
            del self._requests[request]
        return StepResult(tuple(granted), tuple(refused), retired)

    def preempt(self, request: str) -> None:
        """The request lost its blocks."""
        tracked = self._requests.get(request)
        if tracked:
            tracked.keep_live([a.preempt(self._topology) for a in tracked.attempts])

    def forget(self, request: str) -> int:
        """The request finished or was aborted; returns how many attempts went unfulfilled."""
        tracked = self._requests.pop(request, None)
        if tracked is None:
            return 0
        self._alive -= len(tracked.attempts)
        return len(tracked.attempts)

    def clear(self) -> None:
        """Give every attempt up."""
        self._requests.clear()
        self._alive = 0

    def expire(self, now: float) -> int:
        """Drop the attempts of requests admitted too long ago; returns how many."""
        dropped = 0
        while self._requests:
            request, tracked = next(iter(self._requests.items()))
            if now - tracked.admitted_at <= self._max_age:
                break
            dropped += self.forget(request)
        return dropped
