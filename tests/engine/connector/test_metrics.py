"""The metrics through vLLM's own Prometheus path: what is declared is what a scrape shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine environment (`make engine`)")

from prometheus_client import REGISTRY, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from sparkcache_connector.connector_stats import SparkCacheStats
from sparkcache_connector.telemetry.metrics import METRICS, Counts, Kind

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "sparkcache.json"
ENGINE_LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture(scope="module")
def prom() -> Iterator[Any]:
    """vLLM's registration of a connector's metrics, as a front end makes it."""
    transfer = KVTransferConfig(
        kv_connector="SparkCacheConnector",
        kv_connector_module_path="sparkcache_connector.connector",
        kv_role="kv_both",
    )
    config = SimpleNamespace(kv_transfer_config=transfer)
    before = set(REGISTRY._collector_to_names)
    yield KVConnectorProm(config, list(ENGINE_LABELS), {0: list(ENGINE_LABELS.values())})
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def counted_once() -> dict[str, Any]:
    """Every metric once, as it leaves an engine core: plain data, serialised."""
    counts = Counts()
    for metric in METRICS.values():
        labels = [f"some-{label}" for label in metric.labels]
        if metric.kind is Kind.COUNTER:
            counts.add(metric.name, *labels, by=2)
        else:
            counts.set(metric.name, *labels, to=7)
    stats = SparkCacheStats.taken_from(counts)
    assert stats is not None
    return json.loads(json.dumps(stats.data))


def test_a_scrape_shows_every_metric_under_its_name_with_the_engines_labels(prom: Any) -> None:
    prom.observe(counted_once())
    prom.observe(counted_once())
    for metric in METRICS.values():
        labels = ENGINE_LABELS | {label: f"some-{label}" for label in metric.labels}
        expected = 4 if metric.kind is Kind.COUNTER else 7
        assert REGISTRY.get_sample_value(metric.name, labels) == expected, metric.name


def test_the_dashboard_asks_for_names_that_a_scrape_shows(prom: Any) -> None:
    prom.observe(counted_once())
    shown = set(re.findall(r"^(sparkcache_\w+){", generate_latest().decode(), re.MULTILINE))
    asked = set(re.findall(r"sparkcache_\w+", DASHBOARD.read_text()))
    assert asked
    assert asked <= shown


def test_gauges_of_several_front_ends_are_one_series(prom: Any) -> None:
    for metric in METRICS.values():
        if metric.kind is Kind.GAUGE:
            collector = prom.prom_metrics._collectors[metric.name]
            assert collector._multiprocess_mode == "mostrecent"
