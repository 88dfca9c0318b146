"""The layout: one set of bytes for one input, and readable by the tools that people use."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from builder.oci import LayerFile, LayerPathError, Referrer, layer, layout

SITE = "usr/local/lib/python3.12/dist-packages"
FILES = [
    LayerFile(f"{SITE}/vllm/v1/core/sched/scheduler.py", b"patched\n"),
    LayerFile(f"{SITE}/sparkcache_connector/store/pack.py", b"pack\n"),
    LayerFile(f"{SITE}/sparkcache_connector/bin/tool", b"#!/bin/sh\n", executable=True),
]
OWN = [f"{SITE}/sparkcache_connector"]


def make(files: list[LayerFile] = FILES) -> dict[str, bytes]:
    return layout(
        layer(files, OWN),
        architecture="amd64",
        tag="v0.28.0",
        labels={"org.opencontainers.image.version": "0.28.0+spark.1"},
        annotations={"org.opencontainers.image.title": "layer"},
        referrers=[Referrer("application/vnd.in-toto+json", b'{"payload":""}')],
    )


def write(files: dict[str, bytes], folder: Path) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def test_the_order_of_the_input_does_not_matter() -> None:
    assert make(FILES[::-1]) == make(FILES)


def test_every_blob_has_the_name_of_its_digest() -> None:
    for path, data in make().items():
        if path.startswith("blobs/"):
            assert path == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"


def test_the_layer_owns_only_our_directories_and_nothing_of_the_machine() -> None:
    with tarfile.open(fileobj=io.BytesIO(layer(FILES, OWN).data)) as tar:
        members = tar.getmembers()
    assert [m.name for m in members if m.isdir()] == [
        f"{SITE}/sparkcache_connector",
        f"{SITE}/sparkcache_connector/bin",
        f"{SITE}/sparkcache_connector/store",
    ]
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {
        (0, 0, "", "", 315532800)
    }
    assert {m.name: m.mode for m in members if m.isfile()} == {
        FILES[0].path: 0o644,
        FILES[1].path: 0o644,
        FILES[2].path: 0o755,
    }


def test_referrers_name_the_image_as_their_subject_and_have_no_tag() -> None:
    files = make()
    index = json.loads(files["index.json"])
    image, referrer = index["manifests"]
    assert image["annotations"] == {"org.opencontainers.image.ref.name": "v0.28.0"}
    assert "annotations" not in referrer
    manifest = json.loads(files[f"blobs/{referrer['digest'].replace(':', '/')}"])
    assert manifest["subject"]["digest"] == image["digest"]


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["/etc/passwd"], "/etc/passwd"),
        (["a/../b"], r"a/\.\./b"),
        (["a", "a"], "found twice"),
        (["a", "a/b"], "expected a directory at a, found a file"),
        (["x" * 200], "USTAR holds paths"),
    ],
    ids=["absolute", "parent", "twice", "file and directory", "too long"],
)
def test_a_path_that_cannot_be_laid_over_is_refused_by_name(paths: list[str], problem: str) -> None:
    with pytest.raises(LayerPathError, match=problem):
        layer([LayerFile(path, b"") for path in paths])


@pytest.mark.parametrize(
    "command",
    [
        ["skopeo", "inspect", "oci:{layout}:v0.28.0"],
        ["umoci", "unpack", "--rootless", "--image", "{layout}:v0.28.0", "{scratch}/unpacked"],
    ],
    ids=["skopeo", "umoci"],
)
def test_debians_tools_read_the_layout(tmp_path: Path, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    made = write(make(), tmp_path / "layout")
    names = {"layout": str(made), "scratch": str(tmp_path)}
    result = subprocess.run(
        [part.format(**names) for part in command], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
