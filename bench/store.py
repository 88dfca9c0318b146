"""What the store's performance claims are made of: ``python -m bench.store [DIRECTORY]``.

Every number has a ruler in the same run (see ``sparkcache_connector/store/benchmark.py``) or
is a time against a stated goal. The table ends with one line that says which goals were met;
the exit code is 0 either way, because a busy disk is not a defect.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sparkcache_connector.store import GroupKind, GroupPages, Options, Store
from sparkcache_connector.store.benchmark import measure
from sparkcache_connector.store.delta import GroupShape, compose_groups
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.manifest import DIGEST_BYTES, Manifest, PackRef, manifest_name

MIB = 1 << 20
IDENTITY = bytes(32)
PAGE_SIZES = (64 << 10, 256 << 10, MIB, 4 * MIB)
BOUNDARIES = 128 * 1024 // 256
"""Boundaries of a prompt of 128K tokens."""

Row = dict[str, object]


def goal(name: str, value: float, limit: float, *, at_most: bool = False) -> Row:
    """Return one line of the verdict."""
    met = value <= limit if at_most else value >= limit
    sign = "<=" if at_most else ">="
    return {"name": name, "value": round(value, 4), "goal": f"{sign} {limit}", "met": met}


def throughput(directory: Path, page_bytes: int, total: int, repeat: int) -> tuple[Row, list[Row]]:
    """Measure one page size and compare with the goals."""
    result = measure(directory, page_bytes, total, repeat)
    name = f"{page_bytes >> 10} KiB"
    ratios = {
        "save": result.ratio("save", "raw write buffered", "raw write direct"),
        "cold": result.ratio("cold load", "raw read direct"),
        "hot": result.ratio("hot load", "read and hash"),
    }
    cpu = statistics.median(result.series["save"].cpu)
    return result.as_json(), [
        goal(f"{name}: durable save / raw write", ratios["save"]["best"], 0.9),
        goal(f"{name}: cold load / raw O_DIRECT read", ratios["cold"]["best"], 0.9),
        goal(f"{name}: hot load / read + BLAKE3", ratios["hot"]["best"], 0.8),
        goal(f"{name}: CPU seconds per GB saved", cpu, 0.35, at_most=True),
        goal(f"{name}: files", result.files * (512 * MIB) / result.total_bytes, 16, at_most=True),
    ]


def context(number: int) -> bytes:
    """Return the context digest of a synthetic root."""
    return number.to_bytes(32, "big")


def fill(path: Path, count: int) -> None:
    """Make a cache root of many small roots that share one page, without a sync for each."""
    with Store.open(path, identity=IDENTITY, options=Options(high_bytes=1 << 40)) as store:
        page = GroupPages(GroupKind.FULL_ATTENTION, 4096, 0, [bytes(4096)])
        store.publish(context(0), 256, [page])
        with store.plan(context(0)) as plan:
            reference, digests = plan.manifest.packs[0], plan.manifest.groups[0].digests
    keys = KeyRing.parse((path / "keys").read_bytes(), "keys")
    directory = path / "roots" / IDENTITY.hex()
    for number in range(1, count):
        manifest = _small_manifest(number, reference, digests)
        name = directory / manifest_name(manifest.context)
        with open(name, "wb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(manifest.encode(keys.current))


def _small_manifest(number: int, pack: PackRef, digests: bytes) -> Manifest:
    shapes = [GroupShape(GroupKind.FULL_ATTENTION, 4096, 0, len(digests) // DIGEST_BYTES)]
    packs, groups = compose_groups(shapes, [digests], [0], None, pack)
    return Manifest(IDENTITY, context(number), 256, 0, 1, packs, groups)


def best_of(times: int, action: Callable[[], object]) -> float:
    """Return the shortest time in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def many_roots(directory: Path, count: int) -> list[Row]:
    """Measure opening and looking up among many roots."""
    path = directory / "many"
    fill(path, count)
    options = Options(high_bytes=1 << 40)
    start = time.perf_counter()
    Store.open(path, identity=IDENTITY, options=options).close()
    rebuilt = time.perf_counter() - start
    opened = []
    for _ in range(5):
        start = time.perf_counter()
        store = Store.open(path, identity=IDENTITY, options=options)
        opened.append(time.perf_counter() - start)
        held = len(store.inventory())
        # A prompt of which only the shortest boundary is held: the slowest lookup that hits.
        prompt = [context(1), *(context(count + number) for number in range(BOUNDARIES - 1))]
        lookup = best_of(20, lambda store=store, prompt=prompt: store.longest(prompt))  # type: ignore[misc]
        store.close()
        if held != count:
            raise SystemExit(f"{held} of {count} roots were found")
    shutil.rmtree(path)
    return [
        goal(f"open with {count} roots, s", min(opened), 0.1, at_most=True),
        goal("longest boundary of a 128K-token prompt, ms", lookup * 1e3, 2.0, at_most=True),
        goal(f"open with {count} roots and no catalog, s", rebuilt, 60.0, at_most=True),
    ]


