"""Digests of weight files, remembered by file identity so that a restart reads nothing.

A checkpoint is named by the digests of the files its loader may read, whatever the directory
is called: another fine-tune at the same path is another identity. Reading runs at memory or
disk speed with BLAKE3 over all cores; the memo makes it happen once per file.

The memo is as trustworthy as the cache root that holds it (mode 0700, one owner). An entry
counts only while device, inode, size, mtime and ctime in nanoseconds are those that were
seen both before and after reading. A file that changed less than two seconds before it was
read is not remembered: a second change could hide within the clock's granularity.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from sparkcache_connector.errors import IdentityError

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
# Read beside weights and able to change what they compute: scales, configurations, code.
COMPANION_SUFFIXES: Final = frozenset({".json", ".py", ".yaml"})
# Loaders whose weights are those files. Anything else has no files or streams them.
DIGESTIBLE_LOAD_FORMATS: Final = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "pt",
        "npcache",
        "mistral",
        "sharded_state",
        "fastsafetensors",
        "instanttensor",
    }
)
_CHECKPOINT_CONTEXT: Final = "sparkcache 2026-11 checkpoint v1"
_MEMO_SCHEMA: Final = "sparkcache-weight-memo/v1"
_MEMO_LIMIT_BYTES: Final = 16 << 20
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


class DigestMemo:
    """File identity to digest, in one file of its own; damaged or foreign content is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        """Write the memo with one rename. Losing it costs time only, so failures are silent."""
        if not self._dirty:
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        body = json.dumps({"schema": _MEMO_SCHEMA, "files": self._entries}, sort_keys=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(body)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            return
        self._dirty = False

    def _load(self) -> dict[str, str]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:  # noqa: PTH123
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    return {}
                document: Any = json.loads(file.read(_MEMO_LIMIT_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict) or document.get("schema") != _MEMO_SCHEMA:
            return {}
        files = document.get("files")
        if not isinstance(files, dict):
            return {}
        return {k: v for k, v in files.items() if isinstance(v, str) and _is_digest(v)}


def digest_file(path: Path, memo: DigestMemo, *, clock_ns: Callable[[], int] = time.time_ns) -> str:
    """BLAKE3 of a regular file, read only if the memo does not know this very file.

    Raises:
        IdentityError: it cannot be read, is not a regular file, or changes while it is read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _unreadable(path, "something that is not a regular file")
            before = FileIdentity.of(status)
            known = memo.get(before)
            if known is not None:
                return known
            started = clock_ns()
            hasher = blake3(max_threads=blake3.AUTO)
            if before.size:
                hasher.update_mmap(f"/proc/self/fd/{file.fileno()}")
            after = FileIdentity.of(os.fstat(file.fileno()))
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from error
    if before != after:
        raise _unreadable(path, "a file that changed while it was read")
    digest: str = hasher.hexdigest()
    if started - max(before.mtime_ns, before.ctime_ns) >= _SETTLED_NS:
        memo.put(before, digest)
    return digest


def digest_checkpoint(path: Path, load_format: str, memo: DigestMemo) -> str:
    """Name a checkpoint (a directory, or a single file) by the contents its loader may read.

    Raises:
        IdentityError: the loader has no files, there are none, or one cannot be read.
    """
    if load_format not in DIGESTIBLE_LOAD_FORMATS:
        raise _no_weights(
            f"load format {load_format!r}", "weights that are not read from digestible files"
        )
    files = sorted(_files(path))
    if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
        raise _no_weights(f"checkpoint {path.name!r}", "no weight file")
    hasher = blake3(derive_key_context=_CHECKPOINT_CONTEXT)
    for file in files:
        name = file.name.encode("utf-8", "surrogateescape")
        hasher.update(len(name).to_bytes(4, "little") + name)
        hasher.update(bytes.fromhex(digest_file(file, memo)))
    memo.save()
    digest: str = hasher.hexdigest()
    return digest


def _files(path: Path) -> Iterator[Path]:
    try:
        if path.is_file():
            yield path
            return
        for entry in path.iterdir():
            if entry.suffix in WEIGHT_SUFFIXES | COMPANION_SUFFIXES and entry.is_file():
                yield entry
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from error


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _unreadable(path: Path, found: str) -> IdentityError:
    return IdentityError(
        f"weight file {path}",
        expected="a readable regular file that nobody is writing",
        found=found,
        next_step="make it readable and complete, then start again",
    )


def _no_weights(thing: str, found: str) -> IdentityError:
    return IdentityError(
        thing,
        expected="weight files whose contents can be digested",
        found=found,
        next_step="name the weights with spark_cache_target_checkpoint_sha256",
    )
