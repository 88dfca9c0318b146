"""The bundle's bill of materials: CycloneDX 1.6, where a fork is "ancestors plus patches".

Pure. It says what the patched vLLM descends from (``pedigree``), with the full text of every
patch, and what ships beside it. It has no serial number and no timestamp, which CycloneDX
allows: the same inputs have the same bill.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify import strictjson
from verify.strictjson import Json

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_APACHE = [{"license": {"id": "Apache-2.0"}}]


@dataclass(frozen=True, slots=True)
class Upstream:
    """A file of the package index that the patched vLLM descends from."""

    project: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Patched:
    """The patched vLLM: its wheel, and what makes it differ from its ancestors."""

    local_version: str
    filename: str
    sha256: str
    base: str
    ancestors: Sequence[Upstream]
    commit: str | None
    git: str
    patches: Mapping[str, bytes]
    modules: Mapping[str, str]
    composition_sha256: str
    native_sha256: str


@dataclass(frozen=True, slots=True)
class Connector:
    """The connector's wheel."""

    version: str
    filename: str
    sha256: str
    source_sha256: str


def bom(patched: Patched, connector: Connector) -> bytes:
    """Return ``bom.cdx.json`` as canonical JSON."""
    vllm = _purl("generic", "vllm", patched.local_version)
    beside = _purl("generic", "sparkcache-connector", connector.version)
    return strictjson.dump(
        {
            "$schema": _SCHEMA,
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": _patched(patched, vllm)},
            "components": [
                {
                    "type": "library",
                    "bom-ref": beside,
                    "name": "sparkcache-connector",
                    "version": connector.version,
                    "purl": beside,
                    "licenses": _APACHE,
                    "hashes": _sha256(connector.sha256),
                    "properties": _properties(
                        file=connector.filename, source_sha256=connector.source_sha256
                    ),
                },
                *(
                    {
                        "type": "file",
                        "bom-ref": path,
                        "name": path,
                        "licenses": _APACHE,
                        "hashes": _sha256(digest),
                    }
                    for path, digest in sorted(patched.modules.items())
                ),
            ],
            "dependencies": [
                {"ref": vllm, "dependsOn": sorted(patched.modules)},
                {"ref": beside, "dependsOn": [vllm]},
            ],
        }
    )


def _patched(patched: Patched, purl: str) -> Json:
    pedigree: dict[str, Json] = {
        "ancestors": [
            {
                "type": "library",
                "bom-ref": _purl("pypi", each.project, each.version),
                "name": each.project,
                "version": each.version,
                "purl": _purl("pypi", each.project, each.version),
                "licenses": _APACHE,
                "hashes": _sha256(each.sha256),
            }
            for each in patched.ancestors
        ],
        "patches": [
            {"type": "unofficial", "diff": {"text": _text(patch)}}
            for patch in patched.patches.values()
        ],
        "notes": "Patches in the order in which they apply: " + ", ".join(patched.patches),
    }
    if patched.commit is not None:
        pedigree["commits"] = [{"uid": patched.commit, "url": patched.git}]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": "vllm",
        "version": patched.local_version,
        "description": "vLLM with the SparkCache overlay",
        "purl": purl,
        "licenses": _APACHE,
        "hashes": _sha256(patched.sha256),
        "pedigree": pedigree,
        "properties": _properties(
            base=patched.base,
            file=patched.filename,
            composition_sha256=patched.composition_sha256,
            native_sha256=patched.native_sha256,
        ),
    }


def _purl(kind: str, name: str, version: str) -> str:
    """Return a package URL; ``+`` of a local version is the one character that needs care."""
    return f"pkg:{kind}/{name}@{version.replace('+', '%2B')}"


def _sha256(digest: str) -> Json:
    return [{"alg": "SHA-256", "content": digest}]


def _properties(**values: str) -> Json:
    return [{"name": f"sparkcache:{name}", "value": values[name]} for name in sorted(values)]


def _text(patch: bytes) -> Json:
    """Return an attachment; bytes that are no text, or that JSON tools may alter, as base64."""
    try:
        text = patch.decode("utf-8")
    except UnicodeDecodeError:
        text = "\r"
    if "\r" in text:
        content = base64.b64encode(patch).decode("ascii")
        return {"contentType": "text/x-diff", "encoding": "base64", "content": content}
    return {"contentType": "text/x-diff", "content": text}
