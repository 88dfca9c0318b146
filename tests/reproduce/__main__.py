"""Builds twice under different conditions and compares every byte of the outputs.

``python -m tests.reproduce [--target NAME] [--base NAME]``, which ``make reproduce`` calls.
The conditions are those that usually leak into a build: the folder, the umask, the time zone,
the locale, the home directory, the hash seed, file times, and the order in which directories
list their files. First a small target shows that the comparison sees a planted timestamp and
a planted path; only then its silence about the real target means something.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from builder.cache import default_folder
from tests.reproduce.compare import differences
from tests.small_checkout import ROOT, make_checkout
from tests.small_target import NAME as SMALL

_KEPT = ("PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
_NOT_COPIED = (".git", ".venv", ".engine", "dist", "build", "__pycache__", "*.pyc", ".*_cache")


@dataclass(frozen=True)
class Conditions:
    """What surrounds one of the two builds and must not matter."""

    folder: str
    umask: int
    seed: int
    environment: dict[str, str]


CONDITIONS = (
    Conditions(
        "a",
        0o022,
        1,
        {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1", "USER": "one"},
    ),
    Conditions(
        "another folder/with a longer name/ünïcode",
        0o077,
        2,
        {
            "TZ": "Pacific/Kiritimati",
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "4242",
            "USER": "two",
            "SOURCE_DATE_EPOCH": "1700000000",
        },
    ),
)


def build_twice(
    scratch: Path,
    make: Callable[[Path], object],
    *,
    target: str,
    base: str,
    cache: Path | None,
    plant: str = "none",
) -> list[str]:
    """Build under both conditions and return the differences of the two ``dist`` folders.

    ``make`` writes a checkout into a folder; ``cache`` holds its downloads, None for the
    folder ``cache`` of the checkout.

    Raises:
        RuntimeError: when a build fails; the message ends with what it said.
    """
    outputs = []
    for conditions in CONDITIONS:
        checkout = scratch / plant / conditions.folder / "checkout"
        home = scratch / plant / conditions.folder / "home"
        home.mkdir(parents=True)
        make(checkout)
        age_files(checkout, conditions.seed)
        environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
        environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        environment |= conditions.environment
        environment |= {"HOME": str(home)}
        environment |= {"XDG_CACHE_HOME": str(_own_cache(home, cache or checkout / "cache"))}
        # one key for both: with another key the signatures differ, and nothing else may
        environment["XDG_CONFIG_HOME"] = str(scratch / "config")
        command = [sys.executable, "-m", "tests.reproduce.shuffled", str(conditions.seed), plant]
        done = subprocess.run(
            [*command, "build", "--target", target, "--base", base],
            cwd=checkout,
            env=environment,
            umask=conditions.umask,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the build in {checkout} failed:\n{done.stdout}")
        outputs.append(checkout / "dist")
    return differences(*outputs)


def _own_cache(home: Path, shared: Path) -> Path:
    """Return a cache with the downloads of ``shared``, and nothing that was compiled.

    What the compiler brings, such as stubs of the C library, may be shared; our objects not.
    """
    own = home / "cache" / "sparkcache"
    (own / "zig").mkdir(parents=True)
    common = shared / "sparkcache" / "zig" / "global"
    common.mkdir(parents=True, exist_ok=True)
    (own / "zig" / "global").symlink_to(common)
    (own / "downloads").symlink_to(shared / "sparkcache" / "downloads")
    return own.parent


def copy_checkout(folder: Path) -> None:
    """Copy what a build reads of this checkout."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_NOT_COPIED))


def age_files(folder: Path, seed: int) -> None:
    """Give every file another time."""
    times = random.Random(seed)
    for file in sorted(folder.rglob("*")):
        moment = times.randint(500_000_000, 1_900_000_000)
        os.utime(file, (moment, moment))


def self_test(scratch: Path) -> str | None:
    """Return what is wrong with the comparison, or None when it sees what it must see."""
    for plant, expected in (("none", 0), ("timestamp", 1), ("path", 1)):
        found = build_twice(
            scratch, make_checkout, target=SMALL, base="all", cache=None, plant=plant
        )
        boms = [line for line in found if "bom.cdx.json: differ" in line]
        if bool(boms) != bool(expected) or (not expected and found):
            return f"planted {plant}: expected {expected or 'no'} difference, found {found}"
        print(f"reproduce: planted {plant}: {len(found)} differing files, as it must be")
    return None


def main() -> int:
    """Run the self-test, then the real target."""
    parser = argparse.ArgumentParser(prog="python -m tests.reproduce", description=__doc__)
    parser.add_argument("--target", default="v0.28.0")
    parser.add_argument("--base", default="auto")
    args = parser.parse_args()
    start = time.monotonic()
    # XDG_CACHE_HOME/sparkcache/downloads is the download cache
    cache = default_folder().parent.parent
    with tempfile.TemporaryDirectory(prefix="reproduce-") as scratch:
        wrong = self_test(Path(scratch) / "self")
        if wrong is not None:
            print(f"reproduce: the comparison does not work: {wrong}")
            return 1
        found = build_twice(
            Path(scratch) / "real", copy_checkout, target=args.target, base=args.base, cache=cache
        )
    for line in found:
        print(f"differs: {line}")
    verdict = f"{len(found)} DIFFERENCES" if found else "identical in every byte"
    print(
        f"reproduce: {args.target} {args.base}: two builds under different conditions are "
        f"{verdict}, in {time.monotonic() - start:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
