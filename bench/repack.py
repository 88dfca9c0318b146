"""How long repacking a base wheel takes, beside hashing the same bytes.

``python -m bench.repack [--base NAME] [--rounds N]``. Repacking is what a build does: the base
wheel is read and the result written, digested and brought to the disk; hashing reads the base
wheel once. Both are timed alternately on a warm page cache; the claim is about the best of
the rounds, which is the least disturbed by whatever else the machine does.
Exits 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from builder.acquire import Acquirer
from builder.build import prepare
from builder.bundle import staging
from builder.composed import read_pins
from builder.console import Console
from builder.package import Recipe, write_wheel
from builder.target import Layout

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 3.0


def seconds(action: Callable[[], None]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def hash_file(path: Path) -> None:
    """Digest a file as the download cache does."""
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def repack_below(recipe: Recipe, folder: Path) -> None:
    """Repack as a build does: digested on the way, brought to the disk, then published."""
    with staging(folder / recipe.base) as stage:
        stage.stream("repacked.whl", lambda sink: write_wheel(recipe, sink))


def main() -> int:
    """Measure, print, compare with the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.repack", description=__doc__)
    parser.add_argument("--target", default="v0.28.0")
    parser.add_argument("--base", default="cuda-x86_64")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    layout = Layout.open(ROOT, args.target)
    pinned = read_pins(layout)
    recipe = prepare(layout, pinned, args.base, "wheel", Acquirer(Console()))
    hashing: list[float] = []
    repacking: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds + 1):
            hashed = seconds(lambda: hash_file(recipe.wheel))
            repacked = seconds(lambda: repack_below(recipe, Path(scratch)))
            if number:  # the first round warms the page cache
                hashing.append(hashed)
                repacking.append(repacked)
    repack, digest = min(repacking), min(hashing)
    held = repack <= LIMIT_SECONDS
    print(
        f"repack: {pinned.bases[args.base].filename}, {recipe.wheel.stat().st_size / 1e6:.1f} MB: "
        f"best {repack:.2f} s (median {statistics.median(repacking):.2f}), hashing the same bytes "
        f"{digest:.2f} s, ratio {repack / digest:.1f}; at most {LIMIT_SECONDS:.0f} s: "
        f"{'held' if held else 'NOT HELD'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
