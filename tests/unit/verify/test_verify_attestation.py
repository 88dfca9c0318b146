"""ATT checks: the forgery table, each forgery with its own check id, and what is undecided."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from securesystemslib.dsse import Envelope as OracleEnvelope
from securesystemslib.signer import SSlibKey

from tests.unit.verify import small_target as small
from verify import cli
from verify.catalogue import CHECKS
from verify.checks.attestation import Demands
from verify.dsse import Envelope
from verify.errors import FormatError
from verify.judges.bundle import judge_bundle
from verify.judges.case import Options
from verify.report import Report, Status, Verdict
from verify.trust import TrustRoot

BASE = "cuda-x86_64"
NAME = "attestations.intoto.jsonl"
IN_TOTO = "application/vnd.in-toto+json"
NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Signer:
    """A private key that is made anew in every run."""

    private: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey

    @property
    def der(self) -> bytes:
        return self.private.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def pem(self) -> str:
        return (
            self.private.public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            .decode()
        )

    @property
    def id(self) -> str:
        return hashlib.sha256(self.der).hexdigest()

    @property
    def scheme(self) -> str:
        ed = isinstance(self.private, ed25519.Ed25519PrivateKey)
        return "ed25519" if ed else "ecdsa-p256-sha256"

    def sign(self, message: bytes) -> bytes:
        if isinstance(self.private, ed25519.Ed25519PrivateKey):
            return self.private.sign(message)
        return self.private.sign(message, ec.ECDSA(SHA256()))


def ed() -> Signer:
    return Signer(ed25519.Ed25519PrivateKey.generate())


def p256() -> Signer:
    return Signer(ec.generate_private_key(ec.SECP256R1()))


ALICE, BOB, MALLORY = ed(), p256(), ed()


def statements(bundle: dict[str, bytes]) -> list[dict[str, Any]]:
    """The statements of a bundle, written from docs/attestation.md."""
    receipt = json.loads(bundle["receipt.json"])
    pins = small.pins()
    base = pins["bases"][BASE]
    wheel = {small.wheel_name(BASE)}
    wheels = {name for name in bundle if name.endswith(".whl")}
    folder = f"overlay/targets/{small.TARGET}"
    consumed = {f"{folder}/pins.json": receipt["pins"]["sha256"]}
    consumed[f"{folder}/contract.json"] = receipt["contract"]["sha256"]
    consumed["sparkcache_connector"] = receipt["connector"]["source_sha256"]
    consumed |= {each["name"]: each["sha256"] for each in receipt["inputs"]}
    consumed |= {f"patches/{small.TARGET}/{p['name']}": p["sha256"] for p in receipt["patches"]}
    consumed |= {f"overlay/modules/{m['path']}": m["sha256"] for m in receipt["modules"]}
    provenance = {
        "buildDefinition": {
            "buildType": "urn:sparkcache:vllm:build/v1",
            "externalParameters": {"target": small.TARGET, "base": BASE, "source": "wheel"},
            "resolvedDependencies": [
                {"name": name, "digest": {"sha256": consumed[name]}} for name in sorted(consumed)
            ],
        },
        "runDetails": {"builder": {"id": "urn:sparkcache:vllm:builder/unhosted/v1"}},
    }
    source = pins["source"]
    composition = {
        "target": small.TARGET,
        "base": BASE,
        "local_version": small.LOCAL,
        "claimed": {"git": "https://x", "commit": pins["commit"]["id"], "tree": source["tree"]},
        "proven": {key: source[key] for key in ("vllm_tree", "vllm_manifest_sha256")},
        "native": {**base["native"], "wheel_sha256": base["sha256"]},
        "files": pins["files"],
        "modules": pins["modules"],
        "packaging": base["packaging"],
        "result": pins["composed"],
    }
    predicates = (
        ("https://slsa.dev/provenance/v1", provenance, set(bundle)),
        ("urn:sparkcache:vllm:composition/v1", composition, wheel),
        ("https://cyclonedx.org/bom", json.loads(bundle["bom.cdx.json"]), wheels),
    )
    return [
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [
                {"name": name, "digest": {"sha256": small.sha256(bundle[name])}}
                for name in sorted(subjects)
            ],
            "predicateType": kind,
            "predicate": predicate,
        }
        for kind, predicate, subjects in predicates
    ]


def pae(kind: str, payload: bytes) -> bytes:
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def envelope(payload: bytes, signers: list[Signer], kind: str = IN_TOTO) -> dict[str, Any]:
    message = pae(kind, payload)
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": kind,
        "signatures": [
            {"keyid": each.id, "sig": base64.b64encode(each.sign(message)).decode()}
            for each in sorted(signers, key=lambda each: each.id)
        ],
    }


def trust(signers: list[Signer], threshold: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "schema": "sparkcache.trust/v1",
        "version": 1,
        "expires": "2027-12-31T00:00:00Z",
        "keys": {each.id: {"scheme": each.scheme, "pem": each.pem} for each in signers},
        "roles": {"builder": {"keys": [each.id for each in signers], "threshold": threshold}},
    } | changes


@dataclass
class Scene:
    """A bundle with attestations and a trust root, before and after a forgery."""

    folder: Path
    home: Path
    signers: list[Signer] = field(default_factory=lambda: [ALICE])
    root: dict[str, Any] = field(default_factory=lambda: trust([ALICE]))
    payloads: list[bytes] = field(default_factory=list)
    envelopes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        files = small.bundle(BASE)
        small.write(self.folder / "bundle", files)
        self.payloads = [small.canonical(each) for each in statements(files)]
        self.sign()

    def sign(self) -> None:
        self.envelopes = [envelope(payload, self.signers) for payload in self.payloads]

    def change(self, line: int, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a statement and sign again."""
        value = json.loads(self.payloads[line])
        change(value)
        self.payloads[line] = small.canonical(value)
        self.sign()

    def judge(self, raw: bytes | None = None, **demands: Any) -> Report:
        lines = b"".join(small.canonical(each) for each in self.envelopes)
        (self.folder / "bundle" / NAME).write_bytes(lines if raw is None else raw)
        (self.folder / "root.json").write_bytes(small.canonical(self.root))
        asked = {"trust": self.folder / "root.json", "at": NOW, "required": True} | demands
        return judge_bundle(
            self.folder / "bundle", Options(home=self.home, attestations=Demands(**asked))
        )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small.write(folder, small.checkout())
    return folder


