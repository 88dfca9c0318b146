"""A place for thousands of short-lived cache roots."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A directory in memory, if there is one: these roots' own syncs need not reach a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)
