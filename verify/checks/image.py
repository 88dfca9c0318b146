"""IMAGE: the image is the one that its tag names, and it says of itself what is so.

1. The layout has one image of this tag and platform.
2. Every blob from the manifest to the layers, and of its referrers, is there and has the
   digest and size by which it is referred to.
3. The config lists the layers: each one's plain bytes have the listed digest (``diff_id``).
4. Every layer means the same to every engine (:mod:`verify.oci.merged` has the rules).
5. The merged root has one vLLM, and an interpreter for it.
6. Labels, annotations and platform say what pins and receipt say.
7. The papers that the layer brings are all there and are those of the receipt.
8. The referrers that bring attestations bring those that the image holds.

Steps 1 to 5 are driven by :mod:`verify.judges.image`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from verify import strictjson
from verify.anchor import Anchor
from verify.checks.bundle import ATTESTATIONS, BOM, RECEIPT, at
from verify.digest import Digest, ReadError
from verify.dsse import Envelope
from verify.errors import FormatError
from verify.oci.layout import Descriptor, ImageConfig, Layout, LayoutError, Manifest
from verify.receipt import Artifact, Receipt
from verify.report import Recorder

SHARE = "usr/share/sparkcache"
CONTRACT = "contract.json"
ATTESTATION_TYPE = "application/vnd.in-toto+json"

_PREFIX = "org.sparkcache."
_OCI = "org.opencontainers.image."
_BASE_IMAGE = (f"{_OCI}base.name", f"{_OCI}base.digest")
_PREDICATE = "in-toto.io/predicate-type"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def judge_facts(
    manifest: Manifest,
    config: ImageConfig,
    base: str | None,
    facts: Mapping[str, str],
    rec: Recorder,
    *,
    whole: bool,
) -> None:
    """Run step 6; ``whole`` is for the layer by itself, which says everything and no more.

    An image that was built with the layer has labels of its own; what it repeats of the
    layer's must be true.
    """
    # (6)
    spoken = {"label": config.labels, "annotation": manifest.annotations}
    for kind, found in spoken.items():
        ours = {key for key in found if key.startswith(_PREFIX)}
        if whole:
            ours |= facts.keys() | (found.keys() - set(_BASE_IMAGE))
        for key in sorted(ours):
            expected, actual = facts.get(key), found.get(key)
            if expected != actual:
                rec.fail(
                    "IMAGE-6",
                    key,
                    f"the {kind} does not say what is so",
                    expected=expected or f"no such {kind}",
                    actual=actual or "none",
                )
    for key in _BASE_IMAGE:
        told = {found.get(key) for found in spoken.values()}
        if whole and len(told) > 1:
            message = "label and annotation name different base images"
            rec.fail("IMAGE-6", key, message, expected="one", actual=", ".join(map(str, told)))
    machine = (base or "").rpartition("-")[2]
    expected = f"linux/{_MACHINES.get(machine, config.architecture)}"
    actual = f"{config.os}/{config.architecture}"
    if actual != expected:
        message = "the image is for another platform than its vLLM"
        rec.fail("IMAGE-6", None, message, expected=expected, actual=actual)
    rec.passed("IMAGE-6", f"{actual}, {sum(map(len, spoken.values()))} labels and annotations")


def facts(anchor: Anchor, receipt: Receipt | None, receipt_sha256: str | None) -> dict[str, str]:
    """Return what the layer's labels must say, as far as pins and receipt tell it."""
    pins = anchor.pins
    found = {
        f"{_OCI}title": "SparkCache for vLLM",
        f"{_OCI}version": pins.local_version,
        f"{_OCI}licenses": "Apache-2.0",
        f"{_PREFIX}target": pins.target,
        f"{_PREFIX}pins-sha256": anchor.pins_sha256,
        f"{_PREFIX}contract-sha256": pins.contract_sha256,
        f"{_PREFIX}composition-sha256": pins.composed.manifest_sha256,
    }
    if pins.commit is not None:
        found[f"{_PREFIX}vllm-commit"] = pins.commit
    if receipt is not None and receipt_sha256 is not None:
        found |= {
            f"{_PREFIX}base": receipt.base,
            f"{_PREFIX}connector-version": receipt.connector.version,
            f"{_PREFIX}connector-source-sha256": receipt.connector.source_sha256,
            f"{_PREFIX}receipt-sha256": receipt_sha256,
        }
    return found


