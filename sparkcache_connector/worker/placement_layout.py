"""Where pages live, as plain values, and the rules that pages and spans obey.

A **page** is what one block owns in one group, over every layer of the group. Its *encoded*
form, the bytes that are hashed and stored, is the concatenation, without gaps, of

    for layer in layers of the group, in the order given
        for extent in layer.extents
            for r in range(extent.repeat)
                extent.positions * extent.position_bytes bytes at
                layer.base + block * layer.page_stride + extent.offset + r * extent.repeat_stride

so padding between extents is neither stored nor written. Pure: no torch, no ctypes. The
native library applies the same rules in C++ (``csrc/src/layout.cpp``, ``csrc/src/ledger.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from .placement_errors import CoverageError, PlacementArgumentError, UnverifiedPageError

NULL_BLOCK = 0
"""vLLM's placeholder block; never a source and never a destination."""

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that holds pages: an address range and whatever keeps it alive.

    ``owner`` is a flat ``torch.uint8`` tensor over the range where torch is at hand
    (:func:`sparkcache_connector.worker.placement.region_of_tensor`), else any object that
    owns the bytes. ``device`` is ``"cpu"`` or ``"cuda:N"``.
    """

    address: int
    nbytes: int
    device: str
    owner: object

    def __repr__(self) -> str:
        return f"MemoryRegion({self.nbytes} bytes on {self.device})"


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a layer's page: ``repeat`` rows of ``positions`` token positions.

    Bytes are at ``offset + r * repeat_stride`` from the block's start. The row's first
    position holds token ``first_position`` of the block; a capture that keeps only the
    first *n* positions stores zeros for the rest. A recurrent state is one position.
    Kernel blocks smaller than the manager's block are one extent each, with their own
    ``first_position``; K and V planes apart are two extents, the second far beyond the stride.
    """

    offset: int
    positions: int
    position_bytes: int
    first_position: int = 0
    repeat: int = 1
    repeat_stride: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.positions * self.position_bytes


@dataclass(frozen=True, slots=True)
class LayerPages:
    """How one layer keeps the pages of its group inside a memory region."""

    name: str
    group: int
    region: MemoryRegion
    base: int
    page_stride: int
    blocks: int
    extents: tuple[Extent, ...]

    def check(self) -> None:
        """Raise :class:`PlacementArgumentError` unless every page lies inside the region."""
        where = f"layer {self.name!r}"
        if min(self.group, self.base) < 0 or self.blocks < 1 or self.page_stride < 1:
            raise PlacementArgumentError(
                f"{where}: group {self.group}, base {self.base}, {self.blocks} blocks, stride "
                f"{self.page_stride}: group and base must be >= 0, the rest >= 1; fix the geometry"
            )
        if not self.extents:
            raise PlacementArgumentError(f"{where}: no extents; describe at least one")
        for extent in self.extents:
            sizes = (extent.positions, extent.position_bytes, extent.repeat)
            offsets = (extent.offset, extent.first_position, extent.repeat_stride)
            if min(sizes) < 1 or min(offsets) < 0:
                raise PlacementArgumentError(f"{where}: impossible {extent}; fix the geometry")
            end = (
                self.base
                + (self.blocks - 1) * self.page_stride
                + extent.offset
                + (extent.repeat - 1) * extent.repeat_stride
                + extent.row_bytes
            )
            if end > self.region.nbytes:
                raise PlacementArgumentError(
                    f"{where}: {extent} of block {self.blocks - 1} ends at byte {end} of a region "
                    f"of {self.region.nbytes}; fix the geometry"
                )


class Row(NamedTuple):
    """One contiguous stretch of an encoded page: where it is in the page and in memory."""

    layer: int
    memory_offset: int  # from the layer's base, without block * page_stride
    page_offset: int
    first_position: int
    positions: int
    position_bytes: int

    @property
    def length(self) -> int:
        """Bytes of the row."""
        return self.positions * self.position_bytes

    def kept(self, positions: int) -> int:
        """Bytes of the row that belong to the first ``positions`` tokens of the block."""
        return min(max(positions - self.first_position, 0), self.positions) * self.position_bytes


