"""SARIF and JUnit: what code scanning and test dashboards read."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.unit.verify import small_target
from tests.unit.verify.small_target import World
from verify.catalogue import CHECKS
from verify.judges.case import Options
from verify.judges.source import judge_tree
from verify.judges.wheel import judge_wheel
from verify.render_ci import junit, sarif
from verify.report import Report, Status


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_target.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def failed(world: World) -> Report:
    return judge_tree(world.release, Options(home=world.home))


def test_sarif_has_a_rule_for_every_check_and_a_result_for_every_finding(failed: Report) -> None:
    log = json.loads(sarif(failed))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(CHECKS)
    failures = list(failed.with_status(Status.FAIL))
    results = [result for result in run["results"] if result["kind"] == "fail"]
    assert [result["ruleId"] for result in results] == [finding.check for finding in failures]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert (result["level"] == "error") == (result["kind"] == "fail")
    assert run["invocations"][0]["exitCode"] == 1


def test_sarif_fingerprints_are_stable_and_distinct(world: World, failed: Report) -> None:
    again = json.loads(sarif(judge_tree(world.release, Options(home=world.home))))
    prints = [
        [
            result["partialFingerprints"]["sparkcacheVerify/v1"]
            for result in log["runs"][0]["results"]
        ]
        for log in (json.loads(sarif(failed)), again)
    ]
    assert prints[0] == prints[1]
    assert len(set(prints[0])) == len(prints[0])


def test_sarif_paths_are_relative_uris(world: World, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a b#c.py").write_text("")
    log = json.loads(sarif(judge_tree(tmp_path, Options(home=world.home))))
    uris = {
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for result in log["runs"][0]["results"]
    }
    assert "vllm/a%20b%23c.py" in uris
    assert not any(uri.startswith("/") for uri in uris)


def test_junit_counts_checks_and_tells_what_failed(failed: Report) -> None:
    suite = ET.fromstring(junit(failed)).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    statuses = failed.checks()
    assert [case.get("name", "").split()[0] for case in cases] == list(statuses)
    failures = [case for case in cases if case.find("failure") is not None]
    expected = [check for check, status in statuses.items() if status is Status.FAIL]
    assert [case.get("name", "").split()[0] for case in failures] == expected
    assert suite.get("failures") == str(len(expected))
    text = failures[0].find("failure").text or ""  # type: ignore[union-attr]
    assert "expected: " in text
    assert "next: " in text


def test_junit_skips_what_is_undecided(world: World) -> None:
    report = judge_wheel(world.wheel, Options(home=Path("/nonexistent")))
    suite = ET.fromstring(junit(report)).find("testsuite")
    assert suite is not None
    assert suite.get("skipped") == "1"
    assert suite.find("testcase/skipped") is not None


def test_junit_of_hostile_names_is_xml(world: World, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "\x01<&]]>.py").write_text("")
    report = judge_tree(tmp_path, Options(home=world.home))
    assert "\\x01<&]]>.py" in "".join(ET.fromstring(junit(report)).itertext())
