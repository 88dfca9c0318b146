"""What the scheduler tells the ranks and what they answer: plain data, once per step."""

from __future__ import annotations

from dataclasses import dataclass

from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.scheduler.quorum import Report


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Physical blocks for consecutive pages of one group.

    Attributes:
        group: index of the group.
        first: block table index of the first page.
        blocks: physical block per page, none of them null.
        last_positions: positions of the last page that belong to the context.
    """

    group: int
    first: int
    blocks: tuple[int, ...]
    last_positions: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Restore a root into blocks that were allocated for it.

    Attributes:
        request: the engine's request id.
        root: context digest.
        boundary: tokens that the root covers.
        local_tokens: of these, tokens that the engine had itself.
        groups: destinations, without pages of the local prefix.
        refused: why nothing may be written; the load is reported as failed at once.
    """

    request: str
    root: bytes
    boundary: int
    local_tokens: int
    groups: tuple[GroupBlocks, ...]
    refused: str = ""

    @property
    def blocks(self) -> frozenset[int]:
        """Every destination."""
        return frozenset(block for group in self.groups for block in group.blocks)


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """Store a root out of blocks that the scheduler holds for it.

    Attributes:
        number: names the publication in every report.
        request: the engine's request id, for records.
        root: context digest.
        boundary: tokens that the root covers.
        base: a root whose leading pages may be referenced.
        groups: sources, every group in order.
        ready: the contents were complete before this step, not only after its forward.
    """

    number: int
    request: str
    root: bytes
    boundary: int
    base: bytes | None
    groups: tuple[GroupBlocks, ...]
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Orders:
    """Everything that one step tells every rank.

    Attributes:
        loads: roots to restore.
        publications: roots to store.
        withdrawals: roots that not every rank stored.
        start_over: ranks that report their whole inventory again.
        switched_off: why nothing is stored or restored any more; empty while it is.
    """

    loads: tuple[LoadOrder, ...] = ()
    publications: tuple[PublishOrder, ...] = ()
    withdrawals: tuple[bytes, ...] = ()
    start_over: frozenset[int] = frozenset()
    switched_off: str = ""


@dataclass(frozen=True, slots=True)
class PublicationReport:
    """A rank's only word about the fate of a publication."""

    number: int
    result: Result
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Why a rank could not restore a root; restored ones need no words.

    Attributes:
        request: the engine's request id.
        root: context digest.
        reason: counter label.
        quarantined: the bytes were wrong, and the root is out of service on this rank.
    """

    request: str
    root: bytes
    reason: str
    quarantined: bool


@dataclass(frozen=True, slots=True)
class RankReport:
    """Everything that one rank says with one step.

    Attributes:
        rank: who speaks.
        inventory: numbered inventory reports, in order.
        copied: publications whose source blocks are not read any more.
        publications: publications that ended.
        failed_loads: loads that failed.
        switched_off: why this rank neither stores nor restores any more, said once.
    """

    rank: int
    inventory: tuple[Report, ...] = ()
    copied: tuple[int, ...] = ()
    publications: tuple[PublicationReport, ...] = ()
    failed_loads: tuple[LoadReport, ...] = ()
    switched_off: str = ""

    @property
    def says_something(self) -> bool:
        """Whether sending it is worth anything."""
        return bool(
            self.inventory
            or self.copied
            or self.publications
            or self.failed_loads
            or self.switched_off
        )
