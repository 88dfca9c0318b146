"""The dashboard asks for metrics that there are, as what they are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkcache_connector.telemetry.metrics import METRICS, Kind

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "sparkcache.json").read_text())
ENGINE_LABELS = {"model_name", "engine"}


def strings(value: Any) -> Iterator[tuple[str, str]]:
    """Every string of the document with the name it has in its object."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str):
                yield name, inner
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


EXPRESSIONS = sorted(
    text for name, text in strings(DASHBOARD) if name in ("expr", "query") and "sparkcache" in text
)


def metrics_of(expression: str) -> list[str]:
    # A label's value may spell anything; a name outside quotes is a metric's.
    return re.findall(r"\bsparkcache\w*", re.sub(r'"[^"]*"', "", expression))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_of_an_expression_exists(expression: str) -> None:
    names = metrics_of(expression)
    assert names
    assert set(names) <= set(METRICS)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_label_of_an_expression_is_one_of_its_metrics(expression: str) -> None:
    known = set.intersection(
        *({*METRICS[n].labels, *ENGINE_LABELS} for n in metrics_of(expression))
    )
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = [
        label.strip()
        for labels in re.findall(r"\b(?:by|without) \(([^)]*)\)", expression)
        for label in labels.split(",")
    ]
    assert {*selected, *grouped} <= known


@pytest.mark.parametrize("expression", [e for e in EXPRESSIONS if "label_values" not in e])
def test_counters_are_rates_and_gauges_are_not(expression: str) -> None:
    for name in metrics_of(expression):
        is_rate = f"rate({name}{{" in expression
        assert is_rate == (METRICS[name].kind is Kind.COUNTER)


def test_every_metric_has_a_place_on_the_dashboard() -> None:
    assert {name for e in EXPRESSIONS for name in metrics_of(e)} == set(METRICS)


def test_legends_name_labels_that_their_expression_keeps() -> None:
    targets = [t for panel in DASHBOARD["panels"] for t in panel.get("targets", ())]
    assert len(targets) == len(EXPRESSIONS) - 1  # all but the template's query
    for target in targets:
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target["expr"]


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not covered & cells, panel["title"]
        assert max(x for x, _ in covered) < 24
        cells |= covered


@pytest.mark.parametrize("name", METRICS)
def test_every_declared_metric_is_counted_somewhere(name: str) -> None:
    sources = (ROOT / "sparkcache_connector").rglob("*.py")
    users = [p.name for p in sources if f'"{name}"' in p.read_text() and p.name != "metrics.py"]
    assert users
