"""builder.pin, builder.base_wheel and `python -m builder pin` on a small target."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builder.base_wheel import examine
from builder.cli import main
from builder.source import SourceError, scan
from builder.source_sdist import SdistSource
from builder.wheel_version import stamp_metadata, stamp_version_module
from tests import small_wheel
from tests.small_target import (
    COMMIT,
    MODULE,
    NAME,
    PATCHED,
    PLATFORMS,
    SCHEDULER,
    SDIST,
    SERIES,
    TOUCHED,
    WHEELS,
    SmallTarget,
    default_patch,
    generated,
    release,
)
from verify.gitobj import File, blob_id, object_id, tree_ids
from verify.manifest import Manifest

CHECKOUT = Path(__file__).resolve().parents[3]


def pin(checkout, *options):
    arguments = ["--checkout", str(checkout), "pin", "--offline"]
    return main([*arguments, "--files", str(checkout / "index"), *options])


def target_file(checkout, name):
    return checkout / "overlay" / "targets" / NAME / name


def pins_of(checkout):
    return json.loads(target_file(checkout, "pins.json").read_bytes())


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def checkout(tmp_path):
    root = SmallTarget().write(tmp_path)
    assert pin(root) == 0
    return root


def test_pins_say_what_the_release_and_the_composition_are(checkout):
    pins = pins_of(checkout)
    files = [File(p, mode, blob_id(data)) for p, (mode, data) in release().items()]
    trees = tree_ids(files)
    manifest = target_file(checkout, "source.manifest").read_bytes()
    assert pins["source"] == {
        "tree": trees[""],
        "vllm_tree": trees["vllm"],
        "generated": sorted(generated()),
        "manifest": {"sha256": sha256(manifest)},
        "vllm_manifest_sha256": sha256(
            b"".join(x for x in manifest.splitlines(True) if x.split(b" ")[2].startswith(b"vllm/"))
        ),
    }
    assert pins["commit"] == {"id": COMMIT, "status": "unproven"}
    assert pins["patches"] == [{"name": SERIES[0], "sha256": sha256(default_patch())}]
    assert pins["files"] == [
        {
            "path": TOUCHED,
            "mode": "100644",
            "pre": {"sha256": sha256(SCHEDULER), "git": blob_id(SCHEDULER)},
            "post": {"sha256": sha256(PATCHED), "git": blob_id(PATCHED)},
            "patches": list(SERIES),
        }
    ]
    assert [module["path"] for module in pins["modules"]] == [MODULE]
    assert pins["contract"]["sha256"] == sha256(target_file(checkout, "contract.json").read_bytes())
    assert pins["sdist"]["sha256"] == sha256((checkout / "index" / SDIST).read_bytes())
    assert pins["local_version"] == "0.28.0+spark.1"


def test_a_base_records_what_it_does_not_have_from_the_release(checkout):
    pins = pins_of(checkout)
    base = pins["bases"]["cpu-x86_64"]
    text = target_file(checkout, "bases/cpu-x86_64.manifest").read_bytes()
    manifest = Manifest.parse(text, "m")
    assert base["manifest"]["sha256"] == sha256(text)
    assert base["differs"] == {PLATFORMS: sha256(b"kind = 'cpu'\n")}
    ours = set(small_wheel.package()) - set(release())
    ours |= {PLATFORMS, "vllm/tool.py", f"{small_wheel.DIST_INFO}/RECORD"}
    assert set(manifest.files) == ours
    assert manifest.files["vllm/tool.py"].mode == "100644"  # wheels drop the x-bit
    elf = f"100755 {sha256(small_wheel.package()['vllm/_C.abi3.so'])} vllm/_C.abi3.so\n"
    assert base["native"] == {"sha256": sha256(elf.encode()), "count": 1}
    assert pins["bases"]["cuda-x86_64"]["differs"] == {}
    metadata = f"{small_wheel.DIST_INFO}/METADATA"
    version = small_wheel.VERSION_MODULE
    assert base["packaging"] == {
        "rule": "spark-local-version/v1",
        "files": [
            {
                "path": "vllm/_version.py",
                "pre": sha256(version),
                "post": sha256(stamp_version_module(version, "0.28.0", "0.28.0+spark.1")),
            },
            {
                "path": metadata,
                "pre": sha256(small_wheel.METADATA),
                "post": sha256(stamp_metadata(small_wheel.METADATA, "0.28.0", "0.28.0+spark.1")),
            },
        ],
    }


def test_a_release_file_that_the_wheel_lacks_is_recorded_as_absent(tmp_path):
    small = SmallTarget()
    (tmp_path / SDIST).write_bytes(small.sdist())
    del small.files["vllm/tool.py"]
    (tmp_path / "w.whl").write_bytes(small.wheel("cuda-x86_64"))
    found = scan(SdistSource(tmp_path / SDIST, "vllm", "0.28.0"))
    facts = examine(tmp_path / "w.whl", found, "0.28.0", 1, ())
    assert facts.manifest.absent == {"vllm/tool.py"}


def test_python_that_differs_unannounced_is_refused_and_so_is_an_idle_announcement(tmp_path):
    small = SmallTarget()
    (tmp_path / SDIST).write_bytes(small.sdist())
    found = scan(SdistSource(tmp_path / SDIST, "vllm", "0.28.0"))
    for base, differs in (("cpu-x86_64", ()), ("cuda-x86_64", (PLATFORMS,))):
        (tmp_path / "w.whl").write_bytes(small.wheel(base))
        with pytest.raises(
            SourceError, match="expected it to differ from the release in"
        ) as caught:
            examine(tmp_path / "w.whl", found, "0.28.0", 1, differs)
        assert caught.value.differences == (PLATFORMS,)


@pytest.mark.parametrize("name", ["pins.json", "contract.json", "source.manifest",
                                  "bases/cpu-x86_64.manifest"])  # fmt: skip
def test_check_names_every_stale_file_and_writes_nothing(checkout, capsys, name):
    capsys.readouterr()
    assert pin(checkout, "--check") == 0
    path = target_file(checkout, name)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"0", b"1", 1) if name != "pins.json" else data + b"\n")
    edited = path.read_bytes()
    code = pin(checkout, "--check")
    captured = capsys.readouterr()
    assert code == 1
    if name == "pins.json":
        assert "expected canonical JSON" in captured.err
    else:
        assert captured.out == f"stale: overlay/targets/{NAME}/{name}\n"
    assert path.read_bytes() == edited


def test_a_changed_series_makes_pins_stale_and_pin_brings_them_up_to_date(checkout, capsys):
    (checkout / "patches" / NAME / SERIES[0]).write_bytes(
        default_patch().replace(b"A step is counted.", b"Steps are counted.")
    )
    capsys.readouterr()
    assert pin(checkout, "--check") == 1
    assert capsys.readouterr().out == f"stale: overlay/targets/{NAME}/pins.json\n"
    assert pin(checkout) == 0
    assert pin(checkout, "--check") == 0


def test_manifests_of_bases_that_no_longer_exist_are_removed(checkout, capsys):
    orphan = target_file(checkout, "bases/cuda-aarch64.manifest")
    orphan.write_bytes(b"")
    assert pin(checkout, "--check") == 1
    assert pin(checkout) == 0
    assert not orphan.exists()


@pytest.mark.parametrize("name", [SDIST, WHEELS["cuda-x86_64"]])
def test_another_file_under_a_pinned_name_is_refused(checkout, capsys, name):
    path = checkout / "index" / name
    path.write_bytes(path.read_bytes() + b"x")
    assert pin(checkout) == 1
    assert f"{name}: expected SHA-256" in capsys.readouterr().err


def test_an_unknown_target_is_refused(checkout, capsys):
    assert main(["--checkout", str(checkout), "pin", "--target", "v9"]) == 1
    assert "unknown target 'v9'; known: v0.28.0" in capsys.readouterr().err


def raw_objects(files=None):
    """The raw commit, root tree and commit id of a commit whose tree is the release."""
    files = files or {path: (mode, data) for path, (mode, data) in release().items()}
    trees = tree_ids(File(p, mode, blob_id(data)) for p, (mode, data) in files.items())
    entries: dict[str, tuple[str, str]] = {}
    for path, (mode, data) in files.items():
        top, slash, _ = path.partition("/")
        entries[top] = ("40000", trees[top]) if slash else (mode, blob_id(data))
    tree = b"".join(
        f"{mode} {name}".encode() + b"\0" + bytes.fromhex(id_)
        for name, (mode, id_) in sorted(
            entries.items(), key=lambda e: e[0] + "/" * (e[1][0] == "40000")
        )
    )
    assert object_id("tree", tree) == trees[""]
    commit = f"tree {trees['']}\nauthor a <a> 0 +0000\ncommitter a <a> 0 +0000\n\nm\n".encode()
    return commit, tree, object_id("commit", commit)


def with_objects(root, commit, tree, id_):
    small = SmallTarget()
    small.target_yaml = small.target_yaml.replace(COMMIT, id_)
    small.patches = {n: p.replace(COMMIT.encode(), id_.encode()) for n, p in small.patches.items()}
    small.write(root)
    objects = target_file(root, "objects")
    objects.mkdir()
    (objects / "commit").write_bytes(commit)
    (objects / "tree").write_bytes(tree)
    return root


def test_raw_objects_prove_the_commit(tmp_path):
    commit, tree, id_ = raw_objects()
    root = with_objects(tmp_path, commit, tree, id_)
    assert pin(root) == 0
    assert pins_of(root)["commit"] == {"id": id_, "status": "proven"}


@pytest.mark.parametrize("damage", ["commit", "tree", "release"])
def test_raw_objects_that_prove_something_else_are_refused(tmp_path, capsys, damage):
    files = dict(release())
    if damage == "release":
        files["vllm/version.py"] = ("100644", b"other\n")
    commit, tree, id_ = raw_objects(files)
    if damage == "commit":
        commit = commit.replace(b"m\n", b"n\n")
    if damage == "tree":
        tree = raw_objects({"vllm/x.py": ("100644", b"")})[1]
    assert pin(with_objects(tmp_path, commit, tree, id_)) == 1
    assert {
        "commit": "objects/commit: expected",
        "tree": "the commit's tree: expected",
        "release": "the release's root tree: expected",
    }[damage] in capsys.readouterr().err


def test_pins_do_not_depend_on_the_machine(checkout, tmp_path):
    """Another folder, umask, time zone, locale, hash seed; the same bytes."""
    other = tmp_path / "elsewhere"
    SmallTarget().write(other)
    environment = os.environ | {
        "PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "HOME": "/nonexistent",
    }  # fmt: skip
    command = [sys.executable, "-m", "builder", "--checkout", str(other), "pin", "--offline"]
    script = 'umask 077; exec "$@"'
    subprocess.run(
        ["sh", "-c", script, "sh", *command, "--files", str(other / "index")],
        env=environment, check=True, capture_output=True, cwd=CHECKOUT,
    )  # fmt: skip
    for path in sorted(target_file(checkout, ".").rglob("*")):
        if path.is_file():
            name = path.relative_to(checkout)
            assert (other / name).read_bytes() == path.read_bytes(), name
