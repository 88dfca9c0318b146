"""Runs the test suites one after the other and says how long each took.

``python -m tests.suites [NAME …]`` is what ``make test`` calls. A suite is a command; one
that runs pytest leaves a JUnit file, from which tests are counted. The run fails when a
suite fails, when a suite that should run tests ran none, and when a test was skipped for
a reason that ``tests/allowed-skips.txt`` does not list. Tests marked ``full`` are left to
their own make targets (``make e2e``, ``make native``). The last line is the verdict.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED_SKIPS = ROOT / "tests" / "allowed-skips.txt"


@dataclass(frozen=True)
class Suite:
    """One suite: what it shows, and the command that shows it.

    ``pytest`` holds pytest arguments; ``make`` names targets (with variables) that are the
    whole suite. ``python`` is the interpreter relative to the checkout; ``needs`` are
    targets that must have run before.
    """

    name: str
    shows: str
    pytest: tuple[str, ...] = ()
    make: tuple[str, ...] = ()
    python: str = ".venv/bin/python"
    needs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one suite did: counts of tests, skips that nobody allowed, seconds."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unlisted: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ok: bool = True


ENGINE = ".engine/patched/bin/python"
APART = ("verify", "store", "native")

SUITES: tuple[Suite, ...] = (
    Suite("lint", "ruff and mypy strict", make=("lint",)),
    Suite(
        "unit",
        "builder and connector: formats, automata, the patcher",
        pytest=("tests/unit", *(f"--ignore=tests/unit/{name}" for name in APART)),
    ),
    Suite("verify", "the judge and its mutations", pytest=("tests/unit/verify",)),
    Suite(
        "store",
        "the store: properties, faults, crashes, its parsers fed anything",
        pytest=("tests/unit/store", "tests/crash", "tests/fuzz"),
    ),
    Suite(
        "image",
        "a container build with the layer passes its gate, or fails it",
        pytest=("tests/image",),
    ),
    Suite("native", "the placement library on the host", pytest=("tests/unit/native",)),
    Suite("build", "every bundle is built and judged", make=("build BASE=all",)),
    Suite("reproduce", "two builds are equal in every byte", make=("reproduce BASE=cpu-x86_64",)),
    Suite(
        "engine",
        "the overlay's rules and the connector's lifetimes on the real classes",
        pytest=("tests/engine",),
        python=ENGINE,
        needs=("engine",),
        env={"SPARKCACHE_STOCK_PYTHON": str(ROOT / ".engine/stock/bin/python")},
    ),
    Suite("conformance", "vLLM's own tests, unpatched and patched", make=("conformance",)),
    Suite("e2e", "a real engine, killed and restarted", pytest=("tests/e2e",), needs=("engine",)),
    Suite("soak", "random lives, every answer checked", pytest=("tests/soak",), needs=("engine",)),
)


def allowed_skips(text: str) -> list[re.Pattern[str]]:
    """Parse ``tests/allowed-skips.txt``: one regular expression a line, ``#`` comments."""
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [re.compile(line) for line in lines if line]


def read_junit(path: Path, allowed: Sequence[re.Pattern[str]]) -> Outcome:
    """Count the cases of a JUnit file; a skip's line is ``<test id>: <reason>``."""
    outcome = Outcome()
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif (skip := case.find("skipped")) is not None:
            outcome.skipped += 1
            line = f"{case.get('classname')}::{case.get('name')}: {skip.get('message', '')}"
            if not any(pattern.search(line) for pattern in allowed):
                outcome.unlisted.append(line)
        else:
            outcome.passed += 1
    return outcome


def run(suite: Suite, allowed: Sequence[re.Pattern[str]], ready: set[str]) -> Outcome:
    """Run one suite in the checkout and return its outcome.

    A target that several suites need is made for the first of them, and its seconds count
    there; ``ready`` remembers it.
    """
    start = time.monotonic()
    env = os.environ | suite.env
    for target in (*(need for need in suite.needs if need not in ready), *suite.make):
        if subprocess.run(["make", *target.split()], cwd=ROOT, env=env, check=False).returncode:
            return Outcome(failed=1, ok=False, seconds=time.monotonic() - start)
    ready.update(suite.needs)
    outcome = Outcome(passed=1) if suite.make else Outcome()
    if suite.pytest:
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "junit.xml"
            command = [suite.python, "-m", "pytest", "-q", "-m", "not full"]
            command += [f"--junitxml={report}", *suite.pytest]
            code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
            outcome = read_junit(report, allowed) if report.exists() else Outcome(failed=1)
        outcome.ok = code == 0 and outcome.passed > 0 and not outcome.unlisted
    outcome.seconds = time.monotonic() - start
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named suites, or all; return 0 only if every one held."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="suites to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the suites and stop")
    args = parser.parse_args(argv)
    by_name = {suite.name: suite for suite in SUITES}
    if args.list:
        for suite in SUITES:
            print(f"{suite.name:14} {suite.shows}")
        return 0
    if unknown := [name for name in args.names if name not in by_name]:
        parser.error(f"no suite named {', '.join(unknown)}; there are {', '.join(by_name)}")
    allowed = allowed_skips(ALLOWED_SKIPS.read_text())
    outcomes: dict[str, Outcome] = {}
    ready: set[str] = set()
    for name in args.names or by_name:
        print(f"== {name}: {by_name[name].shows}", flush=True)
        outcomes[name] = run(by_name[name], allowed, ready)
        for line in outcomes[name].unlisted:
            print(f"skip that tests/allowed-skips.txt does not list: {line}")
    print("\nsuite           seconds  passed  failed  skipped")
    for name, outcome in outcomes.items():
        print(
            f"{name:14} {outcome.seconds:8.0f} {outcome.passed:7} {outcome.failed:7}"
            f" {outcome.skipped:8}{'' if outcome.ok else '   FAILED'}"
        )
    broken = [outcome for outcome in outcomes.values() if not outcome.ok]
    passed = sum(outcome.passed for outcome in outcomes.values())
    failed = max(sum(outcome.failed for outcome in outcomes.values()), len(broken))
    skipped = sum(outcome.skipped for outcome in outcomes.values())
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
