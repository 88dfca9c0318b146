"""Puts verified bytes into the engine's pages and takes page bytes out of them.

One interface, three implementations of identical behaviour: the native library on the host,
the same library on CUDA (:mod:`.placement_native`), and torch (:mod:`.placement_torch`).
:func:`open_placement` chooses. All moving is a *transaction* over pages named when it opens:

* :class:`DirectRestore`: store files are read into arenas, digests are checked there, then
  the pages are written. Takes :class:`SealedPage` and :class:`VerifiedPage`.
* :class:`PagePlacement`: bytes that were verified elsewhere, in memory, are written.
  Takes :class:`Page` and :class:`Span`.
* :class:`Capture`: the reverse; pages are gathered into arenas.

The first two are never interchangeable: each refuses the other's values by type.

Threads: a placement may be shared; a transaction belongs to one thread at a time. A thread
should submit or release one arena before it acquires the next, since transactions share a
small pool. Nothing is written after ``finish`` or ``abort`` has returned. ``timeout`` is in
seconds everywhere; :class:`PlacementTimeoutError` means that the same call may be repeated.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from .placement_errors import PlacementArgumentError, PlacementError, PlacementUnavailableError
from .placement_layout import (
    MemoryRegion,
    Page,
    PageLayout,
    SealedPage,
    Span,
    VerifiedPage,
)

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

MIN_ARENA_BYTES = 64 << 20
"""Default arena: large enough to hide a launch, small enough to pin several."""

ARENA_ALIGNMENT = 4096
"""Arenas begin and end on this boundary, so that the store may read into them O_DIRECT."""

DRAIN_TIMEOUT = 60.0
"""How long leaving a ``with`` block waits for work that cannot be cancelled."""


@dataclass(frozen=True, slots=True)
class PlacementStats:
    """Counters since the placement was opened."""

    bytes_restored: int = 0
    bytes_captured: int = 0
    pages_restored: int = 0
    pages_captured: int = 0
    launches: int = 0
    transactions_finished: int = 0
    transactions_aborted: int = 0


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """What an operator may choose (the connector's keys of the same names).

    Attributes:
        mode: ``spark_cache_cuda_restore``. ``auto`` takes the native library where it can
            serve, else torch; ``on`` refuses startup where it cannot; ``off`` means torch.
        library: another library than the packaged one; its digest must be given too.
        library_sha256: the digest that the library must have.
        arena_bytes: bytes per arena; 0 picks the larger of 64 MiB and the largest page.
        arenas: how many arenas the transactions share.
        host_threads: threads that copy on the host, the caller included; 0 picks.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    library: Path | None = None
    library_sha256: str | None = None
    arena_bytes: int = 0
    arenas: int = 4
    host_threads: int = 0

    def arena_size(self, layout: PageLayout) -> int:
        """Bytes per arena for ``layout``, a multiple of :data:`ARENA_ALIGNMENT`.

        Raises:
            PlacementArgumentError: ``arena_bytes`` is too small for the largest page.
        """
        wanted = self.arena_bytes or max(MIN_ARENA_BYTES, layout.largest_page)
        if wanted < layout.largest_page:
            raise PlacementArgumentError(
                f"spark_cache_cuda_placement_arena_bytes={wanted} cannot hold one page of "
                f"{layout.largest_page} bytes; raise it, or leave it out"
            )
        return -(-wanted // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


class Arena(ABC):
    """A staging buffer, lent to one transaction until it is submitted or released."""

    view: memoryview
    """The writable bytes. Invalid once the arena was submitted (restore) or released."""

    @abstractmethod
    def release(self) -> None:
        """Give the arena back; a no-op if it went back already."""


class Fence(ABC):
    """A point in the engine's own stream: work behind it sees all that came before it."""

    @abstractmethod
    def close(self) -> None:
        """Free the fence; the transactions that were opened behind it keep their order."""


class Transaction(ABC):
    """What restores, placements and captures share.

    Leaving the ``with`` block without ``finish`` aborts.
    """

    @abstractmethod
    def finish(self, timeout: float) -> None:
        """Wait until every byte has moved, and close.

        Raises:
            CoverageError: not every byte of every page was submitted; still open.
            PlacementTimeoutError: not done yet; still open.
            PlacementDeviceError: the device failed; closed.
        """

    @abstractmethod
    def abort(self, timeout: float) -> None:
        """Close without finishing, once no submitted work can touch a page any more.

        Raises:
            PlacementTimeoutError: work is still in flight; call again before blocks are reused.
        """

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether nothing of this transaction can happen any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.closed:
            self.abort(DRAIN_TIMEOUT)


class DirectRestore(Transaction):
    """Files → arenas → pages, with the digest checked between."""

    @abstractmethod
    def acquire(self, timeout: float) -> Arena:
        """Return a free arena to read files into."""

    @abstractmethod
    def submit(self, arena: Arena, pages: Sequence[VerifiedPage]) -> None:
        """Write whole pages out of ``arena``, which goes back to the pool when they are.

        Raises:
            UnverifiedPageError: a computed digest is not the sealed one; nothing is written.
            CoverageError: a page was submitted before; nothing is written.
        """


class PagePlacement(Transaction):
    """Already authenticated bytes in memory → pages."""

    @abstractmethod
    def submit(self, source: memoryview | bytes | bytearray, spans: Sequence[Span]) -> None:
        """Write ``spans`` out of ``source``, which is free again on return.

        Raises:
            CoverageError: a span repeats or leaves a gap; nothing of this call is written.
            PlacementTimeoutError: no arena became free within :data:`DRAIN_TIMEOUT`; abort.
        """


class Capture(Transaction):
    """Pages → arenas."""

    @abstractmethod
    def acquire(self, timeout: float) -> Arena:
        """Return a free arena to gather into."""

    @abstractmethod
    def submit(self, arena: Arena, spans: Sequence[Span]) -> None:
        """Start to gather ``spans`` into ``arena``, zeros past each page's kept positions."""

    @abstractmethod
    def wait(self, arena: Arena, timeout: float) -> memoryview:
        """Return ``arena.view`` once all bytes are there; the caller releases the arena."""


class Placement(ABC):
    """Moves pages of one layout on one device."""

    name: str
    """``native host``, ``native cuda`` or ``torch``; what logs and metrics say."""

    layout: PageLayout
    arena_bytes: int

    @abstractmethod
    def fence(self, stream: int = 0) -> Fence:
        """Mark the present end of the engine's ``stream``; cheap, for the model's thread.

        ``stream`` is the raw handle (``torch.cuda.current_stream().cuda_stream``); it is
        ignored on the host, where the engine's work is done when its calls return.
        """

    @abstractmethod
    def begin_restore(
        self, pages: Sequence[SealedPage], after: Fence | None = None
    ) -> DirectRestore:
        """Open a direct restore that writes nothing before ``after`` was reached.

        Raises:
            PlacementArgumentError: a page that cannot be: null block, unknown group, a
                :class:`Page` instead of a :class:`SealedPage`.
            CoverageError: two pages share bytes.
        """

    @abstractmethod
    def begin_placement(self, pages: Sequence[Page], after: Fence | None = None) -> PagePlacement:
        """Open a page placement; raises as :meth:`begin_restore`."""

    @abstractmethod
    def begin_capture(self, pages: Sequence[Page], after: Fence | None = None) -> Capture:
        """Open a capture that reads nothing before ``after`` was reached; raises likewise."""

    @abstractmethod
    def stats(self) -> PlacementStats:
        """Return the counters."""

    @abstractmethod
    def close(self) -> None:
        """Free device memory and threads.

        Raises:
            PlacementStateError: a transaction is still open.
        """


def require_type(values: Sequence[object], kind: type, what: str) -> None:
    """Refuse values of the sister interface.

    Raises:
        PlacementArgumentError: one of ``values`` is not a ``kind``.
    """
    for value in values:
        if type(value) is not kind:
            raise PlacementArgumentError(
                f"{what} takes {kind.__name__}, got {type(value).__name__}; direct restore and "
                "page placement are not interchangeable"
            )


def region_of_tensor(tensor: torch.Tensor) -> MemoryRegion:
    """Return the whole storage behind ``tensor`` as a region.

    ``LayerPages.base`` counts from the storage's first byte: for a tensor that starts
    inside its storage, ``tensor.storage_offset() * tensor.element_size()``.
    """
    import torch

    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes(),), (1,))
    return MemoryRegion(storage.data_ptr(), storage.nbytes(), str(tensor.device), flat)


