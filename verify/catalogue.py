"""Every check by its stable id: what it shows when it passes, and what to do when it fails.

The ids are API: gates, waivers and code-scanning tools key on them. A number is never given
to another check. ``docs/verify.md`` describes the same list at length; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its id, what a pass shows, and the advice for a failure without a better one."""

    id: str
    shows: str
    hint: str


_REBUILD = "do not repair it by hand: take the artefact from a trusted build, or build it again"
_REINSTALL = "reinstall the wheel from a verified bundle into a fresh environment"
_REPIN = "restore the file from version control, or regenerate it with `python -m builder pin`"

_ALL = (
    Check(
        "BASE-1",
        "the pins come from outside the thing judged",
        "run verify from a checkout or use verify.pyz, or name pins with --pins",
    ),
    Check("BASE-2", "the pins agree with the manifests that they pin and with themselves", _REPIN),
    Check(
        "BASE-3",
        "the raw commit and tree objects prove that the pinned tree is the pinned commit's",
        "fetch the objects again with `python -m builder pin prove`",
    ),
    Check(
        "BASE-4",
        "the git tree id of the whole release, recomputed from the bytes, is the pinned one",
        _REPIN,
    ),
    Check(
        "BASE-5",
        "the git tree id of vllm/, recomputed from the bytes, is the pinned one",
        _REPIN,
    ),
    Check(
        "BASE-6",
        "an upstream archive is, as a file, the pinned one",
        "download the pinned file again from the package index",
    ),
    Check("PATCH-1", "the patch files and their order are the pinned ones", _REPIN),
    Check(
        "PATCH-2",
        "the patches touch exactly the pinned files, from the pinned to the pinned blob",
        "export the series again with `python -m builder patch export`, then pin again",
    ),
    Check("PATCH-3", "no file that the patches touch is still the release's", _REBUILD),
    Check("PATCH-4", "every file that the patches touch has the pinned bytes", _REBUILD),
    Check("PATCH-5", "files that patches keep exist, files that patches delete do not", _REBUILD),
    Check("TREE-1", "every file that the patches do not touch has the base's bytes", _REBUILD),
    Check("TREE-2", "no file of the base is missing", _REBUILD),
    Check(
        "TREE-3",
        "there is no file beyond the composition",
        "find out where the file comes from; remove it only if that is understood",
    ),
    Check("TREE-4", "every file has the mode of the release or of the base wheel", _REBUILD),
    Check(
        "TREE-5",
        "every entry is a readable regular file with an ordinary name",
        "symbolic links, devices, unreadable files and unusual names are never part of a build; "
        "find out where the entry comes from",
    ),
    Check("TREE-6", "every module that the overlay adds is there with the pinned bytes", _REBUILD),
    Check(
        "CONTRACT-1",
        "contract.json is the pinned one, for this target, and agrees with the pins",
        _REPIN,
    ),
    Check(
        "CONTRACT-2",
        "every file of the lease contract has bytes that the contract accepts in some state",
        "the connector's assumptions about block lifetime hold only for the accepted bytes; "
        "install the wheel that belongs to this contract",
    ),
    Check(
        "CONTRACT-3",
        "all files of the lease contract are in the one state that was asked for",
        "a mixed tree is no state at all: install one wheel into a fresh environment",
    ),
    Check(
        "CONTRACT-4",
        "the symbols that the connector relies on have the signatures of the expected state",
        "see which call of the connector relies on the symbol before accepting new bytes",
    ),
    Check("NATIVE-1", "every native library has the base wheel's bytes", _REBUILD),
    Check("NATIVE-2", "there is no native library beyond the base wheel's", _REBUILD),
    Check("NATIVE-3", "the native libraries as a whole have the pinned count and digest", _REPIN),
    Check(
        "NATIVE-4",
        "operators that the patches begin to use exist in the native libraries",
        "the patched Python asks for an operator that this base's libraries do not have; "
        "choose another base or drop the patch",
    ),
    Check(
        "PKG-1",
        "the archive is well formed and reads the same for every reader",
        "the archive was damaged or made to be read in two ways; " + _REBUILD,
    ),
    Check(
        "PKG-2",
        "file name, dist-info directory and tags are those of the base with the local version",
        "do not rename wheels: the name is part of what is judged",
    ),
    Check("PKG-3", "the version that the package tells follows the packaging rule", _REBUILD),
    Check("PKG-4", "RECORD lists exactly the files that are there, each once", _REINSTALL),
    Check("PKG-5", "every RECORD row has the file's digest and size", _REINSTALL),
    Check(
        "PKG-6",
        "no file is set-user-id, set-group-id, sticky or writable by everyone",
        "remove the permission, then ask who set it",
    ),
    Check(
        "PKG-7",
        "bytecode that Python would run instead of a touched source is that source, compiled",
        "delete the __pycache__ directories below vllm/; Python makes them again",
    ),
    Check(
        "PKG-8",
        "the interpreter would import exactly the vLLM that was judged",
        "remove the other vLLM, or install into a fresh environment",
    ),
    Check(
        "PKG-9",
        "no code that cannot be judged runs when the interpreter starts",
        "read the file; when it is harmless, name its digest with --known-startup",
    ),
    Check("PKG-10", "what installers add is named", _REINSTALL),
    Check("PKG-11", "the bundle holds exactly the files of its receipt, byte for byte", _REBUILD),
    Check("PKG-12", "the receipt says what the pins say", _REBUILD),
    Check(
        "PKG-13",
        "the connector is made from the source that the anchor or the receipt names",
        _REBUILD,
    ),
    Check(
        "PKG-14",
        "what the connector ships beside its source is pinned, the lease contract first",
        _REBUILD,
    ),
    Check("PKG-15", "the bill of materials describes this wheel", _REBUILD),
    Check(
        "PKG-16",
        "an installation in place is finished, and from these pins",
        "finish it with `python -m builder install`, or take it back with `uninstall`",
    ),
    Check(
        "IMAGE-1",
        "the layout has one image of this tag and platform",
        "copy the image again from its source; name the platform with --platform",
    ),
    Check(
        "IMAGE-2",
        "every blob is there and has the digest and size by which it is referred to",
        "the layout is damaged or was changed: copy the image again from its source",
    ),
    Check(
        "IMAGE-3",
        "the config lists the plain digest of every layer",
        "no engine would start this image: build it again",
    ),
    Check(
        "IMAGE-4",
        "every layer means the same to every engine",
        "find out which tool wrote the layer; engines would make different roots of it",
    ),
    Check(
        "IMAGE-5",
        "the merged root has one vLLM, and an interpreter for it",
        "judge the image that was built with the layer, or name its site directory with --site",
    ),
    Check("IMAGE-6", "labels, annotations and platform say what is so", _REBUILD),
    Check("IMAGE-7", "the papers that the layer brings are all there", _REBUILD),
    Check("IMAGE-8", "referrers bring the attestations that the image holds", _REBUILD),
    Check(
        "ATT-1",
        "there are attestations, when they are required",
        "ask the builder for attestations.intoto.jsonl, or build with a signing key",
    ),
    Check("ATT-2", "the attestations are envelopes in canonical form", _REBUILD),
    Check("ATT-3", "every payload is an in-toto statement by its type", _REBUILD),
    Check(
        "ATT-4",
        "the trust root is sound, comes from outside the subject and has not expired",
        "get the current trust root from whoever you trust to sign, not from the bundle",
    ),
    Check(
        "ATT-5",
        "enough distinct trusted keys have signed",
        "whoever signed is not whom the trust root names: take the bundle from its source",
    ),
    Check("ATT-6", "no signature that claims a trusted key is false or given twice", _REBUILD),
    Check("ATT-7", "the statements are those of a bundle", _REBUILD),
    Check("ATT-8", "the statements are about exactly the files of this bundle", _REBUILD),
    Check("ATT-9", "the statements say what the pins and the papers say", _REBUILD),
)

CHECKS: Mapping[str, Check] = {check.id: check for check in _ALL}
