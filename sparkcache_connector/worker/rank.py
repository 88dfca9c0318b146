"""One rank's side of the connector: its store, its memory, and what it tells the scheduler.

Carries out orders and reports; decides nothing about what to store or restore. A store that
cannot be opened leaves serving on: every order is answered with a reason.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable

from sparkcache_connector.config import Config
from sparkcache_connector.geometry import Geometry
from sparkcache_connector.messages import (
    LoadReport,
    Orders,
    PublicationReport,
    PublishOrder,
    RankReport,
)
from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.scheduler.quorum import Journal, Report
from sparkcache_connector.store.core import Options
from sparkcache_connector.store.errors import Unusable
from sparkcache_connector.store.store import Store
from sparkcache_connector.telemetry.health import HealthPage
from sparkcache_connector.telemetry.metrics import Counts
from sparkcache_connector.worker.capture import WORKER_ENDED, CaptureWorker
from sparkcache_connector.worker.placement import Fence, Placement
from sparkcache_connector.worker.restore import Ended, RestoreWorker
from sparkcache_connector.worker.watch import Watch

_log = logging.getLogger("vllm.sparkcache.rank")
WEIGHTS_CHANGED = "weights_changed"


def open_store(path: str, identity: bytes, rank: int, config: Config) -> Store | Unusable:
    """Open this rank's cache root, or say why that cannot be."""
    options = Options(
        high_bytes=config.max_bytes or (1 << 62 if config.max_bytes == 0 else None),
        low_bytes=config.low_watermark_bytes or None,
        ttl_seconds=config.ttl_seconds or None,
        workers=config.cuda_restore_io_workers,
        key_file=config.key_file or None,
    )
    try:
        return Store.open(path, identity=identity, rank=rank, options=options)
    except Unusable as error:
        _log.error("nothing is stored or restored on this rank: %s", error)
        return error


