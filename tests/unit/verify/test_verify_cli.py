"""The command line: exit codes, formats, and answers that end with what to do."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.verify import small_target
from tests.unit.verify.small_target import World
from verify import cli

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_target.build(tmp_path_factory.mktemp("world"))


def run(world: World, *arguments: str | Path) -> int:
    return cli.main([*map(str, arguments), "--pins", str(world.pins / "pins.json")])


def test_a_pass_is_zero_and_says_so_last(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(world, "bundle", world.bundle) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("PASSED (")
    assert "base cuda-x86_64, state spark.1" in out


def test_a_failure_is_one_and_each_finding_says_what_to_do(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(world, "tree", world.release) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("FAILED (")
    failures = [at for at, line in enumerate(lines) if line.startswith("FAIL ")]
    assert failures
    for at in failures:
        assert any(line.strip().startswith("next ") for line in lines[at + 1 : at + 4])


def test_json_holds_every_finding(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(world, "tree", world.release, "--format", "json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "sparkcache.verify/v1"
    assert (report["verdict"], report["exit_code"]) == ("failed", 1)
    assert report["checks"]["PATCH-3"] == "fail"
    assert report["checks"]["TREE-1"] == "pass"
    found = [f for f in report["findings"] if f["check"] == "PATCH-3"]
    assert {f["path"] for f in found} == {"vllm/core/scheduler.py", "vllm/connector/base.py"}
    assert set(found[0]) == {"check", "status", "path", "message", "expected", "actual", "hint"}


def test_the_release_passes_as_upstream(world: World) -> None:
    assert run(world, "tree", world.release, "--state", "upstream") == 0
    assert run(world, "sdist", world.sdist) == 0


def test_an_interpreter_is_judged_without_being_started(world: World) -> None:
    # bin/python of the small world is a text file that no system could run
    assert run(world, "env", world.venv / "bin" / "python") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: KIND"),
        (["wheel"], "the following arguments are required: FILE"),
        (["rpm", "x"], "invalid choice: 'rpm'"),
        (["wheel", "x", "--form", "json"], "unrecognized arguments"),
        (["wheel", "x", "--format", "yaml"], "invalid choice: 'yaml'"),
        (["wheel", "x", "--known-startup", "abc"], "expected sha256:<64 hex digits>"),
    ],
)
def test_wrong_usage_is_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tree", "sdist", "wheel", "venv", "env", "bundle"])
def test_a_subject_that_is_not_there_is_two(
    world: World, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(world, kind, tmp_path / "none") == 2
    assert capsys.readouterr().err.startswith("verify: ")


@pytest.mark.parametrize("kind", ["tree", "venv", "bundle"])
def test_a_file_where_a_directory_belongs_is_two(world: World, kind: str) -> None:
    assert run(world, kind, world.sdist) == 2


@pytest.mark.parametrize("kind", ["sdist", "wheel", "env"])
def test_a_directory_where_a_file_belongs_is_two(world: World, kind: str) -> None:
    assert run(world, kind, world.tree) == 2


def test_an_unknown_base_is_two(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(world, "wheel", world.wheel, "--base", "rocm") == 2
    assert "known: cpu-x86_64, cuda-aarch64, cuda-x86_64" in capsys.readouterr().err


def test_an_internal_error_is_four_and_no_verdict(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "judge_wheel", broken)
    assert run(world, "wheel", world.wheel) == 4
    captured = capsys.readouterr()
    assert "internal error; nothing was decided" in captured.err
    assert captured.out == ""


def test_an_interrupt_is_130_and_no_verdict(world: World, tmp_path: Path) -> None:
    endless = tmp_path / "vllm-9.9.0.tar.gz"
    with endless.open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk, an hour of hashing
    process = subprocess.Popen(
        [sys.executable, "-m", "verify", "sdist", str(endless), "--pins", world.pins / "pins.json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until_open(process.pid, endless)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"")
    assert err == b"verify: interrupted; nothing was decided\n"


def wait_until_open(pid: int, file: Path) -> None:
    folder = Path(f"/proc/{pid}/fd")
    for _ in range(3000):
        with contextlib.suppress(OSError):
            if any(link.readlink() == file for link in folder.iterdir()):
                return
        time.sleep(0.01)
    raise AssertionError(f"{file} was never opened")


def test_the_module_runs_on_the_standard_library_alone(world: World) -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from verify.cli import main; "
            "sys.exit(main(sys.argv[1:]))",
            "bundle",
            str(world.bundle),
            "--pins",
            str(world.pins / "pins.json"),
        ],
        capture_output=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_a_file_name_cannot_write_to_the_terminal(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "\x1b[2Jevil\n.py").write_text("")
    assert run(world, "tree", tmp_path) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"vllm/\x1b[2Jevil\n.py" in out
