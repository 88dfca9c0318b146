"""Looks after one rank once a second, and describes it on its page of health.

A thread of its own, because it writes to the disk that the rank is about, and that disk may be
the one that hangs. It never waits for a lock that is held while the disk is waited for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

from sparkcache_connector.telemetry.health import Health, HealthPage
from sparkcache_connector.telemetry.metrics import Counts

_log = logging.getLogger("vllm.sparkcache.rank")
_SECONDS = 1.0
_FAILURES = {
    "restores": "sparkcache_restore_failures_total",
    "publications": "sparkcache_publication_failures_total",
    "roots": "sparkcache_unusable_roots_total",
}


class Watch:
    """One rank's observer.

    Args:
        rank: this rank, for labels.
        counts: where everything is counted; only read.
        off: why ``publish`` or ``restore`` does nothing at present.
        page: where the state is described.
    """

    def __init__(
        self,
        rank: int,
        counts: Counts,
        *,
        off: Callable[[], Mapping[str, str]],
        page: HealthPage,
    ) -> None:
        self._rank = rank
        self._counts = counts
        self._off = off
        self._page = page
        self._broken = False
        self._end = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._run, name="sparkcache-watch", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look once. A page that could not be written is not tried again."""
        if self._broken:
            return
        failures = {
            what: {labels[0]: int(value) for labels, value in self._counts.totals(name).items()}
            for what, name in _FAILURES.items()
        }
        try:
            self._page.write(Health(pid=os.getpid(), off=dict(self._off()), failures=failures))
        except OSError as error:
            _log.warning("the state of rank %d cannot be described: %s", self._rank, error)
            self._broken = True

    def close(self) -> None:
        """Look a last time and end."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            self.look()
            self._page.close()

    def _run(self) -> None:
        while not self._end.wait(_SECONDS):
            self.look()
