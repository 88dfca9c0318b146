"""Where the pins come from, and what the answer is without them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.verify import small_target
from tests.unit.verify.small_target import World
from verify.anchor import Origin, find
from verify.errors import ConfigError, FormatError
from verify.judges.bundle import judge_bundle
from verify.judges.case import Options
from verify.judges.site import judge_venv
from verify.judges.source import judge_sdist, judge_tree
from verify.judges.wheel import judge_wheel
from verify.report import Report, Status, Verdict

NOWHERE = Path("/nonexistent")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_target.build(tmp_path_factory.mktemp("world"))


def undecided(report: Report) -> set[str]:
    return {finding.check for finding in report.with_status(Status.UNDECIDED)}


def failed(report: Report) -> set[str]:
    return {finding.check for finding in report.with_status(Status.FAIL)}


def test_without_an_anchor_every_consistent_subject_is_undecided(world: World) -> None:
    nothing = Options(home=NOWHERE)
    reports = [
        judge_wheel(world.wheel, nothing),
        judge_wheel(world.connector, nothing),
        judge_bundle(world.bundle, nothing),
        judge_venv(world.venv, nothing),
        judge_tree(world.tree, nothing),
        judge_sdist(world.sdist, nothing),
    ]
    for report in reports:
        assert report.exit_code == 3
        assert "BASE-1" in undecided(report)
        assert not failed(report)


def test_without_an_anchor_an_inconsistent_wheel_fails(world: World, tmp_path: Path) -> None:
    members = small_target.unzipped(world.wheel.read_bytes())
    members["vllm/crlf.py"] = (small_target.F, b"other")
    file = tmp_path / world.wheel.name
    file.write_bytes(small_target.zipped(members))
    assert failed(judge_wheel(file, Options(home=NOWHERE))) == {"PKG-5"}


def test_without_an_anchor_a_forged_bundle_fails_by_its_receipt(
    world: World, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(world.bundle, bundle)
    (bundle / "NOTICE").write_text("other")
    assert failed(judge_bundle(bundle, Options(home=NOWHERE))) == {"PKG-11"}


def test_pins_inside_the_subject_authenticate_nothing(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.tree, tmp_path / "tree")
    shutil.copytree(world.home, tmp_path / "tree" / "home")
    report = judge_tree(tmp_path / "tree", Options(home=tmp_path / "tree" / "home"))
    assert "BASE-1" in undecided(report)


def test_pins_inside_the_subject_count_when_their_digest_is_given_by_hand(
    world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.root, tmp_path / "all")
    inside = World(tmp_path / "all")
    digest = small_target.sha256((world.pins / "pins.json").read_bytes())
    asked = Options(home=inside.home, pins=f"sha256:{digest}")
    anchor = find(asked.pins, None, [inside.root], inside.home)
    assert anchor is not None
    assert anchor.inside
    assert anchor.authenticated


def test_other_pins_than_those_asked_for_fail(world: World) -> None:
    report = judge_wheel(world.wheel, Options(home=world.home, pins="sha256:" + "0" * 64))
    assert failed(report) == {"BASE-1"}
    assert report.exit_code == 1


def test_pins_given_as_a_file_are_used_with_what_lies_beside_them(world: World) -> None:
    report = judge_wheel(world.wheel, Options(home=NOWHERE, pins=str(world.pins / "pins.json")))
    assert report.verdict is Verdict.PASSED
    assert report.anchor.startswith(Origin.GIVEN)


def test_pins_given_as_a_lone_file_lack_their_manifests(world: World, tmp_path: Path) -> None:
    shutil.copy(world.pins / "pins.json", tmp_path / "pins.json")
    report = judge_wheel(world.wheel, Options(pins=str(tmp_path / "pins.json")))
    assert failed(report) == {"BASE-2", "BASE-3"}


@pytest.mark.parametrize("given", ["sha256:", "sha256:" + "0" * 63, "no-such-file", "."])
def test_a_pins_option_that_names_nothing_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a pins\.json or sha256"):
        find(given, None, [])


def test_an_unknown_target_is_refused_with_the_known_ones(world: World) -> None:
    with pytest.raises(ConfigError, match=r"--target v1: there is no such target; known: v9\.9\.0"):
        find(None, "v1", [], world.home)


def test_a_given_target_must_be_that_of_the_given_pins(world: World) -> None:
    with pytest.raises(ConfigError, match=r"--target v1: the pins in .* are those of v9\.9\.0"):
        find(str(world.pins / "pins.json"), "v1", [])


def test_several_targets_must_be_told_apart(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.home, tmp_path / "home")
    shutil.copytree(world.pins, tmp_path / "home/overlay/targets/v9.9.1")
    with pytest.raises(ConfigError, match=r"found v9\.9\.0, v9\.9\.1: name one with --target"):
        find(None, None, [], tmp_path / "home")


def test_a_target_without_pins_is_refused(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.home, tmp_path / "home")
    (tmp_path / "home/overlay/targets/v9.9.0/pins.json").unlink()
    with pytest.raises(ConfigError, match="the target has no pins"):
        find(None, None, [], tmp_path / "home")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not JSON"),
        (b'{"schema":1}\n', "expected text"),
        (b'{"schema":"sparkcache.pins/v2"}\n', "expected 'sparkcache.pins/v1'"),
        (b'{ "a": 1 }\n', "expected canonical JSON"),
        (b'{"a":1,"a":2}\n', "the key occurs twice"),
        (b"[" * 100_000, "not JSON that we accept"),
        (b'{"a":' + b"9" * 5000 + b"}\n", "not JSON that we accept"),
        (b"\xff\n", "expected UTF-8"),
    ],
)
def test_pins_that_are_no_pins_are_refused(
    world: World, tmp_path: Path, data: bytes, problem: str
) -> None:
    shutil.copytree(world.home, tmp_path / "home")
    (tmp_path / "home/overlay/targets/v9.9.0/pins.json").write_bytes(data)
    with pytest.raises(FormatError, match=problem):
        find(None, None, [], tmp_path / "home")


def test_an_unproven_commit_is_a_note(world: World, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(world.home, home)
    shutil.rmtree(home / "overlay/targets/v9.9.0/objects")
    pins = small_target.pins()
    pins["commit"]["status"] = "unproven"
    (home / "overlay/targets/v9.9.0/pins.json").write_bytes(small_target.canonical(pins))
    report = judge_wheel(world.wheel, Options(home=home))
    assert report.verdict is Verdict.PASSED
    notes = [note.message for note in report.with_status(Status.NOTE) if note.check == "BASE-3"]
    assert len(notes) == 1
    assert notes[0].startswith("unproven: the pins claim commit ")


def test_missing_patch_files_are_a_note_as_their_results_are_pinned(
    world: World, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(world.home, home)
    shutil.rmtree(home / "patches")
    report = judge_wheel(world.wheel, Options(home=home))
    assert report.verdict is Verdict.PASSED
    assert "PATCH-1" in {note.check for note in report.with_status(Status.NOTE)}
