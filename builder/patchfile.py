"""Reads patch files: what ``git format-patch --full-index`` writes for text, and nothing else.

Bytes in, values out; lines end at a line feed only, so a CRLF file's carriage return is
content. What we do not apply is refused by name: renames, copies, mode changes, binary
patches, symbolic links, submodules, quoted paths, abbreviated object ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from builder.errors import BuildError
from verify.gitobj import EXECUTABLE, FILE
from verify.manifest import path_problem

ABSENT = "0" * 40
"""The object id that git writes for the side on which a file does not exist."""

_FILE = re.compile(rb"diff --git a/(.+) b/(.+)\n\Z", re.DOTALL)
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: ([0-7]+))?\n\Z")
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: [^\n]*)?\n\Z")
_NO_NEWLINE = b"\\ No newline at end of file\n"
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): (\S.*)\Z")
_REFUSED = {
    b"rename from ": "a rename",
    b"rename to ": "a rename",
    b"copy from ": "a copy",
    b"copy to ": "a copy",
    b"similarity index ": "a rename or copy",
    b"dissimilarity index ": "a rewrite",
    b"old mode ": "a mode change",
    b"new mode ": "a mode change",
    b"GIT binary patch": "a binary patch",
    b"Binary files ": "a binary patch",
}


class PatchFormatError(BuildError):
    """A patch file holds something that we do not apply.

    Attributes:
        patch: the patch file's name.
        line: the line's number, from 1.
        problem: what was expected and what was found.
    """

    def __init__(self, patch: str, line: int, problem: str) -> None:
        self.patch = patch
        self.line = line
        self.problem = problem
        super().__init__(
            f"{patch}, line {line}: {problem}; write patches with `python -m builder patch export`"
        )


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk: its place (first line, counted from 0, on both sides) and its lines.

    Lines keep their line feed; a last line without one has none here either.
    """

    old_at: int
    new_at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int
    line: int


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a patch does to one file; a mode is None on the side where the file is absent."""

    path: str
    old_mode: str | None
    new_mode: str | None
    old_id: str
    new_id: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """A parsed patch file. ``data`` is the bytes that were read: they are what is pinned."""

    name: str
    data: bytes
    message: str
    changes: tuple[FileChange, ...]
    trailers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes, name: str) -> Patch:
        """Read a patch file; ``name`` names it in errors.

        Raises:
            PatchFormatError: for anything outside the format above.
        """
        lines = data.split(b"\n")
        if lines.pop():
            raise PatchFormatError(name, len(lines) + 1, "expected a final newline")
        reader = _Reader(name, [line + b"\n" for line in lines])
        message = reader.message()
        changes: list[FileChange] = []
        while not reader.at_end():
            change = reader.change()
            if any(change.path == other.path for other in changes):
                raise reader.error(f"expected each file once, found {change.path} again")
            changes.append(change)
        if not changes:
            raise reader.error("expected `diff --git a/PATH b/PATH`, found no change at all")
        return cls(name, data, message, tuple(changes), _trailers(message))


class _Reader:
    def __init__(self, name: str, lines: Sequence[bytes]) -> None:
        self._name = name
        self._lines = lines
        self._at = 0

    def at_end(self) -> bool:
        return self._at == len(self._lines)

    def error(self, problem: str) -> PatchFormatError:
        return PatchFormatError(self._name, min(self._at + 1, len(self._lines)), problem)

    def _peek(self) -> bytes:
        return b"" if self.at_end() else self._lines[self._at]

    def _take(self, expected: bytes) -> None:
        if self._peek() != expected:
            raise self.error(f"expected {_show(expected)}, found {_show(self._peek())}")
        self._at += 1

    def message(self) -> str:
        """Everything before the first file, which only people and trailers read."""
        start = self._at
        while not self.at_end() and not self._peek().startswith(b"diff --"):
            self._at += 1
        try:
            return b"".join(self._lines[start : self._at]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PatchFormatError(self._name, 1, "expected a UTF-8 message") from error

    def change(self) -> FileChange:
        path = self._path()
        old_mode, new_mode = self._side(b"deleted"), self._side(b"new")
        for start, what in _REFUSED.items():
            if self._peek().startswith(start):
                raise self.error(f"{path}: {what} is not supported")
        match = _INDEX.match(self._peek())
        if match is None:
            raise self.error(f"{path}: expected `index OLD..NEW`, found {_show(self._peek())}")
        old_id, new_id = match[1].decode(), match[2].decode()
        if len(old_id) != 40 or len(new_id) != 40:
            raise self.error(f"{path}: expected whole object ids (--full-index), found a prefix")
        if old_mode is None and new_mode is None:
            if match[3] is None:
                raise self.error(f"{path}: expected the file's mode after the object ids")
            old_mode = new_mode = self._mode(match[3])
        elif match[3] is not None:
            raise self.error(f"{path}: expected no mode beside the ids of a new or deleted file")
        if (old_id == ABSENT) != (old_mode is None) or (new_id == ABSENT) != (new_mode is None):
            raise self.error(f"{path}: the object ids and the file's mode lines contradict")
        if old_id == new_id:
            raise self.error(f"{path}: expected a change, found equal object ids")
        self._at += 1
        hunks = self._hunks(path, old_mode, new_mode)
        return FileChange(path, old_mode, new_mode, old_id, new_id, hunks)

    def _path(self) -> str:
        line = self._peek()
        if line.startswith((b'diff --git "', b"diff --cc", b"diff --combined")) or b'"' in line:
            raise self.error("a quoted path or a merge is not supported")
        match = _FILE.match(line)
        # with equal names on both sides the split is known: ` b/` may occur inside a path
        half = (len(line) - len(b"diff --git a/ b/\n")) // 2
        path = line[len(b"diff --git a/") :][:half]
        if match is None or line != b"diff --git a/" + path + b" b/" + path + b"\n":
            raise self.error(f"expected `diff --git a/PATH b/PATH`, found {_show(line)}")
        text = path.decode("utf-8", "surrogateescape")
        problem = path_problem(text)
        if problem is not None:
            raise self.error(f"the path {text!r} is not allowed: {problem}")
        self._at += 1
        return text

    def _side(self, which: bytes) -> str | None:
        """Take ``new file mode M`` or ``deleted file mode M`` when it is there."""
        prefix = which + b" file mode "
        if not self._peek().startswith(prefix):
            return None
        mode = self._mode(self._peek()[len(prefix) : -1])
        self._at += 1
        return mode

    def _mode(self, mode: bytes) -> str:
        text = mode.decode("ascii", "replace")
        if text not in (FILE, EXECUTABLE):
            kind = {"120000": "a symbolic link", "160000": "a submodule"}.get(text, f"mode {text}")
            raise self.error(f"{kind} is not supported")
        return text

    def _hunks(self, path: str, old_mode: str | None, new_mode: str | None) -> tuple[Hunk, ...]:
        if self.at_end() or self._peek().startswith(b"diff --"):
            if old_mode is None or new_mode is None:
                return ()  # an empty file comes or goes
            raise self.error(f"{path}: expected hunks, found none")
        for start, what in _REFUSED.items():
            if self._peek().startswith(start):
                raise self.error(f"{path}: {what} is not supported")
        raw = path.encode("utf-8", "surrogateescape")
        # git ends a name that holds a space with a tab, so that `patch` finds its end
        tab = b"\t" if b" " in raw else b""
        self._take(b"--- " + (b"a/" + raw + tab if old_mode else b"/dev/null") + b"\n")
        self._take(b"+++ " + (b"b/" + raw + tab if new_mode else b"/dev/null") + b"\n")
        hunks: list[Hunk] = []
        while self._peek().startswith(b"@@ "):
            hunks.append(self._hunk(path))
        if not hunks or not (self.at_end() or self._peek().startswith(b"diff --")):
            raise self.error(f"{path}: expected a hunk, found {_show(self._peek())}")
        return tuple(hunks)

    def _hunk(self, path: str) -> Hunk:
        match = _HUNK.match(self._peek())
        if match is None:
            raise self.error(f"{path}: expected `@@ -N,N +N,N @@`, found {_show(self._peek())}")
        line = self._at + 1
        old_start, new_start = int(match[1]), int(match[3])
        old_count = 1 if match[2] is None else int(match[2])
        new_count = 1 if match[4] is None else int(match[4])
        self._at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        kinds = bytearray()
        while len(old) < old_count or len(new) < new_count:
            old_done, new_done = len(old) == old_count, len(new) == new_count
            kind, content = self._peek()[:1], self._peek()[1:]
            if kind not in (b" ", b"-", b"+") or (
                (kind != b"+" and old_done) or (kind != b"-" and new_done)
            ):
                raise self.error(
                    f"{path}: expected {old_count} old and {new_count} new lines in the hunk, "
                    f"found {_show(self._peek())} after {len(old)} and {len(new)}"
                )
            self._at += 1
            if self._peek() == _NO_NEWLINE:
                content = content[:-1]
                if not content:
                    raise self.error(f"{path}: a line needs its newline or something before it")
                self._at += 1
            if kind != b"+":
                old.append(content)
            if kind != b"-":
                new.append(content)
            kinds += kind
        for side in (old, new):
            if any(not content.endswith(b"\n") for content in side[:-1]):
                raise self.error(f"{path}: a line without its newline is not the file's last")
        stripped = bytes(kinds)
        if not stripped.strip(b" "):
            raise self.error(f"{path}: expected a change in the hunk, found context alone")
        leading = len(stripped) - len(stripped.lstrip(b" "))
        trailing = len(stripped) - len(stripped.rstrip(b" "))
        # a side without lines is named by the line before it, every other side by its first
        old_at = old_start - (old_count > 0)
        new_at = new_start - (new_count > 0)
        if old_at < 0 or new_at < 0:
            raise PatchFormatError(self._name, line, f"{path}: lines are counted from 1")
        return Hunk(old_at, new_at, tuple(old), tuple(new), leading, trailing, line)


def _trailers(message: str) -> dict[str, str]:
    """The ``Key: value`` lines of the message's last paragraph, continuation lines joined."""
    paragraphs = [part for part in message.split("\n\n") if part.strip()]
    found: dict[str, str] = {}
    key = ""
    for line in paragraphs[-1].split("\n") if len(paragraphs) > 1 else ():
        match = _TRAILER.match(line)
        if match:
            key = match[1]
            found[key] = match[2]
        elif line.startswith(" ") and key:
            found[key] += " " + line.strip()
        elif line.strip():
            return {}
    return found


def _show(line: bytes) -> str:
    if not line:
        return "the end of the file"
    return repr(line[:60].decode("utf-8", "replace"))
