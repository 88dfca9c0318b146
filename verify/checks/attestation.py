"""ATT: who vouches for the bundle, and for what (docs/attestation.md).

1. There are attestations, when they are required.
2. Every line is an envelope in canonical form, within the limits.
3. Every payload is of the in-toto type.
4. The trust root is sound, lies outside of the subject, and has not expired.
5. Each envelope is signed by as many distinct keys of the role builder as the root demands.
6. No signature that claims a trusted key is false, and none is given twice.
7. The statements are those of a bundle: three, in order, each of its predicate type.
8. Their subjects are the bundle's files, by SHA-256.
9. Their predicates say what the pins, the receipt and the bill of materials say.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verify import strictjson
from verify.anchor import Anchor
from verify.checks.bundle import ATTESTATIONS as FILE
from verify.checks.bundle import BOM, at
from verify.digest import Digest, ReadError
from verify.dsse import PAYLOAD_TYPE, Envelope
from verify.errors import FormatError
from verify.holders import Holder
from verify.pins import Pins
from verify.receipt import Receipt
from verify.report import Recorder
from verify.strictjson import Json
from verify.trust import BUILDER, NoCryptographyError, Role, TrustRoot, verifies

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
COMPOSITION = "urn:sparkcache:vllm:composition/v1"
CYCLONEDX = "https://cyclonedx.org/bom"
BUILD_TYPE = "urn:sparkcache:vllm:build/v1"
BUILDER_ID = "urn:sparkcache:vllm:builder/unhosted/v1"
PREDICATES = (PROVENANCE, COMPOSITION, CYCLONEDX)


@dataclass(frozen=True, slots=True)
class Demands:
    """What the caller asks of attestations: a trust root, the moment to judge at, presence."""

    trust: Path | None = None
    at: datetime.datetime | None = None
    required: bool = False


def judge_attestations(
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    receipt: Receipt | None,
    anchor: Anchor | None,
    demands: Demands,
    subject: Path,
    rec: Recorder,
) -> None:
    """Run all steps on the bundle in ``holder``."""
    # (1)
    if FILE not in holder.items:
        if demands.required or demands.trust is not None:
            message = "the bundle has no attestations, and they are required"
            rec.undecided("ATT-1", FILE, message, expected="a file", actual="none")
        return
    rec.passed("ATT-1", FILE)
    envelopes = _envelopes(holder, rec)
    if rec.tripped("ATT-2"):
        return
    # (3)
    for number, envelope in enumerate(envelopes, start=1):
        if envelope.payload_type != PAYLOAD_TYPE:
            rec.fail(
                "ATT-3",
                f"{FILE}: line {number}",
                "a payload of another type",
                expected=PAYLOAD_TYPE,
                actual=envelope.payload_type,
            )
    rec.passed("ATT-3", PAYLOAD_TYPE)
    root = _trust_root(demands, subject, rec)
    if root is not None:
        _judge_signatures(envelopes, root, rec)
    statements = _statements(envelopes, rec)
    if not rec.tripped("ATT-3", "ATT-7"):
        _judge_subjects(statements, digests, rec)
        _judge_predicates(statements, holder, receipt, anchor, rec)


def _envelopes(holder: Holder, rec: Recorder) -> list[Envelope]:
    # (2)
    found: list[Envelope] = []
    try:
        lines = holder.read(FILE).splitlines(keepends=True)
    except ReadError as error:
        rec.fail("ATT-2", FILE, str(error), expected=error.expected, actual=error.actual)
        return found
    for number, line in enumerate(lines, start=1):
        try:
            found.append(Envelope.parse(line, f"line {number}"))
        except FormatError as error:
            rec.fail("ATT-2", FILE, str(error), expected="an envelope in canonical form")
    rec.passed("ATT-2", f"{len(found)} envelopes")
    return found


def _trust_root(demands: Demands, subject: Path, rec: Recorder) -> TrustRoot | None:
    # (4)
    if demands.trust is None:
        message = "signatures are not judged: no trust root was given"
        if demands.required:
            rec.undecided("ATT-4", None, message, expected="--trust FILE", actual="none")
        else:
            rec.note("ATT-4", None, message)
        return None
    try:
        data = demands.trust.read_bytes()
        root = TrustRoot.parse(data, str(demands.trust))
    except OSError as error:
        rec.fail("ATT-4", str(demands.trust), f"cannot be read: {error.strerror}")
        return None
    except FormatError as error:
        rec.fail("ATT-4", str(demands.trust), str(error), expected="a trust root")
        return None
    if demands.trust.resolve().is_relative_to(subject.resolve()):
        message = "the trust root lies inside the thing judged"
        rec.undecided("ATT-4", str(demands.trust), message, expected="a file from elsewhere")
    now = demands.at or datetime.datetime.now(datetime.UTC)
    if root.expires <= now:
        rec.fail(
            "ATT-4",
            str(demands.trust),
            "the trust root has expired",
            expected=f"an end after {now:%Y-%m-%dT%H:%M:%SZ}",
            actual=f"{root.expires:%Y-%m-%dT%H:%M:%SZ}",
        )
    elif BUILDER not in root.roles:
        message = "the trust root names nobody who may sign bundles"
        rec.fail("ATT-4", str(demands.trust), message, expected="a role builder", actual="none")
    rec.passed("ATT-4", f"version {root.version}, sha256 {hashlib.sha256(data).hexdigest()}")
    return None if rec.tripped("ATT-4") else root


def _judge_signatures(envelopes: list[Envelope], root: TrustRoot, rec: Recorder) -> None:
    role = root.roles[BUILDER]
    for number, envelope in enumerate(envelopes, start=1):
        place = f"{FILE}: line {number}"
        try:
            good, false = _signers(envelope, root, role)
        except NoCryptographyError as error:
            rec.undecided("ATT-5", None, str(error), expected="the package", actual="none")
            return
        except FormatError as error:
            rec.fail("ATT-4", None, str(error), expected="keys of their schemes")
            return
        # (6)
        for key_id, problem in false:
            rec.fail("ATT-6", place, problem, expected="one true signature", actual=key_id)
        # (5) a false signature of a trusted key explains a threshold that is not met
        if len(good) < role.threshold and not false:
            rec.fail(
                "ATT-5",
                place,
                "too few trusted keys have signed",
                expected=f"{role.threshold} of {len(role.keys)} keys",
                actual=", ".join(sorted(good)) or "none of them",
            )
    rec.passed("ATT-5", f"{role.threshold} of {len(role.keys)} keys on each of {len(envelopes)}")
    rec.passed("ATT-6", f"{len(envelopes)} envelopes")


def _signers(
    envelope: Envelope, root: TrustRoot, role: Role
) -> tuple[set[str], list[tuple[str, str]]]:
    """Return the ids of the role's keys that signed, and ids with what is wrong about them.

    Ids are computed from the keys' bytes (:class:`TrustRoot`), so distinct ids are distinct
    keys.
    """
    good: set[str] = set()
    false: list[tuple[str, str]] = []
    for signature in envelope.signatures:
        if signature.key_id not in role.keys:
            continue
        if signature.key_id in good:
            false.append((signature.key_id, "a key has signed twice"))
        elif verifies(root.keys[signature.key_id], envelope.signed, signature.value):
            good.add(signature.key_id)
        else:
            false.append((signature.key_id, "a signature that its key did not make"))
    return good, false


def _statements(envelopes: list[Envelope], rec: Recorder) -> list[Json]:
    # (7)
    found: list[Json] = []
    for number, envelope in enumerate(envelopes, start=1):
        try:
            value = strictjson.parse(envelope.payload, f"line {number}: payload")
        except FormatError as error:
            rec.fail("ATT-7", FILE, str(error), expected="a statement in canonical form")
            continue
        keys = set(value) if isinstance(value, Mapping) else set()
        if keys != {"_type", "subject", "predicateType", "predicate"} or (
            at(value, "_type") != STATEMENT
        ):
            message = f"line {number} holds no statement"
            rec.fail("ATT-7", FILE, message, expected=STATEMENT, actual=str(at(value, "_type")))
        found.append(value)
    types = tuple(at(value, "predicateType") for value in found)
    if types != PREDICATES and not rec.tripped("ATT-7"):
        rec.fail(
            "ATT-7",
            FILE,
            "not the statements of a bundle",
            expected=", ".join(PREDICATES),
            actual=", ".join(map(str, types)),
        )
    rec.passed("ATT-7", f"{len(found)} statements")
    return found


def _judge_subjects(
    statements: list[Json], digests: Mapping[str, Digest | ReadError], rec: Recorder
) -> None:
    # (8)
    files = {
        name: found.sha256
        for name, found in digests.items()
        if isinstance(found, Digest) and name != FILE
    }
    wheels = {name: sha256 for name, sha256 in files.items() if name.endswith(".whl")}
    patched = {name: each for name, each in wheels.items() if name.startswith("vllm")}
    for value, expected in zip(statements, (files, patched, wheels), strict=True):
        listed = at(value, "subject")
        subjects = [
            {"name": name, "digest": {"sha256": expected[name]}} for name in sorted(expected)
        ]
        if listed != subjects:
            rec.fail(
                "ATT-8",
                FILE,
                f"the subjects of {at(value, 'predicateType')} are not the bundle's files",
                expected=_subjects(subjects),
                actual=_subjects(listed),
            )
    rec.passed("ATT-8", f"{len(files)} files")


def _subjects(value: object) -> str:
    if not isinstance(value, list):
        return "no list"
    return ", ".join(f"{at(each, 'name')} {at(each, 'digest', 'sha256')}" for each in value)


def _judge_predicates(
    statements: list[Json],
    holder: Holder,
    receipt: Receipt | None,
    anchor: Anchor | None,
    rec: Recorder,
) -> None:
    # (9)
    provenance, composition, bom = (at(value, "predicate") for value in statements)
    facts: list[tuple[str, Json, Json]] = []
    if BOM in holder.items:
        try:
            written = strictjson.parse(holder.read(BOM), BOM)
        except (FormatError, ReadError):
            written = bom  # PKG-15 has said so
        facts.append((BOM, written, bom))
    facts += _provenance(provenance, receipt)
    if anchor is not None and receipt is not None:
        facts += _composition(composition, anchor.pins, anchor.pins_json, receipt.base)
    for name, expected, actual in facts:
        if expected != actual:
            rec.fail(
                "ATT-9",
                FILE,
                f"a predicate does not say what is so: {name}",
                expected=_short(expected),
                actual=_short(actual),
            )
    rec.passed("ATT-9", f"{len(facts)} facts")


def _provenance(value: Json, receipt: Receipt | None) -> Iterator[tuple[str, Json, Json]]:
    definition = at(value, "buildDefinition")
    yield "buildType", BUILD_TYPE, at(definition, "buildType")
    yield "builder", BUILDER_ID, at(value, "runDetails", "builder", "id")
    if receipt is None:
        return
    parameters = at(definition, "externalParameters")
    yield "target", receipt.target, at(parameters, "target")
    yield "base", receipt.base, at(parameters, "base")
    listed = at(definition, "resolvedDependencies")
    consumed: dict[str, Json] = {
        str(at(each, "name")): at(each, "digest", "sha256")
        for each in (listed if isinstance(listed, list) else [])
        if at(each, "name") != "commit"
    }
    folder = f"overlay/targets/{receipt.target}"
    expected: dict[str, Json] = {
        f"{folder}/pins.json": receipt.pins_sha256,
        f"{folder}/contract.json": receipt.contract_sha256,
        "sparkcache_connector": receipt.connector.source_sha256,
    }
    expected |= {name: each.sha256 for name, each in receipt.inputs.items()}
    expected |= {f"patches/{receipt.target}/{each.name}": each.sha256 for each in receipt.patches}
    expected |= {f"overlay/modules/{each.path}": each.sha256 for each in receipt.modules}
    yield "resolvedDependencies", expected, consumed


def _composition(value: Json, pins: Pins, raw: Json, base: str) -> Iterator[tuple[str, Json, Json]]:
    pinned = at(raw, "bases", base)
    native = at(pinned, "native")
    yield "target", pins.target, at(value, "target")
    yield "base", base, at(value, "base")
    yield "local_version", pins.local_version, at(value, "local_version")
    for key, known in (("files", at(raw, "files")), ("modules", at(raw, "modules"))):
        yield key, known, at(value, key)
    yield "packaging", at(pinned, "packaging"), at(value, "packaging")
    yield "result", at(raw, "composed"), at(value, "result")
    for key in ("sha256", "count"):
        yield f"native.{key}", at(native, key), at(value, "native", key)
    yield "native.wheel_sha256", at(pinned, "sha256"), at(value, "native", "wheel_sha256")
    # an identity is claimed or proven, never both, and it is the pinned one either way
    source = at(raw, "source")
    for key, identity in (
        ("tree", at(source, "tree")),
        ("vllm_tree", at(source, "vllm_tree")),
        ("vllm_manifest_sha256", at(source, "vllm_manifest_sha256")),
        ("commit", pins.commit),
    ):
        told = [at(value, part, key) for part in ("claimed", "proven") if _has(value, part, key)]
        yield key, [identity], list(told)


def _has(value: Json, part: str, key: str) -> bool:
    inner = at(value, part)
    return isinstance(inner, Mapping) and key in inner


def _short(value: Json) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text)} characters)"
