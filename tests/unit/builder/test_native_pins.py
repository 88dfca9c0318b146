"""The native library and its pins; compiling it is the native suite's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from builder.native import FATBIN, KERNELS_MANIFEST, LIBRARY, MANIFEST
from builder.native_pins import (
    NativePinError,
    Natives,
    declare,
    expect_pinned,
    read_native_pins,
)
from verify.anchor import NATIVE_PINS
from verify.natives import NativePins

ROOT = Path(__file__).resolve().parents[3]
FILES = {name: name.encode() for name in (LIBRARY, MANIFEST, FATBIN, KERNELS_MANIFEST)}
BUILT = Natives("x86_64", FILES, "nvcc 13.0.88")
PINS = NativePins({"x86_64": BUILT.library()}, BUILT.kernels())


def test_what_was_built_is_what_is_pinned():
    expect_pinned(PINS, BUILT)
    without = Natives("x86_64", {name: FILES[name] for name in (LIBRARY, MANIFEST)}, None)
    expect_pinned(PINS, without)


@pytest.mark.parametrize("name", FILES)
def test_another_byte_is_refused_and_says_how_to_pin(name):
    other = Natives("x86_64", {**FILES, name: FILES[name] + b"!"}, "nvcc 13.0.88")
    digest = hashlib.sha256(FILES[name]).hexdigest()
    with pytest.raises(NativePinError) as caught:
        expect_pinned(PINS, other)
    told = str(caught.value)
    assert told.startswith(f"csrc: {name} for x86_64: expected SHA-256 {digest}")
    assert "python -m builder pin native" in told


def test_an_architecture_that_is_not_pinned_is_refused():
    with pytest.raises(NativePinError, match=rf"{LIBRARY} for riscv64: .*pin native"):
        expect_pinned(PINS, Natives("riscv64", FILES, None))


def test_kernels_of_another_compiler_are_declared_beside_the_pinned_ones():
    other = Natives("x86_64", {**FILES, FATBIN: b"others"}, "nvcc 14.0.1")
    expect_pinned(PINS, other)
    declared = declare(PINS, other)
    assert declared.kernels == {**PINS.kernels, **other.kernels()}
    assert declare(PINS, BUILT) == PINS
    assert declare(PINS, Natives("x86_64", FILES, None)) == PINS


def test_files_lie_in_the_wheel_by_machine():
    assert sorted(BUILT.members()) == sorted(
        f"sparkcache_connector/native/x86_64/{name}" for name in FILES
    )


def test_a_checkout_without_native_sources_has_no_library(tmp_path):
    assert read_native_pins(tmp_path) is None


def test_sources_without_pins_are_refused(tmp_path):
    (tmp_path / "csrc").mkdir()
    with pytest.raises(NativePinError, match=r"csrc/pins\.json: the file is missing; .*git"):
        read_native_pins(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]\n"])
def test_unreadable_pins_are_refused(tmp_path, data):
    (tmp_path / "csrc").mkdir()
    (tmp_path / NATIVE_PINS).write_bytes(data)
    with pytest.raises(NativePinError, match=r"csrc/pins\.json: expected"):
        read_native_pins(tmp_path)


def test_the_pins_of_this_checkout_name_both_architectures():
    pins = read_native_pins(ROOT)
    assert pins is not None
    assert sorted(pins.libraries) == ["aarch64", "x86_64"]
    for files in pins.libraries.values():
        assert sorted(files) == [LIBRARY, MANIFEST]
    for files in pins.kernels.values():
        assert sorted(files) == [FATBIN, KERNELS_MANIFEST]
    assert json.loads((ROOT / NATIVE_PINS).read_bytes())["schema"] == "sparkcache.native/v1"
