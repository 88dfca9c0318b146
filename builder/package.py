"""Packages one base: from a composition and a verified base wheel to the files of a bundle.

What leaves here is a function of the :class:`Recipe` and of the connector's source, README,
LICENSE and NOTICE in the checkout. Steps of :func:`package`:

1. the contract that ships with the connector is the pinned one;
2. repack the base wheel with the composition's changes;
3. what the packaging rule made of version and metadata is what the pins say;
4. the connector wheel, bound to its source;
5. licence files, bill of materials, and the receipt over all of it;
6. the attestations, signed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.attest.assemble import FILENAME as ATTESTATIONS
from builder.attest.assemble import Evidence, attestations
from builder.attest.dsse import Signer
from builder.bom import Connector, Patched, Upstream, bom
from builder.bundle import Artifact, Staging
from builder.compose import Composition
from builder.connector_wheel import PACKAGE, connector_wheel, read_source
from builder.errors import BuildError
from builder.patcher import Content
from builder.pinned import Pinned
from builder.receipt import ConnectorFacts, Input, receipt
from builder.wheel_repack import Add, Change, Remove, Repacked, Replace, repack
from builder.wheel_version import WheelName
from builder.wheel_write import Sink
from verify.manifest import EXECUTABLE

RECEIPT = "receipt.json"
BOM = "bom.cdx.json"
CONTRACT = f"{PACKAGE}/contract.json"
LICENSES = ("LICENSE", "NOTICE")


class PinMismatchError(BuildError):
    """What the build made or read is not what the pins say.

    Attributes:
        path: the file.
        expected: the pinned SHA-256.
        found: the SHA-256 that the build has.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        self.path = path
        self.expected = expected
        self.found = found
        super().__init__(
            f"{path}: expected SHA-256 {expected} as pinned, found {found}; if the change is "
            "meant, pin it with `python -m builder pin`, else restore the file with git"
        )


def architecture(base: str) -> str:
    """Return the machine that a base is for: ``x86_64`` or ``aarch64``."""
    return base.rpartition("-")[2]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that one bundle is made of.

    ``wheel`` is the base wheel, already verified; ``source`` says where the release's files
    were read from (``wheel``, ``sdist``), ``inputs`` what was read from outside;
    ``patches`` the patch files in series order; ``native`` the files of the native library
    for this base's architecture, by path in the connector's wheel.
    """

    checkout: Path
    pinned: Pinned
    base: str
    wheel: Path
    source: str
    inputs: Sequence[Input]
    composition: Composition
    patches: Mapping[str, bytes]
    contract: bytes
    git: str
    native: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packaged:
    """The names of what was packaged, for people."""

    wheel: str
    connector: str
    connector_version: str
    size: int


def package(recipe: Recipe, stage: Staging, signers: Sequence[Signer]) -> Packaged:
    """Write every file of the bundle into ``stage``; ``signers`` sign its attestations.

    Raises:
        PinMismatchError: when something is not what the pins say.
        BuildError: when the base wheel or the connector's source cannot be packaged.
        KeyUseError: when a signer cannot sign.
        OutputError: when a file cannot be written.
    """
    pinned = recipe.pinned
    base = pinned.bases[recipe.base]
    _expect("contract.json", pinned.contract_sha256, recipe.contract)  # (1)

    wheel_name = WheelName.parse(base.filename).with_version(pinned.local_version).filename
    stamped: list[tuple[str, bytes, bytes]] = []
    wheel = stage.stream(wheel_name, lambda sink: stamped.extend(write_wheel(recipe, sink).stamped))
    for path, before, after in stamped:  # (2), (3)
        pre, post = base.packaging[path]
        _expect(path, pre, before)
        _expect(f"{path} in {wheel_name}", post, after)

    connector = _connector(recipe, stage)  # (4)
    for name in LICENSES:  # (5)
        stage.write(name, (recipe.checkout / name).read_bytes())
    materials = _bom(recipe, wheel_name, wheel, connector, stage)
    stage.write(BOM, materials)
    artifacts = stage.artifacts
    stage.write(
        RECEIPT,
        receipt(pinned.json, pinned.sha256, recipe.base, recipe.inputs, connector, artifacts),
    )
    evidence = Evidence(  # (6)
        pinned=pinned,
        base=recipe.base,
        source=recipe.source,
        git=recipe.git,
        inputs=recipe.inputs,
        connector=connector,
        wheel=wheel_name,
        bom=materials,
        artifacts={name: artifact.sha256 for name, artifact in stage.artifacts.items()},
    )
    stage.write(ATTESTATIONS, attestations(evidence, signers))
    size = sum(artifact.size for artifact in stage.artifacts.values())
    return Packaged(wheel_name, connector.filename, connector.version, size)


def write_wheel(recipe: Recipe, sink: Sink) -> Repacked:
    """(2) Repack the base with the composition's changes.

    Raises:
        BuildError: when the base cannot be repacked.
    """
    filename = recipe.pinned.bases[recipe.base].filename
    changes: dict[str, Change] = {
        path: _change(recipe.composition.before.get(path), content)
        for path, content in recipe.composition.changes().items()
    }
    with recipe.wheel.open("rb") as file:
        return repack(file, filename, sink, version=recipe.pinned.local_version, changes=changes)


def _change(before: Content | None, after: Content | None) -> Change:
    if after is None:
        return Remove()
    if before is None:
        return Add(after.data, executable=after.mode == EXECUTABLE)
    return Replace(after.data)


def _connector(recipe: Recipe, stage: Staging) -> ConnectorFacts:
    """(4) Write the connector wheel and return what binds it to its source."""
    source = read_source(recipe.checkout)
    generated = {CONTRACT: recipe.contract, **recipe.native}
    wheel = connector_wheel(
        recipe.checkout,
        source,
        generated,
        architecture=architecture(recipe.base) if recipe.native else None,
    )
    stage.stream(wheel.filename, wheel.write)
    return ConnectorFacts(
        version=wheel.version,
        filename=wheel.filename,
        git_tree=source.git_tree,
        source_sha256=source.sha256,
        generated={path: _sha256(data) for path, data in generated.items()},
        contract_sha256=_sha256(recipe.contract),
    )


def _bom(
    recipe: Recipe, wheel_name: str, wheel: Artifact, connector: ConnectorFacts, stage: Staging
) -> bytes:
    pinned = recipe.pinned
    base = pinned.bases[recipe.base]
    ancestors = [Upstream(base.project, pinned.version, base.sha256)]
    if pinned.sdist is not None and base.project != pinned.sdist.project:
        release = Upstream(pinned.sdist.project, pinned.version, pinned.sdist.sha256)
        ancestors = [release, *ancestors]
    return bom(
        Patched(
            local_version=pinned.local_version,
            filename=wheel_name,
            sha256=wheel.sha256,
            base=recipe.base,
            ancestors=ancestors,
            commit=pinned.commit,
            git=recipe.git,
            patches=recipe.patches,
            modules={
                path: _sha256(content.data) for path, content in recipe.composition.modules.items()
            },
            composition_sha256=pinned.composed_sha256,
            native_sha256=base.native_sha256,
        ),
        Connector(
            version=connector.version,
            filename=connector.filename,
            sha256=stage.artifacts[connector.filename].sha256,
            source_sha256=connector.source_sha256,
        ),
    )


def _expect(path: str, pinned: str, data: bytes) -> None:
    if _sha256(data) != pinned:
        raise PinMismatchError(path, pinned, _sha256(data))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
