"""BASE: what everything else is compared with, and the names that git gives it.

1. The pins come from outside the thing judged, and have the digest that was asked for.
2. The pins agree with themselves: every manifest has its pinned digest, each touched file
   begins as the release has it, and patches and modules add up to the pinned composition.
3. When the commit is claimed to be proven: the raw commit object hashes to the commit id and
   names the pinned tree, whose raw object hashes to its id and names the pinned vllm/.
4. The git tree id of the whole release, recomputed from the judged bytes, is the pinned one.
5. So is the git tree id of ``vllm/``, of the release or of the composition.
6. An upstream archive is, as a file, the pinned one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from verify import expect, gitobj
from verify.anchor import Anchor
from verify.digest import Digest, ReadError
from verify.errors import FormatError
from verify.manifest import Manifest
from verify.pins import Base, Download, Pins
from verify.report import Recorder


@dataclass(frozen=True, slots=True)
class Basis:
    """Pins that agree with themselves, and the manifests that they pin."""

    pins: Pins
    release: Manifest
    bases: Mapping[str, Manifest]


def judge_anchor(
    anchor: Anchor | None, rec: Recorder, *, commit_proof: bool = False
) -> Basis | None:
    """Run steps 1 to 3; None when there is nothing sound to compare with.

    With ``commit_proof``, pins that do not claim a proof leave step 3 undecided.
    """
    # (1)
    if anchor is None:
        rec.undecided(
            "BASE-1",
            None,
            "there are no pins outside the thing judged: what follows is consistent at best, "
            "not authenticated",
        )
        return None
    if anchor.required_sha256 not in (None, anchor.pins_sha256):
        rec.fail(
            "BASE-1",
            "pins.json",
            f"the pins of the {anchor.origin} are not those that --pins names",
            expected=anchor.required_sha256,
            actual=anchor.pins_sha256,
            hint="check out the revision whose pins have this digest, or correct --pins",
        )
    elif not anchor.authenticated:
        rec.undecided(
            "BASE-1",
            "pins.json",
            "the pins lie inside the thing judged: what follows is consistent at best, "
            "not authenticated",
        )
    rec.passed("BASE-1", f"pins {anchor.pins_sha256[:16]}… of the {anchor.origin}")
    # (2)
    basis = _agreement(anchor, rec)
    # (3)
    _commit(anchor, rec, required=commit_proof)
    return None if rec.tripped("BASE-2") else basis


def judge_tree_ids(
    pins: Pins,
    modes: Mapping[str, str],
    digests: Mapping[str, Digest | ReadError],
    rec: Recorder,
    *,
    whole: bool,
    patched: bool,
) -> None:
    """Run steps 4 and 5 over the files of ``modes`` (path to git mode).

    Only called when every file already has its pinned SHA-256, so a difference here means
    that the pins' SHA-256 values and git ids do not name the same bytes. With patches, only
    the id of the composed ``vllm/`` is pinned.
    """
    files: list[gitobj.File] = []
    for path, mode in modes.items():
        found = digests[path]
        if isinstance(found, ReadError) or found.git is None:
            return
        files.append(gitobj.File(path, mode, found.git))
    ids = gitobj.tree_ids(files)
    # (4)
    if whole and not patched:
        if ids[""] != pins.source.tree:
            rec.fail(
                "BASE-4",
                None,
                "the release's git tree has another id",
                expected=pins.source.tree,
                actual=ids[""],
            )
        rec.passed("BASE-4", f"git tree {ids['']} ({len(files)} files)")
    # (5)
    wanted = pins.composed.vllm_tree if patched else pins.source.vllm_tree
    actual = ids.get("vllm", "no directory")
    if actual != wanted:
        rec.fail("BASE-5", "vllm", "the git tree has another id", expected=wanted, actual=actual)
    rec.passed("BASE-5", f"git tree of vllm/ {actual}")


def judge_download(
    pinned: Download, sha256: str, size: int, path: str | None, rec: Recorder
) -> None:
    """Run step 6 for one file."""
    # (6)
    if sha256 != pinned.sha256:
        rec.fail(
            "BASE-6",
            path,
            f"not {pinned.filename} as {pinned.project} published it",
            expected=f"sha256 {pinned.sha256}, {pinned.size} bytes",
            actual=f"sha256 {sha256}, {size} bytes",
        )
    rec.passed("BASE-6", f"{pinned.filename} sha256 {pinned.sha256[:16]}…")


def _agreement(anchor: Anchor, rec: Recorder) -> Basis | None:
    # (2) first the files as bytes, then what they say about each other
    pins = anchor.pins
    release = _manifest("source.manifest", anchor.release, pins.source.manifest_sha256, rec)
    bases: dict[str, Manifest] = {}
    for name, base in pins.bases.items():
        file = f"bases/{name}.manifest"
        manifest = _manifest(file, anchor.bases.get(name), base.manifest_sha256, rec)
        if manifest is not None:
            bases[name] = manifest
    if release is None or len(bases) != len(pins.bases):
        return None
    for path, expected, actual in _disagreements(pins, release, bases):
        rec.fail("BASE-2", path, "the pins do not agree", expected=expected, actual=actual)
    rec.passed("BASE-2", f"{len(release.files)} files of the release, {len(bases)} base wheels")
    return Basis(pins, release, bases)


def _manifest(name: str, data: bytes | None, pinned: str, rec: Recorder) -> Manifest | None:
    if data is None:
        rec.fail("BASE-2", name, "a file beside the pins is missing", expected=f"sha256 {pinned}")
        return None
    actual = hashlib.sha256(data).hexdigest()
    if actual != pinned:
        rec.fail("BASE-2", name, "not the pinned manifest", expected=pinned, actual=actual)
        return None
    try:
        return Manifest.parse(data, name)
    except FormatError as error:
        rec.fail("BASE-2", name, str(error))
        return None


def _disagreements(
    pins: Pins, release: Manifest, bases: Mapping[str, Manifest]
) -> Iterator[tuple[str, str, str]]:
    """Yield place, expected and actual value of everything that contradicts itself."""
    vllm = release.below("vllm").sha256()
    if vllm != pins.source.vllm_manifest_sha256:
        yield "source.vllm_manifest_sha256", vllm, pins.source.vllm_manifest_sha256
    for file in pins.files:
        known = release.files.get(file.path)
        pre = file.pre.sha256 if file.pre is not None else "absent"
        in_release = known.sha256 if known is not None else "absent"
        if pre != in_release:
            yield f"files: {file.path}", in_release, pre
        elif known is not None and known.mode != file.mode:
            yield f"files: {file.path}", known.mode, file.mode
    for module in pins.modules:
        if module.path in release.files or not module.path.startswith("vllm/"):
            yield f"modules: {module.path}", "a new file below vllm/", "a file of the release"
    composed = expect.composed_manifest(pins, release).sha256()
    if composed != pins.composed.manifest_sha256:
        yield "composed.manifest_sha256", composed, pins.composed.manifest_sha256
    for name, base in pins.bases.items():
        yield from _base_disagreements(name, base, release, bases[name])


def _base_disagreements(
    name: str, base: Base, release: Manifest, overlay: Manifest
) -> Iterator[tuple[str, str, str]]:
    def in_wheel(path: str) -> str:
        known = overlay.files.get(path, release.files.get(path))
        return "absent" if known is None or path in overlay.absent else known.sha256

    for each in base.packaged:
        if each.pre != in_wheel(each.path):
            yield f"bases.{name}.packaging: {each.path}", in_wheel(each.path), each.pre
    for path, sha256 in base.differs.items():
        if sha256 != in_wheel(path):
            yield f"bases.{name}.differs: {path}", in_wheel(path), sha256


def _commit(anchor: Anchor, rec: Recorder, *, required: bool) -> None:
    # (3)
    pins = anchor.pins
    if not pins.proven:
        claim = f"commit {pins.commit}" if pins.commit else "no commit"
        message = (
            f"unproven: the pins claim {claim}, and hold no raw objects that tie the tree to it"
        )
        if required:
            rec.undecided("BASE-3", None, message, expected="objects/commit and objects/tree")
        else:
            rec.note("BASE-3", None, message)
        return
    commit, tree = anchor.objects.get("commit"), anchor.objects.get("tree")
    if commit is None or tree is None:
        rec.fail(
            "BASE-3",
            "objects",
            "the commit is said to be proven and the raw objects are missing",
            expected="objects/commit and objects/tree",
            actual=", ".join(sorted(anchor.objects)) or "neither",
        )
        return
    steps: tuple[tuple[str, str | None, Callable[[], str]], ...] = (
        ("objects/commit", pins.commit, lambda: gitobj.object_id("commit", commit)),
        (
            "objects/commit: tree",
            pins.source.tree,
            lambda: gitobj.parse_commit(commit, "objects/commit").tree,
        ),
        ("objects/tree", pins.source.tree, lambda: gitobj.object_id("tree", tree)),
        ("objects/tree: vllm", pins.source.vllm_tree, lambda: _vllm_entry(tree)),
    )
    for path, expected, compute in steps:
        try:
            actual = compute()
        except FormatError as error:
            rec.fail("BASE-3", path, str(error))
            return
        if actual != expected:
            rec.fail("BASE-3", path, "not the pinned id", expected=expected, actual=actual)
            return
    rec.passed("BASE-3", f"commit {pins.commit} names tree {pins.source.tree}")


def _vllm_entry(tree: bytes) -> str:
    for entry in gitobj.parse_tree(tree, "objects/tree"):
        if entry.name == b"vllm" and entry.mode == gitobj.DIRECTORY:
            return entry.id
    return "no directory vllm"