class Run(NamedTuple):
    """Rows that are adjacent in the page and in memory, merged: one copy for a whole page."""

    layer: int
    memory_offset: int
    page_offset: int
    length: int


@dataclass(frozen=True)
class PageLayout:
    """Every layer of every group of one rank: the destinations, described once."""

    layers: tuple[LayerPages, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlacementArgumentError("no layers; describe at least one")
        for layer in self.layers:
            layer.check()
        devices = sorted({layer.region.device for layer in self.layers})
        if len(devices) > 1:
            raise PlacementArgumentError(
                f"layers on {', '.join(devices)}; use one placement per device"
            )

    @property
    def device(self) -> str:
        """The device of all layers."""
        return self.layers[0].region.device

    @cached_property
    def rows(self) -> dict[int, tuple[Row, ...]]:
        """Rows per group, in the order of the encoded page."""
        rows: dict[int, list[Row]] = {}
        sizes: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            of_group = rows.setdefault(layer.group, [])
            at = sizes.get(layer.group, 0)
            for e in layer.extents:
                for r in range(e.repeat):
                    memory = e.offset + r * e.repeat_stride
                    of_group.append(
                        Row(index, memory, at, e.first_position, e.positions, e.position_bytes)
                    )
                    at += e.row_bytes
            sizes[layer.group] = at
        return {group: tuple(of_group) for group, of_group in rows.items()}

    @cached_property
    def runs(self) -> dict[int, tuple[Run, ...]]:
        """Maximal contiguous stretches per group, in the order of the encoded page."""
        return {group: tuple(_merge(rows)) for group, rows in self.rows.items()}

    @cached_property
    def blocks(self) -> dict[int, int]:
        """Blocks that every layer of the group has."""
        return {
            group: min(layer.blocks for layer in self.layers if layer.group == group)
            for group in self.rows
        }

    @cached_property
    def page_sizes(self) -> dict[int, int]:
        """Encoded bytes of one page, per group."""
        return {group: rows[-1].page_offset + rows[-1].length for group, rows in self.rows.items()}

    @cached_property
    def largest_page(self) -> int:
        """Encoded bytes of the largest page: the least that an arena must hold."""
        return max(self.page_sizes.values())


def _merge(rows: Sequence[Row]) -> Iterator[Run]:
    run: Run | None = None
    for row in rows:
        if (
            run is not None
            and run.layer == row.layer
            and run.memory_offset + run.length == row.memory_offset
        ):
            run = run._replace(length=run.length + row.length)
            continue
        if run is not None:
            yield run
        run = Run(row.layer, row.memory_offset, row.page_offset, row.length)
    if run is not None:
        yield run


@dataclass(frozen=True, slots=True)
class Page:
    """A page to write or to read; a capture keeps its first ``positions`` (None: all)."""

    group: int
    block: int
    positions: int | None = None


@dataclass(frozen=True, slots=True)
class SealedPage:
    """A page of a direct restore, with the digest that its manifest demands."""

    group: int
    block: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes of page number ``page`` of the transaction, from ``page_offset`` on.

    ``source_offset`` is where they are in the arena or in the buffer. Spans of one page come
    in ascending order and without gaps; pages may interleave.
    """

    page: int
    page_offset: int
    source_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class VerifiedPage:
    """A whole page in an arena, with the digest that was *computed* over those bytes."""

    page: int
    source_offset: int
    digest: bytes


class PageLedger:
    """Strict coverage of one transaction: which bytes of which page are still due.

    Raises :class:`PlacementArgumentError` for pages and spans that cannot be, and
    :class:`CoverageError` for overlap, repetition and short coverage. A refused call
    changes nothing.
    """

    def __init__(self, layout: PageLayout, pages: Sequence[Page | SealedPage]) -> None:
        """Check ``pages``; they are numbered in the order given."""
        if not pages:
            raise PlacementArgumentError("no pages; a transaction names at least one")
        for page in pages:
            blocks = layout.blocks.get(page.group)
            if blocks is None:
                raise PlacementArgumentError(
                    f"group {page.group} has no layers here; known: {sorted(layout.blocks)}"
                )
            if page.block == NULL_BLOCK:
                raise PlacementArgumentError(
                    f"group {page.group}: block {NULL_BLOCK} is the null block; "
                    "name an allocated block"
                )
            if not 0 < page.block < blocks:
                raise PlacementArgumentError(
                    f"group {page.group}: block {page.block} of {blocks}; name an allocated block"
                )
            if isinstance(page, SealedPage) and len(page.digest) != DIGEST_BYTES:
                raise PlacementArgumentError(
                    f"group {page.group} block {page.block}: digest of {len(page.digest)} bytes, "
                    f"expected {DIGEST_BYTES}; pass the manifest's"
                )
            if isinstance(page, Page) and page.positions is not None and page.positions < 1:
                raise PlacementArgumentError(
                    f"group {page.group} block {page.block}: keep {page.positions} positions; "
                    "keep at least one, or leave the page out"
                )
        self.pages = tuple(pages)
        self._sizes = [layout.page_sizes[page.group] for page in pages]
        self._done = [0] * len(pages)
        _refuse_overlap(layout, pages)

    def size(self, page: int) -> int:
        """Encoded bytes of page number ``page``."""
        if not 0 <= page < len(self.pages):
            raise PlacementArgumentError(f"page {page} of {len(self.pages)}; number from 0")
        return self._sizes[page]

    def submit(self, spans: Sequence[Span], source_bytes: int) -> None:
        """Account for ``spans`` that lie in a source of ``source_bytes``, all or none."""
        done: dict[int, int] = {}
        for span in spans:
            size = self.size(span.page)
            if min(span.page_offset, span.source_offset) < 0 or span.length < 1:
                raise PlacementArgumentError(f"impossible {span}; offsets >= 0, length >= 1")
            if span.page_offset + span.length > size:
                raise PlacementArgumentError(f"{span} passes its page's end at {size}")
            if span.source_offset + span.length > source_bytes:
                raise PlacementArgumentError(f"{span} passes its source's end at {source_bytes}")
            due = done.get(span.page, self._done[span.page])
            if span.page_offset != due:
                raise CoverageError(
                    f"{span} begins at {span.page_offset}, due is {due}; "
                    "submit each byte once, in ascending order"
                )
            done[span.page] = due + span.length
        for page, at in done.items():
            self._done[page] = at

    def verified(self, pages: Sequence[VerifiedPage]) -> list[Span]:
        """Return whole-page spans for ``pages``, each computed digest compared with its seal."""
        spans = []
        for verified in pages:
            size = self.size(verified.page)
            sealed = self.pages[verified.page]
            if not isinstance(sealed, SealedPage):
                raise PlacementArgumentError(
                    f"page {verified.page} carries no digest; open a direct restore for it"
                )
            if verified.digest != sealed.digest:
                raise UnverifiedPageError(
                    f"page {verified.page} (group {sealed.group}, block {sealed.block}): computed "
                    f"digest {verified.digest.hex()}, the manifest demands {sealed.digest.hex()}; "
                    "do not place it, quarantine the root"
                )
            spans.append(Span(verified.page, 0, verified.source_offset, size))
        return spans

    def require_complete(self) -> None:
        """Raise :class:`CoverageError` unless every byte of every page was submitted."""
        for index, (done, size) in enumerate(zip(self._done, self._sizes, strict=True)):
            if done != size:
                page = self.pages[index]
                raise CoverageError(
                    f"page {index} (group {page.group}, block {page.block}): {done} of {size} "
                    "bytes were submitted; submit the rest, or abort"
                )


def _refuse_overlap(layout: PageLayout, pages: Sequence[Page | SealedPage]) -> None:
    intervals = []
    for index, page in enumerate(pages):
        for run in layout.runs[page.group]:
            layer = layout.layers[run.layer]
            start = layer.region.address + layer.base + run.memory_offset
            start += page.block * layer.page_stride
            intervals.append((start, start + run.length, index))
    intervals.sort()
    for (_, end, first), (start, _, second) in pairwise(intervals):
        if start < end:
            a, b = pages[first], pages[second]
            raise CoverageError(
                f"page {first} (group {a.group}, block {a.block}) and page {second} (group "
                f"{b.group}, block {b.block}) share bytes; name each destination once"
            )