def eviction(directory: Path, total: int, evicted: int, repeat: int) -> list[Row]:
    """Measure how much evicting many roots slows a load of another root."""
    path = directory / "evict"
    page = os.urandom(MIB)
    big = b"\xff" * 32
    alone: list[float] = []
    beside: list[float] = []
    with Store.open(path, identity=IDENTITY, options=Options(high_bytes=1 << 40)) as store:
        pages = [page] * (total // MIB)
        store.publish(big, 256, [GroupPages(GroupKind.FULL_ATTENTION, MIB, 0, pages)])
        targets = [[bytearray(MIB) for _ in pages]]

        def load() -> None:
            with store.plan(big) as plan:
                store.read(plan, targets)

        load()
        load()
        for _ in range(repeat):
            for number in range(evicted):
                small = GroupPages(GroupKind.FULL_ATTENTION, 4096, 0, [page[:4096]])
                store.publish(context(number), 256, [small])
            contexts = [context(number) for number in range(evicted)]
            alone.append(best_of(3, load))
            remover = threading.Thread(target=store.remove, args=(contexts,))
            remover.start()
            beside.append(best_of(1, load))
            remover.join()
    shutil.rmtree(path)
    return [
        goal(
            f"load beside {evicted} evictions / alone", min(beside) / min(alone), 1.1, at_most=True
        )
    ]


def main() -> int:
    """Measure, print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(),
        help="on the disk to measure (default: here)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--total", type=int, default=512, metavar="MIB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--roots", type=int, default=100_000)
    parser.add_argument("--evictions", type=int, default=1000)
    arguments = parser.parse_args()
    results: list[Row] = []
    goals: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=arguments.directory) as name:
        scratch = Path(name)
        for page_bytes in PAGE_SIZES:
            print(f"pages of {page_bytes >> 10} KiB …", file=sys.stderr)
            row, met = throughput(scratch, page_bytes, arguments.total * MIB, arguments.repeat)
            results.append(row)
            goals += met
        print(f"{arguments.roots} roots …", file=sys.stderr)
        goals += many_roots(scratch, arguments.roots)
        print(f"{arguments.evictions} evictions …", file=sys.stderr)
        goals += eviction(scratch, arguments.total * MIB, arguments.evictions, 2)
    if arguments.format == "json":
        json.dump({"throughput": results, "goals": goals}, sys.stdout, indent=2)
        print()
    else:
        _print(results, goals)
    return 0


def _print(results: list[Row], goals: list[Row]) -> None:
    for row in results:
        print(f"\n{int(str(row['page_bytes'])) >> 10} KiB pages, {row['files']} files")
        series = row["series"]
        assert isinstance(series, dict)
        for name, summary in series.items():
            print(
                f"  {name:20} best {summary['best_gb_s']:6.2f}  median"
                f" {summary['median_gb_s']:6.2f} GB/s   {summary['cpu_s_per_gb']:.2f} CPU s/GB"
            )
        print(f"  ratios {row['ratios']}")
    print()
    for row in goals:
        print(
            f"{'met   ' if row['met'] else 'MISSED'}  {row['name']}: {row['value']} ({row['goal']})"
        )
    print(f"bench store: {sum(bool(row['met']) for row in goals)} of {len(goals)} goals met")


if __name__ == "__main__":
    sys.exit(main())
