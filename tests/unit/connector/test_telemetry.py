import dataclasses
import json
import re
import threading

import pytest

from sparkcache_connector.telemetry.metrics import METRICS, Counts, Kind, combine
from sparkcache_connector.telemetry.records import (
    SCHEMAS,
    PublicationRecord,
    RestoreRecord,
    json_schema,
    to_json,
)


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda m: m.name)
def test_names_are_prometheus_names_and_counters_say_so(metric):
    assert re.fullmatch(r"sparkcache_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.help.endswith(".")
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)


def test_counters_add_up_and_are_taken_once():
    counts = Counts()
    counts.add("sparkcache_lookups_total", "hit")
    counts.add("sparkcache_lookups_total", "hit", by=2)
    counts.set("sparkcache_roots", to=5)
    counts.set("sparkcache_roots", to=4)
    assert counts.take() == [
        ("sparkcache_lookups_total", ("hit",), 3),
        ("sparkcache_roots", (), 4),
    ]
    assert counts.take() == []


def test_what_ranks_counted_is_merged_by_kind():
    one = [("sparkcache_restored_bytes_total", (), 10), ("sparkcache_roots", (), 1)]
    two = [("sparkcache_restored_bytes_total", (), 5), ("sparkcache_roots", (), 2)]
    assert combine(one, two) == [
        ("sparkcache_restored_bytes_total", (), 15),
        ("sparkcache_roots", (), 2),
    ]


def test_taken_counts_survive_serialisation():
    counts = Counts()
    counts.add("sparkcache_lookups_total", "miss")
    taken = counts.take()
    assert combine(json.loads(json.dumps(taken))) == taken


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.add("sparkcache_unheard_of_total"),
        lambda c: c.add("sparkcache_lookups_total"),
        lambda c: c.add("sparkcache_lookups_total", "a", "b"),
        lambda c: c.add("sparkcache_roots"),
        lambda c: c.set("sparkcache_lookups_total", "hit", to=1),
    ],
)
def test_undeclared_series_are_programming_errors(use):
    with pytest.raises(KeyError):
        use(Counts())


def test_counters_never_go_down():
    with pytest.raises(ValueError, match="cannot go down"):
        Counts().add("sparkcache_restored_bytes_total", by=-1)


def test_counting_from_many_threads_loses_nothing():
    counts = Counts()

    def count():
        for _ in range(2_000):
            counts.add("sparkcache_restored_tokens_total")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.take() == [("sparkcache_restored_tokens_total", (), 8_000)]


VALUES = {"str": "x", "int": 3, "float": 1.23456, "bool": True}
PYTHON = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


@pytest.mark.parametrize("kind", [RestoreRecord, PublicationRecord])
def test_record_is_one_line_that_its_json_schema_describes(kind):
    record = kind(**{f.name: VALUES[str(f.type)] for f in dataclasses.fields(kind)})
    line = to_json(record)
    assert "\n" not in line
    document, schema = json.loads(line), json_schema(kind)
    assert sorted(document) == schema["required"] == sorted(schema["properties"])
    for name, rule in schema["properties"].items():
        if name == "schema":
            assert document[name] == rule["const"] == SCHEMAS[kind]
        else:
            assert isinstance(document[name], PYTHON[rule["type"]])
    assert 1.235 in document.values()
