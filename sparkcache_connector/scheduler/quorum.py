"""Which roots every rank of the current engine generation holds.

Each rank keeps a journal of its inventory and sends numbered reports: the whole inventory
first (``reset``), then what changed. The scheduler counts ranks per root. A report that is
missing, repeated or from another life of the rank never makes a root appear: the rank is
withdrawn, so that none of its roots counts, until it starts over with a reset.

Startup: every rank hands over its journal's reports once before the first request, so the
first request after a restart can hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_RETIRED_GENERATIONS: Final = 64


@dataclass(frozen=True, slots=True)
class Report:
    """One numbered message of one rank.

    Attributes:
        rank: who speaks.
        generation: names one life of the rank's process; never used twice.
        sequence: number of this report in that life, from 0.
        reset: everything that was reported before is void.
        added: roots that the rank holds now.
        removed: roots that it does not hold any more.
    """

    rank: int
    generation: str
    sequence: int
    reset: bool
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Absorbed(StrEnum):
    """What became of a report; the value is a counter label."""

    APPLIED = "applied"
    RESYNC = "resync"  # a report is missing: the rank must start over
    STALE = "stale"  # another life of the rank, or a rank that cannot be


class Journal:
    """A rank's side: what it holds and what of that has not been reported yet.

    Args:
        rank: this rank.
        generation: a name that no other life of any rank has.
        max_roots: roots that are reported; the oldest ones are left out beyond that.
        max_changes: roots in one report, so that no step carries megabytes.
    """

    def __init__(
        self, rank: int, generation: str, *, max_roots: int = 1 << 18, max_changes: int = 1_024
    ) -> None:
        self._rank = rank
        self._generation = generation
        self._max_roots = max_roots
        self._max_changes = max_changes
        self._held: dict[bytes, None] = {}
        self._changes: dict[bytes, bool] = {}
        self._sequence = 0
        self._reset = True

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, root: bytes) -> bool:
        return root in self._held

    def add(self, root: bytes) -> None:
        """The rank holds this root from now on."""
        if root in self._held:
            return
        while len(self._held) >= self._max_roots:
            self.remove(next(iter(self._held)))
        self._held[root] = None
        self._note(root, True)

    def remove(self, root: bytes) -> None:
        """The rank does not hold this root any more."""
        if self._held.pop(root, True) is None:
            self._note(root, False)

    def replace(self, roots: Iterable[bytes]) -> None:
        """The rank holds exactly these roots, oldest first."""
        new = dict.fromkeys(roots)
        for gone in [root for root in self._held if root not in new]:
            self.remove(gone)
        for root in new:
            self.add(root)

    def start_over(self) -> None:
        """Report everything again, beginning with a reset."""
        self._reset = True
        self._changes = dict.fromkeys(self._held, True)

    def next_report(self) -> Report | None:
        """The next message, or None when there is nothing to say."""
        if not self._changes and not self._reset:
            return None
        batch = list(self._changes.items())[: self._max_changes]
        for root, _ in batch:
            del self._changes[root]
        report = Report(
            self._rank,
            self._generation,
            self._sequence,
            self._reset,
            tuple(root for root, held in batch if held),
            tuple(root for root, held in batch if not held),
        )
        self._sequence += 1
        self._reset = False
        return report

    def drain(self) -> list[Report]:
        """All messages, for the exchange at startup."""
        reports = []
        while (report := self.next_report()) is not None:
            reports.append(report)
        return reports

    def _note(self, root: bytes, held: bool) -> None:
        # A change and its opposite between two reports cancel out: the scheduler has seen
        # neither, and the order of what it does see stays that of the last word.
        if self._changes.get(root, held) is not held:
            del self._changes[root]
        else:
            self._changes[root] = held


@dataclass(slots=True)
class _Rank:
    generation: str = ""
    next_sequence: int = 0
    in_step: bool = False


class Quorum:
    """The scheduler's side.

    Args:
        ranks: number of ranks that must agree.

    Attributes:
        version: changes whenever an answer of :meth:`holds` may have changed.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"a quorum of {ranks} ranks")
        self._all = (1 << ranks) - 1
        self._ranks = [_Rank() for _ in range(ranks)]
        self._holders: dict[bytes, int] = {}
        self._complete = 0
        self._retired: deque[str] = deque(maxlen=_RETIRED_GENERATIONS * ranks)
        self.version = 0

    def holds(self, root: bytes) -> bool:
        """Whether every rank holds the root."""
        return self._holders.get(root) == self._all

    def __len__(self) -> int:
        """Roots that every rank holds."""
        return self._complete

    @property
    def out_of_step(self) -> frozenset[int]:
        """Ranks whose inventory is not known: they must start over."""
        return frozenset(i for i, rank in enumerate(self._ranks) if not rank.in_step)

    def absorb(self, report: Report) -> Absorbed:
        """Take one report into account."""
        if not 0 <= report.rank < len(self._ranks) or report.generation in self._retired:
            return Absorbed.STALE
        rank = self._ranks[report.rank]
        if report.reset:
            if report.generation == rank.generation and report.sequence < rank.next_sequence:
                return Absorbed.STALE
            self._withdraw(report.rank)
            if rank.generation and rank.generation != report.generation:
                self._retired.append(rank.generation)
            rank.generation = report.generation
            rank.in_step = True
        elif report.generation != rank.generation:
            return Absorbed.STALE if rank.in_step else Absorbed.RESYNC
        elif report.sequence < rank.next_sequence:
            return Absorbed.STALE
        elif report.sequence > rank.next_sequence or not rank.in_step:
            self._withdraw(report.rank)
            return Absorbed.RESYNC
        rank.next_sequence = report.sequence + 1
        self._apply(report)
        return Absorbed.APPLIED

    def discard(self, rank: int, root: bytes) -> None:
        """A rank does not hold a root any more, known before its inventory says so.

        What the other ranks hold stays: they do not report it a second time.
        """
        if 0 <= rank < len(self._ranks) and root in self._holders:
            self._set(root, self._holders[root] & ~(1 << rank))
            self.version += 1

    def _apply(self, report: Report) -> None:
        bit = 1 << report.rank
        for root in report.removed:
            self._set(root, self._holders.get(root, 0) & ~bit)
        for root in report.added:
            self._set(root, self._holders.get(root, 0) | bit)
        self.version += 1

    def _set(self, root: bytes, holders: int) -> None:
        self._complete += (holders == self._all) - (self._holders.get(root) == self._all)
        if holders:
            self._holders[root] = holders
        else:
            self._holders.pop(root, None)

    def _withdraw(self, index: int) -> None:
        self._ranks[index].in_step = False
        keep = ~(1 << index)
        for root, holders in list(self._holders.items()):
            self._set(root, holders & keep)
        self.version += 1