class Rank:
    """Joins store, placement, capture and restore of one rank.

    Args:
        store: the open store, or why there is none.
        placement: how pages move.
        geometry: what pages are.
        rank: this rank.
        config: the operator's options.
        counts: where everything is counted.
        weights_changed: whether the engine's weights are not those of the identity any more.
        page: where the rank's state is described; None to describe it nowhere.
    """

    def __init__(
        self,
        store: Store | Unusable,
        placement: Placement,
        geometry: Geometry,
        rank: int,
        config: Config,
        counts: Counts,
        *,
        weights_changed: Callable[[], bool],
        page: HealthPage | None,
    ) -> None:
        self._store = None if isinstance(store, Unusable) else store
        self._off = str(store.reason) if isinstance(store, Unusable) else ""
        self._weights_changed = weights_changed
        self._told_changed = ""
        self._told_off: set[tuple[str, str]] = set()
        self._placement = placement
        self._rank = rank
        self._counts = counts
        self._journal = Journal(rank, secrets.token_hex(16))
        self._refused_loads: list[LoadReport] = []
        self._refused_blocks: set[int] = set()
        self._copied: list[int] = []
        self._publications: list[PublicationReport] = []
        self._failed: list[LoadReport] = []
        self._told_bytes = -1
        self._told_evictions: dict[str, int] = {}
        self._capture: CaptureWorker | None = None
        self._restore: RestoreWorker | None = None
        if not isinstance(store, Unusable):
            for reason, number in store.found_unusable().items():
                counts.add("sparkcache_unusable_roots_total", reason, by=number)
            store.drain_changes()
            self._journal.replace(store.inventory())
            self._capture = CaptureWorker(store, placement, geometry.shapes, rank, counts)
            self._restore = RestoreWorker(
                store,
                placement,
                geometry.shapes,
                rank,
                counts,
                threads=config.load_threads,
                deadline_seconds=config.restore_deadline_seconds,
            )
        self._watch = page and Watch(rank, counts, off=self._why_off, page=page)

    def fence(self) -> Fence:
        """Mark the present end of the model's stream."""
        return self._placement.fence(_current_stream(self._placement.layout.device))

    def introduce(self) -> tuple[Report, ...]:
        """The whole inventory, for the exchange before the first request."""
        return tuple(self._journal.drain())

    def before_forward(self, orders: Orders, fence: Callable[[], Fence]) -> None:
        """Start what needs nothing of this step's forward."""
        if self._weights_changed():
            self._switch_off(WEIGHTS_CHANGED)
        elif orders.switched_off:
            self._switch_off(orders.switched_off)
        for order in orders.loads:
            if self._restore is None or self._off:
                refused = LoadReport(order.request, order.root, self._off, False)
                self._refused_loads.append(refused)
                self._refused_blocks |= order.blocks
            else:
                self._restore.submit(order, fence())
        for publication in orders.publications:
            if publication.ready:
                self._publish(publication, fence)
        if orders.withdrawals and self._store is not None:
            self._store.withdraw(orders.withdrawals)
        if self._rank in orders.start_over:
            self._journal.start_over()

    def after_forward(self, orders: Orders, fence: Callable[[], Fence]) -> None:
        """Start publications whose contents this step's forward completed."""
        for publication in orders.publications:
            if not publication.ready:
                self._publish(publication, fence)

    def cancel(self, requests: Iterable[str]) -> None:
        """These requests ended."""
        if self._restore is not None:
            self._restore.cancel(requests)

    def ended_loads(self) -> Ended:
        """Loads that ended since the last call, each named once."""
        ended = self._restore.take() if self._restore else Ended(frozenset(), (), frozenset())
        refused, self._refused_loads = tuple(self._refused_loads), []
        blocks, self._refused_blocks = frozenset(self._refused_blocks), set()
        ended = Ended(
            ended.requests | {report.request for report in refused},
            ended.failed + refused,
            ended.invalid_blocks | blocks,
        )
        self._failed.extend(ended.failed)
        return ended

    def collect(self) -> None:
        """Take what has ended since the last call; then take counts, then :meth:`report`.

        In this order nothing is reported whose counts come a step later, or never where no
        step follows.
        """
        if self._capture is not None:
            copied, ended = self._capture.take()
            self._copied += copied
            self._publications += ended
        if self._store is not None:
            changes = self._store.drain_changes()
            for root in changes.removed:
                self._journal.remove(root)
            for root in changes.added:
                self._journal.add(root)
            self._tell_store(self._store)
        self._tell_off()

    def report(self) -> RankReport:
        """Everything that :meth:`collect` found new since the last call."""
        copied, self._copied = tuple(self._copied), []
        publications, self._publications = tuple(self._publications), []
        inventory = self._journal.next_report()
        failed, self._failed = tuple(self._failed), []
        news = self._off if self._off == WEIGHTS_CHANGED != self._told_changed else ""
        self._told_changed = news or self._told_changed
        return RankReport(
            self._rank,
            (inventory,) if inventory else (),
            copied,
            publications,
            failed,
            news,
        )

    def close(self) -> None:
        """End both workers, then the store; safe to call twice."""
        if self._watch is not None:
            self._watch.close()
        if self._restore is not None:
            self._restore.close()
        if self._capture is not None:
            self._capture.close()
        if self._store is not None:
            self._store.close()

    def _tell_store(self, store: Store) -> None:
        """Count what changed in the store."""
        if store.allocated_bytes != self._told_bytes:
            self._told_bytes = store.allocated_bytes
            self._counts.set("sparkcache_store_bytes", str(self._rank), to=self._told_bytes)
        evictions = store.evictions()
        if evictions != self._told_evictions:
            for reason, number in evictions.items():
                new = number - self._told_evictions.get(reason, 0)
                self._counts.add("sparkcache_evictions_total", reason, by=new)
            self._told_evictions = evictions

    def _tell_off(self) -> None:
        """Set the gauge of what is off."""
        now = set(self._why_off().items())
        for what, reason in now ^ self._told_off:
            to = int((what, reason) in now)
            self._counts.set("sparkcache_switched_off", what, reason, str(self._rank), to=to)
        self._told_off = now

    def _publish(self, order: PublishOrder, fence: Callable[[], Fence]) -> None:
        if self._capture is None or self._off:
            self._counts.add("sparkcache_publication_failures_total", self._off)
            refused = PublicationReport(order.number, Result.SKIPPED, self._off)
            self._publications.append(refused)
        else:
            self._capture.submit(order, fence())

    def _switch_off(self, reason: str) -> None:
        """Neither store nor restore any more, from this very step on."""
        if self._off:
            return
        self._off = reason
        _log.warning("nothing is stored or restored on this rank from now on: %s", reason)
        if self._restore is not None:
            self._restore.give_up(reason)

    def _why_off(self) -> dict[str, str]:
        if self._off:
            return {"publish": self._off, "restore": self._off}
        if self._capture is not None and self._capture.ended:
            return {"publish": WORKER_ENDED}
        publish = self._store.publishing_off if self._store is not None else None
        return {"publish": publish} if publish else {}


def _current_stream(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    import torch

    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream
