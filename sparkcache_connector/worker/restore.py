"""Brings stored pages back into the engine's memory, off the model's thread.

Per load:

1. open the root: manifest read and authenticated;
2. compare it with the live geometry and with the order, page by page;
3. read and authenticate pages into arenas, in manifest order;
4. place what was authenticated, behind the fence;
5. wait until nothing can be written any more; only then say that the load ended.

Each load ends exactly once, received or failed. A load that is cancelled, late or broken is
drained before it is reported, so that its blocks can go to someone else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sparkcache_connector.messages import GroupBlocks, LoadOrder, LoadReport
from sparkcache_connector.pages import GroupShape, select
from sparkcache_connector.store.errors import WRONG_BYTES, Miss, Reason, Stopped, StoreError
from sparkcache_connector.store.manifest import Manifest
from sparkcache_connector.store.reader import Plan
from sparkcache_connector.store.store import Store
from sparkcache_connector.telemetry.metrics import Counts
from sparkcache_connector.telemetry.records import RestoreRecord, to_json
from sparkcache_connector.worker.capture import GROUP_KINDS, WORKER_ENDED
from sparkcache_connector.worker.placement import (
    DirectRestore,
    Fence,
    Placement,
    PlacementError,
    SealedPage,
    VerifiedPage,
)
from sparkcache_connector.worker.placement_errors import PlacementTimeoutError

_log = logging.getLogger("vllm.sparkcache.restore")
_DRAIN_SLICE = 1.0
# Bytes that do not fit this engine are as useless as wrong ones, and stay so.
GEOMETRY = "geometry"


class GeometryMismatchError(Exception):
    """An authentic root that does not describe this engine's pages."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Loads that ended since the last call.

    Attributes:
        requests: all of them, received or failed.
        failed: why some failed.
        invalid_blocks: blocks whose contents must not be used.
    """

    requests: frozenset[str]
    failed: tuple[LoadReport, ...]
    invalid_blocks: frozenset[int]


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    fence: Fence | None
    cancel: threading.Event
    submitted_at: float
    deadline: float
    started_at: float = 0.0
    read_at: float = 0.0
    pages: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One page to be written."""

    group: int
    number: int
    block: int
    size: int
    digest: bytes


