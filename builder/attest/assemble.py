"""Makes the attestations of one bundle from what was packaged (docs/attestation.md).

Pure: the statements are values of the recipe and of the artifacts; the signers sign them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from builder.attest.dsse import Signer, envelope
from builder.attest.statements import (
    CYCLONEDX,
    Dependency,
    Identities,
    composition,
    index_dependency,
    provenance,
    statement,
)
from builder.pinned import Pinned
from builder.receipt import ConnectorFacts, Input
from verify import strictjson
from verify.strictjson import Record

FILENAME = "attestations.intoto.jsonl"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the statements of one bundle are made of.

    ``artifacts`` maps every other file of the bundle to its SHA-256; ``wheel`` is the patched
    vLLM's among them, ``bom`` the content of the bill of materials.
    """

    pinned: Pinned
    base: str
    source: str
    git: str
    inputs: Sequence[Input]
    connector: ConnectorFacts
    wheel: str
    bom: bytes
    artifacts: Mapping[str, str]


def statements(evidence: Evidence) -> list[bytes]:
    """Return the payloads, in the order in which the file holds them."""
    wheel = {evidence.wheel: evidence.artifacts[evidence.wheel]}
    connector = evidence.connector.filename
    return [
        provenance(
            evidence.pinned.target,
            evidence.base,
            evidence.source,
            dependencies(evidence),
            evidence.artifacts,
        ),
        composition(evidence.pinned.json, evidence.base, identities(evidence), wheel),
        statement(
            CYCLONEDX,
            strictjson.parse(evidence.bom, "bom.cdx.json"),
            {**wheel, connector: evidence.artifacts[connector]},
        ),
    ]


def attestations(evidence: Evidence, signers: Iterable[Signer]) -> bytes:
    """Return ``attestations.intoto.jsonl``: every statement, signed by every signer.

    Raises:
        KeyUseError: when a signer cannot sign.
    """
    signers = list(signers)
    return b"".join(envelope(payload, signers) for payload in statements(evidence))


def dependencies(evidence: Evidence) -> list[Dependency]:
    """Return exactly what the build consumed."""
    pinned, target = evidence.pinned, evidence.pinned.target
    files = [*pinned.bases.values(), *((pinned.sdist,) if pinned.sdist is not None else ())]
    projects = {file.filename: file.project for file in files}
    folder = f"overlay/targets/{target}"
    commit = Dependency(
        "commit", {"gitCommit": pinned.commit or ""}, f"git+{evidence.git}@{pinned.commit}"
    )
    return [
        *((commit,) if evidence.source == "git" else ()),
        *(
            index_dependency(projects[each.name], pinned.version, each.name, each.sha256)
            for each in evidence.inputs
        ),
        *(
            Dependency(f"patches/{target}/{name}", {"sha256": sha256})
            for name, sha256 in pinned.patches.items()
        ),
        *(
            Dependency(f"overlay/modules/{path}", {"sha256": sha256})
            for path, sha256 in pinned.modules.items()
        ),
        Dependency(f"{folder}/pins.json", {"sha256": pinned.sha256}),
        Dependency(f"{folder}/contract.json", {"sha256": pinned.contract_sha256}),
        Dependency(
            "sparkcache_connector",
            {
                "sha256": evidence.connector.source_sha256,
                "gitTree": evidence.connector.git_tree,
            },
        ),
    ]


def identities(evidence: Evidence) -> Identities:
    """Return the release's identities as the pins have them, and how much of it was read."""
    top = Record(evidence.pinned.json, "pins.json")
    source = top.record("source")
    return Identities(
        commit=evidence.pinned.commit,
        # fetching from git ends with the commit's own bytes hashed to its id
        commit_proven=evidence.source == "git" or top.record("commit").text("status") == "proven",
        git=evidence.git,
        tree=source.git_id("tree"),
        vllm_tree=source.git_id("vllm_tree"),
        manifest_sha256=evidence.pinned.source_manifest_sha256,
        vllm_manifest_sha256=source.sha256("vllm_manifest_sha256"),
        whole=evidence.source != "wheel",
    )
