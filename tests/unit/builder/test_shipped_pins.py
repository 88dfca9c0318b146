"""The pins of the checkout: coherent with the files beside them, and as generated."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from builder.cli import main
from builder.compose import read_modules
from builder.series import Series
from builder.target import Layout
from verify import strictjson
from verify.gitobj import blob_id
from verify.manifest import Manifest

CHECKOUT = Path(__file__).resolve().parents[3]
LAYOUT = Layout.open(CHECKOUT, "v0.28.0")
PINS = strictjson.parse(LAYOUT.pins.read_bytes(), "pins.json")
STALE = "run `python -m builder pin` and commit what it changes"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_the_release_is_vllm_0_28_0():
    assert PINS["commit"]["id"] == "2cf0a6915ce544dc493a0990f2ea38d81601128a"
    assert PINS["source"]["tree"] == "1940041619b03a5d3d1a73e9cffc295de329ad9d"
    assert PINS["source"]["vllm_tree"] == "abdb29ff623722d3af011cb057c4d357162c568c"
    assert len(PINS["source"]["generated"]) == 9
    assert PINS["sdist"]["sha256"] == (
        "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a"
    )
    assert set(PINS["bases"]["cpu-x86_64"]["differs"]) == {
        "vllm/_version.py",
        "vllm/platforms/__init__.py",
    }


def test_patches_and_modules_are_the_pinned_ones():
    series = Series.read(LAYOUT.patches, LAYOUT.read_target().base_trailer)
    found = [{"name": patch.name, "sha256": sha256(patch.data)} for patch in series.patches]
    assert found == PINS["patches"], STALE
    ids = {}
    for patch in series.patches:
        ids |= {change.path: change.new_id for change in patch.changes}
    assert ids == {file["path"]: file["post"]["git"] for file in PINS["files"]}, STALE
    modules = [
        {"path": path, "mode": content.mode, "sha256": sha256(content.data),
         "git": blob_id(content.data)}
        for path, content in sorted(read_modules(LAYOUT.modules).items())
    ]  # fmt: skip
    assert modules == PINS["modules"], STALE


def test_contract_and_manifests_are_the_pinned_ones():
    data = LAYOUT.contract.read_bytes()
    assert sha256(data) == PINS["contract"]["sha256"], STALE
    contract = strictjson.parse(data, "contract.json")
    listed = {file["path"] for file in contract["files"]}
    ours = {entry["path"] for key in ("files", "modules") for entry in PINS[key]}
    assert listed == ours | set(LAYOUT.read_target().contract), STALE
    data = LAYOUT.source_manifest.read_bytes()
    assert sha256(data) == PINS["source"]["manifest"]["sha256"], STALE
    release = Manifest.parse(data, "source.manifest")
    # a file with CRLF line ends is in the release; conversion on checkout would show here
    assert release.files["vllm/config/fault_tolerance.py"].sha256.startswith("b166b243")
    for file in PINS["files"]:
        if file["pre"] is not None:
            assert release.files[file["path"]].sha256 == file["pre"]["sha256"]
    for name, base in PINS["bases"].items():
        data = LAYOUT.base_manifest(name).read_bytes()
        assert sha256(data) == base["manifest"]["sha256"], STALE
        Manifest.parse(data, name)


@pytest.mark.download
def test_everything_generated_is_as_generated_from_the_release():
    assert main(["--checkout", str(CHECKOUT), "pin", "--check"]) == 0


@pytest.mark.download
def test_every_shipped_patch_round_trips_through_commits_on_the_release():
    assert main(["--checkout", str(CHECKOUT), "patch", "check"]) == 0
