"""The C++ tests: kernels, host, ABI, and the CUDA backend under every fault, with sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.native import native_build


@pytest.mark.parametrize("sanitizer", ["asan", pytest.param("tsan", marks=pytest.mark.full)])
def test_the_native_tests_pass_under(sanitizer):
    program = native_build.native_tests(sanitizer)
    done = subprocess.run(
        [program],
        env={
            **os.environ,
            "TSAN_OPTIONS": "halt_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "tests passed" in done.stdout


def test_the_drivers_declarations_are_nvidias():
    nvcc = shutil.which("nvcc")
    places = [Path("/usr/local/cuda/include"), Path(nvcc or "/").resolve().parents[1] / "include"]
    found = [place for place in places if (place / "cuda.h").is_file()]
    if not found:
        pytest.skip("no CUDA toolkit (cuda.h) on this machine")
    native_build.compiles("tests/cuda_header_check.cpp", ["-isystem", str(found[0])])
