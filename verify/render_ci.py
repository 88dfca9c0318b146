"""Writes a report for code scanning (SARIF 2.1.0) and for test dashboards (JUnit XML).

In SARIF every check of the catalogue is a rule and every failed or undecided finding a result
with a stable fingerprint, so that a service recognises it in the next run. In JUnit every
check that ran is a test case: failed, skipped when undecided, or passed.
"""

from __future__ import annotations

import hashlib
import json
import urllib.parse
import xml.etree.ElementTree as ET

from verify.catalogue import CHECKS
from verify.report import Finding, Report, Status

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Status.FAIL: "error", Status.UNDECIDED: "warning", Status.NOTE: "note"}
_KINDS = {Status.FAIL: "fail", Status.UNDECIDED: "open", Status.NOTE: "informational"}


def sarif(report: Report) -> str:
    """Return the report as a SARIF log with one run."""
    rules = [
        {
            "id": check.id,
            "shortDescription": {"text": check.shows},
            "help": {"text": check.hint},
        }
        for check in CHECKS.values()
    ]
    order = {check: position for position, check in enumerate(CHECKS)}
    results = [
        {
            "ruleId": each.check,
            "ruleIndex": order[each.check],
            "kind": _KINDS[each.status],
            "level": _LEVELS[each.status] if each.status is Status.FAIL else "none",
            "message": {"text": _message(each)},
            "locations": [_location(report, each)],
            "partialFingerprints": {"sparkcacheVerify/v1": _fingerprint(each)},
        }
        for each in report.findings
        if each.status in _KINDS
    ]
    run = {
        "tool": {"driver": {"name": "sparkcache-verify", "rules": rules}},
        "results": results,
        "properties": {
            "verdict": report.verdict,
            "target": report.target,
            "base": report.base,
            "pins": report.anchor_sha256,
        },
        "invocations": [{"executionSuccessful": True, "exitCode": report.exit_code}],
        "columnKind": "unicodeCodePoints",
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def junit(report: Report) -> str:
    """Return the report as JUnit XML, one test case for each check that ran."""
    statuses = report.checks()
    suite = ET.Element(
        "testsuite",
        name=f"verify {report.kind}",
        tests=str(len(statuses)),
        failures=str(sum(status is Status.FAIL for status in statuses.values())),
        errors="0",
        skipped=str(sum(status is Status.UNDECIDED for status in statuses.values())),
        time="0",
    )
    for check, status in statuses.items():
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"verify.{report.kind}",
            name=f"{check} {CHECKS[check].shows}",
            time="0",
        )
        findings = [each for each in report.findings if each.check == check]
        if status is Status.FAIL:
            _add(case, "failure", [each for each in findings if each.status is Status.FAIL])
        elif status is Status.UNDECIDED:
            _add(case, "skipped", [each for each in findings if each.status is Status.UNDECIDED])
    suites = ET.Element("testsuites", name=f"verify {report.subject}")
    suites.append(suite)
    ET.indent(suites)
    text = ET.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _add(case: ET.Element, tag: str, findings: list[Finding]) -> None:
    element = ET.SubElement(case, tag, message=f"{len(findings)} findings")
    if tag == "failure":
        element.set("type", findings[0].check)
    element.text = "\n".join(
        f"{each.path}: {_message(each)}" if each.path else _message(each) for each in findings
    )


def _message(finding: Finding) -> str:
    parts = [finding.message]
    for label, value in (
        ("expected", finding.expected),
        ("found", finding.actual),
        ("next", finding.hint),
    ):
        if value is not None:
            parts.append(f"{label}: {value}")
    return "; ".join(parts)


def _location(report: Report, finding: Finding) -> dict[str, object]:
    # a subject as a whole is its own location; code scanning needs some file to show
    path = finding.path if finding.path is not None else report.subject
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": urllib.parse.quote(path.lstrip("/") or ".")},
            "region": {"startLine": 1},
        }
    }


def _fingerprint(finding: Finding) -> str:
    return hashlib.sha256(f"{finding.check}\0{finding.path or ''}".encode()).hexdigest()
