"""`python -m builder port`: what it says, what it writes, and what it leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.cli import main
from builder.scratch import import_series
from builder.series import Series
from builder.source import SourceFile
from builder.target import Layout
from tests.small_checkout import make_checkout
from tests.small_target import MODULE, NAME, SCHEDULER, SERIES, TOUCHED, SmallTarget, generated

NEW = "v0.29.0"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("port") / "checkout")


@pytest.fixture
def checkout(template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout from which whatever a port writes is taken away again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(template / "cache"))
    yield template
    for folder in (Layout(template, NEW).folder, Layout(template, NEW).patches):
        shutil.rmtree(folder, ignore_errors=True)


def release(folder: Path, **files: bytes) -> Path:
    """The sdist of the next release: the small one with other files and another version."""
    small = SmallTarget()
    renumbered = {p: d.replace(b"0.28.0", b"0.29.0") for p, d in generated().items()}
    changed = small.files | {path: ("100644", data) for path, data in files.items()}
    new = SmallTarget(files=changed, generated=renumbered, top="vllm-0.29.0")
    place = folder / "vllm-0.29.0.tar.gz"
    place.write_bytes(new.sdist())
    return place


def port(checkout: Path, source: Path, *options: str) -> int:
    arguments = ["port", "--from", NAME, "--to", NEW, "--source", str(source), "--offline"]
    return main(["--checkout", str(checkout), *arguments, *options])


def test_a_series_that_fits_becomes_a_target_with_what_is_not_known_left_open(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = b"# one line more\n" + SCHEDULER
    assert port(checkout, release(tmp_path, **{TOUCHED: moved})) == 0
    said = capsys.readouterr()
    assert f"moved by +1        {TOUCHED}" in said.out
    summary = said.out.splitlines()[-1]
    assert summary.startswith(f"port: {NAME} -> {NEW}: ")
    assert summary.endswith(": fits; review the contract files")
    layout = Layout.open(checkout, NEW)
    target, old = layout.read_target(), Layout.open(checkout, NAME).read_target()
    assert (target.name, target.version, target.commit) == (NEW, "0.29.0", None)
    assert target.sdist is not None
    assert target.sdist.filename == "vllm-0.29.0.tar.gz"
    assert not target.bases
    assert target.contract == old.contract
    written = {
        str(path.relative_to(checkout)) for folder in (layout.folder, layout.patches)
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip
    assert written == {
        f"overlay/targets/{NEW}/target.yaml", f"patches/{NEW}/series", f"patches/{NEW}/{SERIES[0]}",
    }  # fmt: skip
    assert {line.partition("wrote ")[2] for line in said.err.splitlines() if "wrote" in line} == (
        written
    )
    # the series is one that the patch command takes: it applies exactly, and names its base
    series = Series.read(layout.patches, target.base_trailer)
    import_series(tmp_path / "scratch", [SourceFile(TOUCHED, "100644", moved)], series.patches, NEW)
    text = (tmp_path / "scratch" / TOUCHED).read_bytes()
    assert text.startswith(b"# one line more\n")
    assert b"step: int = 0" in text


def test_a_commit_that_is_known_is_written_down(checkout: Path, tmp_path: Path) -> None:
    commit = "a" * 40
    assert port(checkout, release(tmp_path), "--commit", commit) == 0
    layout = Layout.open(checkout, NEW)
    assert layout.read_target().commit == commit
    assert f"Base: {NEW} {commit}".encode() in (layout.patches / SERIES[0]).read_bytes()


def test_a_conflict_writes_nothing_and_names_file_and_contract(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SCHEDULER.replace(b"schedule(self) -> list[int]", b"plan(self) -> tuple[int, ...]")
    assert port(checkout, release(tmp_path, **{TOUCHED: other})) == 1
    out = capsys.readouterr().out
    assert f"conflict           {TOUCHED}" in out
    assert f"changed {TOUCHED}" in out
    assert out.rstrip().endswith("does not fit")
    assert not Layout(checkout, NEW).folder.exists()
    assert not Layout(checkout, NEW).patches.exists()


def test_a_module_that_the_release_has_itself_is_a_conflict(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert port(checkout, release(tmp_path, **{MODULE: b"theirs = 1\n"})) == 1
    assert f"{MODULE}: we add this file, the new release has one" in capsys.readouterr().out


def test_a_dry_run_reports_and_writes_nothing(checkout: Path, tmp_path: Path) -> None:
    assert port(checkout, release(tmp_path), "--dry-run") == 0
    assert not Layout(checkout, NEW).folder.exists()


def test_a_target_that_was_begun_is_never_overwritten(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = release(tmp_path)
    assert port(checkout, source) == 0
    text = Layout(checkout, NEW).target_yaml.read_bytes()
    Layout(checkout, NEW).target_yaml.write_bytes(text + b"# completed by hand\n")
    assert port(checkout, source) == 1
    assert "the target was begun already" in capsys.readouterr().err
    assert Layout(checkout, NEW).target_yaml.read_bytes().endswith(b"# completed by hand\n")
