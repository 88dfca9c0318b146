"""Kills the story at every system call that changes files, SQLite's own included.

``python -m tests.crash.sweep_syscalls`` (part of ``make crash``) needs strace. The points are
the calls of a recording run; each is run again with SIGKILL injected at that call, counted
per name in a process of one thread. A point that did not kill, or not there, fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.crash.story import Audience, check_survivors

CALLS = [
    *("openat", "mkdir", "mkdirat", "ftruncate", "fallocate", "utimensat"),
    *("pwritev", "pwritev2", "pwrite64", "write", "fdatasync", "fsync"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat"),
]
_LINE = re.compile(r"^\d+ +(?P<name>\w+)\((?P<arguments>.*)")


def trace(root: Path, log: Path, inject: str | None = None) -> tuple[int, list[str]]:
    """Tell the story under strace; return its status and what it promised."""
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={','.join(CALLS)}"]
    if inject is not None:
        command += ["-e", f"inject={inject}"]
    command += [sys.executable, "-B", "-m", "tests.crash.story", str(root)]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout.splitlines()


def calls(log: Path) -> list[tuple[str, str]]:
    """Return (name, arguments) of every traced call."""
    found = (_LINE.match(line) for line in log.read_text(errors="replace").splitlines())
    return [(match["name"], match["arguments"]) for match in found if match]


def points(log: Path, root: Path) -> list[tuple[str, int]]:
    """Return (name, how many of that name until then) of the calls that change files."""
    counts: Counter[str] = Counter()
    result = []
    begun = False
    for name, arguments in calls(log):
        counts[name] += 1
        begun = begun or (name.startswith("mkdir") and root.name in arguments)
        if begun and (name != "openat" or "O_CREAT" in arguments):
            result.append((name, counts[name]))
    return result


def sweep(scratch: Path, every: int) -> int:
    """Kill at every point (or every so many-th); return the number of points killed at."""
    recorded, killed = scratch / "recorded", 0
    status, _ = trace(recorded, scratch / "log")
    assert status == 0, "the story could not be told under strace"
    todo = points(scratch / "log", recorded)[::every]
    root, log = scratch / "root", scratch / "killed.log"
    for number, (name, when) in enumerate(todo, start=1):
        shutil.rmtree(root, ignore_errors=True)
        status, lines = trace(root, log, f"{name}:signal=SIGKILL:when={when}")
        seen = [call for call, _ in calls(log)]
        assert status in (-9, 137), f"{name} #{when}: not killed (status {status})"
        assert seen[-1] == name, f"{name} #{when}: killed at {seen[-1]}"
        assert seen.count(name) == when, f"{name} #{when}: killed at #{seen.count(name)}"
        audience = Audience()
        for line in lines:
            audience.hear(line)
        if root.exists():
            check_survivors(root, audience.promised).close()
        killed += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number}/{len(todo)} points")
    return killed


def main() -> int:
    """Run the sweep and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th point")
    arguments = parser.parse_args()
    if shutil.which("strace") is None:
        print("crash: strace is needed for the sweep at system calls", file=sys.stderr)
        return 1
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        killed = sweep(Path(scratch), arguments.every)
    print(f"crash: killed at {killed} system calls, every root whole or absent afterwards")
    return 0


if __name__ == "__main__":
    sys.exit(main())
