"""`python -m builder build` as a person runs it: exit codes, last lines, and what stays behind."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small_checkout import make_checkout
from tests.small_target import NAME

BASE = "cpu-x86_64"
SLOW_JUDGE = """
import pathlib, time
pathlib.Path("judging").touch()
time.sleep(60)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which one bundle was built."""
    checkout = make_checkout(tmp_path_factory.mktemp("template") / "checkout")
    done = run(checkout, "--base", BASE)
    assert done.returncode == 0, done.stderr
    return checkout


@pytest.fixture
def checkout(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "checkout"))


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {
        "XDG_CACHE_HOME": str(checkout / "cache"),
        "XDG_CONFIG_HOME": str(checkout / "config"),
        # These tests change the checkout's sources, and cut off what is written.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "builder", "build", "--target", NAME, "--offline", *options]


def run(
    checkout: Path, *options: str, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options),
        cwd=checkout,
        env=environment(checkout),
        preexec_fn=before,
        capture_output=True,
        text=True,
        check=False,
    )


def published(checkout: Path) -> dict[str, bytes]:
    """Every file below ``dist``, hidden ones too."""
    dist = checkout / "dist"
    return {str(f.relative_to(dist)): f.read_bytes() for f in dist.rglob("*") if f.is_file()}


def test_all_bases_are_built_and_one_summary_line_is_last(checkout: Path) -> None:
    done = run(checkout, "--base", "all")
    assert done.returncode == 0
    (summary,) = done.stdout.splitlines()
    assert summary.startswith("build: vLLM 0.28.0+spark.1 for cpu-x86_64, cuda-x86_64: judged and")
    assert {path.name for path in (checkout / "dist" / NAME).iterdir()} == {
        "cpu-x86_64",
        "cuda-x86_64",
        "verify.pyz",
    }


def test_building_again_changes_no_byte(checkout: Path) -> None:
    before = published(checkout)
    assert run(checkout, "--base", BASE).returncode == 0
    assert published(checkout) == before


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--base", "cuda-riscv"), 2, "unknown base 'cuda-riscv'; known: all, cpu-x86_64, cuda-"),
        (("--source", "tarball"), 2, "invalid choice: 'tarball'"),
        (("--target", "v9.9.9"), 1, "unknown target 'v9.9.9'; known: v0.28.0"),
    ],
)
def test_unknown_words_are_answered_with_the_known_ones(
    checkout: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    done = run(checkout, *options)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_download_is_named_when_offline(checkout: Path) -> None:
    shutil.rmtree(checkout / "cache")
    done = run(checkout, "--base", BASE)
    assert done.returncode == 1
    assert "run once without --offline" in done.stderr


def test_bundle_that_the_judge_refuses_stays_unpublished(checkout: Path) -> None:
    before = published(checkout)
    # the judge's own source is part of verify.pyz, so only its answer may differ here
    main = checkout / "verify" / "__main__.py"
    main.write_text("import sys\nprint('FAILED PKG-5: planted')\nsys.exit(1)\n")
    done = run(checkout, "--base", BASE)
    assert done.returncode == 1
    assert "FAILED PKG-5: planted" in done.stderr
    assert "nothing was published" in done.stderr
    assert published(checkout) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_leaves_the_earlier_bundle_alone(checkout: Path, number: int) -> None:
    before = published(checkout)
    (checkout / "verify" / "__main__.py").write_text(SLOW_JUDGE)
    with subprocess.Popen(
        command("--base", BASE),
        cwd=checkout,
        env=environment(checkout),
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (checkout / "judging").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, number)  # a terminal signals the whole group
        assert process.wait(30) == 130
    assert published(checkout) == before


def test_killed_build_is_cleaned_up_by_the_next_one(checkout: Path) -> None:
    before = published(checkout)
    judge = (checkout / "verify" / "__main__.py").read_bytes()
    (checkout / "verify" / "__main__.py").write_text(SLOW_JUDGE)
    with subprocess.Popen(
        command("--base", BASE),
        cwd=checkout,
        env=environment(checkout),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (checkout / "judging").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    debris = published(checkout).keys() - before.keys()
    assert debris
    assert all(f".{BASE}.partial" in path for path in debris)
    (checkout / "verify" / "__main__.py").write_bytes(judge)
    assert run(checkout, "--base", BASE).returncode == 0
    assert published(checkout) == before


def test_full_disk_is_named_and_nothing_is_left(checkout: Path) -> None:
    before = published(checkout)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = run(checkout, "--base", BASE, before=limit)
    assert done.returncode == 1
    assert ".whl: cannot be written: File too large" in done.stderr
    assert "an earlier output stays as it was" in done.stderr
    assert published(checkout) == before


def test_output_folder_that_cannot_be_written_is_named(checkout: Path) -> None:
    done = run(checkout, "--base", BASE, "--out", "/sys/sparkcache")
    assert done.returncode == 1
    assert "/sys/sparkcache/v0.28.0: cannot be written: " in done.stderr
    assert "--out" in done.stderr
    assert "Traceback" not in done.stderr
