"""NATIVE: the compiled libraries are the base wheel's, untouched.

1. Every native library has the base wheel's bytes.
2. There is no native library beyond the base wheel's.
3. As a whole they have the pinned count and digest.
4. Operators (``torch.ops.<namespace>.<name>``) that the patches or modules begin to use exist
   in them: an operator's name is a string in the library that registers it.

Steps 1 and 2 are reported by :mod:`verify.checks.tree`, which sees every file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from verify.anchor import Anchor
from verify.checks.patch import added_and_removed
from verify.digest import Digest, ReadError
from verify.expect import Composition, Origin
from verify.holders import Holder
from verify.manifest import Entry, Manifest
from verify.pins import Native
from verify.report import Recorder

_OPERATOR = re.compile(rb"torch\.ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")


def judge_native(
    anchor: Anchor,
    pinned: Native,
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    composition: Composition,
    rec: Recorder,
) -> None:
    """Run steps 3 and 4, and let steps 1 and 2 pass when nothing was reported."""
    libraries = {
        path: found
        for path, found in digests.items()
        if isinstance(found, Digest) and found.elf and path in composition.files
    }
    for check in ("NATIVE-1", "NATIVE-2"):
        rec.passed(check, f"{len(libraries)} libraries")
    if rec.tripped("NATIVE-1"):
        return
    # (3)
    manifest = Manifest(
        {
            path: Entry(composition.files[path].mode, found.sha256)
            for path, found in libraries.items()
        }
    )
    actual = f"{len(libraries)} libraries, {manifest.sha256()}"
    expected = f"{pinned.count} libraries, {pinned.sha256}"
    if actual != expected:
        message = "the libraries as a whole are not the pinned ones"
        rec.fail("NATIVE-3", None, message, expected=expected, actual=actual)
    rec.passed("NATIVE-3", actual)
    # (4)
    wanted = new_operators(anchor, holder, composition)
    for name in sorted(wanted - _strings(holder, libraries, wanted)):
        rec.fail(
            "NATIVE-4",
            None,
            f"the patches use torch.ops.{name}, which no library registers",
            expected="a library that has the operator's name",
            actual="none",
        )
    rec.passed("NATIVE-4", f"{len(wanted)} operators begin to be used")


def new_operators(anchor: Anchor, holder: Holder, composition: Composition) -> set[str]:
    """Return ``namespace.name`` of every operator that patches or modules begin to use."""
    added, removed = added_and_removed(anchor.patches)
    texts = [added]
    for path, expected in composition.files.items():
        if expected.origin is Origin.MODULE and path in holder.items:
            try:
                texts.append(holder.read(path))
            except ReadError:
                continue
    found = {match for text in texts for match in _OPERATOR.findall(text)}
    known = set(_OPERATOR.findall(removed))
    return {b".".join(pair).decode("ascii", "replace") for pair in found - known}


def _strings(holder: Holder, libraries: Mapping[str, Digest], wanted: set[str]) -> set[str]:
    """Return those of ``wanted`` whose operator name is a string in one of the libraries."""
    found: set[str] = set()
    for path in sorted(libraries):
        left = wanted - found
        if not left:
            break
        names = {name: _word(name.rpartition(".")[2]) for name in left}
        tail = b""
        for chunk in holder.chunks(path):
            window = tail + chunk
            found.update(name for name, pattern in names.items() if pattern.search(window))
            tail = window[-256:]
    return found


def _word(name: str) -> re.Pattern[bytes]:
    # a byte on both sides: a window's edge is not the end of a word
    return re.compile(rb"(?<=[^A-Za-z0-9_])%s(?=[^A-Za-z0-9_])" % name.encode("ascii"))
