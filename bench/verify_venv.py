"""How long judging an environment takes, beside hashing the same bytes.

``python -m bench.verify_venv [--venv DIR] [--rounds N]``. Without ``--venv``, a bundle of the base
is built into a scratch directory and installed, as a user would, into a fresh environment.
Judging is the whole command, ``python -m verify venv DIR``, interpreter start included: every
row of RECORD hashed, every check run. Hashing reads the same files, one after the other, in
one thread. Both are timed alternately on a warm page cache; the claim is about the median.
Exits 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 2.0


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def install(base: str, folder: Path) -> Path:
    """Build a bundle, install its two wheels and return the environment."""
    command = [sys.executable, "-m", "builder", "build", "--base", base, "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    env = folder / "env"
    venv.create(env, with_pip=True)
    wheels = sorted(str(wheel) for wheel in folder.glob(f"*/{base}/*.whl"))
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--disable-pip-version-check", *wheels], check=True)
    return env


def recorded(env: Path) -> list[Path]:
    """The files of all RECORD rows with a hash, of vLLM and of the connector."""
    found: list[Path] = []
    for record in sorted(env.glob("lib/python3.*/site-packages/*.dist-info/RECORD")):
        if record.parent.name.startswith(("vllm", "sparkcache_connector")):
            with record.open(newline="", encoding="utf-8") as rows:
                site = record.parent.parent
                found += [site / row[0] for row in csv.reader(rows) if row[1]]
    return found


def hash_files(files: list[Path]) -> int:
    """Hash the files one after the other; return the number of bytes."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")
            total += file.tell()
    return total


def judge(env: Path) -> None:
    """Run the judge; anything but a pass is no measurement."""
    command = [sys.executable, "-m", "verify", "venv", str(env)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"verify venv: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main() -> int:
    """Measure, print, compare with the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.verify_venv", description=__doc__)
    parser.add_argument("--base", default="cpu-x86_64")
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    hashing: list[float] = []
    judging: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        env = args.venv or install(args.base, Path(scratch))
        files = recorded(env)
        size = hash_files(files)
        judge(env)
        for _ in range(args.rounds):
            hashing.append(seconds(lambda: hash_files(files)))
            judging.append(seconds(lambda: judge(env)))
    judged, hashed = statistics.median(judging), statistics.median(hashing)
    held = judged <= LIMIT_SECONDS
    print(
        f"verify venv: {len(files)} RECORD rows, {size / 1e6:.1f} MB: median {judged:.2f} s "
        f"(best {min(judging):.2f}), hashing the same bytes {hashed:.2f} s, ratio "
        f"{judged / hashed:.1f}; at most {LIMIT_SECONDS:.0f} s: {'held' if held else 'NOT HELD'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
