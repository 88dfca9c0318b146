"""Digests of weight files, remembered by file identity so that a restart reads nothing.

A checkpoint is named by the digests of the files its loader may read, whatever the directory
is called: another fine-tune at the same path is another identity. Reading runs at memory or
disk speed with BLAKE3 over all cores; the memo makes it happen once per file.
A file that changes while it is read has no digest; see :mod:`.file_memo` for what counts as
the same file.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

from sparkcache_connector.errors import IdentityError
from sparkcache_connector.file_memo import DigestMemo, FileIdentity

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
MEMO_ALGORITHM: Final = "blake3"


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
    if before.settled_at(started):
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
