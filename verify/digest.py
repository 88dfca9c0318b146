"""Hashes many files at once: SHA-256 for the decision, git's blob id for the name.

Hashing and inflating release the interpreter's lock, so a few threads keep the cores busy;
the largest files begin first, and small ones travel in batches.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from verify.errors import VerifyError
from verify.gitobj import BlobHasher

CHUNK = 1 << 20
ELF = b"\x7fELF"

_BATCH_BYTES = 4 << 20
_MAX_THREADS = 8

Progress: TypeAlias = Callable[[int], None]
"""Told the number of bytes that were hashed since the last call; called from any thread."""


class ReadError(VerifyError):
    """A file of the subject that cannot be read to its end.

    Attributes:
        path: the file, inside the subject.
        expected: what a readable file would have shown.
        actual: what happened.
    """

    def __init__(self, path: str, expected: str, actual: str) -> None:
        self.path = path
        self.expected = expected
        self.actual = actual
        super().__init__(f"{path}: expected {expected}, found {actual}")


@dataclass(frozen=True, slots=True)
class Digest:
    """What hashing found: SHA-256, size, git blob id when asked for, and whether it is ELF."""

    sha256: str
    size: int
    git: str | None
    elf: bool


def quiet(_done: int) -> None:
    """Show no progress."""


def digest(chunks: Iterable[bytes], size: int, *, git: bool, progress: Progress = quiet) -> Digest:
    """Hash one file whose chunks add up to ``size`` bytes."""
    sha256 = hashlib.sha256()
    blob = BlobHasher(size) if git else None
    seen = 0
    head = b""
    for chunk in chunks:
        if len(head) < len(ELF):
            head += chunk[: len(ELF)]
        sha256.update(chunk)
        if blob is not None:
            blob.update(chunk)
        seen += len(chunk)
        progress(len(chunk))
    name = blob.id() if blob is not None and seen == size else None
    return Digest(sha256.hexdigest(), seen, name, head.startswith(ELF))


def digest_all(
    sizes: Mapping[str, int],
    chunks: Callable[[str], Iterator[bytes]],
    git: Collection[str],
    progress: Progress,
) -> dict[str, Digest | ReadError]:
    """Hash every path of ``sizes``; a file that cannot be read is its own error's value.

    ``chunks`` is called from several threads and may raise :class:`ReadError`.
    """
    wanted = frozenset(git)

    def work(batch: list[str]) -> list[tuple[str, Digest | ReadError]]:
        found: list[tuple[str, Digest | ReadError]] = []
        for path in batch:
            try:
                value: Digest | ReadError = digest(
                    chunks(path), sizes[path], git=path in wanted, progress=progress
                )
            except ReadError as error:
                value = error
            found.append((path, value))
        return found

    batches = list(_batches(sizes))
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(batches)))
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return dict(pair for pairs in pool.map(work, batches) for pair in pairs)


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Largest first; files together until they make up a batch."""
    batch: list[str] = []
    weight = 0
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        batch.append(path)
        weight += sizes[path] + 4096
        if weight >= _BATCH_BYTES:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch
