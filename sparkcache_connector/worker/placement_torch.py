"""Placement with torch alone: the fallback, on CPU and on CUDA.

Same contract as the native library, same refusals (both follow ``placement_layout``). On
CUDA the work runs on a low-priority side stream through pinned arenas; on the host it is done
when ``submit`` returns.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from .placement import (
    ARENA_ALIGNMENT,
    DRAIN_TIMEOUT,
    Arena,
    Capture,
    DirectRestore,
    Fence,
    PagePlacement,
    Placement,
    PlacementOptions,
    PlacementStats,
    Transaction,
    require_type,
)
from .placement_errors import (
    CoverageError,
    PlacementArgumentError,
    PlacementDeviceError,
    PlacementStateError,
    PlacementTimeoutError,
)
from .placement_layout import (
    MemoryRegion,
    Page,
    PageLayout,
    PageLedger,
    Row,
    Run,
    SealedPage,
    Span,
    VerifiedPage,
)

_POLL_SECONDS = 50e-6


class TorchPlacement(Placement):
    """Moves pages with ``Tensor.copy_``."""

    name = "torch"

    def __init__(self, layout: PageLayout, options: PlacementOptions) -> None:
        """Allocate the arenas; raises :class:`PlacementDeviceError` where that fails."""
        self.layout = layout
        self.arena_bytes = options.arena_size(layout)
        self.device = torch.device(layout.device)
        self.cuda = self.device.type == "cuda"
        self.memory = [_flat(layer.region) for layer in layout.layers]
        try:
            self._free = [_TorchArena(self) for _ in range(options.arenas)]
            # On CUDA, 0 is the lowest priority that torch offers.
            self.stream = torch.cuda.Stream(self.device, priority=0) if self.cuda else None
        except RuntimeError as error:
            raise PlacementDeviceError(f"arenas of {self.arena_bytes} bytes: {error}") from error
        self._pool = threading.Condition()
        self._open = 0
        self._counters: dict[str, int] = {}

    def fence(self, stream: int = 0) -> Fence:
        """Record an event on ``stream``."""
        return _TorchFence(self, stream)

    def begin_restore(
        self, pages: Sequence[SealedPage], after: Fence | None = None
    ) -> DirectRestore:
        """Open a direct restore."""
        require_type(pages, SealedPage, "a direct restore")
        return _TorchRestore(self, pages, after)

    def begin_placement(self, pages: Sequence[Page], after: Fence | None = None) -> PagePlacement:
        """Open a page placement."""
        require_type(pages, Page, "a page placement")
        return _TorchPagePlacement(self, pages, after)

    def begin_capture(self, pages: Sequence[Page], after: Fence | None = None) -> Capture:
        """Open a capture."""
        require_type(pages, Page, "a capture")
        return _TorchCapture(self, pages, after)

    def stats(self) -> PlacementStats:
        """Return the counters."""
        with self._pool:
            return PlacementStats(**self._counters)

    def close(self) -> None:
        """Drop the arenas."""
        with self._pool:
            if self._open:
                raise PlacementStateError(f"{self._open} transactions are open; finish or abort")
            self._free.clear()

    def opened(self) -> None:
        """Count a transaction that opened."""
        with self._pool:
            self._open += 1

    def closed(self, **counters: int) -> None:
        """Count a transaction that closed, and what it did."""
        with self._pool:
            self._open -= 1
            for name, value in counters.items():
                self._counters[name] = self._counters.get(name, 0) + value

    def acquire(self, owner: Transaction, timeout: float) -> _TorchArena:
        """Take a free arena out of the pool, reaping those whose work is done."""
        deadline = time.monotonic() + timeout
        with self._pool:
            while True:
                for arena in self._free:
                    if arena.idle():
                        self._free.remove(arena)
                        arena.lend(owner)
                        return arena
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PlacementTimeoutError(f"no arena became free in {timeout:g} s; try again")
                # Work on the device ends without a notification, so look again soon.
                self._pool.wait(min(left, _POLL_SECONDS if self._free else 0.05))

    def give_back(self, arena: _TorchArena) -> None:
        """Return an arena to the pool; its work may still be in flight."""
        with self._pool:
            arena.owner = None
            self._free.append(arena)
            self._pool.notify()


class _TorchFence(Fence):
    def __init__(self, placement: TorchPlacement, stream: int) -> None:
        self.event: Any = None
        if placement.cuda:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.ExternalStream(stream, device=placement.device))

    def close(self) -> None:
        self.event = None


class _TorchArena(Arena):
    def __init__(self, placement: TorchPlacement) -> None:
        self._placement = placement
        nbytes = placement.arena_bytes
        pinned = torch.empty(nbytes + ARENA_ALIGNMENT, dtype=torch.uint8, pin_memory=placement.cuda)
        lead = -pinned.data_ptr() % ARENA_ALIGNMENT
        self.host = pinned[lead : lead + nbytes]
        self.staging = self.host
        if placement.cuda:
            self.staging = torch.empty(nbytes, dtype=torch.uint8, device=placement.device)
        self.event: Any = None
        self.owner: Transaction | None = None
        array = (ctypes.c_ubyte * nbytes).from_address(self.host.data_ptr())
        self._bytes = memoryview(array).cast("B")

    def lend(self, owner: Transaction) -> None:
        self.owner, self.event, self.view = owner, None, self._bytes
        self.gathered = False

    def idle(self) -> bool:
        try:
            return self.event is None or bool(self.event.query())
        except RuntimeError:
            return True  # a failed context runs nothing any more; the next use reports it

    def release(self) -> None:
        if self.owner is not None:
            self._placement.give_back(self)


class _TorchTransaction(Transaction):
    counted = "restored"

    def __init__(
        self,
        placement: TorchPlacement,
        pages: Sequence[Page | SealedPage],
        after: Fence | None,
    ) -> None:
        self.ledger = PageLedger(placement.layout, pages)
        self.placement = placement
        self._after = cast(_TorchFence, after).event if after is not None else None
        self._last: Any = None
        self._lent: set[_TorchArena] = set()
        self._closed = self._broken = False
        self._moved = self._launches = 0
        placement.opened()

    @property
    def closed(self) -> bool:
        return self._closed

    def acquire(self, timeout: float) -> Arena:
        self.require_open()
        arena = self.placement.acquire(self, timeout)
        self._lent.add(arena)
        return arena

    def finish(self, timeout: float) -> None:
        self.require_open()
        if self._broken:
            raise PlacementStateError("a submit of this transaction failed; abort it")
        self.ledger.require_complete()
        self._drain(timeout)
        pages = len(self.ledger.pages)
        self._close(
            transactions_finished=1,
            **{f"bytes_{self.counted}": self._moved, f"pages_{self.counted}": pages},
        )

    def abort(self, timeout: float) -> None:
        self.require_open()
        self._drain(timeout)
        self._close(transactions_aborted=1)

    def require_open(self) -> None:
        if self._closed:
            raise PlacementStateError("the transaction is closed; begin another")

    def owned(self, arena: Arena) -> _TorchArena:
        if not isinstance(arena, _TorchArena) or arena.owner is not self:
            raise PlacementStateError("the arena is not lent to this transaction; acquire one")
        return arena

    def enqueue(self, work: Callable[[], None], moved: int) -> Any:
        """Run ``work`` behind the fence; returns the event that ends it (None on the host)."""
        try:
            stream = self.placement.stream
            if stream is None:
                work()
                event = None
            else:
                with torch.cuda.stream(stream):
                    if self._after is not None:
                        stream.wait_event(self._after)
                    work()
                    event = torch.cuda.Event()
                    event.record(stream)
        except RuntimeError as error:
            self._broken = True
            raise PlacementDeviceError(f"torch: {error}") from error
        self._last = event
        self._moved += moved
        self._launches += 1
        return event

    def wait_event(self, event: Any, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            while event is not None and not event.query():
                if time.monotonic() >= deadline:
                    raise PlacementTimeoutError(f"still in flight after {timeout:g} s; wait again")
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            # A failed context runs nothing any more: there is nothing left to wait for.
            self._last = None
            self._close(transactions_aborted=1)
            raise PlacementDeviceError(f"torch: {error}") from error

    def _drain(self, timeout: float) -> None:
        self.wait_event(self._last, timeout)
        self._last = None

    def _close(self, **counters: int) -> None:
        self._closed = True
        for arena in self._lent:
            if arena.owner is self:
                arena.release()
        self.placement.closed(launches=self._launches, **counters)

    def pieces(self, span: Span) -> Sequence[tuple[torch.Tensor, int, int]]:
        """Return (bytes in the engine's memory, offset in the source, bytes kept) of a span."""
        layout = self.placement.layout
        page = self.ledger.pages[span.page]
        positions = page.positions if isinstance(page, Page) else None
        pieces = []
        rows: Sequence[Row | Run]
        rows = layout.runs[page.group] if positions is None else layout.rows[page.group]
        for row in rows:
            low = max(row.page_offset, span.page_offset)
            high = min(row.page_offset + row.length, span.page_offset + span.length)
            if low >= high:
                continue
            layer = layout.layers[row.layer]
            start = layer.base + row.memory_offset + page.block * layer.page_stride
            start += low - row.page_offset
            kept = high - low
            if positions is not None and isinstance(row, Row):
                kept = min(max(row.page_offset + row.kept(positions) - low, 0), kept)
            memory = self.placement.memory[row.layer][start : start + high - low]
            pieces.append((memory, span.source_offset + low - span.page_offset, kept))
        return pieces


class _TorchRestore(_TorchTransaction, DirectRestore):
    def submit(self, arena: Arena, pages: Sequence[VerifiedPage]) -> None:
        self.require_open()
        lent = self.owned(arena)
        require_type(pages, VerifiedPage, "a direct restore")
        spans = self.ledger.verified(pages)
        self.ledger.submit(spans, self.placement.arena_bytes)
        lent.event = self.enqueue(
            lambda: _scatter(self, lent, spans), sum(span.length for span in spans)
        )
        lent.release()


class _TorchPagePlacement(_TorchTransaction, PagePlacement):
    def submit(self, source: memoryview | bytes | bytearray, spans: Sequence[Span]) -> None:
        self.require_open()
        require_type(spans, Span, "a page placement")
        view = memoryview(source).cast("B")
        self.ledger.submit(spans, view.nbytes)
        for part in _split(spans, self.placement.arena_bytes):
            try:
                lent = cast(_TorchArena, self.acquire(DRAIN_TIMEOUT))
            except PlacementTimeoutError:
                self._broken = True  # the ledger is ahead of what was written
                raise
            staged, at = [], 0
            for span in part:
                end = span.source_offset + span.length
                lent.view[at : at + span.length] = view[span.source_offset : end]
                staged.append(Span(span.page, span.page_offset, at, span.length))
                at += span.length
            lent.event = self.enqueue(lambda a=lent, s=staged: _scatter(self, a, s), at)  # type: ignore[misc]
            lent.release()


class _TorchCapture(_TorchTransaction, Capture):
    counted = "captured"

    def submit(self, arena: Arena, spans: Sequence[Span]) -> None:
        self.require_open()
        lent = self.owned(arena)
        require_type(spans, Span, "a capture")
        if lent.gathered:
            raise PlacementStateError("the arena was submitted already; wait, then release it")
        _refuse_overlap(spans)
        self.ledger.submit(spans, self.placement.arena_bytes)
        lent.gathered = True
        lent.event = self.enqueue(
            lambda: _gather(self, lent, spans), sum(span.length for span in spans)
        )

    def wait(self, arena: Arena, timeout: float) -> memoryview:
        lent = self.owned(arena)
        if not lent.gathered:
            raise PlacementStateError("nothing was submitted for this arena; submit first")
        self.wait_event(lent.event, timeout)
        return lent.view


def _scatter(of: _TorchTransaction, arena: _TorchArena, spans: Sequence[Span]) -> None:
    if arena.staging is not arena.host:
        low = min(span.source_offset for span in spans)
        high = max(span.source_offset + span.length for span in spans)
        arena.staging[low:high].copy_(arena.host[low:high], non_blocking=True)
    for span in spans:
        for memory, at, _ in of.pieces(span):
            memory.copy_(arena.staging[at : at + memory.numel()])


def _gather(of: _TorchTransaction, arena: _TorchArena, spans: Sequence[Span]) -> None:
    for span in spans:
        for memory, at, kept in of.pieces(span):
            arena.staging[at : at + kept].copy_(memory[:kept])
            arena.staging[at + kept : at + memory.numel()].zero_()
    if arena.staging is not arena.host:
        for span in spans:
            low, high = span.source_offset, span.source_offset + span.length
            arena.host[low:high].copy_(arena.staging[low:high], non_blocking=True)


def _refuse_overlap(spans: Sequence[Span]) -> None:
    for first, second in pairwise(sorted(spans, key=lambda span: span.source_offset)):
        if second.source_offset < first.source_offset + first.length:
            raise CoverageError(
                f"{first} and {second} share the arena's bytes; give each its own place"
            )


def _split(spans: Sequence[Span], arena_bytes: int) -> Sequence[Sequence[Span]]:
    """Cut ``spans`` so that the bytes of each part fit one arena."""
    parts: list[list[Span]] = [[]]
    room = arena_bytes
    for span in spans:
        done = 0
        while done < span.length:
            if room == 0:
                parts.append([])
                room = arena_bytes
            take = min(span.length - done, room)
            parts[-1].append(
                Span(span.page, span.page_offset + done, span.source_offset + done, take)
            )
            done += take
            room -= take
    return [part for part in parts if part]


def _flat(region: MemoryRegion) -> torch.Tensor:
    owner = region.owner
    if isinstance(owner, torch.Tensor):
        if owner.dtype is not torch.uint8 or owner.dim() != 1:
            raise PlacementArgumentError(f"{region}: owner must be a flat uint8 tensor")
        return owner
    if region.device != "cpu":
        raise PlacementArgumentError(f"{region}: torch needs a tensor as owner")
    array = (ctypes.c_ubyte * region.nbytes).from_address(region.address)
    return torch.frombuffer(array, dtype=torch.uint8)