@pytest.fixture
def scene(tmp_path: Path, home: Path) -> Scene:
    return Scene(tmp_path, home)


def bad(report: Report) -> set[str]:
    return {f.check for f in report.findings if f.status in (Status.FAIL, Status.UNDECIDED)}


@pytest.mark.parametrize("signer", [ed, p256], ids=["ed25519", "ecdsa-p256"])
def test_a_bundle_signed_by_a_trusted_key_passes(
    scene: Scene, signer: Callable[[], Signer]
) -> None:
    key = signer()
    scene.signers, scene.root = [key], trust([key])
    scene.sign()
    report = scene.judge()
    assert report.verdict is Verdict.PASSED
    assert {f"ATT-{number}" for number in range(1, 10)} <= set(report.checks())


def test_two_of_three_keys_are_enough_and_one_is_not(scene: Scene) -> None:
    scene.root = trust([ALICE, BOB, MALLORY], threshold=2)
    scene.signers = [ALICE, BOB]
    scene.sign()
    assert not bad(scene.judge())
    scene.signers = [BOB]
    scene.sign()
    assert bad(scene.judge()) == {"ATT-5"}


def test_an_independent_implementation_agrees_about_every_envelope(scene: Scene) -> None:
    scene.judge()
    key = SSlibKey(ALICE.id, "ed25519", "ed25519", {"public": ALICE.der[-32:].hex()})
    for line in (scene.folder / "bundle" / NAME).read_bytes().splitlines(keepends=True):
        assert list(OracleEnvelope.from_dict(json.loads(line)).verify([key], 1)) == [ALICE.id]
        assert (
            Envelope.parse(line, "line").signed == OracleEnvelope.from_dict(json.loads(line)).pae()
        )


# The forgery table.


def _other_key(scene: Scene) -> None:
    scene.signers = [MALLORY]
    scene.sign()


def _claimed_id(scene: Scene) -> None:
    _other_key(scene)
    for each in scene.envelopes:
        each["signatures"][0]["keyid"] = ALICE.id


def _same_key_twice(scene: Scene) -> None:
    scene.root = trust([ALICE, BOB], threshold=2)
    for each in scene.envelopes:
        each["signatures"] *= 2


def _one_key_under_two_ids(scene: Scene) -> None:
    scene.root = trust([ALICE])
    scene.root["keys"]["0" * 64] = scene.root["keys"][ALICE.id]
    scene.root["roles"]["builder"] = {"keys": [ALICE.id, "0" * 64], "threshold": 2}


