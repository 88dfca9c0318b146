"""Every metric of the connector: name, kind, labels, help. The only list there is.

Names are Prometheus names. Both roles count into :class:`Counts`, which travels through
vLLM's connector statistics as plain data; whoever exports it looks names up here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

Value = int | float
# One series: metric name and its label values in the order of the metric's labels.
Series = tuple[str, tuple[str, ...]]


class Kind(StrEnum):
    """How values of a metric combine: counters add up, gauges replace."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric(
            "sparkcache_lookups_total",
            Kind.COUNTER,
            "Requests looked up once each: hit, miss, uncacheable or not_allowed.",
            ("outcome",),
        ),
        Metric(
            "sparkcache_uncacheable_total",
            Kind.COUNTER,
            "Requests whose content has no digest, by reason.",
            ("reason",),
        ),
        Metric(
            "sparkcache_restores_total",
            Kind.COUNTER,
            "Restores that ended on one rank: received, failed or cancelled.",
            ("outcome",),
        ),
        Metric(
            "sparkcache_restore_failures_total",
            Kind.COUNTER,
            "Restores that ended in recomputation, by reason.",
            ("reason",),
        ),
        Metric("sparkcache_restored_tokens_total", Kind.COUNTER, "Tokens not recomputed."),
        Metric("sparkcache_restored_bytes_total", Kind.COUNTER, "Authenticated bytes placed."),
        Metric("sparkcache_restore_seconds_total", Kind.COUNTER, "Time spent in restores."),
        Metric(
            "sparkcache_publications_total",
            Kind.COUNTER,
            "Publications that ended on one rank: stored, already_held, skipped or failed.",
            ("outcome",),
        ),
        Metric(
            "sparkcache_publication_failures_total",
            Kind.COUNTER,
            "Publications that were skipped or failed, by reason.",
            ("reason",),
        ),
        Metric(
            "sparkcache_publication_pages_total",
            Kind.COUNTER,
            "Pages of published roots: stored, or referenced in a base root.",
            ("kind",),
        ),
        Metric("sparkcache_published_bytes_total", Kind.COUNTER, "Bytes allocated on disk."),
        Metric("sparkcache_publication_seconds_total", Kind.COUNTER, "Time spent publishing."),
        Metric(
            "sparkcache_withdrawals_total",
            Kind.COUNTER,
            "Roots withdrawn because not every rank stored them.",
        ),
        Metric(
            "sparkcache_evictions_total",
            Kind.COUNTER,
            "Roots removed from a rank's store, by reason.",
            ("reason",),
        ),
        Metric(
            "sparkcache_proofs_refused_total",
            Kind.COUNTER,
            "Publication attempts that evidence poisoned, by reason.",
            ("reason",),
        ),
        Metric(
            "sparkcache_attempts_dropped_total",
            Kind.COUNTER,
            "Publication attempts given up without proof, by reason.",
            ("reason",),
        ),
        Metric(
            "sparkcache_inventory_reports_total",
            Kind.COUNTER,
            "Inventory reports of ranks: applied, resync or stale.",
            ("outcome",),
        ),
        Metric(
            "sparkcache_unusable_roots_total",
            Kind.COUNTER,
            "Roots that a rank found at its start and cannot serve, by reason.",
            ("reason",),
        ),
        Metric("sparkcache_roots", Kind.GAUGE, "Roots that every rank holds."),
        Metric("sparkcache_publications_held", Kind.GAUGE, "Publications whose blocks are held."),
        Metric("sparkcache_attempts", Kind.GAUGE, "Publication attempts that wait for proof."),
        Metric(
            "sparkcache_store_bytes", Kind.GAUGE, "Allocated bytes of a rank's store.", ("rank",)
        ),
        Metric(
            "sparkcache_switched_off",
            Kind.GAUGE,
            "1 while publish or restore is off, by reason, on a rank or on all of them.",
            ("what", "reason", "rank"),
        ),
    )
}


class Counts:
    """Thread-safe values of the metrics above, taken as plain data once per step.

    Raises:
        KeyError: a name that is not in :data:`METRICS`, or a number of labels that is not its.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Series, Value] = {}
        self._taken: dict[Series, Value] = {}

    def add(self, name: str, *labels: str, by: Value = 1) -> None:
        """Count; ``by`` must not be negative."""
        series = _series(name, labels, Kind.COUNTER)
        if by < 0:
            raise ValueError(f"{name} cannot go down (by {by})")
        with self._lock:
            self._values[series] = self._values.get(series, 0) + by

    def set(self, name: str, *labels: str, to: Value) -> None:
        """Set a gauge."""
        series = _series(name, labels, Kind.GAUGE)
        with self._lock:
            self._values[series] = to

    def take(self) -> list[tuple[str, tuple[str, ...], Value]]:
        """What was counted since the last call; counters start over."""
        with self._lock:
            if not self._values:
                return []
            values, self._values = self._values, {}
            for series, value in values.items():
                if METRICS[series[0]].kind is Kind.COUNTER:
                    self._taken[series] = self._taken.get(series, 0) + value
        return [(name, labels, value) for (name, labels), value in sorted(values.items())]

    def totals(self, name: str) -> dict[tuple[str, ...], Value]:
        """A counter's values since the start, by its labels, taken or not."""
        found: dict[tuple[str, ...], Value] = {}
        with self._lock:
            for values in (self._taken, self._values):
                for (metric, labels), value in values.items():
                    if metric == name:
                        found[labels] = found.get(labels, 0) + value
        return found


def combine(
    *parts: Iterable[tuple[str, tuple[str, ...], Value]],
) -> list[tuple[str, tuple[str, ...], Value]]:
    """Merge what several ranks or steps counted: counters add up, later gauges win."""
    merged: dict[Series, Value] = {}
    for part in parts:
        for name, labels, value in part:
            series = (name, tuple(labels))
            counter = METRICS[name].kind is Kind.COUNTER
            merged[series] = merged.get(series, 0) + value if counter else value
    return [(name, labels, value) for (name, labels), value in sorted(merged.items())]


def _series(name: str, labels: tuple[str, ...], kind: Kind) -> Series:
    metric = METRICS[name]
    if metric.kind is not kind or len(labels) != len(metric.labels):
        raise KeyError(f"{name} is a {metric.kind} with labels {metric.labels}, got {labels}")
    return name, labels
