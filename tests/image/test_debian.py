"""The real layer on a Debian root with the published release: what ``make image-check`` shows."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile

from builder.acquire import Acquirer
from builder.console import Console
from builder.inputs import obtain, pinned_digests
from builder.target import Layout
from tests.image import roots
from tests.image.tool import Buildah

pytestmark = [pytest.mark.full, pytest.mark.download]

ROOT = Path(__file__).resolve().parents[2]
TARGET = "v0.28.0"
SITE = "usr/local/lib/python3.11/dist-packages"
UNTOUCHED = "vllm/logger.py"


@pytest.fixture(scope="module")
def real_product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer for Debian's site directory, made from the real bundle."""
    dist = ROOT / "dist" / TARGET
    base = f"cuda-{platform.machine()}"
    place = tmp_path_factory.mktemp("product")
    shutil.copytree(dist / base, place / base, copy_function=shutil.copy)
    shutil.copy(dist / "verify.pyz", place)
    command = ["image", "--site", f"/{SITE}", "--arch", platform.machine(), "--out", str(place)]
    subprocess.run([sys.executable, "-m", "builder", *command], cwd=ROOT, check=True)
    return place


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's root with the published wheel installed as pip installs it."""
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    place = tmp_path_factory.mktemp("staged") / "root"
    roots.debian(place)
    layout = Layout.open(ROOT, TARGET)
    file = layout.read_target().bases[f"cuda-{platform.machine()}"].file
    wheel = obtain(file, pinned_digests(layout)[file.filename], Acquirer(Console()))
    scheme = {"purelib": SITE, "platlib": SITE, "scripts": "usr/local/bin", "data": "usr/local",
              "headers": "usr/local/include"}  # fmt: skip
    named = place.parent / file.filename  # the cache names files by digest
    named.symlink_to(wheel.path)
    destination = SchemeDictionaryDestination(
        {kind: str(place / path) for kind, path in scheme.items()},
        interpreter="/usr/bin/python3",
        script_kind="posix",
    )
    with WheelFile.open(named) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"pip\n"})
    return place


def test_the_published_release_on_debian_passes_and_one_wrong_byte_fails(
    real_product: Path, buildah: Buildah, staged: Path, tmp_path: Path
) -> None:
    container = buildah("from", "scratch").stdout.strip()
    assert buildah("copy", container, str(staged), "/").returncode == 0
    assert buildah("commit", container, "stock").returncode == 0
    built = buildah.build(real_product, "localhost/stock")
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    assert (
        buildah("push", "--disable-compression", "gated", f"oci:{tmp_path}/gated:x").returncode == 0
    )
    judged = subprocess.run(
        [sys.executable, str(real_product / "verify.pyz"), "image", f"{tmp_path}/gated:x",
         "--format", "json"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(judged.stdout)
    assert judged.returncode == 0, [f for f in report["findings"] if f["status"] == "fail"]
    assert report["base"] == f"cuda-{platform.machine()}"
    wrong = tmp_path / "logger.py"
    data = (staged / SITE / UNTOUCHED).read_bytes()
    wrong.write_bytes(data.replace(b"logging", b"Logging", 1))
    assert len(data) == wrong.stat().st_size
    assert buildah("copy", container, str(wrong), f"/{SITE}/{UNTOUCHED}").returncode == 0
    assert buildah("commit", container, "wrong").returncode == 0
    failed = buildah.build(real_product, "localhost/wrong")
    assert failed.returncode != 0
    assert f"FAIL TREE-1     {UNTOUCHED}" in failed.stdout
