"""Publications under way: all ranks publish the same root, or none does.

The scheduler names a publication; every rank reports it exactly once, whatever happened.
Only the last report settles it: then the blocks that were held for it may be recycled, and
a root that not every rank stored is withdrawn from those that did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """What one rank made of one publication."""

    STORED = "stored"
    ALREADY_HELD = "already_held"
    SKIPPED = "skipped"
    FAILED = "failed"


_HELD = frozenset({Result.STORED, Result.ALREADY_HELD})


class Refused(StrEnum):
    """Why a publication is not started; the value is a counter label."""

    TOO_MANY = "too_many_delayed_stores"
    UNDER_WAY = "already_under_way"


@dataclass(frozen=True, slots=True)
class Settled:
    """A publication that every rank has reported.

    Attributes:
        publication: its number.
        root: the context digest.
        results: per rank.
    """

    publication: int
    root: bytes
    results: Mapping[int, Result]

    @property
    def complete(self) -> bool:
        """Every rank holds the root."""
        return all(result in _HELD for result in self.results.values())

    @property
    def withdraw(self) -> bool:
        """Some ranks stored what others lack: those must remove it."""
        return not self.complete and any(r in _HELD for r in self.results.values())


@dataclass(slots=True)
class _Open:
    root: bytes
    results: dict[int, Result]


class PublicationLedger:
    """Numbers publications and collects their reports.

    Args:
        ranks: how many report each publication.
        limit: publications whose blocks may be held at the same time.
    """

    def __init__(self, ranks: int, limit: int) -> None:
        self._ranks = ranks
        self._limit = limit
        self._open: dict[int, _Open] = {}
        self._roots: set[bytes] = set()
        self._next = 1

    def __len__(self) -> int:
        return len(self._open)

    def open(self, root: bytes) -> int | Refused:
        """Start a publication; its number, or why not."""
        if root in self._roots:
            return Refused.UNDER_WAY
        if len(self._open) >= self._limit:
            return Refused.TOO_MANY
        number = self._next
        self._next += 1
        self._open[number] = _Open(root, {})
        self._roots.add(root)
        return number

    def report(self, rank: int, publication: int, result: Result) -> Settled | None:
        """One rank's only word about a publication; a second one changes nothing.

        Returns:
            The settlement, from the last report that was missing.
        """
        entry = self._open.get(publication)
        if entry is None or not 0 <= rank < self._ranks or rank in entry.results:
            return None
        entry.results[rank] = result
        if len(entry.results) < self._ranks:
            return None
        del self._open[publication]
        self._roots.discard(entry.root)
        return Settled(publication, entry.root, entry.results)


class HeldBlocks:
    """Blocks that are kept from being recycled until every rank has read them.

    Args:
        ranks: how many read each publication.

    Attributes:
        limit: blocks that may be held at the same time.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._held: dict[int, tuple[int, set[int]]] = {}
        self._blocks = 0
        self._released: list[int] = []
        self.limit = 1 << 62

    def __len__(self) -> int:
        """Publications whose blocks are held."""
        return len(self._held)

    def room_for(self, blocks: int) -> bool:
        """Whether so many more may be held."""
        return self._blocks + blocks <= self.limit

    def hold(self, publication: int, blocks: int) -> None:
        """A publication's blocks are held from now on."""
        self._held[publication] = (blocks, set())
        self._blocks += blocks

    def read(self, rank: int, publication: int) -> None:
        """A rank reads them no more; a second word of the same rank changes nothing."""
        blocks, ranks = self._held.get(publication, (0, set()))
        ranks.add(rank)
        if publication in self._held and len(ranks) == self._ranks:
            del self._held[publication]
            self._blocks -= blocks
            self._released.append(publication)

    def take_released(self) -> list[int]:
        """Publications whose blocks no rank reads any more, each named once."""
        released, self._released = self._released, []
        return released
