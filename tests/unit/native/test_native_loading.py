"""What refuses startup: another library, another ABI, kernels that are missing or not the ones."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from sparkcache_connector.worker import placement_abi as abi
from sparkcache_connector.worker.placement import (
    PlacementOptions,
    open_placement,
    region_of_buffer,
)
from sparkcache_connector.worker.placement_errors import PlacementUnavailableError
from sparkcache_connector.worker.placement_layout import (
    Extent,
    LayerPages,
    MemoryRegion,
    PageLayout,
)
from sparkcache_connector.worker.placement_native import NativeMissingError, open_native
from tests.unit.native import native_build


def layout(device="cpu"):
    region = region_of_buffer(bytearray(4 * 64))
    region = MemoryRegion(region.address, region.nbytes, device, region.owner)
    return PageLayout((LayerPages("attn", 0, region, 0, 64, 4, (Extent(0, 4, 16),)),))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def package(tmp_path):
    """A connector's ``native`` folder."""
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copyfile(native_build.library(), folder / "libsparkcache_placement.so")
    (folder / "kernels.fatbin").write_bytes(b"kernels")
    write_manifest(folder)
    return folder


def write_manifest(folder):
    for name, manifest in (
        ("libsparkcache_placement.so", "placement.json"),
        ("kernels.fatbin", "kernels.json"),
    ):
        (folder / manifest).unlink(missing_ok=True)
        if (folder / name).exists():
            files = {name: {"sha256": sha256(folder / name)}}
            (folder / manifest).write_text(json.dumps({"files": files}))


def open_here(package, layout_=None, **options):
    return open_native(layout_ or layout(), PlacementOptions(**options), package)


def test_the_packaged_library_opens(package):
    placement = open_here(package, arena_bytes=4096)
    assert placement.name == "native host"
    placement.close()


def test_one_flipped_byte_is_refused_before_any_code_runs(package):
    path = package / "libsparkcache_placement.so"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PlacementUnavailableError, match=r"SHA-256 is .* expected .*reinstall"):
        open_here(package)


def test_an_operators_digest_is_what_counts(package):
    with pytest.raises(PlacementUnavailableError, match="SHA-256"):
        open_here(package, library=package / "libsparkcache_placement.so", library_sha256="0" * 64)


def test_a_library_that_no_manifest_names_needs_a_digest(package):
    (package / "placement.json").unlink()
    with pytest.raises(PlacementUnavailableError, match="library_sha256"):
        open_here(package)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": {}}}', '{"files": 3}'])
def test_an_unreadable_manifest_is_refused(package, text):
    (package / "placement.json").write_text(text)
    with pytest.raises(PlacementUnavailableError, match=r"placement\.json: unreadable"):
        open_here(package)


def test_a_symbolic_link_is_refused(package, tmp_path):
    link = tmp_path / "link.so"
    link.symlink_to(package / "libsparkcache_placement.so")
    with pytest.raises(PlacementUnavailableError, match="symbolic link"):
        open_here(package, library=link, library_sha256=sha256(link))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(PlacementUnavailableError, match="regular file"):
        abi.read_checked(tmp_path, "0" * 64)


def test_a_named_library_that_is_missing_is_refused(tmp_path):
    with pytest.raises(PlacementUnavailableError, match="no such file"):
        open_here(tmp_path, library=tmp_path / "none.so", library_sha256="0" * 64)


def test_nothing_packaged_leaves_it_to_torch(tmp_path):
    with pytest.raises(NativeMissingError, match="no native library"):
        open_here(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(b"not an ELF file")
    with pytest.raises(PlacementUnavailableError, match="architecture"):
        open_here(tmp_path, library=path, library_sha256=sha256(path))


def compile_library(tmp_path, source):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    path = tmp_path / "other.so"
    code = tmp_path / "other.c"
    code.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", code, "-o", path], check=True)
    return path


def test_another_library_is_refused(tmp_path):
    path = compile_library(tmp_path, "int nothing(void) { return 0; }")
    with pytest.raises(PlacementUnavailableError, match="not a SparkCache placement library"):
        open_here(tmp_path, library=path, library_sha256=sha256(path))


@pytest.mark.parametrize(
    ("status", "words", "problem"),
    [
        (7, [2], "speaks ABI 2, this connector 1"),
        (0, [1, 1, 63], "config_bytes is 63, expected 64"),
        (0, [1, 1, 64, 64, 48, 24, 48, 32, 48, 24, 64], "incomplete"),
    ],
)
def test_another_abi_is_refused(tmp_path, status, words, problem):
    fill = "".join(f"info[{i}] = {word};" for i, word in enumerate(words))
    path = compile_library(
        tmp_path,
        "int sparkcache_query(unsigned abi, unsigned* info)"
        f" {{ (void)abi; {fill} return {status}; }}",
    )
    with pytest.raises(PlacementUnavailableError, match=problem):
        open_here(tmp_path, library=path, library_sha256=sha256(path))


def test_cuda_without_kernels_is_left_to_torch_or_refused_when_forced(package):
    (package / "kernels.fatbin").unlink()
    write_manifest(package)
    with pytest.raises(NativeMissingError, match=r"no kernels\.fatbin"):
        open_here(package, layout("cuda:0"))


def test_cuda_forced_on_without_kernels_refuses_startup(package, monkeypatch):
    (package / "kernels.fatbin").unlink()
    write_manifest(package)
    library = package / "libsparkcache_placement.so"
    options = PlacementOptions(mode="on", library=library, library_sha256=sha256(library))
    with pytest.raises(
        PlacementUnavailableError, match=r"spark_cache_cuda_restore=on: .*no kernels\.fatbin"
    ):
        open_placement(layout("cuda:0"), options)


def test_kernels_that_went_missing_or_changed_are_refused(package):
    (package / "kernels.fatbin").write_bytes(b"others")
    with pytest.raises(PlacementUnavailableError, match=r"kernels\.fatbin: SHA-256"):
        open_here(package, layout("cuda:0"))
    (package / "kernels.fatbin").unlink()
    with pytest.raises(PlacementUnavailableError, match=r"kernels\.fatbin: missing"):
        open_here(package, layout("cuda:0"))


def test_two_files_under_one_descriptor_number_are_two_libraries(package, tmp_path):
    """The loader knows a library by its path, and this path holds a descriptor's number."""
    wrong = compile_library(
        tmp_path,
        "int sparkcache_query(unsigned abi, unsigned* info) { (void)abi; info[0] = 9; return 7; }",
    )
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from sparkcache_connector.worker import placement_abi as abi\n"
        "from sparkcache_connector.worker.placement_errors import PlacementUnavailableError\n"
        "first, first_sha, second, second_sha = sys.argv[1:]\n"
        "try:\n"
        "    abi.load_library(Path(first), first_sha)\n"
        "except PlacementUnavailableError as error:\n"
        "    assert 'speaks ABI 9' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('accepted')\n"
        "abi.load_library(Path(second), second_sha)\n"
    )
    right = package / "libsparkcache_placement.so"
    done = subprocess.run(
        [sys.executable, "-c", code, wrong, sha256(wrong), right, sha256(right)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(native_build.ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
