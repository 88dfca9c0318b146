"""Placement by ``libsparkcache_placement.so``, on the host and on CUDA.

Thin: every rule lives in the library, this module packs arguments and translates statuses.
Calls release the GIL, so reading, hashing and copying overlap.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import placement_abi as abi
from .placement import (
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
    PlacementError,
    PlacementStateError,
    PlacementTimeoutError,
    PlacementUnavailableError,
    UnverifiedPageError,
)
from .placement_layout import DIGEST_BYTES, Page, PageLayout, SealedPage, Span, VerifiedPage

PACKAGED = Path(__file__).resolve().parent.parent / "native" / platform.machine()
"""Where a connector wheel for this machine has the library, its kernels and their manifests."""

LIBRARY = "libsparkcache_placement.so"
FATBIN = "kernels.fatbin"
MANIFEST = "placement.json"
KERNELS_MANIFEST = "kernels.json"


class NativeMissingError(Exception):
    """The library is not installed here or cannot serve this device; torch may."""


_ERRORS: dict[int, type[PlacementError]] = {
    abi.INVALID_ARGUMENT: PlacementArgumentError,
    abi.INVALID_STATE: PlacementStateError,
    abi.COVERAGE: CoverageError,
    abi.UNVERIFIED: UnverifiedPageError,
    abi.NOT_READY: PlacementTimeoutError,
    abi.NO_MEMORY: PlacementDeviceError,
    abi.UNSUPPORTED: PlacementUnavailableError,
    abi.DEVICE: PlacementDeviceError,
}


def open_native(
    layout: PageLayout, options: PlacementOptions, packaged: Path = PACKAGED
) -> NativePlacement:
    """Open the library for ``layout``: on the device where its pages are.

    Raises:
        NativeMissingError: no library, no kernels, no driver or no such device.
        PlacementUnavailableError: a library or kernels that are not what they should be.
    """
    path = options.library or packaged / LIBRARY
    manifest = _manifest(path.parent / MANIFEST)
    sha256 = options.library_sha256 or manifest.get(path.name)
    try:
        if sha256 is None:
            if path.exists():
                raise PlacementUnavailableError(
                    f"{path}: its SHA-256 is in no {MANIFEST} beside it; give "
                    "spark_cache_cuda_placement_library_sha256"
                )
            raise FileNotFoundError
        library = abi.load_library(path, sha256)
    except FileNotFoundError:
        if options.library is not None:
            raise PlacementUnavailableError(f"{path}: no such file; name the library") from None
        raise NativeMissingError(
            f"this installation carries no native library for {platform.machine()}"
        ) from None
    fatbin = b""
    if layout.device != "cpu":
        kernels = path.parent / FATBIN
        sha256 = _manifest(path.parent / KERNELS_MANIFEST).get(FATBIN)
        if sha256 is None:
            raise NativeMissingError(f"{path.parent} has no {FATBIN}: built without nvcc")
        try:
            descriptor, fatbin = abi.read_checked(kernels, sha256)
        except FileNotFoundError:
            raise PlacementUnavailableError(
                f"{kernels}: missing, although {KERNELS_MANIFEST} names it; reinstall the connector"
            ) from None
        os.close(descriptor)
    return NativePlacement(library, layout, options, fatbin)


def _manifest(path: Path) -> dict[str, str]:
    """Digests by file name; empty where there is no manifest."""
    try:
        with path.open("rb") as file:
            record = json.load(file)
        return {str(name): str(entry["sha256"]) for name, entry in record["files"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlacementUnavailableError(
            f"{path}: unreadable ({error}); reinstall the connector"
        ) from error


def _device_ordinal(device: str) -> int:
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not ordinal.isdecimal():
        raise NativeMissingError(f"the library does not know the device {device!r}")
    return int(ordinal)


def _nanoseconds(timeout: float) -> int:
    return min(max(int(timeout * 1e9), 0), 2**63)


def _pack(record: struct.Struct, rows: Sequence[tuple[object, ...]], items: object) -> bytes:
    """Pack ``rows``; ``items`` are what they were made of, for the message."""
    try:
        return b"".join([record.pack(*row) for row in rows])
    except struct.error as error:
        raise PlacementArgumentError(f"a number that cannot be in {items}: {error}") from None


def _pack_pages(pages: Sequence[Page]) -> bytes:
    rows = [
        (p.block, abi.ALL_POSITIONS if p.positions is None else p.positions, p.group, 0)
        for p in pages
    ]
    return _pack(abi.PAGE, rows, pages)


def _pack_sealed(pages: Sequence[SealedPage]) -> bytes:
    for page in pages:
        if len(page.digest) != DIGEST_BYTES:
            raise PlacementArgumentError(
                f"group {page.group} block {page.block}: digest of {len(page.digest)} bytes, "
                f"expected {DIGEST_BYTES}; pass the manifest's"
            )
    return _pack(abi.SEALED_PAGE, [(p.block, p.group, 0, p.digest) for p in pages], pages)


def _pack_spans(spans: Sequence[Span]) -> bytes:
    rows = [(s.page, s.page_offset, s.source_offset, s.length) for s in spans]
    return _pack(abi.SPAN, rows, spans)


def _pack_verified(pages: Sequence[VerifiedPage]) -> bytes:
    for page in pages:
        if len(page.digest) != DIGEST_BYTES:
            raise UnverifiedPageError(
                f"page {page.page}: digest of {len(page.digest)} bytes, expected {DIGEST_BYTES}; "
                "compute it as the manifest does"
            )
    rows = [(p.page, p.source_offset, p.digest) for p in pages]
    return _pack(abi.VERIFIED_PAGE, rows, pages)


class _PyBuffer(ctypes.Structure):
    """``Py_buffer``: how to get the address of memory that may be read-only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("rest", ctypes.c_byte * 64),
    )


