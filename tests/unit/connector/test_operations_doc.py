from dataclasses import fields
from pathlib import Path

import pytest

from sparkcache_connector.config import Config
from sparkcache_connector.telemetry.metrics import METRICS
from sparkcache_connector.telemetry.records import SCHEMAS

TEXT = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


@pytest.mark.parametrize("option", [f"`spark_cache_{f.name}`" for f in fields(Config)])
def test_every_option_is_documented(option):
    assert f"| {option} |" in TEXT


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda m: m.name)
def test_every_metric_is_documented_as_it_is(metric):
    labels = ", ".join(metric.labels) or "–"
    assert f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |" in TEXT


@pytest.mark.parametrize("record", SCHEMAS, ids=lambda r: r.__name__)
def test_every_field_of_a_record_is_documented(record):
    assert SCHEMAS[record] in TEXT
    for field in fields(record):
        assert f"| `{field.name}` | {field.type} |" in TEXT
