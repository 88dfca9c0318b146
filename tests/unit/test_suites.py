"""The runner itself must not be able to call a broken run green."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import suites

JUNIT = """<testsuites><testsuite>
<testcase classname="t" name="good"/>
<testcase classname="t" name="bad"><failure message="no"/></testcase>
<testcase classname="t" name="broken"><error message="no"/></testcase>
<testcase classname="t" name="gone"><skipped message="no CUDA device"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    return path


def test_counts_failures_and_errors_alike(report: Path) -> None:
    outcome = suites.read_junit(report, [])
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)


def test_an_unlisted_skip_is_reported(report: Path) -> None:
    assert suites.read_junit(report, []).unlisted == ["t::gone: no CUDA device"]


def test_a_listed_skip_is_allowed(report: Path) -> None:
    allowed = suites.allowed_skips("# reason\nno CUDA device  # on machines without one\n")
    assert suites.read_junit(report, allowed).unlisted == []


@pytest.mark.parametrize(
    ("body", "ok"),
    [
        ("def test_a(): pass\n", True),
        ("def test_a(): assert False\n", False),
        ("", False),
        ("import pytest\ndef test_b(): pass\ndef test_a(): pytest.skip('why')\n", False),
    ],
    ids=["passing", "failing", "no tests at all", "unlisted skip"],
)
def test_a_suite_is_green_only_when_tests_ran_and_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, ok: bool
) -> None:
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (tmp_path / "test_it.py").write_text(body)
    suite = suites.Suite("x", "", pytest=("test_it.py",), python=sys.executable)
    assert suites.run(suite, [], set()).ok is ok


def test_an_unknown_suite_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        suites.main(["nonesuch"])
    assert stopped.value.code == 2
    assert "no suite named nonesuch; there are lint, unit" in capsys.readouterr().err


def test_a_target_that_two_suites_need_is_made_once_and_again_after_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (tmp_path / "Makefile").write_text("it:\n\t@echo made >> log\n\t@test -e good\n")
    suite, ready = suites.Suite("x", "", needs=("it",)), set[str]()
    assert not suites.run(suite, [], ready).ok
    (tmp_path / "good").touch()
    for _ in range(2):
        suites.run(suite, [], ready)
    assert (tmp_path / "log").read_text().splitlines() == ["made", "made"]


def test_tests_marked_full_are_left_to_their_own_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: long\n")
    marked = "import pytest\n@pytest.mark.full\ndef test_a(): assert False\n"
    (tmp_path / "test_it.py").write_text(marked + "def test_b(): pass\n")
    suite = suites.Suite("x", "", pytest=("test_it.py",), python=sys.executable)
    outcome = suites.run(suite, [], set())
    assert (outcome.ok, outcome.passed) == (True, 1)
