"""builder.composed, builder.tree and `python -m builder compose` on a small target."""

from __future__ import annotations

import hashlib
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builder.cli import main
from builder.composed import TargetStateError, check_target, compose_pinned, read_pins
from builder.source import SourceError
from builder.source_sdist import SdistSource
from builder.source_wheel import WheelSource
from builder.target import Layout
from tests.small_target import (
    MODULE,
    MODULES,
    NAME,
    PATCHED,
    SDIST,
    SERIES,
    TOUCHED,
    WHEELS,
    SmallTarget,
    patch,
    release,
)

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path):
    root = SmallTarget().write(tmp_path / "checkout")
    files = ["--files", str(root / "index")]
    assert main(["--checkout", str(root), "pin", "--offline", *files]) == 0
    return root


@pytest.fixture
def downloads(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "sparkcache" / "downloads" / "sha256"
    folder.mkdir(parents=True)
    for file in (checkout / "index").iterdir():
        shutil.copy(file, folder / hashlib.sha256(file.read_bytes()).hexdigest())
    return folder


def checked(checkout):
    layout = Layout.open(checkout, NAME)
    return check_target(layout, read_pins(layout))


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode & 0o777, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_both_providers_give_the_pinned_composition(checkout):
    target = checked(checkout)
    sdist = compose_pinned(target, SdistSource(checkout / "index" / SDIST, "vllm", "0.28.0"))
    for base, differs in target.pinned.bases.items():
        wheel = WheelSource(checkout / "index" / WHEELS[base])
        assert compose_pinned(target, wheel, differs.differs) == sdist


def test_writes_exactly_the_composed_tree(checkout, downloads, tmp_path, capsys):
    out = tmp_path / "deep" / "tree"
    assert main(["--checkout", str(checkout), "compose", str(out), "--offline"]) == 0
    expected = {
        path: (0o755 if mode == "100755" else 0o644, data)
        for path, (mode, data) in release().items()
    }
    expected |= {TOUCHED: (0o644, PATCHED), MODULE: (0o644, MODULES[MODULE])}
    assert tree(out) == expected
    assert [path.name for path in out.parent.iterdir()] == ["tree"]
    assert main(["--checkout", str(checkout), "compose", str(out), "--offline"]) == 1
    assert "expected no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (f"patches/{NAME}/{SERIES[0]}", f"patches/{SERIES[0]}: expected SHA-256"),
        (f"overlay/modules/{MODULE}", f"modules/{MODULE}: expected SHA-256"),
        ("overlay/modules/vllm/more.py", r"modules/vllm/more\.py: there, but not pinned"),
        (f"overlay/targets/{NAME}/contract.json", r"contract\.json: expected SHA-256"),
        (f"overlay/targets/{NAME}/source.manifest", r"source\.manifest: expected SHA-256"),
    ],
)
def test_a_checkout_that_is_not_as_pinned_is_refused(checkout, name, match):
    path = checkout / name
    text = path.read_bytes() if path.exists() else b""
    path.write_bytes(b"Note\n" + text if name.endswith(".patch") else text + b"#\n")
    with pytest.raises(TargetStateError, match=match):
        checked(checkout)


def test_a_module_that_is_gone_is_refused(checkout):
    (checkout / "overlay" / "modules" / MODULE).unlink()
    with pytest.raises(TargetStateError, match=f"modules/{MODULE}: pinned, but not there"):
        checked(checkout)


def test_the_order_of_the_series_is_pinned(tmp_path):
    changes = [{f"vllm/{name}.py": (None, b"x = 1\n")} for name in "ab"]
    patches = {f"000{i}-x.patch": patch(change) for i, change in enumerate(changes)}
    root = SmallTarget(patches=patches).write(tmp_path)
    assert main(["--checkout", str(root), "pin", "--offline", "--files", f"{root}/index"]) == 0
    series = root / "patches" / NAME / "series"
    series.write_text("0001-x.patch\n0000-x.patch\n")
    with pytest.raises(TargetStateError, match=r"the order is 0001-x\.patch, 0000-x\.patch"):
        checked(root)


def test_a_source_that_is_not_the_release_is_refused(checkout):
    small = SmallTarget()
    small.files["setup.py"] = ("100644", b"import os\n")
    (checkout / SDIST).write_bytes(small.sdist())
    with pytest.raises(SourceError, match=r"setup\.py: expected SHA-256"):
        compose_pinned(checked(checkout), SdistSource(checkout / SDIST, "vllm", "0.28.0"))


def test_a_full_disk_leaves_nothing_behind(checkout, downloads, tmp_path):
    """The limit on file sizes is a full disk in miniature: the kernel refuses the write."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    out = tmp_path / "tree"
    arguments = ["--checkout", str(checkout), "compose", str(out), "--offline"]
    done = subprocess.run(
        # -B: Python would leave bytecode of this checkout cut off at the limit.
        [sys.executable, "-B", "-m", "builder", *arguments],
        cwd=CHECKOUT, preexec_fn=limit, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{out}: cannot be written: File too large" in done.stderr
    assert not [path for path in tmp_path.iterdir() if "tree" in path.name]


def test_without_pins_the_next_step_is_named(checkout, capsys):
    (checkout / "overlay" / "targets" / NAME / "pins.json").unlink()
    assert main(["--checkout", str(checkout), "compose", "x", "--offline"]) == 1
    assert "python -m builder pin" in capsys.readouterr().err
