"""Runs ``python -m builder`` where directories list their files in a random order.

``python -m tests.reproduce.shuffled SEED PLANT ARGUMENT …``. File systems promise no order;
most of them happen to keep one, which is how an unsorted listing survives on the machine of
whoever wrote it. PLANT is ``none``, or a defect to build in, so that the comparison can be
shown to see it: ``timestamp`` puts the clock, ``path`` the checkout's folder into an output.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from builder import package
from builder.cli import main

PLANTS = ("none", "timestamp", "path")


class _Shuffled:
    """What ``os.scandir`` returns, in another order."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Shuffled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release nothing: the real listing was read to its end."""


def shuffle_listings(seed: int) -> None:
    """Make every directory listing of this process come in an order that ``seed`` decides."""
    order = random.Random(seed)
    scandir, listdir = os.scandir, os.listdir

    def shuffled_scandir(path: Any = ".") -> _Shuffled:
        with scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        order.shuffle(found)
        return _Shuffled(found)

    def shuffled_listdir(path: Any = ".") -> list[Any]:
        found = sorted(listdir(path))
        order.shuffle(found)
        return found

    os.scandir = shuffled_scandir  # type: ignore[assignment]
    os.listdir = shuffled_listdir  # type: ignore[assignment]


def plant(defect: str) -> None:
    """Build a defect in that many builders have had."""
    real: Callable[..., bytes] = package.bom
    if defect == "timestamp":
        text = f"built {time.time_ns()}"
    elif defect == "path":
        text = f"built in {Path.cwd()}"
    else:
        return
    package.bom = lambda *args: real(*args).replace(  # type: ignore[assignment]
        b"vLLM with the SparkCache overlay", text.encode()
    )


if __name__ == "__main__":
    shuffle_listings(int(sys.argv[1]))
    plant(sys.argv[2])
    sys.exit(main(sys.argv[3:]))
