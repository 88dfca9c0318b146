"""Generates everything below ``overlay/targets/<target>/`` that is not written by hand.

Inputs are the release, the base wheels, the patch series, the modules and ``target.yaml``;
outputs are ``pins.json``, ``contract.json``, ``source.manifest`` and ``bases/*.manifest``
(docs/build.md). The same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.base_wheel import BaseFacts, examine
from builder.cache import Digest
from builder.compose import PACKAGE, Composition, compose, read_modules
from builder.contract import contract_paths, make_contract
from builder.errors import BuildError
from builder.patcher import Content
from builder.series import Series
from builder.source import Release, SourceProvider, scan
from builder.target import IndexFile, Layout, Target
from builder.wheel_version import local_version
from verify import gitobj, strictjson
from verify.errors import FormatError
from verify.manifest import Manifest
from verify.strictjson import Json

SCHEMA = "sparkcache.pins/v1"


class PinError(BuildError):
    """The inputs of the pins do not fit together."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file of the package index as it lies on disk."""

    file: IndexFile
    path: Path
    digest: Digest


@dataclass(frozen=True, slots=True)
class Inputs:
    """What pins are generated from: the release, its sdist if it is one, and base wheels."""

    release: SourceProvider
    sdist: Input | None
    bases: Mapping[str, Input]


def make_pins(layout: Layout, inputs: Inputs, say: Callable[[str], None]) -> dict[str, bytes]:
    """Return the generated files by their path below the target's folder.

    Raises:
        BuildError: when patches do not fit, a wheel differs from the release where it should
            not, or the commit's raw objects contradict the release.
    """
    target = layout.read_target()
    series = Series.read(layout.patches, target.base_trailer)
    modules = read_modules(layout.modules)
    wanted = {*series.paths(), *target.contract}
    say(f"reading {inputs.release.name}")
    release = scan(inputs.release, keep=wanted)
    before = {path: Content(file.mode or "", file.data) for path, file in release.kept.items()}
    composition = compose(
        series, modules, {path: before.get(path) for path in series.paths()}, release.manifest
    )
    contract = make_contract(
        target,
        composition,
        {p: before[p] for p in contract_paths(target, composition) if p in before},
    )
    files: dict[str, bytes] = {
        "contract.json": contract,
        "source.manifest": release.manifest.dump(),
    }
    bases: dict[str, Json] = {}
    for name, wheel in sorted(inputs.bases.items()):
        say(f"hashing the members of {wheel.file.filename}")
        intent = target.bases[name]
        facts = examine(wheel.path, release, target.version, target.revision, intent.differs)
        files[f"bases/{name}.manifest"] = facts.manifest.dump()
        bases[name] = _base(wheel, facts)
    files["pins.json"] = strictjson.dump(
        {
            "schema": SCHEMA,
            "target": target.name,
            "version": target.version,
            "local_version": local_version(target.version, target.revision),
            "commit": _commit(layout, target, release),
            "source": _source(release),
            "sdist": None if inputs.sdist is None else _index_file(inputs.sdist),
            "bases": bases,
            "patches": [
                {"name": patch.name, "sha256": hashlib.sha256(patch.data).hexdigest()}
                for patch in series.patches
            ],
            "files": [_touched(path, composition, series) for path in sorted(composition.patched)],
            "modules": [
                {"path": path, "mode": content.mode, **_blob(content)}
                for path, content in sorted(composition.modules.items())
            ],
            "composed": _composed(composition, release),
            "contract": {"sha256": hashlib.sha256(contract).hexdigest()},
        }
    )
    return files


def _commit(layout: Layout, target: Target, release: Release) -> Json:
    """The commit, ``proven`` only by raw objects that hash to it and hold this very release."""
    folder = layout.folder / "objects"
    if not folder.is_dir():
        return {"id": target.commit, "status": "unproven"}
    try:
        raw_commit = (folder / "commit").read_bytes()
        raw_tree = (folder / "tree").read_bytes()
        commit = gitobj.parse_commit(raw_commit, "objects/commit")
        root = gitobj.parse_tree(raw_tree, "objects/tree")
    except (OSError, FormatError) as error:
        raise PinError(f"the raw objects of the commit are unusable: {error}") from error
    trees = release.git_trees()
    below = {entry.name: entry.id for entry in root}
    steps = (
        ("objects/commit", target.commit, gitobj.object_id("commit", raw_commit)),
        ("the commit's tree", commit.tree, gitobj.object_id("tree", raw_tree)),
        ("the release's root tree", commit.tree, trees[""]),
        ("the release's vllm/ tree", below.get(PACKAGE.encode()), trees.get(PACKAGE)),
    )
    for what, expected, found in steps:
        if expected != found:
            raise PinError(
                f"{what}: expected {expected}, found {found}: the release is not the commit that "
                "target.yaml names"
            )
    return {"id": target.commit, "status": "proven"}


def _source(release: Release) -> Json:
    trees = release.git_trees()
    return {
        "tree": trees[""],
        "vllm_tree": trees[PACKAGE],
        "generated": sorted(release.generated),
        "manifest": {"sha256": release.manifest.sha256()},
        "vllm_manifest_sha256": release.manifest.below(PACKAGE).sha256(),
    }


def _index_file(item: Input) -> dict[str, Json]:
    return {
        "project": item.file.project,
        "filename": item.file.filename,
        "sha256": item.digest.sha256,
        "size": item.digest.size,
    }


def _base(wheel: Input, facts: BaseFacts) -> Json:
    return {
        **_index_file(wheel),
        "dist_info": facts.dist_info,
        "differs": dict(facts.differs),
        "manifest": {"sha256": facts.manifest.sha256()},
        "native": {"sha256": facts.native.sha256(), "count": len(facts.native.files)},
        "packaging": {
            "rule": facts.rule,
            "files": [
                {"path": path, "pre": before, "post": after}
                for path, before, after in facts.packaging
            ],
        },
    }


def _touched(path: str, composition: Composition, series: Series) -> Json:
    before, after = composition.before[path], composition.patched[path]
    kept = after if after is not None else before
    if kept is None:
        raise PinError(f"{path}: the patches add it and delete it again: drop both")
    return {
        "path": path,
        "mode": kept.mode,
        "pre": None if before is None else _blob(before),
        "post": None if after is None else _blob(after),
        "patches": list(series.touching(path)),
    }


def _composed(composition: Composition, release: Release) -> Json:
    trees = composition.git_trees({file.path: file for file in release.git_files()})
    manifest: Manifest = composition.manifest(release.manifest).below(PACKAGE)
    return {"vllm_tree": trees[PACKAGE], "manifest_sha256": manifest.sha256()}


def _blob(content: Content) -> dict[str, Json]:
    return {
        "sha256": hashlib.sha256(content.data).hexdigest(),
        "git": gitobj.blob_id(content.data),
    }