def judge_papers(
    digests: Mapping[str, Digest | ReadError],
    receipt: Receipt,
    contract_sha256: str | None,
    rec: Recorder,
) -> None:
    """Run step 7 on the files of the papers' folder."""
    # (7)
    expected: dict[str, str | None] = {
        name: _sha256(receipt.artifacts.get(name)) for name in (BOM, "LICENSE", "NOTICE")
    }
    expected |= {CONTRACT: contract_sha256 or receipt.contract_sha256, RECEIPT: None}
    for name in sorted(expected.keys() - digests.keys()):
        message = "a paper that the layer brings is missing"
        rec.fail("IMAGE-7", name, message, expected=expected[name] or "a file", actual="no file")
    for name, found in sorted(digests.items()):
        if isinstance(found, ReadError) or name in (RECEIPT, ATTESTATIONS):
            continue
        if found.sha256 != expected.get(name):
            message = "not a paper of the receipt"
            wanted = expected.get(name) or "no file"
            rec.fail("IMAGE-7", name, message, expected=wanted, actual=found.sha256)
    rec.passed("IMAGE-7", f"{len(digests)} files")


def receipt_files(receipt: Receipt, own: Digest | ReadError | None) -> dict[str, Digest]:
    """Return the files of the bundle, which attestations speak of, as the receipt has them."""
    files = {
        name: Digest(each.sha256, each.size, None, elf=False)
        for name, each in receipt.artifacts.items()
    }
    return files | ({RECEIPT: own} if isinstance(own, Digest) else {})


def judge_referrers(
    layout: Layout,
    index: Iterable[Descriptor],
    image: Descriptor,
    attestations: bytes | None,
    rec: Recorder,
    *,
    whole: bool,
) -> None:
    """Run step 8, and step 2 for the referrers; ``attestations`` is the file in the image."""
    lines = (attestations or b"").splitlines(keepends=True)
    brought: list[bytes] = []
    for descriptor in index:
        if descriptor.artifact_type is None:
            continue
        try:
            manifest = layout.manifest(descriptor)
            if manifest.subject is None or manifest.subject.sha256 != image.sha256:
                continue
            blobs = [layout.blob(each) for each in manifest.layers]
        except LayoutError as error:
            rec.fail(
                error.check,
                error.path,
                f"a referrer: {error.problem}",
                expected=error.expected,
                actual=error.actual,
            )
            continue
        # (8)
        if manifest.artifact_type != ATTESTATION_TYPE:
            message = f"a referrer that is not judged: {manifest.artifact_type}"
            rec.note("IMAGE-8", descriptor.path, message)
            continue
        data = b"".join(blobs)
        brought.append(data)
        problem = _referrer_problem(data, manifest, lines)
        if problem is not None:
            rec.fail(
                "IMAGE-8",
                descriptor.path,
                "the referrer does not bring an attestation of the image",
                expected=problem[0],
                actual=problem[1],
            )
    if whole and len(brought) != len(lines) and not rec.tripped("IMAGE-2"):
        message = "not every attestation of the layer is a referrer, once"
        expected = f"{len(lines)} referrers"
        rec.fail("IMAGE-8", None, message, expected=expected, actual=f"{len(brought)}")
    if brought or whole:
        rec.passed("IMAGE-8", f"{len(brought)} referrers")


def _referrer_problem(
    data: bytes, manifest: Manifest, lines: Sequence[bytes]
) -> tuple[str, str] | None:
    if data not in lines:
        return f"a line of {ATTESTATIONS}", "other bytes"
    told = manifest.annotations.get(_PREDICATE)
    try:
        payload = Envelope.parse(data, "referrer").payload
        stated = at(strictjson.parse(payload, "payload"), "predicateType")
    except FormatError:
        return None  # ATT-2 or ATT-7 has said so of the line
    return None if told == stated else (f"{_PREDICATE} {stated}", str(told))


def _sha256(artifact: Artifact | None) -> str | None:
    return artifact.sha256 if artifact is not None else None