def _payload_type(scene: Scene) -> None:
    scene.envelopes[1] = envelope(scene.payloads[1], [ALICE], "text/plain")


def _swapped_type(scene: Scene) -> None:
    scene.envelopes[1]["payloadType"] = "text/plain"


def _one_signature_missing(scene: Scene) -> None:
    scene.root = trust([ALICE, BOB], threshold=2)
    scene.signers = [ALICE, BOB]
    scene.sign()
    del scene.envelopes[2]["signatures"][0]


def _no_signature(scene: Scene) -> None:
    scene.envelopes[0]["signatures"] = []


def _seventeen_signatures(scene: Scene) -> None:
    scene.envelopes[0]["signatures"] *= 17


def _truncated_base64(scene: Scene) -> None:
    scene.envelopes[0]["signatures"][0]["sig"] = scene.envelopes[0]["signatures"][0]["sig"][:-1]


def _loose_base64(scene: Scene) -> None:
    sig = scene.envelopes[0]["signatures"][0]["sig"]
    assert sig.endswith("==")
    scene.envelopes[0]["signatures"][0]["sig"] = sig[:-3] + chr(ord(sig[-3]) + 1) + "=="


def _reencoded(scene: Scene) -> None:
    """Signed as pretty JSON, delivered as the canonical bytes of the same value."""
    pretty = json.dumps(json.loads(scene.payloads[0]), indent=1).encode()
    signed = envelope(pretty, [ALICE])
    scene.envelopes[0]["signatures"] = signed["signatures"]


def _pretty_payload(scene: Scene) -> None:
    pretty = json.dumps(json.loads(scene.payloads[0]), indent=1).encode()
    scene.envelopes[0] = envelope(pretty, [ALICE])


def _wrong_predicate(scene: Scene) -> None:
    scene.change(1, lambda v: v.update(predicateType="https://slsa.dev/provenance/v1"))


def _statement_missing(scene: Scene) -> None:
    del scene.envelopes[1]


def _statements_swapped(scene: Scene) -> None:
    scene.envelopes.reverse()


def _no_statement(scene: Scene) -> None:
    scene.payloads[2] = b"[]\n"
    scene.sign()


def _other_statement_type(scene: Scene) -> None:
    scene.change(2, lambda v: v.update(_type="https://in-toto.io/Statement/v0.1"))


def _other_wheel(scene: Scene) -> None:
    scene.change(1, lambda v: v["subject"][0]["digest"].update(sha256="0" * 64))


def _subject_missing(scene: Scene) -> None:
    scene.change(0, lambda v: v["subject"].pop())


def _subject_more(scene: Scene) -> None:
    more = {"name": "z", "digest": {"sha256": "0" * 64}}
    scene.change(0, lambda v: v["subject"].append(more))


def _other_algorithm(scene: Scene) -> None:
    scene.change(2, lambda v: v["subject"][0].update(digest={"sha1": "0" * 40}))


def _dependency_hidden(scene: Scene) -> None:
    scene.change(0, lambda v: v["predicate"]["buildDefinition"]["resolvedDependencies"].pop())


def _dependency_changed(scene: Scene) -> None:
    def change(value: dict[str, Any]) -> None:
        listed = value["predicate"]["buildDefinition"]["resolvedDependencies"]
        listed[0]["digest"]["sha256"] = "0" * 64

    scene.change(0, change)


def _higher_builder(scene: Scene) -> None:
    scene.change(
        0, lambda v: v["predicate"]["runDetails"]["builder"].update(id="https://github.com/x")
    )


def _other_result(scene: Scene) -> None:
    scene.change(1, lambda v: v["predicate"]["result"].update(vllm_tree="0" * 40))


def _proven_tree(scene: Scene) -> None:
    scene.change(1, lambda v: v["predicate"]["proven"].update(tree="0" * 40))


def _other_bom(scene: Scene) -> None:
    scene.change(2, lambda v: v["predicate"].update(version=2))


def _expired(scene: Scene) -> None:
    scene.root["expires"] = "2026-12-31T23:59:59Z"


def _no_builder(scene: Scene) -> None:
    scene.root["roles"] = {"verifier": scene.root["roles"]["builder"]}


def _wrong_scheme(scene: Scene) -> None:
    scene.root["keys"][ALICE.id]["scheme"] = "ecdsa-p256-sha256"