class RestoreWorker:
    """One rank's loads.

    Args:
        store: where roots come from.
        placement: how pages enter the engine's memory.
        shapes: the KV cache groups.
        rank: this rank, for records.
        counts: where everything is counted.
        threads: loads that run at the same time.
        deadline_seconds: after which a load is given up.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        shapes: Sequence[GroupShape],
        rank: int,
        counts: Counts,
        *,
        threads: int,
        deadline_seconds: float,
    ) -> None:
        self._store = store
        self._placement = placement
        self._shapes = tuple(shapes)
        self._rank = rank
        self._counts = counts
        self._deadline_seconds = deadline_seconds
        self._pool = ThreadPoolExecutor(threads, "sparkcache-restore")
        self._lock = threading.Lock()
        self._running: dict[str, _Load] = {}
        self._ended: list[str] = []
        self._received: dict[str, LoadOrder] = {}
        self._given_up = ""
        self._failed: list[LoadReport] = []
        self._invalid: set[int] = set()

    def submit(self, order: LoadOrder, fence: Fence | None) -> None:
        """Take a load; nothing is written before ``fence`` was reached."""
        now = time.monotonic()
        load = _Load(order, fence, threading.Event(), now, now + self._deadline_seconds)
        with self._lock:
            self._running[order.request] = load
        try:
            self._pool.submit(self._run, load)
        except RuntimeError:
            self._end(load, WORKER_ENDED, quarantined=False)

    def cancel(self, requests: Iterable[str]) -> None:
        """These requests ended: stop their loads, which are still reported once drained."""
        with self._lock:
            for request in requests:
                if request in self._running:
                    self._running[request].cancel.set()

    def give_up(self, reason: str) -> None:
        """Let every load that is not yet taken fail, finished ones too, and all later ones."""
        with self._lock:
            self._given_up = reason
            for load in self._running.values():
                load.cancel.set()
            for order in self._received.values():
                self._note_failure(order, reason, quarantined=False)
            self._received = {}

    def take(self) -> Ended:
        """What ended since the last call."""
        with self._lock:
            ended = Ended(frozenset(self._ended), tuple(self._failed), frozenset(self._invalid))
            self._ended, self._failed, self._invalid = [], [], set()
            self._received = {}
        return ended

    def close(self) -> None:
        """Cancel what runs and wait until nothing is written any more."""
        with self._lock:
            for load in self._running.values():
                load.cancel.set()
        self._pool.shutdown(wait=True)

    def _run(self, load: _Load) -> None:
        load.started_at = time.monotonic()
        # Stays if even the thread ends in between.
        reason, quarantined = WORKER_ENDED, False
        try:
            self._restore(load)
            reason = ""
        except GeometryMismatchError as error:
            reason, quarantined = GEOMETRY, True
            _log.warning("root %s: %s", load.order.root.hex()[:16], error)
            self._quarantine(load.order.root)
        except StoreError as error:
            reason = str(error.reason)
            quarantined = isinstance(error, Miss) and (
                error.reason in WRONG_BYTES or error.reason is Reason.ABSENT
            )
            _log.warning("root %s: %s", load.order.root.hex()[:16], error)
        except PlacementError as error:
            reason = type(error).__name__
            _log.warning("root %s: %s", load.order.root.hex()[:16], error)
        except Exception:
            reason = "internal"
            _log.exception("root %s: restore failed", load.order.root.hex()[:16])
        finally:
            self._end(load, reason, quarantined=quarantined)  # (5)

    def _restore(self, load: _Load) -> None:
        order = load.order
        if order.refused:
            raise StoreError(Reason.INVALID, f"load of {order.request}: {order.refused}")
        self._check(load)
        with self._store.plan(order.root) as plan:  # (1)
            require_geometry(plan.manifest, order, self._shapes, self._placement)  # (2)
            wanted = list(_wanted(plan.manifest, order.groups))
            sealed = [SealedPage(page.group, page.block, page.digest) for page in wanted]
            restore = self._placement.begin_restore(sealed, after=load.fence)
            try:
                for batch in _batches(wanted, self._placement.arena_bytes):
                    self._place(load, plan, restore, wanted, batch)
                load.read_at = time.monotonic()
                while not restore.closed:
                    self._finish(load, restore)
            finally:
                _drain(restore)
        load.pages = len(wanted)
        load.bytes = sum(page.size for page in wanted)

    def _place(
        self,
        load: _Load,
        plan: Plan,
        restore: DirectRestore,
        wanted: Sequence[_Wanted],
        batch: range,
    ) -> None:
        arena = restore.acquire(max(load.deadline - time.monotonic(), 0.0))
        try:
            destinations: list[list[memoryview | None]] = [
                [None] * group.count for group in plan.manifest.groups
            ]
            at = 0
            pages: list[VerifiedPage] = []
            for index in batch:
                page = wanted[index]
                destinations[page.group][page.number] = arena.view[at : at + page.size]
                pages.append(VerifiedPage(index, at, page.digest))
                at += page.size
            self._store.read(  # (3)
                plan, destinations, cancel=load.cancel, deadline=load.deadline
            )
            destinations.clear()
            restore.submit(arena, pages)  # (4)
        except BaseException:
            arena.release()
            raise

    def _finish(self, load: _Load, restore: DirectRestore) -> None:
        self._check(load)
        try:
            restore.finish(_DRAIN_SLICE)
        except PlacementTimeoutError:
            return

    def _check(self, load: _Load) -> None:
        if load.cancel.is_set():
            raise Stopped(Reason.CANCELLED, "the request ended (cancelled)")
        if time.monotonic() >= load.deadline:
            raise Stopped(Reason.DEADLINE, "the restore took too long (deadline)")

    def _quarantine(self, root: bytes) -> None:
        try:
            self._store.quarantine(root)
        except StoreError:
            _log.exception("root %s cannot be quarantined", root.hex()[:16])

    def _end(self, load: _Load, reason: str, *, quarantined: bool) -> None:
        order = load.order
        if load.fence is not None:
            load.fence.close()
        with self._lock:
            self._running.pop(order.request, None)
            self._ended.append(order.request)
            reason = self._given_up or reason
            if reason:
                self._note_failure(order, reason, quarantined=quarantined)
            else:
                self._received[order.request] = order
            outcome = _outcome(reason)
            now = time.monotonic()
            # With the lock: whoever knows of the load finds it counted.
            self._count(load, outcome, reason, now - load.submitted_at)
        read_at = load.read_at or now
        started = load.started_at or now
        record = RestoreRecord(
            request=order.request,
            rank=self._rank,
            root=order.root.hex()[:16],
            boundary_tokens=order.boundary,
            local_tokens=order.local_tokens,
            outcome=outcome,
            reason=reason,
            quarantined=quarantined,
            pages=load.pages,
            bytes=load.bytes,
            queued_ms=(started - load.submitted_at) * 1e3,
            read_ms=(read_at - started) * 1e3,
            place_ms=(now - read_at) * 1e3,
        )
        _log.info("%s", to_json(record))

    def _count(self, load: _Load, outcome: str, reason: str, seconds: float) -> None:
        if reason:
            self._counts.add("sparkcache_restore_failures_total", reason)
        self._counts.add("sparkcache_restores_total", outcome)
        self._counts.add("sparkcache_restored_bytes_total", by=load.bytes)
        self._counts.add("sparkcache_restore_seconds_total", by=seconds)

    def _note_failure(self, order: LoadOrder, reason: str, *, quarantined: bool) -> None:
        self._failed.append(LoadReport(order.request, order.root, reason, quarantined))
        self._invalid |= order.blocks


def require_geometry(
    manifest: Manifest, order: LoadOrder, shapes: Sequence[GroupShape], placement: Placement
) -> None:
    """Refuse a root whose pages are not exactly those that this engine has at that boundary.

    Raises:
        GeometryMismatchError: the first difference.
    """
    if manifest.boundary != order.boundary or len(manifest.groups) != len(shapes):
        raise GeometryMismatchError(
            f"{len(manifest.groups)} groups at {manifest.boundary}, expected {len(shapes)} "
            f"at {order.boundary}"
        )
    for index, (group, shape) in enumerate(zip(manifest.groups, shapes, strict=True)):
        pages = select(shape, order.boundary)
        expected = (
            GROUP_KINDS[shape.kind],
            placement.layout.page_sizes[index],
            pages.first,
            pages.count,
        )
        found = (group.kind, group.page_bytes, group.first, group.count)
        if found != expected:
            raise GeometryMismatchError(f"group {index}: {found}, expected {expected}")


def _outcome(reason: str) -> str:
    if not reason:
        return "received"
    return "cancelled" if reason == Reason.CANCELLED else "failed"


def _wanted(manifest: Manifest, groups: Iterable[GroupBlocks]) -> Iterator[_Wanted]:
    """The pages to be written, in manifest order."""
    for blocks in groups:
        group = manifest.groups[blocks.group]
        for offset, block in enumerate(blocks.blocks):
            number = blocks.first - group.first + offset
            if not 0 <= number < group.count:
                raise GeometryMismatchError(f"group {blocks.group} has no page {number}")
            yield _Wanted(blocks.group, number, block, group.page_bytes, group.digest(number))


def _batches(wanted: Sequence[_Wanted], arena_bytes: int) -> Iterator[range]:
    """Consecutive pages that fit one arena together."""
    start, size = 0, 0
    for index, page in enumerate(wanted):
        if size + page.size > arena_bytes:
            yield range(start, index)
            start, size = index, 0
        size += page.size
    if start < len(wanted):
        yield range(start, len(wanted))


def _drain(restore: DirectRestore) -> None:
    """Wait until no submitted work can touch a page any more, however long it takes."""
    while not restore.closed:
        try:
            restore.abort(_DRAIN_SLICE)
        except PlacementTimeoutError:
            _log.warning("a restore is still being drained")
