"""Hundreds of mutations of a small world: each fails its own checks, no other, without a crash."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.verify import mutations, small_target
from tests.unit.verify.mutations import Mutation
from tests.unit.verify.small_target import World
from verify.catalogue import CHECKS
from verify.judges.bundle import judge_bundle
from verify.judges.case import Options
from verify.judges.site import judge_venv
from verify.judges.source import judge_sdist, judge_tree
from verify.judges.wheel import judge_wheel
from verify.report import Report, Status, Verdict

ALL = mutations.every()

JUDGES: dict[str, tuple[Callable[[Path, Options], Report], Callable[[World], Path]]] = {
    "wheel": (judge_wheel, lambda world: next(world.bundle.glob("vllm*.whl"))),
    "connector": (judge_wheel, lambda world: world.connector),
    "bundle": (judge_bundle, lambda world: world.bundle),
    "tree": (judge_tree, lambda world: world.tree),
    "sdist": (judge_sdist, lambda world: world.sdist),
    "venv": (judge_venv, lambda world: world.venv),
}
NEEDS = {
    "wheel": "bundle",
    "connector": "bundle",
    "bundle": "bundle",
    "tree": "tree",
    "venv": "venv",
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_target.build(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def world(pristine: World, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """A copy of what the test's subject needs."""
    mutation = request.node.callspec.params["mutation"]
    subject = mutation.subject
    copy = World(tmp_path)
    if mutation.anchor:
        shutil.copytree(pristine.home, copy.home)
    else:
        copy.home.symlink_to(pristine.home)
    if subject in NEEDS:
        shutil.copytree(pristine.root / NEEDS[subject], copy.root / NEEDS[subject])
    else:
        shutil.copy2(pristine.sdist, copy.sdist)
    return copy


@pytest.mark.parametrize("subject", JUDGES)
def test_every_untouched_subject_passes(pristine: World, subject: str) -> None:
    judge, place = JUDGES[subject]
    report = judge(place(pristine), Options(home=pristine.home))
    assert report.verdict is Verdict.PASSED, [f for f in report.findings if f.status == "fail"]


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_a_mutation_fails_its_own_checks_and_no_other(world: World, mutation: Mutation) -> None:
    mutation.apply(world)
    judge, place = JUDGES[mutation.subject]
    report = judge(place(world), Options(home=world.home))
    bad = [f for f in report.findings if f.status in (Status.FAIL, Status.UNDECIDED)]
    assert {finding.check for finding in bad} == mutation.expected, bad
    assert (report.exit_code == 0) == (not mutation.expected)
    for finding in bad:
        assert finding.hint, finding
        assert "\n" not in finding.message + (finding.path or "")


def test_there_are_hundreds_of_mutations_with_a_name_each() -> None:
    assert len(ALL) >= 200
    assert len({mutation.name for mutation in ALL}) == len(ALL)


def test_every_check_id_is_hit_by_a_mutation_or_by_a_named_test() -> None:
    hit = {check for mutation in ALL for check in mutation.expected}
    named = {
        "BASE-1",  # test_verify_anchor: no anchor, an anchor inside, another digest
        "PKG-16",  # test_verify_inplace: journals that are unfinished, foreign or damaged
        # test_verify_attestation has a table of forgeries, and a test that it hits every one
        *(check for check in CHECKS if check.startswith("ATT-")),
        # as has test_verify_image
        *(check for check in CHECKS if check.startswith("IMAGE-")),
    }
    assert hit | named == set(CHECKS)
    assert not hit & named


def test_the_documentation_lists_exactly_the_checks_of_the_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "verify.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([A-Z]+-\d+)` \|", text, re.MULTILINE)
    assert documented == list(CHECKS)
