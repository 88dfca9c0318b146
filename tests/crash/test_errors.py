"""Each file operation of the story fails once, with each error that a disk can give.

Whatever fails, the story goes on: only the store's own errors come out, what was promised is
served byte-exactly, nothing else is, and the next maintenance accounts for every byte.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from sparkcache_connector.store import StoreError
from tests.crash.story import Audience, BufferedFiles, check_survivors, tell_story

ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]
PARTS = 4
# One error in the CI form meets every operation; `make crash` lets all of them meet all.
EVERY = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def tell_with_error(path: Path, point: int, error: int, *, lasting: bool) -> tuple[Audience, str]:
    count = -1
    failed = ""

    def observe(operation: str, arguments: tuple[object, ...]) -> None:
        nonlocal count, failed
        count += 1
        if count == point or (lasting and count > point):
            failed = failed or operation
            raise OSError(error, os.strerror(error))

    audience = Audience()
    tell_story(path, audience, BufferedFiles(observe), forgive=StoreError)
    return audience, failed


@pytest.fixture(scope="module")
def operations(scratch: Path) -> list[str]:
    names: list[str] = []
    files = BufferedFiles(lambda operation, arguments: names.append(operation))
    tell_story(scratch / "recording", Audience(), files)
    return names


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_failing_operation_costs_at_most_a_publication(
    operations: list[str], scratch: Path, part: int, lasting: bool
) -> None:
    path = scratch / "root"
    # A lasting error at one point is much like one at the next.
    step = PARTS if EVERY or not lasting else 3 * PARTS
    for point in range(part, len(operations), step):
        errors = ERRORS if EVERY else [ERRORS[(point // step) % len(ERRORS)]]
        for error in errors:
            shutil.rmtree(path, ignore_errors=True)
            audience, failed = tell_with_error(path, point, error, lasting=lasting)
            assert failed == operations[point]
            if path.exists():
                check_survivors(path, audience.promised).close()
