"""A bounded pool, and the one way in which an operation spreads over it and ends.

Whatever happens — an error, a cancel, a deadline — :func:`run_in_order` returns or raises
only after every task that had started is over. That is what lets the store promise that no
buffer is touched once a call has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from threading import Event, local
from typing import Final, TypeVar

from sparkcache_connector.store.errors import Reason, Stopped

T = TypeVar("T")

_WAKE_SECONDS: Final = 0.05
"""How often a waiting operation looks at its cancel event."""


class Stop:
    """Tells the tasks of one operation that it has ended: by its caller, its clock or an error."""

    def __init__(self, cancel: Event | None = None, deadline: float | None = None) -> None:
        self._cancel = cancel
        self._deadline = deadline
        self._failed = False

    def part(self) -> Stop:
        """Return a stop with the same cancel and deadline that can fail on its own."""
        return Stop(self._cancel, self._deadline)

    def fail(self) -> None:
        """End the operation because one of its tasks failed."""
        self._failed = True

    @property
    def waits(self) -> float | None:
        """Seconds that a wait may take before :meth:`check` has to be called again."""
        if self._cancel is None and self._deadline is None:
            return None
        if self._deadline is None:
            return _WAKE_SECONDS
        return max(0.0, min(_WAKE_SECONDS, self._deadline - time.monotonic()))

    def check(self) -> None:
        """Raise if the operation is to end.

        Raises:
            Stopped: reason ``cancelled`` or ``deadline``.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise Stopped(Reason.CANCELLED, "stopped by its caller (cancelled)")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise Stopped(Reason.DEADLINE, "stopped by its deadline (deadline)")
        if self._failed:
            raise Stopped(Reason.CANCELLED, "stopped by a failed part (cancelled)")


class Workers:
    """A pool of threads; with one worker, tasks run on the caller's thread, in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "sparkcache-io") if count > 1 else None
        self.scratch = local()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run a task on the pool."""
        assert self._pool is not None
        return self._pool.submit(task)

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def run_in_order(workers: Workers, stop: Stop, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run tasks on the pool and yield their results in the order of the tasks.

    Raises:
        Stopped: if ``stop`` says so; else the first error of a task. Tasks that have not
            started are then dropped and those that have are waited for.
    """
    if workers.count == 1:
        for task in tasks:
            stop.check()
            yield task()
        return
    part = stop.part()
    futures: list[Future[T]] = []
    try:
        futures.extend(workers.submit(partial(_guarded, part, task)) for task in tasks)
        for future in futures:
            yield _result(future, part)
    except Stopped as stopped:
        _drain(part, futures)
        raise (_first_error(futures) or stopped) from None
    finally:
        # Also when the consumer stops early: no task outlives the operation.
        _drain(part, futures)


def _guarded(stop: Stop, task: Callable[[], T]) -> T:
    stop.check()
    try:
        return task()
    except BaseException:
        stop.fail()
        raise


def _drain(stop: Stop, futures: Sequence[Future[T]]) -> None:
    stop.fail()
    for future in futures:
        future.cancel()
    wait(futures)


def _result(future: Future[T], stop: Stop) -> T:
    while True:
        try:
            return future.result(timeout=stop.waits)
        except FutureTimeoutError:
            if future.done():
                raise
            stop.check()


def _first_error(futures: Sequence[Future[T]]) -> BaseException | None:
    for future in futures:
        if future.done() and not future.cancelled():
            error = future.exception()
            if error is not None and not isinstance(error, Stopped):
                return error
    return None
