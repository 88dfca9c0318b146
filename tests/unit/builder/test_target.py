"""builder.target: intent is parsed, or refused by the name of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.target import BASES, Layout, Target, TargetError
from tests.small_target import COMMIT, NAME, TARGET_YAML, TOUCHED, SmallTarget

CHECKOUT = Path(__file__).resolve().parents[3]


def parse(text):
    return Target.parse(text.encode(), "target.yaml")


def test_reads_a_target():
    target = parse(TARGET_YAML)
    assert (target.name, target.version, target.commit, target.revision) == (
        NAME, "0.28.0", COMMIT, 1,
    )  # fmt: skip
    assert target.base_trailer == f"{NAME} {COMMIT}"
    assert target.bases["cpu-x86_64"].differs == ("vllm/platforms/__init__.py",)
    assert target.contract[TOUCHED] == ("Scheduler.schedule", "Scheduler.config")


def test_a_commit_may_be_unknown():
    assert parse(TARGET_YAML.replace(COMMIT, "null")).base_trailer == NAME


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("revision: 1", "revision: 1\nrevision: 2", "line 7: not YAML: the key 'revision' occurs"),
        ("differs: []}", "differs: [], differs: []}", "the key 'differs' occurs twice"),
        ("target/v1", "target/v2", "schema: expected 'sparkcache.target/v1', found"),
        ("version: 0.28.0", "version: 0.28", "version: expected text, found a float"),
        ("revision: 1", "revision: yes", "revision: expected a non-negative whole number, found"),
        ("revision: 1", "revision: 0", "revision: expected 1 or more"),
        (COMMIT, COMMIT[:39], "commit: expected 40 lower-case hex digits or null"),
        (COMMIT, "2026-01-01", "commit: expected text, found a date"),
        ("git: ", "gti: ", "the key 'git' is missing"),
        ("revision: 1", "revision: 1\nextra: 1", "unknown key 'extra'"),
        ("cpu-x86_64: {", "rocm: {", "bases.rocm: expected one of cuda-x86_64"),
        ("filename: vllm-0.28.0.tar.gz", "filename: ../x", "sdist.filename: expected a file's"),
        ("vllm/version.py: []", "tests/x.py: []", "expected a Python file below vllm/"),
        ("Scheduler.config]", "Scheduler.schedule]", "expected each symbol once"),
        ("[Scheduler.schedule,", "[1,", r"scheduler.py\[0\]: expected text, found the number 1"),
        ("sdist: {", "sdist: [", "line 7: not YAML"),
        ("revision: 1", "revision: *x", "not YAML: found undefined alias"),
        ("revision: 1", "revision: !!python/name:os.system", "not YAML: could not determine a"),
        ("schema", "\x00", "not YAML"),
    ],
)
def test_refuses(old, new, match):
    assert old in TARGET_YAML
    with pytest.raises(TargetError, match=match) as caught:
        parse(TARGET_YAML.replace(old, new, 1))
    assert str(caught.value).startswith("target.yaml: ")
    assert str(caught.value).endswith("docs/build.md describes the file")


@given(st.text(max_size=40))
def test_no_input_crashes_it(text):
    with pytest.raises(TargetError):
        Target.parse(text.encode("utf-8", "surrogatepass"), "target.yaml")


@pytest.mark.parametrize("name", ["v0.27.0", "../v0.28.0", "", "v0.28.0/", ".."])
def test_an_unknown_target_is_refused_and_the_known_ones_are_named(tmp_path, name):
    SmallTarget().write(tmp_path)
    with pytest.raises(TargetError, match=r"unknown target .*; known: v0\.28\.0 \("):
        Layout.open(tmp_path, name)


def test_a_target_in_anothers_folder_is_refused(tmp_path):
    SmallTarget(target_yaml=TARGET_YAML.replace("name: v0", "name: v1")).write(tmp_path)
    with pytest.raises(TargetError, match=r"name: expected 'v0\.28\.0', found 'v1\.28\.0'"):
        Layout.open(tmp_path, NAME).read_target()


def test_the_shipped_target_names_every_base():
    target = Layout.open(CHECKOUT, "v0.28.0").read_target()
    assert set(target.bases) == set(BASES)
    assert target.commit == "2cf0a6915ce544dc493a0990f2ea38d81601128a"
