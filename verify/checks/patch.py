"""PATCH: the series, and every file that it touches.

1. The patch files and their order are the pinned ones.
2. Together they touch exactly the pinned files; the first ``index`` line of each file
   begins at its pinned preimage, each next one where the last ended, the last one ends at
   the pinned postimage.
3. No touched file is still the release's.
4. Every touched file has the pinned bytes.
5. Files that patches keep exist; files that patches delete do not.

Steps 3 to 5 are reported by :mod:`verify.checks.tree`, which sees every file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

from verify.anchor import Anchor, series_names
from verify.pins import Pins
from verify.report import Recorder

_DIFF = re.compile(rb"^diff --git a/(.+) b/(.+)$")
_INDEX = re.compile(rb"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: [0-7]{6})?$")
_ABSENT = "0" * 40


def judge_series(anchor: Anchor, rec: Recorder) -> None:
    """Run steps 1 and 2 on the patch files beside the pins."""
    pins = anchor.pins
    if anchor.series is None:
        rec.note("PATCH-1", None, "the patch files are not at hand; their results are pinned")
        return
    # (1)
    names = list(series_names(anchor.series))
    pinned = [patch.name for patch in pins.patches]
    if names != pinned:
        rec.fail(
            "PATCH-1",
            "series",
            "the series names other patches, or in another order",
            expected=", ".join(pinned),
            actual=", ".join(names),
        )
    for patch in pins.patches:
        data = anchor.patches.get(patch.name)
        actual = "no file" if data is None else hashlib.sha256(data).hexdigest()
        if actual != patch.sha256 and patch.name in names:
            rec.fail(
                "PATCH-1",
                patch.name,
                "not the pinned patch",
                expected=patch.sha256,
                actual=actual,
            )
    rec.passed("PATCH-1", f"{len(pins.patches)} patches")
    if rec.tripped("PATCH-1"):
        return
    # (2)
    touched = _chains(anchor.patches[name] for name in names)
    for path, expected, actual in _chain_differences(pins, touched):
        rec.fail(
            "PATCH-2",
            path,
            "the patches and the pins do not tell the same story of this file",
            expected=expected,
            actual=actual,
        )
    rec.passed("PATCH-2", f"{len(touched)} touched files")


def added_and_removed(patches: Mapping[str, bytes]) -> tuple[bytes, bytes]:
    """Return all added and all removed lines of the patches, without their marks."""
    added: list[bytes] = []
    removed: list[bytes] = []
    for data in patches.values():
        _, _, body = data.partition(b"\ndiff --git ")
        for line in body.split(b"\n"):
            if line.startswith(b"+") and not line.startswith(b"+++ b/"):
                added.append(line[1:])
            elif line.startswith(b"-") and not line.startswith(b"--- a/"):
                removed.append(line[1:])
    return b"\n".join(added), b"\n".join(removed)


def _chains(patches: Iterator[bytes]) -> dict[str, list[tuple[str, str]]]:
    """Return per path the blob ids that its patches go from and to, in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for data in patches:
        path: str | None = None
        for line in data.split(b"\n"):
            if (match := _DIFF.match(line)) is not None:
                path = match[2].decode("utf-8", "surrogateescape")
                found.setdefault(path, [])
            elif path is not None and (match := _INDEX.match(line)) is not None:
                found[path].append((match[1].decode("ascii"), match[2].decode("ascii")))
                path = None
    return found


def _chain_differences(
    pins: Pins, touched: Mapping[str, list[tuple[str, str]]]
) -> Iterator[tuple[str, str, str]]:
    pinned = {file.path: file for file in pins.files}
    for path in sorted(touched.keys() | pinned.keys()):
        file = pinned.get(path)
        steps = touched.get(path)
        if file is None or steps is None:
            where = ("pinned", "not touched") if steps is None else ("not pinned", "touched")
            yield path, *where
            continue
        pre = file.pre.git if file.pre is not None else _ABSENT
        post = file.post.git if file.post is not None else _ABSENT
        ids = [pre, *(after for _, after in steps)]
        befores = [before for before, _ in steps]
        if not steps or befores != ids[:-1] or ids[-1] != post:
            told = " → ".join([*befores[:1], *(after for _, after in steps)]) or "no index line"
            yield path, f"{pre} → {post}", told
