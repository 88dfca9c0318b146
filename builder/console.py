"""What the builder tells a person while it works: lines and bars on standard error.

Results go to standard output and are printed by the commands themselves. A bar is drawn on
a terminal only; elsewhere the same progress is a line when it starts and one when it ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

_REDRAW_SECONDS = 0.1
_BAR_WIDTH = 24


class Advance(Protocol):
    """Hears of bytes done since the last call."""

    def __call__(self, amount: int, /) -> None:
        """Add ``amount``."""


class Console:
    """Writes lines and progress to one stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()

    def say(self, line: str) -> None:
        """Write one line."""
        self._stream.write(line + "\n")
        self._stream.flush()

    @contextmanager
    def progress(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Show progress over ``total`` bytes, ``done`` of them before the start."""
        bar = _Bar(self._stream, label, total, done) if self._terminal else None
        state = [done]
        start = time.monotonic()
        if bar is None:
            resumed = f", resuming at {_size(done)}" if done else ""
            self.say(f"{label}: {_size(total)}{resumed}")

        def advance(amount: int) -> None:
            state[0] += amount
            if bar is not None:
                bar.draw(state[0])

        try:
            yield advance
        except BaseException:
            if bar is not None:
                bar.clear()
            raise
        if bar is not None:
            bar.clear()
        seconds = time.monotonic() - start
        self.say(f"{label}: done, {_size(state[0])} in {seconds:.1f} s")


class _Bar:
    def __init__(self, stream: TextIO, label: str, total: int, done: int) -> None:
        self._stream = stream
        self._label = label
        self._total = max(total, 1)
        self._first = done
        self._start = time.monotonic()
        self._last = 0.0

    def draw(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last < _REDRAW_SECONDS:
            return
        self._last = now
        share = min(done / self._total, 1.0)
        filled = int(share * _BAR_WIDTH)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        rate = (done - self._first) / max(now - self._start, 1e-9)
        self._stream.write(
            f"\r\x1b[K{self._label} [{bar}] {share:4.0%} {_size(done)} {_size(int(rate))}/s"
        )
        self._stream.flush()

    def clear(self) -> None:
        self._stream.write("\r\x1b[K")
        self._stream.flush()


def _size(amount: int) -> str:
    if amount < 1_000_000:
        return f"{amount / 1_000:.1f} kB"
    return f"{amount / 1_000_000:.1f} MB"
