"""How fast the store is on a disk, beside rulers of the same run.

Every repetition measures a ruler and the store one after the other, because disks that are
shared vary more from minute to minute than anything that is measured here. Rulers do what
cannot be left out: the same bytes, the same threads, no format.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparkcache_connector.store.core import Options
from sparkcache_connector.store.manifest import GroupKind
from sparkcache_connector.store.pack import page_digest
from sparkcache_connector.store.publication import GroupPages
from sparkcache_connector.store.store import Store
from sparkcache_connector.store.writer import SEGMENT_BYTES

_GB = 1e9
_IDENTITY = bytes(32)


@dataclass
class Series:
    """Repetitions of one measurement: GB/s and CPU seconds per GB."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, size: int, wall: float, cpu: float) -> None:
        """Add one repetition."""
        self.rates.append(size / _GB / wall)
        self.cpu.append(cpu / (size / _GB))

    def summary(self) -> dict[str, float]:
        """Return best and median."""
        return {
            "best_gb_s": round(max(self.rates), 3),
            "median_gb_s": round(statistics.median(self.rates), 3),
            "cpu_s_per_gb": round(statistics.median(self.cpu), 3),
        }


@dataclass
class Result:
    """All series of one page size, and the ratios that are promised."""

    page_bytes: int
    total_bytes: int
    files: int
    series: dict[str, Series]

    def ratio(self, what: str, *rulers: str) -> dict[str, float]:
        """Return the store's rate divided by the best ruler's: best to best, median to median."""
        mine = self.series[what].rates
        best = max(max(self.series[name].rates) for name in rulers)
        median = max(statistics.median(self.series[name].rates) for name in rulers)
        pairs = [
            rate / max(self.series[name].rates[at] for name in rulers)
            for at, rate in enumerate(mine)
        ]
        return {
            "best": round(max(mine) / best, 3),
            "median": round(statistics.median(mine) / median, 3),
            "median_of_pairs": round(statistics.median(pairs), 3),
        }

    def as_json(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "page_bytes": self.page_bytes,
            "total_bytes": self.total_bytes,
            "files": self.files,
            "series": {name: series.summary() for name, series in self.series.items()},
            "ratios": {
                "save": self.ratio("save", "raw write buffered", "raw write direct"),
                "cold": self.ratio("cold load", "raw read direct"),
                "hot": self.ratio("hot load", "read and hash"),
            },
        }


def measure(
    directory: str | os.PathLike[str],
    page_bytes: int,
    total_bytes: int,
    repetitions: int = 3,
    workers: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Measure save, cold load and hot load of pages of one size, with their rulers.

    ``directory`` gets a temporary directory that is removed again.

    Raises:
        StoreError: the directory cannot hold a cache root.
        OSError: the rulers' file cannot be written.
    """
    count = max(1, total_bytes // page_bytes)
    total = count * page_bytes
    series = {
        name: Series()
        for name in (
            "raw write buffered",
            "raw write direct",
            "save",
            "raw read direct",
            "cold load",
            "read and hash",
            "hash alone",
            "hot load",
        )
    }
    files = 0
    with _scratch(directory) as scratch, _arena(total) as arena:
        pages = [arena[at : at + page_bytes] for at in range(0, total, page_bytes)]
        _fill(arena)
        for repetition in range(repetitions):
            _one_round(scratch, arena, pages, series, workers)
            files = max(files, _save_and_load(scratch / "store", pages, series, workers))
            if progress is not None:
                progress(repetition + 1, repetitions)
        pages.clear()
    return Result(page_bytes, total, files, series)


def _one_round(
    scratch: Path,
    arena: memoryview,
    pages: list[memoryview],
    series: dict[str, Series],
    workers: int,
) -> None:
    path = scratch / "ruler"
    for name, flags in (("raw write buffered", 0), ("raw write direct", os.O_DIRECT)):
        path.unlink(missing_ok=True)
        with _timed(series[name], len(arena)):
            _raw_write(path, arena, flags)
    with ThreadPoolExecutor(workers) as pool:
        _forget(path)
        with _timed(series["raw read direct"], len(arena)):
            _raw_read(path, arena, os.O_DIRECT, pool)
        _raw_read(path, arena, 0, pool)
        with _timed(series["read and hash"], len(arena)):
            _raw_read(path, arena, 0, pool, len(pages[0]))
    with _timed(series["hash alone"], len(arena)):
        for page in pages:
            page_digest(page)
    path.unlink()


def _save_and_load(
    path: Path, pages: list[memoryview], series: dict[str, Series], workers: int
) -> int:
    total = sum(map(len, pages))
    options = Options(high_bytes=4 * total + (1 << 30), workers=workers)
    context = os.urandom(32)
    group = GroupPages(GroupKind.FULL_ATTENTION, len(pages[0]), 0, pages)
    with Store.open(path, identity=_IDENTITY, options=options) as store:
        store.publish(os.urandom(32), 1, [GroupPages(group.kind, 4096, 0, [bytes(4096)])])
        before = _count_files(path)
        with _timed(series["save"], total):
            store.publish(context, 1, [group])
        files = _count_files(path) - before
    for pack in (path / "packs").iterdir():
        _forget(pack)
    with Store.open(path, identity=_IDENTITY, options=options) as store:
        for name in ("cold load", None, "hot load"):
            with store.plan(context) as plan:
                if name is None:
                    store.read(plan, [pages])  # the second time fills the page cache
                    continue
                with _timed(series[name], total):
                    store.read(plan, [pages])
    shutil.rmtree(path)
    return files


def _count_files(path: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(path))


@contextmanager
def _timed(series: Series, size: int) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    series.add(size, time.perf_counter() - wall, time.process_time() - cpu)


@contextmanager
def _scratch(directory: str | os.PathLike[str]) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sparkcache-bench-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _arena(size: int) -> Iterator[memoryview]:
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    yield view


def _fill(arena: memoryview) -> None:
    noise = os.urandom(SEGMENT_BYTES)
    for at in range(0, len(arena), SEGMENT_BYTES):
        part = arena[at : at + SEGMENT_BYTES]
        part[:] = noise[: len(part)]


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _raw_write(path: Path, arena: memoryview, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        for at in range(0, len(arena), SEGMENT_BYTES):
            os.pwritev(descriptor, [arena[at : at + SEGMENT_BYTES]], at)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _raw_read(
    path: Path, arena: memoryview, flags: int, pool: ThreadPoolExecutor, hashed: int = 0
) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)

    def read(at: int) -> None:
        part = arena[at : at + SEGMENT_BYTES]
        os.preadv(descriptor, [part], at)
        if hashed:
            for begin in range(0, len(part), hashed):
                page_digest(part[begin : begin + hashed])

    try:
        list(pool.map(read, range(0, len(arena), SEGMENT_BYTES)))
    finally:
        os.close(descriptor)
