"""Manifests: a tree's files as text, one ``<mode> <sha256> <path>`` line each (docs/build.md).

The SHA-256 of a manifest's bytes is the tree SHA-256. A base wheel's manifest may also say
``- - <path>``: the release has this file and the wheel does not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from verify.errors import FormatError

FILE = "100644"
EXECUTABLE = "100755"

_LINE = re.compile(r"(?:(100644|100755) ([0-9a-f]{64})|- -) (.+)\Z", re.DOTALL)
# control characters, and the lone surrogates that stand for bytes outside UTF-8
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def path_problem(path: str) -> str | None:
    """Say why ``path`` is not a relative POSIX path that we keep, or None when it is."""
    if not path:
        return "the path is empty"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "expected a relative path without empty, `.` or `..` parts"
    if "\\" in path:
        return "expected `/` between parts, found a backslash"
    if _UNUSABLE.search(path):
        return "found a control character or bytes that are not UTF-8"
    return None


def mode_of(unix_mode: int) -> str:
    """Return the mode that git keeps of a file's permission bits: the owner's x-bit decides."""
    return EXECUTABLE if unix_mode & 0o100 else FILE


@dataclass(frozen=True, slots=True)
class Entry:
    """A file's mode (``100644`` or ``100755``) and the SHA-256 of its bytes."""

    mode: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a tree by path, and the paths that are expected to be absent."""

    files: Mapping[str, Entry]
    absent: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, data: bytes, what: str) -> Manifest:
        """Read a manifest; ``what`` names it in errors.

        Raises:
            FormatError: for a line of another shape, a path that is not allowed, lines out
                of order or twice, or a last line without its newline.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(what, f"byte {error.start}", "expected UTF-8") from error
        if text and not text.endswith("\n"):
            raise FormatError(what, "", "expected a final newline: the file is cut short")
        files: dict[str, Entry] = {}
        absent: set[str] = set()
        last = b""
        for number, line in enumerate(text.split("\n")[:-1], start=1):
            place = f"line {number}"
            match = _LINE.match(line)
            if match is None:
                problem = f"expected `<mode> <sha256> <path>`, found {line[:80]!r}"
                raise FormatError(what, place, problem)
            mode, sha256, path = match.groups()
            problem_or_none = path_problem(path)
            if problem_or_none is not None:
                raise FormatError(what, place, problem_or_none)
            key = path.encode("utf-8")
            if key <= last:
                raise FormatError(what, place, f"expected paths sorted, each once; found {path!r}")
            last = key
            if mode is None:
                absent.add(path)
            else:
                files[path] = Entry(mode, sha256)
        return cls(files, frozenset(absent))

    def dump(self) -> bytes:
        """Return the manifest's bytes.

        Raises:
            ValueError: for a path, mode or hash that no manifest holds, or a path that is
                both present and absent.
        """
        lines: dict[bytes, str] = {}
        for path, entry in self.files.items():
            lines[path.encode("utf-8", "surrogatepass")] = f"{entry.mode} {entry.sha256} {path}\n"
        for path in self.absent:
            if path in self.files:
                raise ValueError(f"{path} is both present and absent")
            lines[path.encode("utf-8", "surrogatepass")] = f"- - {path}\n"
        for line in lines.values():
            match = _LINE.match(line[:-1])
            problem = path_problem(match[3]) if match else "unexpected mode or hash"
            if problem is not None:
                raise ValueError(f"no manifest holds the line {line!r}: {problem}")
        return "".join(line for _, line in sorted(lines.items())).encode("utf-8")

    def sha256(self) -> str:
        """Return the SHA-256 of the manifest's bytes: the tree SHA-256."""
        return hashlib.sha256(self.dump()).hexdigest()

    def select(self, keep: Callable[[str], bool]) -> Manifest:
        """Return the lines whose path ``keep`` wants."""
        return Manifest(
            {path: entry for path, entry in self.files.items() if keep(path)},
            frozenset(path for path in self.absent if keep(path)),
        )

    def below(self, folder: str) -> Manifest:
        """Return the lines of ``folder`` and everything in it, paths unchanged."""
        prefix = folder + "/"
        return self.select(lambda path: path.startswith(prefix))


def source_sha256(digests: Mapping[str, str]) -> str:
    """Return the deployable-source SHA-256 of ``path -> sha256`` (docs/build.md).

    The text is what ``sha256sum`` prints for the files, sorted by the bytes of the path, so
    that anyone can recompute it with the shell.
    """
    lines: Iterable[bytes] = (
        f"{digests[path]}  {path}\n".encode()
        for path in sorted(digests, key=lambda path: path.encode("utf-8"))
    )
    return hashlib.sha256(b"".join(lines)).hexdigest()


def is_deployable(path: str) -> bool:
    """Whether the deployable-source SHA-256 covers ``path``: no bytecode, no caches."""
    return not path.endswith(".pyc") and "__pycache__" not in path.split("/")
