"""Bandwidths on one CUDA device: kernels against copies, and a whole restore from a file."""

import os
import random
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from blake3 import blake3

from sparkcache_connector.worker.placement import PageLayout, PlacementOptions
from sparkcache_connector.worker.placement_layout import (
    Extent,
    LayerPages,
    MemoryRegion,
    SealedPage,
    VerifiedPage,
)
from sparkcache_connector.worker.placement_native import NativePlacement

GOAL = 0.85
GOAL_FROM = 64 << 10
PAGE_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)

TILE = struct.Struct("=QQII")
TILE_BYTES = 32768
THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 6


@dataclass
class Row:
    """One line of the table."""

    what: str
    rate: float
    share: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool:
        return self.goal is None or (self.share is not None and self.share >= self.goal)


def best(device, stream, work, rounds):
    return min(device.seconds(stream, work) for _ in range(rounds + 1))


def kernel_rates(device, fatbin: bytes, nbytes: int, rounds: int) -> Iterator[Row]:
    """Scatter and gather between device memory and spread pages, as a share of a plain copy."""
    scatter, gather = device.functions(fatbin, "sparkcache_scatter_v1", "sparkcache_gather_v1")
    stream = device.stream()
    arena, memory, error = (device.allocate(n) for n in (nbytes, 2 * nbytes, 4096))
    device.write(error, bytes(4096))
    copy = best(
        device,
        stream,
        lambda: device.call(
            "cuMemcpyDtoDAsync_v2", c_uint64(memory), c_uint64(arena), c_size_t(nbytes), stream
        ),
        rounds,
    )
    yield Row("copy, device to device", nbytes / copy / 1e9)
    for size in PAGE_SIZES:
        pages = nbytes // size
        order = random.Random(size).sample(range(2 * pages), pages)
        tiles = bytearray()
        count = 0
        for number, block in enumerate(order):
            for at in range(0, size, TILE_BYTES):
                length = min(TILE_BYTES, size - at)
                tiles += TILE.pack(memory + block * size + at, number * size + at, length, 0)
                count += 1
        descriptors = device.allocate(len(tiles))
        device.write(descriptors, tiles)
        blocks = min(count, device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
        for name, function in (("scatter", scatter), ("gather", gather)):
            seconds = best(
                device,
                stream,
                lambda f=function, d=descriptors, n=count, b=blocks: device.launch(
                    f, b, THREADS, stream, d, n, arena, nbytes, error
                ),
                rounds,
            )
            goal = GOAL if size >= GOAL_FROM else None
            yield Row(
                f"{name}, pages of {size >> 10} KiB", nbytes / seconds / 1e9, copy / seconds, goal
            )
        device.free(descriptors)
    if device.read(error, 4) != bytes(4):
        raise AssertionError("a kernel met a damaged descriptor")
    for pointer in (arena, memory, error):
        device.free(pointer)


def restore_rates(device, library, fatbin: bytes, nbytes: int, workers: int) -> Iterator[Row]:
    """A direct restore of a file in the page cache: read, hash, place."""
    page = 4 << 20
    layers, pages = 32, nbytes // page
    extent = page // layers
    blocks = pages + 1
    memory = device.allocate(layers * blocks * extent)
    region = MemoryRegion(memory, layers * blocks * extent, "cuda:0", device)
    layout = PageLayout(
        tuple(
            LayerPages(
                f"layers.{i}",
                0,
                region,
                i * blocks * extent,
                extent,
                blocks,
                (Extent(0, 1, extent),),
            )
            for i in range(layers)
        )
    )
    stream = device.stream()
    arena_bytes = 64 << 20
    staging, pinned = device.allocate(arena_bytes), device.pinned(arena_bytes)
    host = best(
        device,
        stream,
        lambda: device.call(
            "cuMemcpyHtoDAsync_v2",
            c_uint64(staging),
            c_void_p(pinned),
            c_size_t(arena_bytes),
            stream,
        ),
        5,
    )
    device.free(staging)
    device.free_pinned(pinned)
    yield Row("copy, pinned host to device", arena_bytes / host / 1e9)

    content = random.Random(1).randbytes(page)
    seals = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pack"
        with path.open("wb") as file:
            for number in range(pages):
                data = number.to_bytes(8, "little") + content[8:]
                seals.append(blake3(data).digest())
                file.write(data)
        for transfer, name in ((2, "staged"), (1, "mapped")):
            placement = NativePlacement(
                library, layout, PlacementOptions(arena_bytes=arena_bytes), fatbin, transfer
            )
            with path.open("rb") as file, ThreadPoolExecutor(workers) as pool:
                seconds = [_restore(placement, file.fileno(), page, seals, pool) for _ in range(3)]
            placement.close()
            rate = nbytes / min(seconds) / 1e9
            yield Row(
                f"restore of {nbytes / 1e9:.1f} GB from page cache, {name}, {workers} workers",
                rate,
                rate / (arena_bytes / host / 1e9),
            )
    _check_restored(device, memory, extent, blocks, pages, content)
    device.free(memory)


def _restore(placement, descriptor, page, seals, pool) -> float:
    start = perf_counter()
    pages = [SealedPage(0, 1 + i, seal) for i, seal in enumerate(seals)]
    with placement.begin_restore(pages) as restore:
        fits = placement.arena_bytes // page
        for first in range(0, len(pages), fits):
            arena = restore.acquire(60.0)

            def load(i, view=arena.view, first=first):
                at = i * page
                os.preadv(descriptor, [view[at : at + page]], (first + i) * page)
                found = blake3(view[at : at + page]).digest()
                return VerifiedPage(first + i, at, found)

            restore.submit(arena, list(pool.map(load, range(min(fits, len(pages) - first)))))
        restore.finish(60.0)
    return perf_counter() - start


def _check_restored(device, memory, extent, blocks, pages, content) -> None:
    for number in {0, pages // 2, pages - 1}:
        got = device.read(memory + (1 + number) * extent, extent)
        if got != number.to_bytes(8, "little") + content[8:extent]:
            raise AssertionError(f"page {number} was restored with other bytes")