def _unreachable(scene: Scene) -> None:
    scene.root["roles"]["builder"]["threshold"] = 2


def _threshold_zero(scene: Scene) -> None:
    scene.root["roles"]["builder"]["threshold"] = 0


def _unknown_role_key(scene: Scene) -> None:
    scene.root["roles"]["builder"]["keys"] = ["0" * 64]


def _listed_twice(scene: Scene) -> None:
    scene.root["roles"]["builder"] = {"keys": [ALICE.id, ALICE.id], "threshold": 2}


def _local_time(scene: Scene) -> None:
    scene.root["expires"] = "2027-12-31T00:00:00"


FORGERIES: list[tuple[Callable[[Scene], None], set[str]]] = [
    (_other_key, {"ATT-5"}),
    (_claimed_id, {"ATT-6"}),
    (_same_key_twice, {"ATT-6"}),
    (_one_key_under_two_ids, {"ATT-4"}),
    (_payload_type, {"ATT-3"}),
    (_swapped_type, {"ATT-3", "ATT-6"}),
    (_one_signature_missing, {"ATT-5"}),
    (_no_signature, {"ATT-2"}),
    (_seventeen_signatures, {"ATT-2"}),
    (_truncated_base64, {"ATT-2"}),
    (_loose_base64, {"ATT-2"}),
    (_reencoded, {"ATT-6"}),
    (_pretty_payload, {"ATT-7"}),
    (_wrong_predicate, {"ATT-7"}),
    (_statement_missing, {"ATT-7"}),
    (_statements_swapped, {"ATT-7"}),
    (_no_statement, {"ATT-7"}),
    (_other_statement_type, {"ATT-7"}),
    (_other_wheel, {"ATT-8"}),
    (_subject_missing, {"ATT-8"}),
    (_subject_more, {"ATT-8"}),
    (_other_algorithm, {"ATT-8"}),
    (_dependency_hidden, {"ATT-9"}),
    (_dependency_changed, {"ATT-9"}),
    (_higher_builder, {"ATT-9"}),
    (_other_result, {"ATT-9"}),
    (_proven_tree, {"ATT-9"}),
    (_other_bom, {"ATT-9"}),
    (_expired, {"ATT-4"}),
    (_no_builder, {"ATT-4"}),
    (_wrong_scheme, {"ATT-4"}),
    (_unreachable, {"ATT-4"}),
    (_threshold_zero, {"ATT-4"}),
    (_unknown_role_key, {"ATT-4"}),
    (_listed_twice, {"ATT-4"}),
    (_local_time, {"ATT-4"}),
]


@pytest.mark.parametrize(
    ("forge", "expected"), FORGERIES, ids=[forge.__name__.strip("_") for forge, _ in FORGERIES]
)
def test_a_forgery_fails_its_own_checks_and_no_other(
    scene: Scene, forge: Callable[[Scene], None], expected: set[str]
) -> None:
    forge(scene)
    report = scene.judge()
    assert bad(report) == expected, [f for f in report.findings if f.check in bad(report)]
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "not the statements of a bundle"),
        (b"{}\n", "the key 'payload' is missing"),
        (b'{"payload":"","payload":""}\n', "the key occurs twice"),
        (b"[" * 100_000, "not JSON that we accept"),
        (b"\xff\n", "expected UTF-8"),
        (b"x" * (65 << 20), "expected at most"),
    ],
    ids=["empty", "bare", "duplicate-keys", "deep", "bytes", "huge"],
)
def test_a_file_that_holds_no_envelopes_is_refused(scene: Scene, raw: bytes, problem: str) -> None:
    report = scene.judge(raw)
    assert bad(report) in ({"ATT-2"}, {"ATT-7"})
    assert any(problem in f.message for f in report.findings if f.check in ("ATT-2", "ATT-7"))


def test_a_payload_of_a_hundred_megabytes_is_refused_unread(scene: Scene) -> None:
    scene.envelopes[0]["payload"] = base64.b64encode(bytes(100 << 20)).decode()
    assert bad(scene.judge()) == {"ATT-2"}


def test_a_payload_beyond_the_limit_is_refused_though_the_file_is_read(scene: Scene) -> None:
    scene.envelopes[0]["payload"] = base64.b64encode(bytes((16 << 20) + 3)).decode()
    assert bad(scene.judge()) == {"ATT-2"}


