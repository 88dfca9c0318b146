"""The receipt of a bundle: what went in and what came out (docs/build.md).

Pure. What the pins say is repeated as the pins say it, so that a receipt can be read alone;
what this build read and made is added. :mod:`verify` believes none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from builder.bundle import Artifact
from verify import strictjson
from verify.strictjson import Json

SCHEMA = "sparkcache.receipt/v1"


@dataclass(frozen=True, slots=True)
class Input:
    """A file that the build read from outside."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ConnectorFacts:
    """The connector wheel, bound to its source.

    ``generated`` maps the files that are not in the source to their SHA-256;
    ``contract_sha256`` is that of the contract among them.
    """

    version: str
    filename: str
    git_tree: str
    source_sha256: str
    generated: Mapping[str, str]
    contract_sha256: str


def receipt(
    pins: Mapping[str, Json],
    pins_sha256: str,
    base: str,
    inputs: Sequence[Input],
    connector: ConnectorFacts,
    artifacts: Mapping[str, Artifact],
) -> bytes:
    """Return ``receipt.json`` as canonical JSON.

    Args:
        pins: the parsed ``pins.json``.
        pins_sha256: the SHA-256 of its bytes.
        base: the base that was built, a key of ``pins["bases"]``.
        inputs: exactly what was read from outside.
        connector: what the connector wheel is.
        artifacts: every other file of the bundle.
    """
    bases = pins["bases"]
    if not isinstance(bases, Mapping) or not isinstance(pinned := bases[base], Mapping):
        raise TypeError("pins were not parsed by their schema")
    return strictjson.dump(
        {
            "schema": SCHEMA,
            "target": pins["target"],
            "base": base,
            "local_version": pins["local_version"],
            "commit": pins["commit"],
            "pins": {"sha256": pins_sha256},
            "contract": pins["contract"],
            "inputs": [
                {"name": each.name, "sha256": each.sha256, "size": each.size}
                for each in sorted(inputs, key=lambda each: each.name)
            ],
            "patches": pins["patches"],
            "modules": pins["modules"],
            "composition": pins["composed"],
            "native": pinned["native"],
            "connector": {
                "version": connector.version,
                "filename": connector.filename,
                "git_tree": connector.git_tree,
                "source_sha256": connector.source_sha256,
                "generated": dict(connector.generated),
                "contract_sha256": connector.contract_sha256,
            },
            "artifacts": {
                name: {"sha256": artifact.sha256, "size": artifact.size}
                for name, artifact in artifacts.items()
            },
        }
    )
