"""The statements of a bundle, as docs/attestation.md specifies them.

Pure: values in, canonical bytes out. Nothing here depends on a key, so that two keys sign the
same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify import strictjson
from verify.strictjson import Json

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
CYCLONEDX = "https://cyclonedx.org/bom"
PREFIX = "urn:sparkcache:vllm:"
COMPOSITION = f"{PREFIX}composition/v1"
BUILD_TYPE = f"{PREFIX}build/v1"
BUILDER_ID = f"{PREFIX}builder/unhosted/v1"


@dataclass(frozen=True, slots=True)
class Dependency:
    """Something that the build consumed."""

    name: str
    digest: Mapping[str, str]
    uri: str | None = None

    def json(self) -> Json:
        """The in-toto ResourceDescriptor."""
        found: dict[str, Json] = {"name": self.name, "digest": dict(self.digest)}
        if self.uri is not None:
            found["uri"] = self.uri
        return found


@dataclass(frozen=True, slots=True)
class Identities:
    """What the release is called, and what this build recomputed of it.

    ``whole`` says that the whole release was read (an sdist or a commit), not ``vllm/`` alone.
    """

    commit: str | None
    commit_proven: bool
    git: str
    tree: str
    vllm_tree: str
    manifest_sha256: str
    vllm_manifest_sha256: str
    whole: bool


def index_dependency(project: str, version: str, filename: str, sha256: str) -> Dependency:
    """Return a file of the package index as a dependency."""
    return Dependency(
        filename, {"sha256": sha256}, f"pkg:pypi/{project}@{version}?file_name={filename}"
    )


def statement(predicate_type: str, predicate: Json, subjects: Mapping[str, str]) -> bytes:
    """Return a statement about ``subjects``, file names to SHA-256."""
    return strictjson.dump(
        {
            "_type": STATEMENT,
            "subject": [
                {"name": name, "digest": {"sha256": subjects[name]}} for name in sorted(subjects)
            ],
            "predicateType": predicate_type,
            "predicate": predicate,
        }
    )


def provenance(
    target: str,
    base: str,
    source: str,
    dependencies: Sequence[Dependency],
    subjects: Mapping[str, str],
) -> bytes:
    """Return the SLSA provenance: who built ``subjects``, how, from what."""
    return statement(
        PROVENANCE,
        {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"target": target, "base": base, "source": source},
                "resolvedDependencies": [
                    each.json() for each in sorted(dependencies, key=lambda each: each.name)
                ],
            },
            "runDetails": {"builder": {"id": BUILDER_ID}},
        },
        subjects,
    )


def composition(
    pins: Mapping[str, Json], base: str, identities: Identities, subjects: Mapping[str, str]
) -> bytes:
    """Return what the patched tree is: claimed and proven identities, changes, result.

    ``pins`` are the parsed ``pins.json``; what they say of the base is repeated as it is.
    """
    bases = pins["bases"]
    if not isinstance(bases, Mapping) or not isinstance(pinned := bases[base], Mapping):
        raise TypeError("pins were not parsed by their schema")
    native = pinned["native"]
    if not isinstance(native, Mapping):
        raise TypeError("pins were not parsed by their schema")
    claimed: dict[str, Json] = {"git": identities.git}
    proven: dict[str, Json] = {
        "vllm_tree": identities.vllm_tree,
        "vllm_manifest_sha256": identities.vllm_manifest_sha256,
    }
    if identities.whole:
        proven |= {"tree": identities.tree, "manifest_sha256": identities.manifest_sha256}
    else:
        claimed["tree"] = identities.tree
    if identities.commit_proven and identities.whole:
        proven["commit"] = identities.commit
    else:
        claimed["commit"] = identities.commit
    return statement(
        COMPOSITION,
        {
            "target": pins["target"],
            "base": base,
            "local_version": pins["local_version"],
            "claimed": claimed,
            "proven": proven,
            "native": {**native, "wheel_sha256": pinned["sha256"]},
            "files": pins["files"],
            "modules": pins["modules"],
            "packaging": pinned["packaging"],
            "result": pins["composed"],
        },
        subjects,
    )
