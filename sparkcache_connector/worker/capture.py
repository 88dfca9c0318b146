"""Copies proven pages out of the engine's memory and stores them, off the model's thread.

One thread takes publications in the order in which the scheduler named them, so that a
later root finds the pages of an earlier one; when it has nothing to do for a minute, it
expires, compacts and sweeps the store. Per publication:

1. gather the pages behind the fence, arena by arena, into memory of our own;
2. say that the engine's blocks are not read any more;
3. store the root durably;
4. say what became of it.

Both words are said exactly once, whatever happens in between: also when the thread itself
ends before its time, for what it was doing, for what was queued, and for what comes later.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparkcache_connector.messages import GroupBlocks, PublicationReport, PublishOrder
from sparkcache_connector.pages import FULL, RECURRENT, SLIDING, GroupShape
from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.store.errors import Refused, StoreError
from sparkcache_connector.store.manifest import GroupKind
from sparkcache_connector.store.publication import GroupPages
from sparkcache_connector.store.store import Store
from sparkcache_connector.telemetry.metrics import Counts
from sparkcache_connector.telemetry.records import PublicationRecord, to_json
from sparkcache_connector.worker.placement import (
    DRAIN_TIMEOUT,
    Fence,
    Page,
    Placement,
    PlacementError,
    Span,
)

_log = logging.getLogger("vllm.sparkcache.capture")
_ALIGNMENT = 4096
_MAINTENANCE_SECONDS = 60.0
WORKER_ENDED = "worker_ended"

GROUP_KINDS = {
    FULL: GroupKind.FULL_ATTENTION,
    SLIDING: GroupKind.SLIDING_WINDOW,
    RECURRENT: GroupKind.RECURRENT,
}


@dataclass(slots=True)
class _Job:
    order: PublishOrder
    fence: Fence | None
    named_at: float


@dataclass(slots=True)
class _Fate:
    """What a record says about one publication."""

    result: Result = Result.FAILED
    reason: str = WORKER_ENDED
    pages: int = 0
    referenced: int = 0
    written: int = 0
    started_at: float = 0.0
    gathered_at: float = 0.0


class CaptureWorker:
    """One rank's publications.

    Args:
        store: where roots go.
        placement: how pages leave the engine's memory.
        shapes: the KV cache groups.
        rank: this rank, for records.
        counts: where everything is counted.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        shapes: Sequence[GroupShape],
        rank: int,
        counts: Counts,
    ) -> None:
        self._store = store
        self._placement = placement
        self._shapes = tuple(shapes)
        self._rank = rank
        self._counts = counts
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._copied: list[int] = []
        self._reports: list[PublicationReport] = []
        self._buffer = mmap.mmap(-1, _ALIGNMENT)
        self._closed = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="sparkcache-capture", daemon=True)
        self._thread.start()

    def submit(self, order: PublishOrder, fence: Fence | None) -> None:
        """Take a publication; its pages are read once ``fence`` was reached."""
        job = _Job(order, fence, time.monotonic())
        with self._lock:
            taken = not self._ended
            if taken:
                self._jobs.put(job)
        if not taken:
            self._give_up(job)

    @property
    def ended(self) -> bool:
        """Whether nothing is published any more, because the thread is over."""
        return self._ended

    def take(self) -> tuple[tuple[int, ...], tuple[PublicationReport, ...]]:
        """Publications whose blocks are free, and those that ended, since the last call."""
        with self._lock:
            copied, self._copied = tuple(self._copied), []
            reports, self._reports = tuple(self._reports), []
        return copied, reports

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except BaseException:
            _log.exception("the capture thread ends; nothing is published any more")
        finally:
            with self._lock:
                self._ended = True
            # Nothing is queued any more, so what is queued now is all there is.
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    self._give_up(job)

    def _next(self) -> bool:
        """Take the next publication, or do housekeeping; False at the end."""
        try:
            job = self._jobs.get(timeout=_MAINTENANCE_SECONDS)
        except queue.Empty:
            self._maintain()
            return True
        if job is None:
            return False
        fate = _Fate(started_at=time.monotonic())
        try:
            self._publish(job, fate)
        except (StoreError, PlacementError) as error:
            reason = getattr(error, "reason", None)
            fate.result = Result.SKIPPED if isinstance(error, Refused) else Result.FAILED
            fate.reason = str(reason) if reason else type(error).__name__
            _log.warning("publication %d: %s", job.order.number, error)
        except Exception:
            fate.reason = "internal"
            _log.exception("publication %d failed", job.order.number)
        finally:
            self._close_fence(job)
            self._say(job.order, fate, job.named_at)
        return True

    def _give_up(self, job: _Job) -> None:
        self._close_fence(job)
        self._say(job.order, _Fate(Result.SKIPPED), job.named_at)

    @staticmethod
    def _close_fence(job: _Job) -> None:
        if job.fence is not None:
            job.fence.close()

    def _maintain(self) -> None:
        try:
            self._store.maintain()
        except StoreError as error:
            _log.warning("maintenance: %s", error)

    def _publish(self, job: _Job, fate: _Fate) -> None:
        order = job.order
        if self._store.holds(order.root):
            fate.result, fate.reason = Result.ALREADY_HELD, ""
            return
        groups = self._gather(order, job.fence)  # (1)
        fate.gathered_at = time.monotonic()
        fate.pages = sum(len(group.pages) for group in groups)
        self._say_copied(order.number)  # (2)
        receipt = self._store.publish(order.root, order.boundary, groups, base=order.base)  # (3)
        fate.result = Result.ALREADY_HELD if receipt.already_held else Result.STORED
        fate.reason = ""
        fate.written = receipt.written_bytes
        fate.referenced = receipt.referenced_pages

    def _gather(self, order: PublishOrder, fence: Fence | None) -> list[GroupPages]:
        pages = [
            page for group in order.groups for page in _pages(group, self._shapes[group.group])
        ]
        sizes = [self._placement.layout.page_sizes[page.group] for page in pages]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        target = self._memory(offsets[-1])
        with self._placement.begin_capture(pages, after=fence) as capture:
            done = 0
            while done < len(pages):
                arena = capture.acquire(DRAIN_TIMEOUT)
                spans: list[Span] = []
                at = 0
                while done + len(spans) < len(pages):
                    index = done + len(spans)
                    if at + sizes[index] > self._placement.arena_bytes:
                        break
                    spans.append(Span(index, 0, at, sizes[index]))
                    at += sizes[index]
                capture.submit(arena, spans)
                view = capture.wait(arena, DRAIN_TIMEOUT)
                for span in spans:
                    start = offsets[span.page]
                    source = view[span.source_offset : span.source_offset + span.length]
                    target[start : start + span.length] = source
                arena.release()
                done += len(spans)
            capture.finish(DRAIN_TIMEOUT)
        return self._group_pages(order, target, sizes, offsets)

    def _group_pages(
        self,
        order: PublishOrder,
        memory: memoryview,
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[GroupPages]:
        groups = []
        index = 0
        for group in order.groups:
            views = [
                memory[offsets[i] : offsets[i] + sizes[i]]
                for i in range(index, index + len(group.blocks))
            ]
            kind = GROUP_KINDS[self._shapes[group.group].kind]
            groups.append(GroupPages(kind, sizes[index], group.first, views))
            index += len(group.blocks)
        return groups

    def _memory(self, size: int) -> memoryview:
        """Page-aligned memory that lives as long as this worker and only grows."""
        if len(self._buffer) < size:
            # The old memory goes when the last view of it does.
            self._buffer = mmap.mmap(-1, size)
        return memoryview(self._buffer)

    def _say_copied(self, number: int) -> None:
        with self._lock:
            self._copied.append(number)

    def _say(self, order: PublishOrder, fate: _Fate, named_at: float) -> None:  # (4)
        now = time.monotonic()
        started = fate.started_at or now
        gathered = fate.gathered_at or now
        try:
            # Before it is reported: whoever knows of a publication finds it counted.
            self._count(fate, now - started)
        finally:
            with self._lock:
                self._reports.append(PublicationReport(order.number, fate.result, fate.reason))
        record = PublicationRecord(
            request=order.request,
            rank=self._rank,
            publication=order.number,
            root=order.root.hex()[:16],
            boundary_tokens=order.boundary,
            outcome=fate.result.value,
            reason=fate.reason,
            pages=fate.pages,
            referenced_pages=fate.referenced,
            written_bytes=fate.written,
            queued_ms=(started - named_at) * 1e3,
            gather_ms=(gathered - started) * 1e3,
            store_ms=(now - gathered) * 1e3,
        )
        _log.info("%s", to_json(record))

    def _count(self, fate: _Fate, seconds: float) -> None:
        self._counts.add("sparkcache_publications_total", fate.result.value)
        if fate.reason:
            self._counts.add("sparkcache_publication_failures_total", fate.reason)
        if fate.result is Result.STORED:
            stored = fate.pages - fate.referenced
            self._counts.add("sparkcache_publication_pages_total", "stored", by=stored)
            self._counts.add("sparkcache_publication_pages_total", "referenced", by=fate.referenced)
            self._counts.add("sparkcache_published_bytes_total", by=fate.written)
        self._counts.add("sparkcache_publication_seconds_total", by=seconds)


def _pages(group: GroupBlocks, shape: GroupShape) -> list[Page]:
    pages = [Page(group.group, block) for block in group.blocks]
    if shape.kind != RECURRENT and group.last_positions < shape.block_tokens:
        pages[-1] = Page(group.group, group.blocks[-1], group.last_positions)
    return pages
