"""What the conformance gate reads, compares and prints."""

from __future__ import annotations

import tarfile
import time
from io import BytesIO
from pathlib import Path

import pytest

from tests.conformance import columns
from tests.conformance.results import Difference, differences, read_junit, table

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.v1.core.test_a" name="test_one[x-1]"/>
<testcase classname="tests.v1.core.test_a.TestGroup" name="test_two"><failure/></testcase>
<testcase classname="tests.v1.core.test_a" name="test_three"><skipped/></testcase>
<testcase classname="tests.v1.core.test_b" name="test_four"/>
<testcase classname="tests.v1.core.test_b" name="test_four"><error>teardown</error></testcase>
<testcase classname="" name="tests.v1.core.test_c"><error>collection</error></testcase>
</testsuite></testsuites>"""


def test_a_case_reported_twice_counts_by_its_worst_result() -> None:
    assert read_junit(REPORT) == {
        "tests.v1.core.test_a::test_one[x-1]": "passed",
        "tests.v1.core.test_a.TestGroup::test_two": "failed",
        "tests.v1.core.test_a::test_three": "skipped",
        "tests.v1.core.test_b::test_four": "error",
        "::tests.v1.core.test_c": "error",
    }


def test_every_other_result_is_a_difference_and_an_absent_test_too() -> None:
    stock = {"a": "passed", "b": "failed", "c": "skipped", "d": "passed", "f": "failed"}
    patched = {"a": "passed", "b": "passed", "c": "passed", "e": "passed", "f": "failed"}

    assert differences(stock, patched) == [
        Difference("b", "failed", "passed"),
        Difference("c", "skipped", "passed"),
        Difference("d", "passed", "missing"),
        Difference("e", "missing", "passed"),
    ]


def test_the_table_has_both_columns_per_file_and_in_total() -> None:
    stock = read_junit(REPORT)
    patched = dict.fromkeys(stock, "passed")

    lines = [line.split() for line in table(stock, patched).splitlines()]

    assert ["core/test_a", "1", "1", "0", "1", "3", "0", "0", "0"] in lines
    assert ["core/test_b", "0", "0", "1", "0", "1", "0", "0", "0"] in lines
    assert lines[-1] == ["total", "1", "1", "2", "1", "5", "0", "0", "0"]


def test_the_fixed_part_names_tests_of_the_release_without_repeats() -> None:
    paths = columns.fixed_part()

    assert len(paths) == len(set(paths))
    assert all(path.startswith(columns.FULL) for path in paths)


def test_tests_and_examples_are_unpacked_with_upstreams_markers(tmp_path: Path) -> None:
    sdist = tmp_path / "vllm-0.28.0.tar.gz"
    project = (
        '[tool.pytest.ini_options]\nmarkers = [\n    "slow_test",\n    "split: in parts",\n]\n'
    )
    files = {
        "pyproject.toml": project,
        "tests/v1/core/test_a.py": "a",
        "examples/b.py": "b",
        "vllm/__init__.py": "must not shadow the installed package",
    }
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-0.28.0/{name}")
            member.size = len(text)
            archive.addfile(member, BytesIO(text.encode()))

    columns.unpack(sdist, tmp_path / "scratch")

    found = {
        path.relative_to(tmp_path / "scratch").as_posix()
        for path in (tmp_path / "scratch").rglob("*")
        if path.is_file()
    }
    assert found == {"pytest.ini", "tests/v1/core/test_a.py", "examples/b.py"}
    assert (tmp_path / "scratch" / "pytest.ini").read_text() == (
        "[pytest]\nmarkers =\n    slow_test\n    split: in parts\n"
    )


def test_a_build_whose_pytest_cannot_start_is_not_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr("tests.support.engine_env.interpreter", lambda name: broken)

    with pytest.raises(RuntimeError, match=r"(?s)under stock ended with 4.*no such interpreter"):
        columns.run(["stock"], ["tests"], tmp_path, tmp_path, tmp_path / "out")


def _stuck(path: Path) -> Path:
    """An interpreter that says something once and then nothing for a minute."""
    path.write_text("#!/bin/sh\necho '.... [ 12%]'\nexec sleep 60\n")
    path.chmod(0o755)
    return path


def test_a_pytest_that_falls_silent_is_ended_and_its_last_words_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = _stuck(tmp_path / "python")
    monkeypatch.setattr("tests.support.engine_env.interpreter", lambda name: stuck)
    monkeypatch.setattr(columns, "_SILENCE", 2)
    monkeypatch.setattr(columns, "_NEWS", 1)
    started = time.monotonic()

    with pytest.raises(RuntimeError, match=r"(?s)under stock hangs.*12%"):
        columns.run(["stock"], ["tests"], tmp_path, tmp_path, tmp_path / "out")

    assert time.monotonic() - started < 30
    assert "after 0 min: stock 12%" in capsys.readouterr().err
