"""A placement that moves one byte at a time and remembers each: what the others must equal.

It shares no code with the layout's rows and runs, with the ledger, or with the library: page
bytes are enumerated straight from the definition in ``placement_layout``.
"""

import ctypes
from collections import Counter

from sparkcache_connector.worker.placement import (
    Arena,
    Capture,
    DirectRestore,
    Fence,
    Page,
    PagePlacement,
    Placement,
    PlacementStats,
    SealedPage,
    Span,
    VerifiedPage,
    require_type,
)
from sparkcache_connector.worker.placement_errors import (
    CoverageError,
    PlacementArgumentError,
    PlacementStateError,
    PlacementTimeoutError,
    UnverifiedPageError,
)


def page_addresses(layout, group, block, positions=None):
    """The address of every byte of a page, in encoded order; None where it is not kept."""
    addresses = []
    for layer in layout.layers:
        if layer.group != group:
            continue
        for e in layer.extents:
            for r in range(e.repeat):
                row = layer.region.address + layer.base + block * layer.page_stride
                row += e.offset + r * e.repeat_stride
                for p in range(e.positions):
                    kept = positions is None or e.first_position + p < positions
                    for b in range(e.position_bytes):
                        addresses.append((row + p * e.position_bytes + b) if kept else None)
    return addresses


class NaiveArena(Arena):
    def __init__(self, owner, nbytes):
        self.owner = owner
        self.view = memoryview(bytearray(nbytes))
        self.gathered = False

    def release(self):
        if self.owner is not None:
            self.owner.arenas.remove(self)
            self.owner.placement.lent -= 1
        self.owner = None


class NaiveFence(Fence):
    def close(self):
        pass


class _Naive(PagePlacement, DirectRestore, Capture):
    def __init__(self, placement, pages, *, capture=False):
        self.placement, self.pages, self.capture = placement, list(pages), capture
        layout = placement.layout
        groups = {layer.group for layer in layout.layers}
        if not pages:
            raise PlacementArgumentError("no pages")
        for page in pages:
            if page.group not in groups:
                raise PlacementArgumentError(f"group {page.group}")
            blocks = min(layer.blocks for layer in layout.layers if layer.group == page.group)
            if page.block == 0:
                raise PlacementArgumentError("null block")
            if not 0 <= page.block < blocks:
                raise PlacementArgumentError(f"block {page.block}")
            if isinstance(page, SealedPage) and len(page.digest) != 32:
                raise PlacementArgumentError("digest")
            if isinstance(page, Page) and page.positions is not None and page.positions < 1:
                raise PlacementArgumentError("positions")
        every = [a for page in pages for a in page_addresses(layout, page.group, page.block)]
        if any(count > 1 for count in Counter(every).values()):
            raise CoverageError("destinations overlap")
        self.due = [
            page_addresses(
                layout, p.group, p.block, p.positions if capture and isinstance(p, Page) else None
            )
            for p in pages
        ]
        self.written = [0] * len(pages)
        self.done = False
        self.arenas = []
        placement.open += 1

    @property
    def closed(self):
        return self.done

    def _require_open(self):
        if self.done:
            raise PlacementStateError("closed")

    def acquire(self, timeout):
        self._require_open()
        if self.placement.lent == self.placement.arenas:
            raise PlacementTimeoutError("no arena")
        self.placement.lent += 1
        arena = NaiveArena(self, self.placement.arena_bytes)
        self.arenas.append(arena)
        return arena

    def submit(self, where, spans):
        self._require_open()
        if isinstance(where, Arena):
            if where.owner is not self:
                raise PlacementStateError("not yours")
            bytes_ = where.view
        else:
            bytes_ = memoryview(where).cast("B")
        if self.capture and where.gathered:
            raise PlacementStateError("twice")
        direct = isinstance(self.pages[0], SealedPage)
        require_type(spans, VerifiedPage if direct else Span, "this")
        if direct:
            for v in spans:
                if not 0 <= v.page < len(self.pages):
                    raise PlacementArgumentError("page")
                if v.digest != self.pages[v.page].digest:
                    raise UnverifiedPageError("digest")
            spans = [Span(v.page, 0, v.source_offset, len(self.due[v.page])) for v in spans]
        if self.capture:
            places = Counter(s.source_offset + i for s in spans for i in range(s.length))
            if any(count > 1 for count in places.values()):
                raise CoverageError("arena bytes are shared")
        written = list(self.written)
        for s in spans:
            if not 0 <= s.page < len(self.pages) or s.length < 1:
                raise PlacementArgumentError("page or span length")
            if s.page_offset < 0 or s.page_offset + s.length > len(self.due[s.page]):
                raise PlacementArgumentError("page end")
            if s.source_offset < 0 or s.source_offset + s.length > len(bytes_):
                raise PlacementArgumentError("source end")
            if s.page_offset != written[s.page]:
                raise CoverageError("twice, or a gap")
            written[s.page] += s.length
        self.written = written
        if self.capture:
            where.gathered = True
        for s in spans:
            for i in range(s.length):
                address = self.due[s.page][s.page_offset + i]
                if not self.capture:
                    ctypes.c_ubyte.from_address(address).value = bytes_[s.source_offset + i]
                else:
                    bytes_[s.source_offset + i] = (
                        0 if address is None else ctypes.c_ubyte.from_address(address).value
                    )
        if isinstance(where, Arena) and not self.capture:
            where.release()

    def wait(self, arena, timeout):
        return arena.view

    def finish(self, timeout):
        self._require_open()
        if self.written != [len(due) for due in self.due]:
            raise CoverageError("short")
        what = "captured" if self.capture else "restored"
        self._close(
            transactions_finished=1,
            launches=1,
            **{f"bytes_{what}": sum(self.written), f"pages_{what}": len(self.pages)},
        )

    def abort(self, timeout):
        self._require_open()
        self._close(transactions_aborted=1)

    def _close(self, **counters):
        self.done = True
        for arena in list(self.arenas):
            arena.release()
        self.placement.open -= 1
        for name, value in counters.items():
            self.placement.counters[name] = self.placement.counters.get(name, 0) + value


class NaivePlacement(Placement):
    name = "naive"

    def __init__(self, layout, options):
        self.layout, self.open, self.counters = layout, 0, {}
        self.lent = 0
        self.arenas = options.arenas
        self.arena_bytes = options.arena_size(layout)

    def fence(self, stream=0):
        return NaiveFence()

    def begin_restore(self, pages, after=None):
        require_type(pages, SealedPage, "a direct restore")
        return _Naive(self, pages)

    def begin_placement(self, pages, after=None):
        require_type(pages, Page, "a page placement")
        return _Naive(self, pages)

    def begin_capture(self, pages, after=None):
        require_type(pages, Page, "a capture")
        return _Naive(self, pages, capture=True)

    def stats(self):
        return PlacementStats(**self.counters)

    def close(self):
        if self.open:
            raise PlacementStateError("open")
