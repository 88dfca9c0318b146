from __future__ import annotations

import email
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installer.sources import WheelFile

from builder.connector_wheel import ConnectorError, ConnectorWheel, connector_wheel, read_source

ROOT = Path(__file__).resolve().parents[3]
PIP_INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
CONTRACT = "sparkcache_connector/contracts/v0.28.0.json"


def checkout(folder: Path) -> Path:
    """A copy of what the wheel is made from, without git and without bytecode."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "sparkcache_connector", folder / "sparkcache_connector", ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "README.md").write_text("# SparkCache for vLLM\n")
    return folder


def build(folder: Path, generated: dict[str, bytes] | None = None) -> ConnectorWheel:
    return connector_wheel(folder, read_source(folder), generated or {CONTRACT: b"{}"})


def written(wheel: ConnectorWheel) -> bytes:
    sink = io.BytesIO()
    wheel.write(sink)
    return sink.getvalue()


def test_wheel_holds_the_source_the_generated_files_and_their_metadata(tmp_path: Path) -> None:
    wheel = build(checkout(tmp_path))
    assert wheel.filename == f"sparkcache_connector-{wheel.version}-py3-none-any.whl"
    path = tmp_path / wheel.filename
    path.write_bytes(written(wheel))
    with WheelFile.open(path) as source:
        source.validate_record()
        metadata = email.message_from_string(source.read_dist_info("METADATA"))
        assert metadata["Name"] == "sparkcache-connector"
        assert metadata["Version"] == wheel.version
        assert metadata["License-Expression"] == "Apache-2.0"
        assert "sparkcache = sparkcache_connector.cli:main" in source.read_dist_info(
            "entry_points.txt"
        )
        assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in source.read_dist_info("WHEEL")
        assert {"licenses/LICENSE", "licenses/NOTICE"} <= set(source.dist_info_filenames)
    with zipfile.ZipFile(path) as archive:
        package = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    expected = {name: file.data for name, file in read_source(tmp_path).files.items()}
    assert package == {**expected, CONTRACT: b"{}"}


def test_wheel_with_a_native_library_names_its_platform(tmp_path: Path) -> None:
    library = "sparkcache_connector/native/libsparkcache_placement.so"
    wheel = connector_wheel(
        checkout(tmp_path),
        read_source(tmp_path),
        {library: b"\x7fELF"},
        architecture="aarch64",
    )
    assert wheel.filename.endswith("-py3-none-manylinux_2_28_aarch64.whl")
    with zipfile.ZipFile(io.BytesIO(written(wheel))) as archive:
        assert archive.read(library) == b"\x7fELF"
        (info,) = [name for name in archive.namelist() if name.endswith("/WHEEL")]
        assert b"Root-Is-Purelib: false\nTag: py3-none-manylinux_2_28_aarch64\n" in archive.read(
            info
        )


def test_bytes_do_not_depend_on_folder_modes_or_what_lies_around(tmp_path: Path) -> None:
    first = written(build(checkout(tmp_path / "a")))
    other = checkout(tmp_path / "another folder")
    for path in (other / "sparkcache_connector").rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (1, 1))
    cache = other / "sparkcache_connector" / "__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").write_bytes(b"x")
    (other / ".gitignore").write_text("*.py\n")
    (other / "stray.py").write_text("")
    assert written(build(other)) == first


def test_installed_files_are_the_source(tmp_path: Path) -> None:
    wheel = build(checkout(tmp_path))
    path = tmp_path / wheel.filename
    path.write_bytes(written(wheel))
    target = tmp_path / "site"
    subprocess.run(
        [*PIP_INSTALL, "--target", str(target), str(path)],
        check=True,
    )
    source = read_source(tmp_path)
    for name, file in source.files.items():
        assert (target / name).read_bytes() == file.data
    installed = read_source(target)
    assert set(installed.files) - set(source.files) == {CONTRACT}


def test_source_digest_is_what_sha256sum_says(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    script = (
        "find sparkcache_connector -type f ! -name '*.pyc' | LC_ALL=C sort"
        " | xargs -d '\\n' sha256sum | sha256sum | cut -d ' ' -f 1"
    )
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    assert read_source(folder).sha256 == done.stdout.strip()


def test_source_tree_is_what_git_says(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    (folder / "sparkcache_connector" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sparkcache_connector" / "run.sh").chmod(0o755)
    git = ["git", "-c", "core.autocrlf=false", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "sparkcache_connector"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    done = subprocess.run(
        [*git, "rev-parse", "HEAD:sparkcache_connector"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert read_source(folder).git_tree == done.stdout.strip()


def test_every_byte_of_the_source_is_in_both_digests(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    before = read_source(folder)
    (folder / "sparkcache_connector" / "py.typed").write_bytes(b"\n")
    after = read_source(folder)
    assert before.sha256 != after.sha256
    assert before.git_tree != after.git_tree


def test_symbolic_link_in_the_source_is_refused(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    (folder / "sparkcache_connector" / "link.py").symlink_to("config.py")
    with pytest.raises(ConnectorError, match=r"sparkcache_connector/link\.py: expected a regular"):
        read_source(folder)


def test_generated_file_that_is_in_the_source_is_refused(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    with pytest.raises(ConnectorError, match="the build generates this file"):
        build(folder, {"sparkcache_connector/__init__.py": b""})


def test_file_that_hatchling_leaves_out_is_named(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    text = (folder / "pyproject.toml").read_text()
    packages = 'packages = ["sparkcache_connector"]'
    assert packages in text
    (folder / "pyproject.toml").write_text(
        text.replace(packages, f'{packages}\nexclude = ["sparkcache_connector/py.typed"]')
    )
    with pytest.raises(ConnectorError, match=r"py\.typed: the source and hatchling disagree"):
        build(folder)


def test_missing_readme_is_named(tmp_path: Path) -> None:
    (checkout(tmp_path) / "README.md").unlink()
    with pytest.raises(ConnectorError, match=r"README\.md: the file is missing"):
        build(tmp_path)