def region_of_buffer(buffer: bytearray | memoryview) -> MemoryRegion:
    """Return host memory behind a writable buffer as a region."""
    import ctypes

    nbytes = memoryview(buffer).nbytes
    array = (ctypes.c_ubyte * nbytes).from_buffer(buffer)
    return MemoryRegion(ctypes.addressof(array), nbytes, "cpu", array)


def open_placement(layout: PageLayout, options: PlacementOptions | None = None) -> Placement:
    """Open the placement that ``options.mode`` asks for, and log which one and why.

    Raises:
        PlacementUnavailableError: the library is not the one it should be (whatever the
            mode, unless ``off``), or cannot serve although ``on`` was asked for.
    """
    options = options or PlacementOptions()
    if options.mode not in ("auto", "on", "off"):
        raise PlacementArgumentError(
            f"spark_cache_cuda_restore={options.mode!r}; choose auto, on or off"
        )
    reason = "spark_cache_cuda_restore=off"
    if options.mode != "off":
        from .placement_native import NativeMissingError, open_native

        try:
            placement: Placement = open_native(layout, options)
        except NativeMissingError as missing:
            reason = str(missing)
            if options.mode == "on":
                raise PlacementUnavailableError(f"spark_cache_cuda_restore=on: {missing}") from None
        else:
            _log.info("placement: %s", placement.name)
            return placement
    try:
        from .placement_torch import TorchPlacement

        placement = TorchPlacement(layout, options)
    except ImportError as error:
        raise PlacementUnavailableError(f"{reason}; and torch cannot be imported") from error
    _log.info("placement: torch (%s)", reason)
    return placement


__all__ = [
    "ARENA_ALIGNMENT",
    "Arena",
    "Capture",
    "DirectRestore",
    "Fence",
    "Page",
    "PageLayout",
    "PagePlacement",
    "Placement",
    "PlacementError",
    "PlacementOptions",
    "PlacementStats",
    "SealedPage",
    "Span",
    "Transaction",
    "VerifiedPage",
    "open_placement",
    "region_of_buffer",
    "region_of_tensor",
    "require_type",
]
