"""TREE: the subject is the composition, every file of it and no file beyond.

1. Every file that the patches do not touch has the base's bytes.
2. No file of the base is missing.
3. There is no file beyond the composition.
4. Every file has the mode of the release, or of the base wheel.
5. Every entry is a readable regular file with an ordinary name.
6. Every module that the overlay adds is there with the pinned bytes.

A difference is reported once, by the family that owns the file: PATCH-3 to PATCH-5 for
touched files, NATIVE-1 and NATIVE-2 for native libraries, PKG-3 for packaging files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from verify.digest import Digest, ReadError
from verify.expect import Composition, Expected, Origin, is_native
from verify.holders import Holder, hidden
from verify.manifest import mode_of
from verify.report import Recorder

CHECKS = ("TREE-1", "TREE-2", "TREE-3", "TREE-4", "TREE-5", "TREE-6")
FILE_CHECKS = (*CHECKS, "PATCH-3", "PATCH-4", "PATCH-5", "NATIVE-1", "NATIVE-2", "PKG-3")

_CHANGED = {
    Origin.RELEASE: ("TREE-1", "not the release's bytes"),
    Origin.BASE: ("TREE-1", "not the base wheel's bytes"),
    Origin.PATCH: ("PATCH-4", "neither the release's file nor the patched one"),
    Origin.MODULE: ("TREE-6", "not the module that the overlay adds"),
    Origin.PACKAGING: ("PKG-3", "not what the packaging rule makes of the base's file"),
}
_UNCHANGED = {
    Origin.PATCH: ("PATCH-3", "the patches were not applied: this is still the release's file"),
    Origin.PACKAGING: ("PKG-3", "still the base wheel's file, which tells the base's version"),
}
_MISSING = {
    Origin.RELEASE: ("TREE-2", "a file of the release is missing"),
    Origin.BASE: ("TREE-2", "a file of the base wheel is missing"),
    Origin.PATCH: ("PATCH-5", "a patched file is missing"),
    Origin.MODULE: ("TREE-6", "a module that the overlay adds is missing"),
    Origin.PACKAGING: ("PKG-3", "a packaging file is missing"),
}


def judge_files(
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    composition: Composition,
    rec: Recorder,
    *,
    allowed: Callable[[str], bool],
    patched: bool,
    whole: bool = True,
) -> None:
    """Compare every file; ``allowed`` names the paths beyond the composition that may exist.

    ``whole`` is whether the composition is all of it: steps 1 and 2 do not pass on a part.
    """
    # (5) nothing else is said of what is not a plain file
    judge_defects(holder, rec)
    judge_unreadable(holder, digests, rec)
    for path, expected in sorted(composition.files.items()):
        digest = digests.get(path)
        if digest is None:
            if not hidden(holder, path):
                check, message = _MISSING[expected.origin]
                check = "NATIVE-1" if check == "TREE-2" and is_native(path) else check
                rec.fail(check, path, message, expected=expected.sha256, actual="no file")
        elif isinstance(digest, Digest):
            _judge_bytes(holder, path, digest, expected, rec)
            # (4)
            actual = mode_of(holder.items[path].mode)
            if actual != expected.mode:
                message = "not the mode of the base"
                rec.fail("TREE-4", path, message, expected=expected.mode, actual=actual)
    for path in sorted(digests.keys() - composition.files.keys()):
        _judge_extra(path, digests[path], composition, rec, allowed)
    for check in CHECKS if whole else CHECKS[2:]:
        rec.passed(check, f"{len(composition.files)} files")
    if patched:
        for check in ("PATCH-3", "PATCH-4", "PATCH-5"):
            rec.passed(check, "every touched file")


def judge_defects(holder: Holder, rec: Recorder) -> None:
    """Report what is not a plain file, for step 5 and PKG-1."""
    for defect in holder.defects:
        expected, actual = defect.expected, defect.actual
        rec.fail(defect.check, defect.path, defect.message, expected=expected, actual=actual)


def judge_unreadable(
    holder: Holder, digests: Mapping[str, Digest | ReadError], rec: Recorder
) -> None:
    """Report files that could not be hashed: damaged members, or unreadable files."""
    check = "PKG-1" if holder.archive else "TREE-5"
    for path, found in sorted(digests.items()):
        if isinstance(found, ReadError):
            rec.fail(check, path, "cannot be read", expected=found.expected, actual=found.actual)


def _judge_bytes(
    holder: Holder, path: str, digest: Digest, expected: Expected, rec: Recorder
) -> None:
    # (1), (6)
    if digest.sha256 == expected.sha256:
        return
    origin = expected.origin
    if digest.sha256 == expected.pre and origin in _UNCHANGED:
        check, message = _UNCHANGED[origin]
    else:
        check, message = _CHANGED[origin]
        if check == "TREE-1" and (is_native(path) or digest.elf):
            check = "NATIVE-1"
        elif _only_line_ends(holder, path, digest, expected.sha256):
            message += "; only the line ends differ"
    rec.fail(check, path, message, expected=expected.sha256, actual=digest.sha256)


def _judge_extra(
    path: str,
    digest: Digest | ReadError,
    composition: Composition,
    rec: Recorder,
    allowed: Callable[[str], bool],
) -> None:
    # (3)
    if isinstance(digest, ReadError):
        return
    if path in composition.deleted:
        message = "the patches delete this file"
        rec.fail("PATCH-5", path, message, expected="no file", actual=digest.sha256)
    elif not allowed(path):
        if is_native(path) or digest.elf:
            check, message = "NATIVE-2", "a native library that the base wheel does not have"
        else:
            check, message = "TREE-3", "a file beyond the composition"
        rec.fail(check, path, message, expected="no file", actual=digest.sha256)


def _only_line_ends(holder: Holder, path: str, digest: Digest, expected: str) -> bool:
    if digest.size > 1 << 20:
        return False
    try:
        data = holder.read(path)
    except ReadError:
        return False
    lf = data.replace(b"\r\n", b"\n")
    return expected in (
        hashlib.sha256(lf).hexdigest(),
        hashlib.sha256(lf.replace(b"\n", b"\r\n")).hexdigest(),
    )
