"""builder.image on a small target's bundle."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import tarfile
from pathlib import Path

import pytest

from builder.acquire import Acquirer
from builder.attest.keys import PrivateKey
from builder.build import build, prepare
from builder.cache import Cache
from builder.composed import read_pins
from builder.console import Console
from builder.image import BaseImage, ImageError, containerfile, image_layout, write_layout
from builder.pinned import Pinned
from builder.target import Layout
from builder.wheel_record import Row
from tests.small_checkout import make_checkout
from tests.small_target import MODULE, NAME, PATCHED, TOUCHED

BASE = "cuda-x86_64"
SITE = "/opt/venv/lib/python3.12/site-packages"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pinned]:
    checkout = make_checkout(tmp_path_factory.mktemp("image") / "checkout")
    layout = Layout.open(checkout, NAME)
    pinned = read_pins(layout)
    cache = Cache(checkout / "cache" / "sparkcache" / "downloads")
    recipe = prepare(layout, pinned, BASE, "wheel", Acquirer(Console(), offline=True, cache=cache))
    build(recipe, checkout / "dist", [PrivateKey.generate()], lambda *_: None, Console())
    return checkout / "dist" / NAME / BASE, pinned


def make(bundle: tuple[Path, Pinned], image: BaseImage | None = None) -> dict[str, bytes]:
    return image_layout(*bundle, BASE, SITE, image)


def parts(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict, dict]:
    """The layer's files by path, the image's manifest and its config."""

    def blob(descriptor: dict) -> bytes:
        return files[f"blobs/{descriptor['digest'].replace(':', '/')}"]

    manifest = json.loads(blob(json.loads(files["index.json"])["manifests"][0]))
    with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][0]))) as tar:
        content = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}
    return content, manifest, json.loads(blob(manifest["config"]))


def test_the_layer_holds_the_pinned_files_the_connector_and_the_evidence(bundle) -> None:
    content, _, _ = parts(make(bundle))
    site = SITE[1:]
    assert content[f"{site}/{TOUCHED}"] == PATCHED
    assert f"{site}/{MODULE}" in content
    ours = [path for path in content if path.startswith(f"{site}/vllm/")]
    assert len(ours) == len(bundle[1].files) + len(bundle[1].modules)
    evidence = {path.rpartition("/")[2] for path in content if path.startswith("usr/share/")}
    assert evidence == {
        "LICENSE", "NOTICE", "attestations.intoto.jsonl", "bom.cdx.json", "contract.json",
        "receipt.json",
    }  # fmt: skip


def test_the_connectors_record_lists_every_file_and_its_command(bundle) -> None:
    content, _, _ = parts(make(bundle))
    site = SITE[1:]
    record = next(path for path in content if path.endswith(".dist-info/RECORD"))
    rows = {row[0]: row for row in csv.reader(io.StringIO(content[record].decode()))}
    listed = {
        path.removeprefix(f"{site}/")
        for path in content
        if path.startswith((f"{site}/sparkcache_connector/", record.removesuffix("RECORD")))
    }
    assert set(rows) == {*listed, "../../../bin/sparkcache"}
    script = content["opt/venv/bin/sparkcache"]
    assert rows["../../../bin/sparkcache"][1] == Row.of(script).digest
    assert b"from sparkcache_connector.cli import main" in script


def test_attestations_are_referrers_with_their_predicate_type(bundle) -> None:
    files = make(bundle)
    index = json.loads(files["index.json"])
    types = []
    for descriptor in index["manifests"][1:]:
        manifest = json.loads(files[f"blobs/{descriptor['digest'].replace(':', '/')}"])
        assert manifest["subject"]["digest"] == index["manifests"][0]["digest"]
        types.append(manifest["annotations"]["in-toto.io/predicate-type"])
    assert types == [
        "https://slsa.dev/provenance/v1",
        "urn:sparkcache:vllm:composition/v1",
        "https://cyclonedx.org/bom",
    ]


def test_the_base_image_is_named_only_when_it_is_given(bundle) -> None:
    digest = f"sha256:{'0' * 64}"
    _, plain, _ = parts(make(bundle))
    _, named, config = parts(make(bundle, BaseImage("vllm/vllm-openai", digest)))
    added = {
        "org.opencontainers.image.base.name": "vllm/vllm-openai",
        "org.opencontainers.image.base.digest": digest,
    }
    assert named["annotations"] == plain["annotations"] | added
    assert config["config"]["Labels"] == named["annotations"]


@pytest.mark.parametrize(
    "reference", ["vllm/vllm-openai:v0.28.0", "@sha256:" + "0" * 64, "a@sha256:1"]
)
def test_a_base_image_without_its_digest_is_refused(reference: str) -> None:
    with pytest.raises(ImageError, match="since a tag can move"):
        BaseImage.parse(reference)


def test_a_bundle_of_other_pins_is_refused(bundle) -> None:
    other = dataclasses.replace(bundle[1], sha256="0" * 64)
    with pytest.raises(ImageError, match=r"was built for other pins .*make build BASE=cuda-x86_64"):
        image_layout(bundle[0], other, BASE, SITE, None)


def test_a_missing_bundle_says_how_to_make_it(bundle, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="make the bundle first with `make build`"):
        image_layout(tmp_path, bundle[1], BASE, SITE, None)


def test_writing_again_leaves_no_blob_of_the_layout_before(bundle, tmp_path: Path) -> None:
    write_layout(make(bundle, BaseImage("a", f"sha256:{'0' * 64}")), tmp_path)
    files = make(bundle)
    write_layout(files, tmp_path)
    found = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert found == files


def test_the_containerfile_removes_bytecode_of_every_changed_module_and_ends_with_the_judge(
    bundle,
) -> None:
    text = containerfile(bundle[1], BASE, SITE).decode()
    stem = Path(TOUCHED).stem
    assert f"{SITE}/{Path(TOUCHED).parent}/__pycache__/{stem}.*.pyc" in text
    last = text.strip().splitlines()[-1].strip()
    assert last == f"python3 -I /run/verify.pyz venv {SITE} --target {NAME} --base {BASE}"