def test_a_signature_of_a_stranger_beside_a_trusted_one_changes_nothing(scene: Scene) -> None:
    scene.signers = [ALICE, MALLORY]
    scene.sign()
    assert not bad(scene.judge())


def test_a_resigned_bundle_is_undecided_without_an_anchor_and_fails_with_one(
    scene: Scene,
) -> None:
    """Everything replaced and signed again by somebody who names himself in the trust root."""
    members = small.patched_wheel(BASE)
    members["vllm/crlf.py"] = (small.F, b"EVIL = 1\n")
    info = f"vllm-{small.LOCAL}.dist-info/RECORD"
    rest = {path: each for path, each in members.items() if path != info}
    wheel = small.zipped(rest | {info: (small.F, small.record(rest, info))})
    files = {name: data for name, data in small.bundle(BASE).items() if name != "receipt.json"}
    files |= {small.wheel_name(BASE): wheel, "bom.cdx.json": small.canonical(small.bom(wheel))}
    files["receipt.json"] = small.canonical(small.receipt(BASE, files, {}, small.CONNECTOR_NAME))
    small.write(scene.folder / "bundle", files)
    scene.payloads = [small.canonical(each) for each in statements(files)]
    scene.signers, scene.root = [MALLORY], trust([MALLORY])
    scene.sign()
    with_pins = scene.judge()
    assert bad(with_pins) == {"TREE-1"}
    scene.home = Path("/nonexistent")
    without = scene.judge()
    assert without.exit_code == 3
    assert not [f for f in without.findings if f.status is Status.FAIL]


def test_without_a_trust_root_signatures_are_noted_or_undecided(scene: Scene) -> None:
    assert not bad(scene.judge(trust=None, required=False))
    assert bad(scene.judge(trust=None)) == {"ATT-4"}


def test_missing_attestations_are_undecided_when_required(scene: Scene) -> None:
    asked = Options(home=scene.home, attestations=Demands(required=True))
    report = judge_bundle(scene.folder / "bundle", asked)
    assert (bad(report), report.exit_code) == ({"ATT-1"}, 3)
    assert not bad(judge_bundle(scene.folder / "bundle", Options(home=scene.home)))


def test_a_trust_root_inside_the_bundle_decides_nothing(scene: Scene) -> None:
    root = scene.folder / "bundle" / "root.json"
    root.write_bytes(small.canonical(scene.root))
    assert bad(scene.judge(trust=root)) == {"ATT-4", "ATT-8", "PKG-11"}


def test_a_trust_root_that_is_not_there_fails(scene: Scene) -> None:
    assert bad(scene.judge(trust=scene.folder / "none.json")) == {"ATT-4"}


def test_a_proof_of_the_commit_can_be_required(scene: Scene, tmp_path: Path) -> None:
    home = tmp_path / "unproven"
    files = small.checkout()
    pins = small.pins()
    pins["commit"]["status"] = "unproven"
    files[f"overlay/targets/{small.TARGET}/pins.json"] = small.canonical(pins)
    small.write(home, files)
    bundle = scene.folder / "bundle" / small.wheel_name(BASE)
    code = cli.main(
        [
            "wheel",
            str(bundle),
            "--pins",
            str(home / f"overlay/targets/{small.TARGET}/pins.json"),
            "--require-commit-proof",
        ]
    )
    assert code == 3


def test_without_cryptography_signatures_are_undecided_and_say_why(scene: Scene) -> None:
    scene.judge()
    root = Path(__file__).parents[3]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from verify.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    pins = scene.home / f"overlay/targets/{small.TARGET}/pins.json"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            code,
            "bundle",
            scene.folder / "bundle",
            "--pins",
            pins,
            "--trust",
            scene.folder / "root.json",
            "--at",
            "2027-01-01T00:00:00Z",
            "--format",
            "json",
        ],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    findings = json.loads(done.stdout)["findings"]
    (finding,) = [f for f in findings if f["status"] == "undecided"]
    assert finding["check"] == "ATT-5"
    assert "`cryptography`, which is not installed" in finding["message"]


def test_every_att_check_is_hit_here() -> None:
    hit = {check for _, expected in FORGERIES for check in expected} | {"ATT-1"}
    assert hit >= {check for check in CHECKS if check.startswith("ATT-")}


@pytest.mark.parametrize("data", [b"", b"{}\n", b'{"schema":"x"}\n', b"[]\n"])
def test_bytes_that_are_no_trust_root_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="root"):
        TrustRoot.parse(data, "root")
