"""The engine environments' script: what it refuses, and when it does nothing."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path

import pytest

from tests.support import engine_env
from tests.support.engine_env import EngineError

ROOT = Path(__file__).resolve().parents[3]


def test_another_python_is_refused_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 2, "final", 0))

    with pytest.raises(EngineError, match=r"Python 3\.11, 3\.12 or 3\.13 expected"):
        engine_env.make(["stock"], tmp_path / ".engine")

    assert not (tmp_path / ".engine").exists()


def test_another_machine_is_refused_and_told_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")

    with pytest.raises(EngineError, match=r"linux x86_64, found linux riscv64.*`make build`"):
        engine_env.make(["stock"], tmp_path)


def test_a_full_disk_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_env, "SPACE", 1 << 80)

    with pytest.raises(EngineError, match="free disk expected"):
        engine_env.make(["stock"], tmp_path / ".engine")

    assert not (tmp_path / ".engine").exists()


@pytest.mark.parametrize("wheels", [[], ["vllm-1.whl", "vllm-2.whl"]])
def test_not_exactly_one_wheel_names_what_was_found(tmp_path: Path, wheels: list[str]) -> None:
    for name in wheels:
        (tmp_path / name).touch()

    with pytest.raises(EngineError, match=r"found (none|vllm-1\.whl, vllm-2\.whl); run `make"):
        engine_env._only_wheel(tmp_path)


def test_an_environment_is_made_once_per_key_and_again_after_an_interruption(
    tmp_path: Path,
) -> None:
    place, made = tmp_path / "base", []

    def fill(folder: Path) -> None:
        made.append(sorted(path.name for path in folder.glob("*")))
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text("""#!/bin/sh\necho '{"torch": "2"}'\n""")
        python.chmod(0o755)

    assert engine_env._ensure(place, "one", fill) == {"torch": "2"}
    assert engine_env._ensure(place, "one", fill) == {"torch": "2"}
    assert len(made) == 1
    engine_env._ensure(place, "two", fill)
    assert len(made) == 2
    (place / "stamp.json").write_text('{"key": "tw')
    engine_env._ensure(place, "two", fill)
    assert made == [[], [], []]


def test_an_environment_that_cannot_import_is_not_stamped(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text("#!/bin/sh\necho 'ImportError: libfoo' >&2\nexit 1\n")
        python.chmod(0o755)

    with pytest.raises(EngineError, match=r"(?s)cannot import torch.*libfoo.*delete"):
        engine_env._ensure(tmp_path / "base", "one", fill)

    assert not (tmp_path / "base" / "stamp.json").exists()


def test_a_failing_command_shows_its_last_lines() -> None:
    command = [sys.executable, "-c", "import sys; print('no space left'); sys.exit(3)"]

    with pytest.raises(EngineError, match=r"(?s)installing torch failed: .*no space left"):
        engine_env._run("installing torch", command)


def test_the_stock_engine_is_the_pinned_base() -> None:
    pins = json.loads((ROOT / "overlay/targets/v0.28.0/pins.json").read_bytes())
    base = pins["bases"]["cpu-x86_64"]

    assert engine_env.STOCK_LOCK.read_text().splitlines()[-1] == (
        f"{base['project']}=={pins['version']} --hash=sha256:{base['sha256']}"
    )


def test_the_lock_holds_every_requirement_and_nothing_that_is_left_out() -> None:
    def names(path: Path) -> set[str]:
        lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
        found = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in lines)
        return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in found if name}

    folder = ROOT / "requirements"
    locked = names(folder / "engine.lock")

    assert names(folder / "engine.in") <= locked
    assert not names(folder / "engine-excludes.txt") & locked
