"""`make gpu-check` says so where there is no device, and runs to its table where one pretends."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.unit.native import native_build

pytestmark = pytest.mark.skipif(
    find_spec("ziglang") is None, reason="needs the tools' environment (ziglang)"
)


def check(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", *arguments],
        cwd=native_build.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_without_a_device_it_says_so_and_succeeds():
    done = check("--megabytes", "8", "--rounds", "1", LD_LIBRARY_PATH="")
    if "nothing was checked" not in done.stdout:
        pytest.skip("this machine has a CUDA device")
    assert done.returncode == 0
    assert done.stdout.startswith("gpu-check: no CUDA device, nothing was checked")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_over_a_fake_driver_every_step_runs():
    fake = native_build.fake_cuda()
    done = check(
        *("--megabytes", "8", "--rounds", "1", "--workers", "2"), LD_LIBRARY_PATH=str(fake.parent)
    )
    # A fake device misses the goals, and must be told so.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No Device At All" in done.stdout
    assert "behaviour suite: " in done.stdout, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "MISSED" in done.stdout
    assert done.stdout.rstrip().endswith("gpu-check: a goal was missed"), done.stdout + done.stderr
    for line in ("scatter, pages of 64 KiB", "gather, pages of 4096 KiB", "page cache, mapped"):
        assert line in done.stdout