@contextmanager
def _address(source: memoryview | bytes | bytearray) -> Iterator[tuple[int | None, int]]:
    view = _PyBuffer()
    if ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(view), 0) != 0:
        raise PlacementArgumentError("the source is no contiguous buffer; pass bytes")
    try:
        yield view.buf, view.len
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


class NativePlacement(Placement):
    """Moves pages through the C ABI."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layout: PageLayout,
        options: PlacementOptions,
        fatbin: bytes = b"",
        transfer: int = 0,
    ) -> None:
        """Create the placement; raises :class:`NativeMissingError` without driver or device."""
        self.layout = layout
        self.arena_bytes = options.arena_size(layout)
        self._library = library
        host = layout.device == "cpu"
        self.name = "native host" if host else "native cuda"
        config = abi.Config(
            abi_version=abi.ABI_VERSION,
            backend=abi.BACKEND_HOST if host else abi.BACKEND_CUDA,
            arena_bytes=self.arena_bytes,
            arena_count=options.arenas,
            host_threads=options.host_threads,
            device=0 if host else _device_ordinal(layout.device),
            transfer=transfer,
            fatbin=fatbin or None,
            fatbin_bytes=len(fatbin),
        )
        self._handle = ctypes.c_void_p()
        self._views: dict[int, memoryview] = {}
        try:
            self.call("create", ctypes.byref(config), ctypes.byref(self._handle))
        except PlacementUnavailableError as error:
            raise NativeMissingError(str(error)) from None
        try:
            layers, extents = _describe(layout)
            counts = len(layers) // abi.LAYER.size, len(extents) // abi.EXTENT.size
            self.call("describe", self._handle, layers, counts[0], extents, counts[1])
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: object) -> None:
        """Call ``sparkcache_<name>`` and raise what its status stands for."""
        status = getattr(self._library, f"sparkcache_{name}")(*arguments)
        if status != abi.OK:
            message = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
            self._library.sparkcache_last_error(message, abi.MESSAGE_BYTES)
            kind = _ERRORS.get(status, PlacementError)
            raise kind(message.value.decode("utf-8", "replace"))

    def begin(self, kind: str, pages: bytes, count: int, after: Fence | None) -> ctypes.c_void_p:
        """Open a transaction of ``kind`` and return its handle."""
        if after is not None and not isinstance(after, _NativeFence):
            raise PlacementArgumentError("the fence is another placement's; use fence() of this")
        handle = ctypes.c_void_p()
        self.call(
            f"{kind}_begin",
            self._handle,
            pages,
            count,
            after.handle if after is not None else None,
            ctypes.byref(handle),
        )
        return handle

    def view(self, arena: abi.ArenaView) -> memoryview:
        """Return the bytes of an arena, made once."""
        if arena.index not in self._views:
            array = (ctypes.c_ubyte * arena.bytes).from_address(arena.address)
            self._views[arena.index] = memoryview(array).cast("B")
        return self._views[arena.index]

    def fence(self, stream: int = 0) -> Fence:
        """Record an event on ``stream``; nothing on the host."""
        handle = ctypes.c_void_p()
        self.call("fence_record", self._handle, stream, ctypes.byref(handle))
        return _NativeFence(self, handle)

    def begin_restore(
        self, pages: Sequence[SealedPage], after: Fence | None = None
    ) -> DirectRestore:
        """Open a direct restore."""
        require_type(pages, SealedPage, "a direct restore")
        return _NativeRestore(self, _pack_sealed(pages), len(pages), after)

    def begin_placement(self, pages: Sequence[Page], after: Fence | None = None) -> PagePlacement:
        """Open a page placement."""
        require_type(pages, Page, "a page placement")
        return _NativePagePlacement(self, _pack_pages(pages), len(pages), after)

    def begin_capture(self, pages: Sequence[Page], after: Fence | None = None) -> Capture:
        """Open a capture."""
        require_type(pages, Page, "a capture")
        return _NativeCapture(self, _pack_pages(pages), len(pages), after)

    def stats(self) -> PlacementStats:
        """Return the counters."""
        found = abi.Stats()
        self.call("get_stats", self._handle, ctypes.byref(found))
        return PlacementStats(
            **{name: getattr(found, name) for name in PlacementStats.__dataclass_fields__}
        )

    def close(self) -> None:
        """Free everything; a no-op the second time."""
        self.call("destroy", self._handle)
        self._handle = ctypes.c_void_p()
        self._views.clear()


def _describe(layout: PageLayout) -> tuple[bytes, bytes]:
    layers: list[bytes] = []
    extents: list[bytes] = []
    for layer in layout.layers:
        region = layer.region
        layers.append(
            abi.LAYER.pack(
                region.address,
                region.nbytes,
                layer.base,
                layer.page_stride,
                layer.blocks,
                len(extents),
                len(layer.extents),
                layer.group,
                0,
            )
        )
        extents += [
            abi.EXTENT.pack(
                e.offset, e.positions, e.position_bytes, e.first_position, e.repeat, e.repeat_stride
            )
            for e in layer.extents
        ]
    return b"".join(layers), b"".join(extents)


class _NativeFence(Fence):
    def __init__(self, placement: NativePlacement, handle: ctypes.c_void_p) -> None:
        self._placement = placement
        self.handle: ctypes.c_void_p | None = handle

    def close(self) -> None:
        if self.handle is not None:
            self._placement.call("fence_destroy", self.handle)
            self.handle = None


class _NativeArena(Arena):
    def __init__(self, owner: _NativeTransaction, view: memoryview, index: int) -> None:
        self.view = view
        self.index = index
        self.owner: _NativeTransaction | None = owner

    def release(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None and not owner.closed:
            owner.call("release", self.index)


class _NativeTransaction(Transaction):
    kind = ""

    def __init__(
        self, placement: NativePlacement, pages: bytes, count: int, after: Fence | None
    ) -> None:
        self._placement = placement
        self._handle = placement.begin(self.kind, pages, count, after)
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def call(self, name: str, *arguments: object) -> None:
        if self._closed:
            raise PlacementStateError("the transaction is closed; begin another")
        self._placement.call(f"{self.kind}_{name}", self._handle, *arguments)

    def acquire(self, timeout: float) -> Arena:
        found = abi.ArenaView()
        self.call("acquire", _nanoseconds(timeout), ctypes.byref(found))
        return _NativeArena(self, self._placement.view(found), found.index)

    def owned(self, arena: Arena) -> _NativeArena:
        if not isinstance(arena, _NativeArena) or arena.owner is not self:
            raise PlacementStateError("the arena is not lent to this transaction; acquire one")
        return arena

    def finish(self, timeout: float) -> None:
        try:
            self.call("finish", _nanoseconds(timeout))
        except PlacementDeviceError:
            self._close()
            raise
        self._close()

    def abort(self, timeout: float) -> None:
        self.call("abort", _nanoseconds(timeout))
        self._close()

    def _close(self) -> None:
        self.call("destroy")
        self._closed = True


class _NativeRestore(_NativeTransaction, DirectRestore):
    kind = "restore"

    def submit(self, arena: Arena, pages: Sequence[VerifiedPage]) -> None:
        require_type(pages, VerifiedPage, "a direct restore")
        lent = self.owned(arena)
        self.call("submit", lent.index, _pack_verified(pages), len(pages))
        lent.owner = None  # it goes back by itself


class _NativePagePlacement(_NativeTransaction, PagePlacement):
    kind = "placing"

    def submit(self, source: memoryview | bytes | bytearray, spans: Sequence[Span]) -> None:
        require_type(spans, Span, "a page placement")
        packed, timeout = _pack_spans(spans), _nanoseconds(DRAIN_TIMEOUT)
        with _address(source) as (address, nbytes):
            self.call("submit", address, nbytes, packed, len(spans), timeout)


class _NativeCapture(_NativeTransaction, Capture):
    kind = "capture"

    def submit(self, arena: Arena, spans: Sequence[Span]) -> None:
        require_type(spans, Span, "a capture")
        self.call("submit", self.owned(arena).index, _pack_spans(spans), len(spans))

    def wait(self, arena: Arena, timeout: float) -> memoryview:
        lent = self.owned(arena)
        self.call("wait", lent.index, _nanoseconds(timeout))
        return lent.view
