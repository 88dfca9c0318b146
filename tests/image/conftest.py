"""A small product built once: a checkout, its bundle, its image layer and its gate."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image import roots
from tests.image.tool import Buildah
from tests.small_checkout import make_checkout
from tests.small_target import NAME


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with image/, Containerfile and verify.pyz, as ``make image`` leaves them."""
    checkout = make_checkout(tmp_path_factory.mktemp("product") / "checkout")
    environment = os.environ | {
        "XDG_CACHE_HOME": str(checkout / "cache"),
        "XDG_CONFIG_HOME": str(checkout / "config"),
    }
    for command in (
        ["build", "--offline", "--base", "cuda-x86_64"],
        ["image", "--arch", "x86_64", "--site", f"/{roots.SITE}"],
    ):
        subprocess.run(
            [sys.executable, "-m", "builder", command[0], "--target", NAME, *command[1:]],
            cwd=checkout,
            env=environment,
            check=True,
            capture_output=True,
        )
    return checkout / "dist" / NAME


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    if os.geteuid():
        pytest.skip("buildah builds as root here")
    tool = Buildah(tmp_path)
    yield tool
    tool("rm", "--all")
    tool("rmi", "--all", "--force")
