"""Digests of files, remembered by file identity so that the next start reads nothing.

An entry counts only while device, inode, size, mtime and ctime in nanoseconds are those that
were seen both before and after reading. A file that changed less than two seconds before it
was read is not remembered: a second change could hide within the clock's granularity.

A memo is as trustworthy as the directory that holds it (mode 0700, one owner); a file that
someone else owns or may write is not believed. Losing a memo costs time, nothing else.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_SCHEMA: Final = "sparkcache-file-memo/v1"
_LIMIT_BYTES: Final = 16 << 20
_SETTLED_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What the kernel says about a file that any change of its bytes also changes."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Take the five values from a ``stat`` result."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    def key(self) -> str:
        """One line of text, as memos store it."""
        return f"{self.device}:{self.inode}:{self.size}:{self.mtime_ns}:{self.ctime_ns}"

    def settled_at(self, now_ns: int) -> bool:
        """Whether the last change is old enough that a further one would show."""
        return now_ns - max(self.mtime_ns, self.ctime_ns) >= _SETTLED_NS


class DigestMemo:
    """File identity to digest, for one algorithm, in one file of its own."""

    def __init__(self, path: Path, algorithm: str) -> None:
        self._path = path
        self._algorithm = algorithm
        self._entries = self._load()
        self._dirty = False

    def get(self, identity: FileIdentity) -> str | None:
        """The remembered digest, if this very file was digested before."""
        return self._entries.get(identity.key())

    def put(self, identity: FileIdentity, digest: str) -> None:
        """Remember a digest until :meth:`save` writes it."""
        self._entries[identity.key()] = digest
        self._dirty = True

    def save(self) -> None:
        """Write the memo with one rename; a failure costs the next start its time only."""
        if not self._dirty:
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        document = {"schema": _SCHEMA, "algorithm": self._algorithm, "files": self._entries}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="ascii") as file:
                json.dump(document, file, sort_keys=True)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            return
        self._dirty = False

    def _load(self) -> dict[str, str]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    return {}
                document: Any = json.loads(file.read(_LIMIT_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
            return {}
        files = document.get("files")
        if document.get("algorithm") != self._algorithm or not isinstance(files, dict):
            return {}
        return {k: v for k, v in files.items() if isinstance(v, str) and is_digest(v)}


def is_digest(text: str) -> bool:
    """Whether this is a 32-byte digest in lower-case hexadecimal."""
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)
