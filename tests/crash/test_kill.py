"""A writer is killed before each of its file operations, and in the middle of each write.

The points come from a recording run; a point where the child was not killed, or not at the
recorded operation, fails. The child is single-threaded, so a point is one place in the code.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.crash.story import Audience, BufferedFiles, check_survivors, tell_story

PARTS = 8


def record(path: Path) -> list[str]:
    operations: list[str] = []
    files = BufferedFiles(lambda operation, arguments: operations.append(operation))
    audience = Audience()
    tell_story(path, audience, files)
    check_survivors(path, audience.promised).close()
    return operations


def kill_at(path: Path, point: int, torn: bool) -> tuple[Audience, str, int]:
    """Tell the story in a child that kills itself at a point; return what it promised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            count = -1

            def observe(operation: str, arguments: tuple[object, ...]) -> None:
                nonlocal count
                count += 1
                if count != point:
                    return
                if torn:
                    descriptor, parts, offset = arguments
                    half = b"".join(map(bytes, parts))
                    os.pwritev(descriptor, [half[: len(half) // 2 // 512 * 512]], offset)
                os.write(writing, f"killed {operation}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

            tell_story(
                path,
                Audience(lambda line: os.write(writing, f"{line}\n".encode())),
                BufferedFiles(observe),
            )
        finally:
            os._exit(3)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    audience = Audience()
    killed = ""
    for line in lines:
        if line.startswith("killed "):
            killed = line.removeprefix("killed ")
        else:
            audience.hear(line)
    return audience, killed, status


@pytest.fixture(scope="module")
def operations(scratch: Path) -> list[str]:
    return record(scratch / "recording")


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_before_any_operation_only_whole_roots_are_served(
    operations: list[str], scratch: Path, part: int
) -> None:
    points = [(index, operation, False) for index, operation in enumerate(operations)]
    points += [(index, name, True) for index, name in enumerate(operations) if name == "write"]
    assert len(points) >= 300
    for index, operation, torn in points[part::PARTS]:
        path = scratch / "root"
        audience, killed, status = kill_at(path, index, torn)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert killed == operation, f"point {index} was not reached as recorded"
        if path.exists():
            check_survivors(path, audience.promised).close()
            shutil.rmtree(path)


def test_the_story_has_every_kind_of_operation(operations: list[str]) -> None:
    assert set(operations) == {
        "mkdir",
        "create",
        "allocate",
        "write",
        "sync",
        "sync_directory",
        "rename",
        "unlink",
    }
