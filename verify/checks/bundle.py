"""PKG 11, 12 and 15: the bundle is whole, and its papers describe it.

11. The directory holds exactly the files that the receipt lists, byte for byte, and may hold
    attestations, which speak about the receipt and so cannot be in it.
12. The receipt says what the pins say.
15. The bill of materials is CycloneDX and names this vLLM, by version and digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verify import strictjson
from verify.anchor import Anchor
from verify.checks.base import judge_download
from verify.checks.tree import judge_defects, judge_unreadable
from verify.digest import Digest, ReadError
from verify.errors import FormatError
from verify.holders import Holder
from verify.pins import Pins
from verify.receipt import Receipt
from verify.report import Recorder
from verify.strictjson import Json

RECEIPT = "receipt.json"
BOM = "bom.cdx.json"
ATTESTATIONS = "attestations.intoto.jsonl"
PAPERS = frozenset({RECEIPT, BOM, "LICENSE", "NOTICE"})


def read_receipt(
    holder: Holder, digests: Mapping[str, Digest | ReadError], rec: Recorder
) -> Receipt | None:
    """Parse the receipt for step 12; None when there is none to judge by."""
    # (12)
    if RECEIPT not in digests:
        message = "the receipt is missing"
        rec.fail("PKG-12", RECEIPT, message, expected="a file", actual="none")
        return None
    try:
        return Receipt.parse(holder.read(RECEIPT), RECEIPT)
    except (FormatError, ReadError) as error:
        rec.fail("PKG-12", RECEIPT, str(error))
        return None


def judge_listing(
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    receipt: Receipt,
    rec: Recorder,
) -> None:
    """Run step 11."""
    # (11)
    judge_defects(holder, rec)
    judge_unreadable(holder, digests, rec)
    listed = receipt.artifacts
    defective = {defect.path for defect in holder.defects}
    for path in sorted(listed.keys() - digests.keys() - defective):
        message = "the receipt lists a file that is missing"
        rec.fail("PKG-11", path, message, expected=listed[path].sha256, actual="no file")
    for path in sorted(digests.keys() - listed.keys() - {RECEIPT, ATTESTATIONS}):
        message = "a file that the receipt does not list"
        rec.fail("PKG-11", path, message, expected="no file", actual="a file")
    for path in sorted(listed.keys() & digests.keys()):
        digest, artifact = digests[path], listed[path]
        if isinstance(digest, Digest) and (
            (digest.sha256, digest.size) != (artifact.sha256, artifact.size)
        ):
            rec.fail(
                "PKG-11",
                path,
                "not the file that the receipt lists",
                expected=f"{artifact.sha256}, {artifact.size} bytes",
                actual=f"{digest.sha256}, {digest.size} bytes",
            )
    for path in sorted(PAPERS - digests.keys() - listed.keys() - defective - {RECEIPT}):
        message = "a bundle has this file"
        rec.fail("PKG-11", path, message, expected="a file", actual="none")
    rec.passed("PKG-11", f"{len(listed)} files beside the receipt")


def judge_receipt(receipt: Receipt, anchor: Anchor, rec: Recorder) -> None:
    """Run step 12 against the pins, and BASE-6 for what the build read."""
    # (12)
    for key, expected, actual in _claims(receipt, anchor):
        if expected != actual:
            message = f"the receipt does not say what the pins say: {key}"
            rec.fail("PKG-12", RECEIPT, message, expected=str(expected), actual=str(actual))
    rec.passed("PKG-12", f"target {receipt.target}, base {receipt.base}")
    base = anchor.pins.bases.get(receipt.base)
    if base is None:
        return
    allowed = {base.wheel.filename: base.wheel}
    if anchor.pins.sdist is not None:
        allowed[anchor.pins.sdist.filename] = anchor.pins.sdist
    if base.wheel.filename not in receipt.inputs:
        rec.fail(
            "BASE-6",
            RECEIPT,
            "the build did not read the base wheel",
            expected=base.wheel.filename,
            actual=", ".join(sorted(receipt.inputs)) or "no inputs",
        )
    for name, found in sorted(receipt.inputs.items()):
        if name in allowed:
            judge_download(allowed[name], found.sha256, found.size, f"{RECEIPT}: {name}", rec)
        else:
            expected = " or ".join(sorted(allowed))
            message = "the build read a file that is not pinned"
            rec.fail("BASE-6", RECEIPT, message, expected=expected, actual=name)


def judge_bom(holder: Holder, wheel: Digest | None, local_version: str, rec: Recorder) -> None:
    """Run step 15; ``wheel`` is the patched wheel of the bundle."""
    # (15)
    if BOM not in holder.items:
        return  # step 11 has said so
    try:
        bom = strictjson.parse(holder.read(BOM), BOM)
    except (FormatError, ReadError) as error:
        rec.fail("PKG-15", BOM, str(error))
        return
    component = at(bom, "metadata", "component")
    facts: list[tuple[str, Json, Json]] = [
        ("bomFormat", "CycloneDX", at(bom, "bomFormat")),
        ("specVersion", "1.6", at(bom, "specVersion")),
        ("metadata.component.version", local_version, at(component, "version")),
        (
            "metadata.component.purl",
            "pkg:generic/vllm@" + local_version.replace("+", "%2B"),
            at(component, "purl"),
        ),
    ]
    if wheel is not None:
        hashes = at(component, "hashes")
        listed = hashes if isinstance(hashes, list) else []
        contents = [at(each, "content") for each in listed if at(each, "alg") == "SHA-256"]
        facts.append(("metadata.component.hashes", wheel.sha256, contents[0] if contents else None))
    for key, expected, actual in facts:
        if expected != actual:
            message = f"the bill of materials does not describe this bundle: {key}"
            rec.fail("PKG-15", BOM, message, expected=str(expected), actual=str(actual)[:200])
    rec.passed("PKG-15", f"CycloneDX 1.6, vllm {local_version}")


def _claims(receipt: Receipt, anchor: Anchor) -> Iterator[tuple[str, object, object]]:
    pins: Pins = anchor.pins
    yield "pins", anchor.pins_sha256, receipt.pins_sha256
    yield "target", pins.target, receipt.target
    yield "local_version", pins.local_version, receipt.local_version
    yield "commit", (pins.commit, pins.proven), (receipt.commit, receipt.proven)
    yield "contract", pins.contract_sha256, receipt.contract_sha256
    yield "patches", _named(pins.patches), _named(receipt.patches)
    yield "modules", _named(pins.modules), _named(receipt.modules)
    yield "composition", pins.composed, receipt.composition
    base = pins.bases.get(receipt.base)
    if base is None:
        yield "base", " or ".join(sorted(pins.bases)), receipt.base
    else:
        yield "native", base.native, receipt.native


def _named(values: tuple[object, ...]) -> str:
    return "; ".join(str(value) for value in values) or "none"


def at(value: Json, *keys: str) -> Json:
    """Return what lies at ``keys`` of nested objects; null where something is missing."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
