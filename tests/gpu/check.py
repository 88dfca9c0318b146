"""`make gpu-check`: everything that needs a CUDA device, in one command of a few minutes.

    (1) find a device; without one, say so and exit 0
    (2) build the library and its kernels as they ship
    (3) the behaviour suite on the device, staged and mapped
    (4) the same under compute-sanitizer, where it is installed (a part of the suite)
    (5) rates: kernels as a share of a plain copy, a restore from the page cache
    (6) a table; with --record also bench/results/gpu-<device>.json

Exits 1 where a step fails or a goal is missed.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from builder.native import FATBIN, LIBRARY, NativeBuildError, build_native
from sparkcache_connector.worker.placement_abi import load_library
from tests.gpu.driver import Device, NoDeviceError
from tests.gpu.rates import kernel_rates, restore_rates

ROOT = Path(__file__).resolve().parents[2]
SUITE = "tests/gpu/test_placement_cuda.py"
SANITIZED = "partial_page or submitted_twice or another_transaction"


def run_suite(title: str, prefix: list[str], arguments: list[str], log: Path) -> bool:
    """Run the behaviour suite; its output goes to ``log`` and is shown if it fails."""
    start = time.monotonic()
    command = [*prefix, sys.executable, "-m", "pytest", "-q", SUITE, *arguments]
    with log.open("w") as out:
        code = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    text = log.read_text()
    last = text.strip().splitlines()[-1] if text.strip() else "no output"
    print(f"{title}: {last} ({time.monotonic() - start:.0f} s)", flush=True)
    if code != 0:
        print(text[-6000:], file=sys.stderr)
    return code == 0 and " passed" in text


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="bytes moved per measurement")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=8, help="readers of the restore")
    parser.add_argument("--record", action="store_true", help="keep the table in bench/results/")
    arguments = parser.parse_args()
    try:
        device = Device()  # (1)
    except NoDeviceError as error:
        print(f"gpu-check: no CUDA device, nothing was checked: {error}")
        return 0
    print(
        f"{device.name}, compute {device.capability}, {device.multiprocessors} multiprocessors, "
        f"driver for CUDA {device.driver}, {'integrated' if device.integrated else 'discrete'}",
        flush=True,
    )
    ok = True
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        try:
            files = {p.name: p for p in build_native(platform.machine(), scratch)}  # (2)
        except NativeBuildError as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 1
        if FATBIN not in files:
            print("gpu-check: no nvcc in PATH, so no kernels to check", file=sys.stderr)
            return 1
        ok &= run_suite("behaviour suite", [], [], scratch / "suite.log")  # (3)
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer:
            prefix = [sanitizer, "--error-exitcode", "9", "--target-processes", "all"]
            ok &= run_suite(  # (4)
                "compute-sanitizer", prefix, ["-k", SANITIZED], scratch / "sanitizer.log"
            )
        else:
            print("compute-sanitizer: not installed, skipped")
        path = files[LIBRARY]
        library = load_library(path, sha256(path.read_bytes()).hexdigest())
        fatbin = files[FATBIN].read_bytes()
        nbytes = arguments.megabytes << 20
        rows = [*kernel_rates(device, fatbin, nbytes, arguments.rounds)]  # (5)
        rows += restore_rates(device, library, fatbin, nbytes, arguments.workers)
    print(f"{'':<58} {'GB/s':>8} {'share':>6} {'goal':>6}")  # (6)
    for row in rows:
        share = "" if row.share is None else f"{row.share:.2f}"
        goal = "" if row.goal is None else f"{row.goal:.2f}"
        print(f"{row.what:<58} {row.rate:8.1f} {share:>6} {goal:>6}{'' if row.met else '  MISSED'}")
    met = all(row.met for row in rows)
    if arguments.record:
        slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
        record = {
            "device": device.name,
            "capability": device.capability,
            "driver": device.driver,
            "suite": ok,
            "rows": [asdict(row) for row in rows],
        }
        results = ROOT / "bench" / "results" / f"gpu-{slug}.json"
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(record, indent=1) + "\n")
    if ok and met:
        print("gpu-check: passed")
        return 0
    print(f"gpu-check: {'a goal was missed' if ok else 'FAILED'}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
