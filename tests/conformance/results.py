"""Results of one suite under two builds, side by side: what differs, and what to print."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

Results = Mapping[str, str]
"""Test id to `passed`, `failed`, `error` or `skipped`."""

ORDER = ("passed", "failed", "error", "skipped", "missing")


def read_junit(xml: str) -> dict[str, str]:
    """Return the result of each case of a JUnit report.

    A case may be listed twice, when it failed and then its teardown too: the worst result counts.
    """
    results: dict[str, str] = {}
    worse = ("skipped", "passed", "failed", "error")
    for case in ET.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        result = "passed"
        for child, outcome in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            if case.find(child) is not None:
                result = outcome
        results[name] = max(results.get(name, result), result, key=worse.index)
    return results


@dataclass(frozen=True)
class Difference:
    """One test whose result depends on the build."""

    test: str
    stock: str
    patched: str


def differences(stock: Results, patched: Results) -> list[Difference]:
    """Return every test that has not the same result in both columns, sorted by id."""
    return [
        Difference(test, before, after)
        for test in sorted({*stock, *patched})
        if (before := stock.get(test, "missing")) != (after := patched.get(test, "missing"))
    ]


def table(stock: Results, patched: Results) -> str:
    """Return both columns counted per file, one line each, and the totals."""
    files = sorted({_file(test) for test in (*stock, *patched)})
    width = max([len(name) for name in files] + [len("total")])
    lines = [f"{'':{width}}  {'stock':>25}  {'patched':>25}", _counts("", width)]
    for name in files:
        columns = [
            Counter(result for test, result in results.items() if _file(test) == name)
            for results in (stock, patched)
        ]
        lines.append(_counts(name, width, *columns))
    lines.append(_counts("total", width, Counter(stock.values()), Counter(patched.values())))
    return "\n".join(lines)


def _file(test: str) -> str:
    module = test.partition("::")[0].removeprefix("tests.v1.")
    parts = module.split(".")
    # A class inside the module is the last part of JUnit's class name.
    return "/".join(part for part in parts if not part[:1].isupper())


def _counts(name: str, width: int, *columns: Counter[str]) -> str:
    shown = ("passed", "failed", "error", "skipped")
    if not columns:
        head = " ".join(f"{title:>5}" for title in ("pass", "fail", "error", "skip"))
        return f"{name:{width}}  {head:>25}  {head:>25}"
    cells = [" ".join(f"{column[key]:5}" for key in shown) for column in columns]
    return f"{name:{width}}  {cells[0]:>25}  {cells[1]:>25}"
