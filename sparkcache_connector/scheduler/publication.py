"""The publication proof: one automaton per request and target boundary, over plain values.

A root may be published at its target boundary only if, since the last preemption, the engine
handed over exactly one non-null block for every recurrent group at exactly that boundary and
never a different one. ``tests/unit/connector/test_publication.py`` has one test per row of
the transition table::

    pending   no entry here; entries only where others may be   -> pending
    pending   complete mapping at the target                    -> latched
    latched   the same mapping again                            -> latched
    latched   a different mapping at the target                 -> poisoned
    either    an entry that cannot be right (see Poison)        -> poisoned
    latched   computed plus scheduled tokens reach the target   -> published
    any       preempted                                         -> latch cleared
    any       every rank holds the root                         -> retired, evidence not read

Poisoned, published and retired are final. A model without recurrent groups needs no proof:
its attempts are latched from the start and publish from the block table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

Triple = tuple[int, int, int]
Mapping = tuple[tuple[int, int], ...]

NULL_BLOCK: Final = 0


class State(StrEnum):
    """Where an attempt stands."""

    PENDING = "pending"
    LATCHED = "latched"
    POISONED = "poisoned"
    PUBLISHED = "published"
    RETIRED = "retired"


class Poison(StrEnum):
    """Why an attempt can never publish; the value is a counter label."""

    MALFORMED = "malformed_entry"
    NULL = "null_block"
    UNKNOWN_GROUP = "unknown_group"
    NOT_RECURRENT = "group_not_recurrent"
    TWICE = "two_entries_for_one_group"
    INCOMPLETE = "groups_missing"
    CONFLICT = "different_mapping"
    FUTURE = "future_boundary"
    OFF_GRID = "boundary_not_a_hash_block"
    NOT_COMPUTED = "boundary_beyond_computed"


@dataclass(frozen=True, slots=True)
class Topology:
    """What the automaton needs to know about the engine's groups.

    Attributes:
        groups: number of KV cache groups.
        recurrent: indices of those whose block is a state at one boundary.
        hash_block: tokens per hash block; every boundary is a multiple.
    """

    groups: int
    recurrent: frozenset[int]
    hash_block: int

    def __post_init__(self) -> None:
        if self.hash_block < 1 or any(not 0 <= g < self.groups for g in self.recurrent):
            raise ValueError(f"impossible topology {self}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What poisoned an attempt, for one counter and one line in the log."""

    reason: Poison
    target: int
    group: int | None = None
    block: int | None = None
    observed: int | None = None

    def describe(self, request: str) -> str:
        """The log line."""
        return (
            f"publication of request {request} at boundary {self.target} given up: "
            f"{self.reason.value} (group {self.group}, block {self.block}, "
            f"observed boundary {self.observed})"
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one step handed over for one request, parsed once for all of its attempts.

    Attributes:
        entries: the triples, in order.
        tails: those that are vLLM's own partial tails.
        computed: computed plus scheduled tokens of the step that carries them.
        malformed: whether anything in it was not a triple of whole numbers.
    """

    entries: tuple[Triple, ...]
    tails: frozenset[Triple]
    computed: int
    malformed: bool = False

    @classmethod
    def parse(cls, raw: object, raw_tails: object, computed: int) -> Evidence | None:
        """Read the two fields of a step as they came; None means that there is no entry."""
        entries, bad = _triples(raw)
        tails, bad_tails = _triples(raw_tails)
        if not entries and not bad:
            return None
        return cls(entries, frozenset(tails), computed, bad or bad_tails)


@dataclass(frozen=True, slots=True)
class Publication:
    """Permission to publish: these blocks override the table for their recurrent groups."""

    target: int
    proven: Mapping


@dataclass(frozen=True, slots=True)
class Attempt:
    """One automaton. Immutable: every event returns the attempt that follows.

    Attributes:
        target: boundary at which this attempt would publish.
        last_target: the request's last boundary by policy, whether or not it is attempted.
        state: see the module's table.
        mapping: the latched proof, ``(group, block)`` ascending.
        refusal: what poisoned it.
    """

    target: int
    last_target: int
    state: State
    mapping: Mapping = ()
    refusal: Refusal | None = None

    @classmethod
    def begin(cls, topology: Topology, target: int, last_target: int) -> Attempt:
        """A fresh attempt."""
        if not 0 < target <= last_target or target % topology.hash_block:
            raise ValueError(f"target {target} cannot be (last target {last_target})")
        return cls(target, last_target, _initial(topology))

    def observe(self, topology: Topology, evidence: Evidence | None) -> Attempt:
        """A step handed over entries for this request, or none."""
        if evidence is None or self.state not in (State.PENDING, State.LATCHED):
            return self
        refusal = _refuse(self, topology, evidence)
        if refusal:
            return replace(self, state=State.POISONED, mapping=(), refusal=refusal)
        mapping = tuple(sorted((g, b) for g, b, t in evidence.entries if t == self.target))
        if not mapping or mapping == self.mapping:
            return self
        if self.state is State.LATCHED:
            conflict = next(pair for pair in mapping if pair not in self.mapping)
            return replace(
                self,
                state=State.POISONED,
                mapping=(),
                refusal=Refusal(Poison.CONFLICT, self.target, *conflict, self.target),
            )
        return replace(self, state=State.LATCHED, mapping=mapping)

    def reach(self, tokens: int) -> tuple[Attempt, Publication | None]:
        """A step computes the request up to ``tokens``; called after its evidence was observed."""
        if self.state is not State.LATCHED or tokens < self.target:
            return self, None
        return replace(self, state=State.PUBLISHED), Publication(self.target, self.mapping)

    def preempt(self, topology: Topology) -> Attempt:
        """The request lost its blocks: what was proven about them proves nothing now."""
        if self.state is not State.LATCHED:
            return self
        return replace(self, state=_initial(topology), mapping=())

    def retire(self) -> Attempt:
        """Every rank holds the root already."""
        if self.state is State.PUBLISHED:
            return self
        return replace(self, state=State.RETIRED, mapping=())


def _initial(topology: Topology) -> State:
    return State.PENDING if topology.recurrent else State.LATCHED


def _refuse(attempt: Attempt, topology: Topology, evidence: Evidence) -> Refusal | None:
    """The first reason why this evidence cannot be right, if there is one."""
    target = attempt.target
    if evidence.malformed:
        return Refusal(Poison.MALFORMED, target)
    seen: set[int] = set()
    for group, block, boundary in evidence.entries:
        reason = _refuse_boundary(attempt, topology, evidence, (group, block, boundary))
        if reason is None and boundary == target:
            reason = _refuse_at_target(topology, group, block, seen)
            seen.add(group)
        if reason:
            return Refusal(reason, target, group, block, boundary)
    if seen and seen != topology.recurrent:
        missing = min(topology.recurrent - seen)
        return Refusal(Poison.INCOMPLETE, target, missing, None, target)
    return None


def _refuse_boundary(
    attempt: Attempt, topology: Topology, evidence: Evidence, entry: Triple
) -> Poison | None:
    boundary = entry[2]
    if boundary < 1 or boundary % topology.hash_block:
        return Poison.OFF_GRID
    if boundary > evidence.computed:
        return Poison.NOT_COMPUTED
    if boundary > attempt.last_target and entry not in evidence.tails:
        return Poison.FUTURE
    return None


def _refuse_at_target(
    topology: Topology, group: int, block: int, seen: Collection[int]
) -> Poison | None:
    if block <= NULL_BLOCK:
        return Poison.NULL
    if not 0 <= group < topology.groups:
        return Poison.UNKNOWN_GROUP
    if group not in topology.recurrent:
        return Poison.NOT_RECURRENT
    if group in seen:
        return Poison.TWICE
    return None


def _triples(raw: object) -> tuple[tuple[Triple, ...], bool]:
    """The well-formed triples, and whether anything else was there."""
    if raw is None:
        return (), False
    if not isinstance(raw, (list, tuple)):
        return (), True
    triples = tuple(_well_formed(raw))
    return triples, len(triples) != len(raw)


def _well_formed(raw: Iterable[object]) -> Iterable[Triple]:
    for entry in raw:
        # Exactly int: a bool is an int to Python and a sign of a mistake here.
        if isinstance(entry, (list, tuple)) and [type(part) for part in entry] == [int] * 3:
            yield entry[0], entry[1], entry[2]
