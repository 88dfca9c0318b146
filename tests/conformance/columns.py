"""Runs upstream's tests in a scratch folder, once for each build, side by side."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conformance.results import read_junit
from tests.support import engine_env, offline_engine

ROOT = Path(__file__).resolve().parents[2]
FIXED = Path(__file__).with_name("fixed_part.txt")
FULL = ("tests/v1/core", "tests/v1/kv_connector/unit")
_LIMIT = 600
"""Seconds for one test; the longest takes a minute on two cores."""
_SILENCE = 2 * _LIMIT
"""Seconds without a word from pytest: it hangs where its own limit does not reach."""
_NEWS = 60
"""Seconds between two lines about the progress, where no terminal shows it."""


def fixed_part() -> list[str]:
    """Return the paths that CI runs, from `fixed_part.txt`."""
    lines = (line.partition("#")[0].strip() for line in FIXED.read_text().splitlines())
    return [line for line in lines if line]


def unpack(sdist: Path, scratch: Path) -> None:
    """Put upstream's tests, and the examples that some of them import, into `scratch`."""
    markers = re.compile(r"^markers = \[\n(.*?)^\]", re.MULTILINE | re.DOTALL)
    with tarfile.open(sdist) as archive:
        prefix = archive.next().name.partition("/")[0]
        wanted = (f"{prefix}/tests/", f"{prefix}/examples/")
        members = []
        for member in archive:
            if member.name == f"{prefix}/pyproject.toml":
                found = markers.search(archive.extractfile(member).read().decode())
            if member.name.startswith(wanted):
                member.name = member.name.removeprefix(f"{prefix}/")
                members.append(member)
        archive.extractall(scratch, members, filter="data")
    lines = "".join(f"    {line.strip()[1:-2]}\n" for line in found[1].splitlines())
    (scratch / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{lines}")


@contextmanager
def running(
    names: Sequence[str], tests: Sequence[str], scratch: Path, home: Path, out: Path
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start pytest over `tests` under each environment of `names`; end what is left running."""
    environment = os.environ | offline_engine.ENVIRONMENT
    environment |= {"HF_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    # Upstream's tests choose these themselves, and their own `tests` package must win.
    for name in ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        environment.pop(name, None)
    with ExitStack() as stack:
        processes = {}
        for name in names:
            python = engine_env.interpreter(name)
            report, log = out / f"{name}.xml", out / f"{name}.log"
            report.unlink(missing_ok=True)
            options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short"]
            options += [f"--timeout={_LIMIT}", f"--junitxml={report}"]
            process = subprocess.Popen(
                [python, "-m", "pytest", "-q", *options, *tests],
                cwd=scratch,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what a test started ends with it
            )
            stack.callback(_end, process)
            processes[name] = process
        yield processes


def run(
    names: Sequence[str], tests: Sequence[str], scratch: Path, home: Path, out: Path
) -> Mapping[str, dict[str, str]]:
    """Run `tests` under each environment of `names` at once; return their results by name."""
    out.mkdir(parents=True, exist_ok=True)
    with running(names, tests, scratch, home, out) as processes:
        started = told = time.monotonic()
        heard = dict.fromkeys(names, (0, started))
        while any(process.poll() is None for process in processes.values()):
            time.sleep(1)
            now = time.monotonic()
            for name in names:
                size = (out / f"{name}.log").stat().st_size
                if size != heard[name][0]:
                    heard[name] = (size, now)
                elif processes[name].poll() is None and now - heard[name][1] > _SILENCE:
                    raise RuntimeError(f"pytest under {name} hangs:\n{_tail(out, name)}")
            shown = ", ".join(f"{name} {_progress(out / f'{name}.log')}" for name in names)
            if sys.stderr.isatty():
                print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)
            elif now - told > _NEWS:
                told = now
                print(f"after {(now - started) / 60:.0f} min: {shown}", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    results = {}
    for name, process in processes.items():
        report = out / f"{name}.xml"
        if process.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(
                f"pytest under {name} ended with {process.returncode}:\n{_tail(out, name)}"
            )
        results[name] = read_junit(report.read_text())
    return results


def _tail(out: Path, name: str) -> str:
    return "\n".join((out / f"{name}.log").read_text(errors="replace").splitlines()[-15:])


def _progress(log: Path) -> str:
    found = re.findall(rb"\[ *(\d+%)\]", log.read_bytes())
    return found[-1].decode() if found else "starting"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
