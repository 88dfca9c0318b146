"""Applies patches: exact bytes at the exact position, or not at all.

There is no fuzz, no offset, no reverse and no "already applied, fine". A change is accepted
when (1) the file before it has the object id that the patch names, (2) every hunk's old
lines stand at exactly the named line, (3) what comes out has the object id that the patch
names. Why nothing softer: docs/adr/0001-own-exact-patcher.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from builder.errors import BuildError
from builder.patchfile import ABSENT, FileChange, Hunk, Patch
from verify.gitobj import blob_id


class PatchApplyError(BuildError):
    """A patch does not fit the file that it is for.

    Attributes:
        patch: the patch file's name.
        path: the file.
        reason: "preimage", "applied", "position", "context" or "postimage".
        expected: what the patch needs.
        found: what is there.
    """

    def __init__(self, patch: str, path: str, reason: str, expected: str, found: str) -> None:
        self.patch = patch
        self.path = path
        self.reason = reason
        self.expected = expected
        self.found = found
        super().__init__(f"{patch}: {path}: expected {expected}, found {found}; {_NEXT[reason]}")


_NEXT = {
    "preimage": "the patch was made for another version of the file: port it, never force it",
    "applied": "the patch is already applied: start from the unpatched release",
    "position": "the patch file was edited by hand: export it again",
    "context": "the patch file was edited by hand: export it again",
    "postimage": "the patch file was edited by hand: export it again",
}


@dataclass(frozen=True, slots=True)
class Content:
    """A file as patches see it: its git mode and its bytes."""

    mode: str
    data: bytes


def apply_change(change: FileChange, before: Content | None, patch: str) -> Content | None:
    """Return the file after ``change``; None stands for a file that does not exist.

    Raises:
        PatchApplyError: when any of the three conditions above does not hold.
    """
    found_id = blob_id(before.data) if before is not None else ABSENT
    if found_id != change.old_id:  # (1)
        reason = "applied" if found_id == change.new_id else "preimage"
        raise PatchApplyError(patch, change.path, reason, _blob(change.old_id), _blob(found_id))
    if before is not None and before.mode != change.old_mode:
        raise PatchApplyError(
            patch, change.path, "preimage", f"mode {change.old_mode}", f"mode {before.mode}"
        )
    data = apply_hunks(change, before.data if before is not None else b"", patch)  # (2)
    if change.new_mode is None:
        if data:
            raise PatchApplyError(
                patch, change.path, "postimage", "nothing left of it", f"{len(data)} bytes"
            )
        return None
    if blob_id(data) != change.new_id:  # (3)
        raise PatchApplyError(
            patch, change.path, "postimage", _blob(change.new_id), _blob(blob_id(data))
        )
    return Content(change.new_mode, data)


def apply_hunks(change: FileChange, before: bytes, patch: str) -> bytes:
    """Return ``before`` with every hunk applied at its named line, object ids not regarded.

    Raises:
        PatchApplyError: when a hunk's old lines are not exactly there, hunks overlap or are
            out of order, or a hunk's context is too thin to prove its place.
    """
    lines = _split(before)
    out: list[bytes] = []
    at = 0
    for hunk in change.hunks:
        where = f"line {hunk.old_at + 1}"
        if hunk.old_at < at or hunk.old_at > len(lines):
            raise PatchApplyError(
                patch, change.path, "position", f"a hunk between lines {at + 1} and "
                f"{len(lines) + 1}", f"{where} (patch line {hunk.line})",
            )  # fmt: skip
        out += lines[at : hunk.old_at]
        at = hunk.old_at
        if hunk.new_at != len(out):
            raise PatchApplyError(
                patch, change.path, "position", f"new line {len(out) + 1}",
                f"new line {hunk.new_at + 1} (patch line {hunk.line})",
            )  # fmt: skip
        _check_lines(change, hunk, lines, patch)
        out += hunk.new
        at += len(hunk.old)
    out += lines[at:]
    if any(not line.endswith(b"\n") for line in out[:-1]):
        raise PatchApplyError(
            patch, change.path, "context", "a line without its newline only at the end",
            "one before other lines",
        )  # fmt: skip
    return b"".join(out)


def _check_lines(change: FileChange, hunk: Hunk, lines: list[bytes], patch: str) -> None:
    for offset, expected in enumerate(hunk.old):
        index = hunk.old_at + offset
        found = lines[index] if index < len(lines) else b""
        if found != expected:
            shown = repr(found[:80]) if found else "the end of the file"
            raise PatchApplyError(
                patch, change.path, "context", f"{expected[:80]!r} at line {index + 1}", shown
            )
    # Context is what ties a hunk to its place. Only a file's ends may stand in for it.
    end = hunk.old_at + len(hunk.old)
    if (not hunk.leading and hunk.old_at > 0) or (not hunk.trailing and end < len(lines)):
        raise PatchApplyError(
            patch, change.path, "context", "unchanged lines around the change",
            f"none in the hunk at patch line {hunk.line}",
        )  # fmt: skip


def apply_series(
    patches: Iterable[Patch], read: Callable[[str], Content | None]
) -> dict[str, Content | None]:
    """Return every file that ``patches`` touch, after all of them in order.

    ``read`` gives a file before the first patch, or None when it does not exist.

    Raises:
        PatchApplyError: when a patch does not fit.
    """
    after: dict[str, Content | None] = {}
    for patch in patches:
        for change in patch.changes:
            before = after[change.path] if change.path in after else read(change.path)
            after[change.path] = apply_change(change, before, patch.name)
    return after


def _split(data: bytes) -> list[bytes]:
    """Split at line feeds only: ``bytes.splitlines`` would split at a carriage return as well."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _blob(id_: str) -> str:
    return "no file" if id_ == ABSENT else f"git blob {id_}"
