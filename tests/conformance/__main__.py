"""Compare upstream's test results on the stock and on the patched build.

    python -m tests.conformance           the fixed part, which CI runs
    python -m tests.conformance --full    every test of the touched area, about half an hour
    python -m tests.conformance PATH …    some of upstream's tests, say tests/v1/core/test_output.py

Steps: (1) the pinned sdist gives the tests, a generated hub cache the model configurations;
(2) both builds run them at the same time; (3) the columns are compared per test id; (4) tests that
differ run again on both, alone, since a few of upstream's depend on timing: a difference that
stays fails the run, one that does not is named; (5) the fixed part must also have passed at least
`FIXED_PASSES` tests, lest two equally broken columns agree.

Needs the engine environments (`make engine`). Reports and logs stay in build/conformance/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conformance import columns
from tests.conformance.results import Difference, differences, table
from tests.support import engine_env

OUT = columns.ROOT / "build" / "conformance"
NAMES = ("stock", "patched")
FIXED_PASSES = 66


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 only if both builds gave every test the same result."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tests", nargs="*", metavar="PATH", help="default: the fixed part")
    parser.add_argument("--full", action="store_true", help="the whole touched area")
    options = parser.parse_args(arguments)
    fixed = not options.full and not options.tests
    tests = options.tests or (list(columns.FULL) if options.full else columns.fixed_part())
    started = time.monotonic()

    with tempfile.TemporaryDirectory() as place:
        scratch, home = Path(place, "upstream"), Path(place, "hub")
        _prepare(scratch, home)  # (1)
        results = columns.run(NAMES, tests, scratch, home, OUT)  # (2)
        stock, patched = results["stock"], results["patched"]
        differing = differences(stock, patched)  # (3)
        lasting = _again(differing, tests, scratch, home) if differing else []  # (4)

    print(table(stock, patched))
    for difference in differing:
        stays = "differs" if difference.test in lasting else "unstable, alone it is the same"
        print(f"{difference.test}: stock {difference.stock}, patched {difference.patched}: {stays}")
    passed = sum(result == "passed" for result in patched.values())
    few = fixed and passed < FIXED_PASSES  # (5)
    if few:
        print(f"at least {FIXED_PASSES} tests of the fixed part were expected to pass")
    print(
        f"conformance: {len(stock)} tests, {len(lasting)} differ, "
        f"{len(differing) - len(lasting)} unstable, {passed} passed on the patched build, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if lasting or few else 0


def _prepare(scratch: Path, home: Path) -> None:
    acquire = [sys.executable, "-m", "builder", "acquire", "sdist"]
    found = subprocess.run(acquire, cwd=columns.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    columns.unpack(Path(found.stdout.strip().partition("  ")[2]), scratch)
    fill = [engine_env.interpreter("stock"), "-m", "tests.conformance.hub_cache", str(home)]
    subprocess.run(fill, cwd=columns.ROOT, stderr=subprocess.DEVNULL, check=True)


def _again(
    differing: Sequence[Difference], tests: Sequence[str], scratch: Path, home: Path
) -> set[str]:
    """Run the files of the differing tests alone, one build after the other; return who stays."""
    files = sorted({_path(difference.test) for difference in differing})
    alone: dict[str, Mapping[str, str]] = {}
    for name in NAMES:
        alone |= columns.run([name], files, scratch, home, OUT / "again")
    still = {difference.test for difference in differences(alone["stock"], alone["patched"])}
    return still & {difference.test for difference in differing}


def _path(test: str) -> str:
    """Return the file of a test from JUnit's dotted class name."""
    parts = test.partition("::")[0].split(".")
    return "/".join(part for part in parts if not part[:1].isupper()) + ".py"


if __name__ == "__main__":
    sys.exit(main())
