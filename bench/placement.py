"""How fast the native library moves pages on the host, against memcpy of the same bytes.

    python -m bench.placement [--library PATH] [--megabytes N] [--rounds N]

Per extent size: scatter (placement of verified bytes) and gather (capture into an arena) of
pages of 32 layers, one extent each, whose blocks are spread over memory, against ``memcpy`` of
as many bytes by as many threads. The three are interleaved; best and median of the ratios are
printed. Then the overhead of a transaction that moves one small page, and of one call alone.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from sparkcache_connector.worker import placement_abi as abi
from sparkcache_connector.worker.placement import (
    Page,
    PageLayout,
    PlacementOptions,
    Span,
    region_of_buffer,
)
from sparkcache_connector.worker.placement_layout import Extent, LayerPages
from sparkcache_connector.worker.placement_native import NativePlacement

LAYERS = 32
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
GOAL = 0.8
GOAL_CALL_US = 20.0


def memcpy_with(threads: int, to: int, source: int, nbytes: int) -> float:
    """Seconds that ``threads`` threads need for one memcpy of ``nbytes``, split evenly."""
    share = nbytes // threads
    ready, go = threading.Barrier(threads + 1), threading.Barrier(threads + 1)
    done = threading.Barrier(threads + 1)

    def part(index: int) -> None:
        ready.wait()
        go.wait()
        ctypes.memmove(to + index * share, source + index * share, share)
        done.wait()

    pool = [threading.Thread(target=part, args=(i,)) for i in range(threads)]
    for thread in pool:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    go.wait()
    done.wait()
    seconds = time.perf_counter() - start
    for thread in pool:
        thread.join()
    return seconds


def measure(library: ctypes.CDLL, extent: int, nbytes: int, threads: int, rounds: int) -> dict:
    """Rates of memcpy, scatter and gather in GB/s, and the ratios of each round."""
    layers = min(LAYERS, nbytes // extent)
    page = layers * extent
    pages = nbytes // page
    blocks = 2 * pages + 1
    memory = region_of_buffer(bytearray(layers * blocks * extent))
    layout = PageLayout(
        tuple(
            LayerPages(
                f"layers.{i}",
                0,
                memory,
                i * blocks * extent,
                extent,
                blocks,
                (Extent(0, 1, extent),),
            )
            for i in range(layers)
        )
    )
    options = PlacementOptions(arena_bytes=nbytes, arenas=1, host_threads=threads)
    placement = NativePlacement(library, layout, options)
    order = random.Random(extent).sample(range(1, blocks), pages)
    targets = [Page(0, block) for block in order]
    spans = [Span(i, 0, i * page, page) for i in range(pages)]
    source = bytearray(random.Random(0).randbytes(1 << 20) * (nbytes >> 20))
    sink = bytearray(nbytes)
    address = region_of_buffer(source).address
    sink_address = region_of_buffer(sink).address
    found: dict[str, list[float]] = {"memcpy": [], "scatter": [], "gather": []}
    for _ in range(rounds + 1):
        found["memcpy"].append(memcpy_with(threads, sink_address, address, nbytes))
        with placement.begin_placement(targets) as placing:
            start = time.perf_counter()
            placing.submit(source, spans)
            found["scatter"].append(time.perf_counter() - start)
            placing.finish(60.0)
        with placement.begin_capture(targets) as capture:
            arena = capture.acquire(60.0)
            start = time.perf_counter()
            capture.submit(arena, spans)
            capture.wait(arena, 60.0)
            found["gather"].append(time.perf_counter() - start)
            if bytes(arena.view[:extent]) != bytes(source[:extent]):
                raise AssertionError("gather returned other bytes than scatter wrote")
            capture.finish(60.0)
    placement.close()
    # The first round touches fresh memory.
    found = {name: times[1:] for name, times in found.items()}
    result: dict[str, object] = {"extent": extent, "pages": pages, "layers": layers}
    for name, times in found.items():
        result[name] = nbytes / min(times) / 1e9
        if name != "memcpy":
            ratios = [m / t for m, t in zip(found["memcpy"], times, strict=True)]
            result[f"{name}_median"] = statistics.median(ratios)
            result[f"{name}_best"] = min(found["memcpy"]) / min(times)
    return result


def call_overhead(library: ctypes.CDLL) -> tuple[float, float]:
    """Microseconds of a whole transaction over one 4 KiB page, and of one C call in it."""
    region = region_of_buffer(bytearray(4 * 4096))
    layout = PageLayout((LayerPages("layer", 0, region, 0, 4096, 4, (Extent(0, 1, 4096),)),))
    placement = NativePlacement(library, layout, PlacementOptions(arena_bytes=4096, arenas=1))
    source, pages, spans = bytes(4096), [Page(0, 2)], [Span(0, 0, 0, 4096)]

    def transaction() -> None:
        placing = placement.begin_placement(pages)
        placing.submit(source, spans)
        placing.finish(1.0)

    whole = best_of(transaction, 2000)
    packed = abi.SPAN.pack(0, 0, 0, 4096)
    submit = library.sparkcache_placing_submit
    seconds = []
    for _ in range(2000):
        placing = placement.begin_placement(pages)
        handle = placing._handle  # type: ignore[attr-defined]
        start = time.perf_counter()
        submit(handle, source, 4096, packed, 1, 0)
        seconds.append(time.perf_counter() - start)
        placing.finish(1.0)
    placement.close()
    return whole * 1e6, statistics.median(seconds) * 1e6


def best_of(call, count: int) -> float:
    """The median seconds of ``call``."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> int:
    """Print the table; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("--library", type=Path, help="built by builder.native if left out")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.library
        if path is None:
            from builder.native import LIBRARY, build_native

            build_native(platform.machine(), Path(scratch))
            path = Path(scratch) / LIBRARY
        library = abi.load_library(path, hashlib.sha256(path.read_bytes()).hexdigest())
    rows = [
        measure(library, size, arguments.megabytes << 20, arguments.threads, arguments.rounds)
        for size in SIZES
    ]
    whole, call = call_overhead(library)
    worst = min(min(row["scatter_median"], row["gather_median"]) for row in rows)
    met = worst >= GOAL and call <= GOAL_CALL_US
    if arguments.format == "json":
        json.dump(
            {"rows": rows, "transaction_us": whole, "submit_us": call, "met": met}, sys.stdout
        )
        print()
        return 0 if met else 1
    print(
        f"{arguments.megabytes} MiB per round, {arguments.threads} threads, GB/s (ratio to memcpy)"
    )
    print(f"{'extent':>8}  {'memcpy':>7}  {'scatter':>22}  {'gather':>22}")
    for row in rows:
        cells = [
            f"{row[name]:6.2f} ({row[f'{name}_best']:.2f}, median {row[f'{name}_median']:.2f})"
            for name in ("scatter", "gather")
        ]
        print(f"{row['extent'] >> 10:>5} KiB  {row['memcpy']:7.2f}  {cells[0]}  {cells[1]}")
    print(f"one page of 4 KiB: transaction {whole:.1f} us, submit alone {call:.1f} us")
    print(f"placement: {'met' if met else 'MISSED'}: worst ratio {worst:.2f}, goal {GOAL}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
