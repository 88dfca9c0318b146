"""Carries counts from both roles through vLLM's connector statistics to log and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from sparkcache_connector.telemetry.metrics import METRICS, Counts, Kind, combine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VALUES = "values"


class SparkCacheStats(KVConnectorStats):
    """What was counted since the last step: ``data`` is plain and survives serialisation."""

    @classmethod
    def taken_from(cls, counts: Counts) -> SparkCacheStats | None:
        """Everything counted so far, or None for nothing."""
        values = counts.take()
        return cls(data={_VALUES: values}) if values else None

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {_VALUES: []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge what another rank or step counted."""
        values = combine(self.data.get(_VALUES, ()), other.data.get(_VALUES, ()))
        return SparkCacheStats(data={_VALUES: values})

    def reduce(self) -> dict[str, int | float]:
        """One line of the periodic log."""
        return {
            name.removeprefix("sparkcache_") + ("." + ".".join(labels) if labels else ""): value
            for name, labels, value in self.data.get(_VALUES, ())
            if value
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data.get(_VALUES)


class SparkCachePromMetrics(KVConnectorPromMetrics):
    """The metrics of :mod:`.telemetry.metrics` as Prometheus collectors."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Several front-end processes show one engine: its last word counts, not one per process.
        options = {
            Kind.COUNTER: (metric_types[Counter], {}),
            Kind.GAUGE: (metric_types[Gauge], {"multiprocess_mode": "mostrecent"}),
        }
        self._collectors = {}
        for metric in METRICS.values():
            collector, more = options[metric.kind]
            self._collectors[metric.name] = collector(
                name=metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **more,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one step brought."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in transfer_stats_data.get(_VALUES, ()):
            collector = self._collectors[name].labels(*engine, *labels)
            if METRICS[name].kind is Kind.COUNTER:
                collector.inc(value)
            else:
                collector.set(value)
