"""What ships: two architectures, old glibc, the same bytes wherever they are built."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from builder.native import (
    ABI,
    ARCHITECTURES,
    FATBIN,
    KERNELS_MANIFEST,
    LIBRARY,
    MANIFEST,
    Compiler,
    NativeBuildError,
    nvcc_in_use,
)
from builder.native import build_native as build
from builder.native_pins import Natives, expect_pinned, read_native_pins
from sparkcache_connector.worker.placement import PlacementOptions
from sparkcache_connector.worker.placement_abi import ABI_VERSION, load_library
from tests.unit.native import native_build

pytestmark = pytest.mark.skipif(
    find_spec("ziglang") is None, reason="needs the tools' environment (ziglang)"
)

ROOT = native_build.ROOT
ALLOWED_LIBRARIES = {
    b"libc.so.6",
    b"libdl.so.2",
    b"libpthread.so.0",
    b"libm.so.6",
    b"libcuda.so.1",  # opened by name, where there is one
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both architectures, built in the checkout."""
    out = tmp_path_factory.mktemp("built")
    return {arch: build(arch, out / arch) for arch in ARCHITECTURES}


def library_of(files):
    return next(path for path in files if path.name == LIBRARY)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_old_glibc_symbols_and_no_other_library_are_needed(built, arch):
    data = library_of(built[arch]).read_bytes()
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_([\d.]+)\0", data)}
    assert versions
    assert max(versions) <= (2, 28)
    named = set(re.findall(rb"(?<=\0)lib[\w+-]+\.so\.\d+(?=\0)", data))
    assert named <= ALLOWED_LIBRARIES
    assert b"GLIBCXX" not in data


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nothing_of_this_machine_is_inside(built, arch):
    data = library_of(built[arch]).read_bytes()
    for private in (str(ROOT), str(Path.home()), sys.prefix, "/tmp/"):
        assert private.encode() not in data


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_the_abi_is_exported(built, arch):
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library_of(built[arch])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    header = (ROOT / "csrc/include/sparkcache_placement.h").read_text()
    declared = set(re.findall(r"SPARKCACHE_API [\w *]+?\b(sparkcache_\w+)\(", header))
    assert len(declared) > 25
    assert names == declared


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_manifests_name_what_lies_beside_them(built, arch):
    folder = library_of(built[arch]).parent
    names = [LIBRARY, MANIFEST]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["abi"] == ABI == ABI_VERSION
    assert manifest["target"] == f"{arch}-linux-gnu.2.28"
    described = manifest["files"]
    if shutil.which("nvcc") is not None:
        names += [FATBIN, KERNELS_MANIFEST]
        kernels = json.loads((folder / KERNELS_MANIFEST).read_text())
        assert re.fullmatch(r"nvcc \d+\.\d+\.\d+", kernels["compiler"])
        described |= kernels["files"]
    assert described == {
        name: {
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            "size": (folder / name).stat().st_size,
        }
        for name in names
        if name in (LIBRARY, FATBIN)
    }
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert sorted(built[arch]) == sorted(folder / name for name in names)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_library_is_the_pinned_one(built, arch):
    files = {path.name: path.read_bytes() for path in built[arch]}
    compiler = nvcc_in_use() if FATBIN in files else None
    pins = read_native_pins(ROOT)
    assert pins is not None
    expect_pinned(pins, Natives(arch, files, compiler))


def elsewhere(tmp_path, arch, path_variable):
    """Build from a copy of the sources in another folder, under other conditions."""
    copy = tmp_path / "somewhere else"
    for name in ("csrc", "builder"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "verify", copy / "verify", ignore=shutil.ignore_patterns("__pycache__"))
    # The compiler's own runtime may be reused, our objects not.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkcache/zig"
    (tmp_path / "cache/sparkcache/zig").mkdir(parents=True)
    (tmp_path / "cache/sparkcache/zig/global").symlink_to(cache / "global")
    environment = {
        "PATH": path_variable,
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TZ": "Pacific/Chatham",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "builder.native", arch, tmp_path / "out"],
        cwd=copy,
        env=environment,
        umask=0o077,
        check=True,
        capture_output=True,
    )
    return tmp_path / "out"


@pytest.mark.full
def test_two_builds_in_different_folders_are_the_same_bytes(built, tmp_path):
    out = elsewhere(tmp_path, "aarch64", os.environ["PATH"])
    for path in built["aarch64"]:
        assert (out / path.name).read_bytes() == path.read_bytes()
        assert (out / path.name).stat().st_mode == path.stat().st_mode


def test_without_nvcc_the_library_is_the_same_file(built, tmp_path):
    """The other architecture, in another folder again."""
    bare = tmp_path / "bin"
    bare.mkdir()
    out = elsewhere(tmp_path, "x86_64", str(bare))
    assert sorted(path.name for path in out.iterdir()) == sorted([LIBRARY, MANIFEST])
    for name in (LIBRARY, MANIFEST):
        assert (out / name).read_bytes() == (library_of(built["x86_64"]).parent / name).read_bytes()


def test_this_machines_library_loads_and_serves(built):
    machine = platform.machine()
    if machine not in built:
        pytest.skip(f"no library is built for {machine}")
    from sparkcache_connector.worker.placement_native import NativePlacement
    from tests.unit.native.placement_suite import PlacementSuite

    path = library_of(built[machine])
    library = load_library(path, hashlib.sha256(path.read_bytes()).hexdigest())
    suite = PlacementSuite()
    suite.open = lambda layout, options: NativePlacement(library, layout, options)
    assert PlacementOptions().mode == "auto"
    suite.test_a_partial_page_keeps_its_positions_in_every_layer_and_no_other()
    suite.test_a_byte_submitted_twice_is_refused()


def test_the_aarch64_library_passes_the_host_tests(built, tmp_path):
    """On an emulated processor: the very file that ships, under the C++ tests of the host."""
    emulator, sysroot = shutil.which("qemu-aarch64"), Path("/usr/aarch64-linux-gnu")
    if emulator is None or not (sysroot / "lib/ld-linux-aarch64.so.1").exists():
        pytest.skip("needs qemu-aarch64 and an arm64 glibc (qemu-user, libc6-arm64-cross)")
    library = library_of(built["aarch64"])
    program = tmp_path / "native_tests"
    sources = ["tests/test_main.cpp", "tests/test_host.cpp", "src/sync.cpp", "src/status.cpp"]
    Compiler("aarch64").link(sources, program, tmp_path, [str(library)])
    done = subprocess.run(
        [emulator, "-L", sysroot, "-E", f"LD_LIBRARY_PATH={library.parent}", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 tests passed" in done.stdout


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(NativeBuildError, match="choose one of x86_64, aarch64"):
        build("riscv64", tmp_path / "out")
    assert not (tmp_path / "out").exists()
