"""Writes a report for people and for programs: text and JSON."""

from __future__ import annotations

import json

from verify.report import Finding, Report, Status, Verdict, tally

REPORT_SCHEMA = "sparkcache.verify/v1"

_LABELS = {Status.FAIL: "FAIL", Status.UNDECIDED: "????", Status.NOTE: "note", Status.PASS: "ok"}
_VERDICTS = {
    Verdict.PASSED: "PASSED",
    Verdict.FAILED: "FAILED",
    Verdict.UNDECIDED: "UNDECIDED: required evidence is missing",
}


def text(report: Report) -> str:
    """Return the report as lines: passes, notes, then everything else; the verdict is last."""
    lines = [
        f"{report.kind} {report.subject}",
        f"  target {report.target or 'unknown'}, base {report.base or 'none'}, "
        f"state {report.state or 'unknown'}",
        f"  pins   {report.anchor_sha256 or 'none'} ({report.anchor})",
        "",
    ]
    for status in (Status.PASS, Status.NOTE, Status.UNDECIDED, Status.FAIL):
        lines.extend(line for each in report.with_status(status) for line in _finding(each))
    counts = tally(report.findings)
    summary = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    return "\n".join([*lines, "", f"{_VERDICTS[report.verdict]} ({summary})", ""])


def as_json(report: Report) -> str:
    """Return the report as one JSON object (docs/verify.md describes the schema)."""
    return (
        json.dumps(
            {
                "schema": REPORT_SCHEMA,
                "verdict": report.verdict,
                "exit_code": report.exit_code,
                "kind": report.kind,
                "subject": report.subject,
                "target": report.target,
                "base": report.base,
                "state": report.state,
                "anchor": {"found": report.anchor, "sha256": report.anchor_sha256},
                "checks": report.checks(),
                "findings": [
                    {
                        "check": each.check,
                        "status": each.status,
                        "path": each.path,
                        "message": each.message,
                        "expected": each.expected,
                        "actual": each.actual,
                        "hint": each.hint,
                    }
                    for each in report.findings
                ],
            },
            indent=1,
        )
        + "\n"
    )


def _finding(finding: Finding) -> list[str]:
    place = f"{finding.path}: " if finding.path else ""
    lines = [f"{_LABELS[finding.status]:<4} {finding.check:<10} {place}{finding.message}"]
    for label, value in (
        ("expected", finding.expected),
        ("found", finding.actual),
        ("next", finding.hint),
    ):
        if value is not None:
            lines.append(f"{'':15} {label:<8} {value}")
    return lines
