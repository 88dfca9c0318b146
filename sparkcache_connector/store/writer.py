"""Writes packs: hashes and writes segments side by side, then makes the file durable.

Pages go from the caller's buffers to the disk past the page cache where the file system and
the buffers' alignment allow it; otherwise through an aligned copy, or buffered. Each page is
read twice, once by the hash and once by the disk: the caller must not change it meanwhile.
A page that changes anyway is stored with a digest that does not match it, which is a miss.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from sparkcache_connector.store.delta import GroupShape, stored_offsets
from sparkcache_connector.store.durable import Buffer, Directory, Files, write_all
from sparkcache_connector.store.errors import Reason, Refused
from sparkcache_connector.store.manifest import DIGEST_BYTES, Group
from sparkcache_connector.store.pack import ALIGNMENT, PackHeader, pack_name, page_digest, stride
from sparkcache_connector.store.workers import Stop, Workers, run_in_order

SEGMENT_BYTES: Final = 4 << 20
"""Pages are hashed and written in segments of about this size."""
_MAX_PARTS: Final = 1024
_ZEROS: Final = bytes(ALIGNMENT)


@dataclass(frozen=True)
class _Segment:
    group: int
    first: int
    count: int
    offset: int


def count_equal_leading(
    workers: Workers, stop: Stop, pages: Sequence[Buffer], base: Group
) -> tuple[int, list[bytes]]:
    """Return how many leading pages have the base's digests, and the digests computed so far.

    The digests returned are a prefix of the pages'; they reach at least to the first page
    that differs.
    """
    limit = min(len(pages), base.count)
    step = max(1, SEGMENT_BYTES // base.page_bytes)
    digests: list[bytes] = []
    batches = [range(at, min(at + step, limit)) for at in range(0, limit, step)]
    wave = max(2, workers.count)
    for at in range(0, len(batches), wave):
        tasks = [partial(_digests, pages, batch) for batch in batches[at : at + wave]]
        for part in run_in_order(workers, stop, tasks):
            digests.extend(part)
        for index in range(len(digests)):
            if digests[index] != base.digest(index):
                return index, digests
    return limit, digests


def _digests(pages: Sequence[Buffer], batch: range) -> list[bytes]:
    return [page_digest(pages[index]) for index in batch]


def write_pack(
    directory: Directory,
    workers: Workers,
    stop: Stop,
    header: PackHeader,
    shapes: Sequence[GroupShape],
    pages: Sequence[Sequence[Buffer]],
    referenced: Sequence[int],
    known: Sequence[list[bytes]],
) -> tuple[list[bytes], int]:
    """Write the pages that are not referenced into a new pack, durably, and name it.

    ``known`` holds the digests that were computed before, a prefix for each group.

    Returns:
        The concatenated digests of every group's pages, and the bytes the file occupies.

    Raises:
        Stopped: cancelled or past its deadline; nothing is left behind.
        OSError: from the file system; the temporary file is removed if that works.
    """
    files = directory.files
    digests = [
        bytearray(b"".join(part).ljust(shape.count * DIGEST_BYTES, b"\0"))
        for part, shape in zip(known, shapes, strict=True)
    ]
    with directory.temporary(direct=True) as (descriptor, temporary):
        files.allocate(descriptor, header.size)
        _write_aligned(files, workers, descriptor, [header.encode()], 0)
        task = partial(_store, files, workers, descriptor, shapes, pages, known, digests)
        segments = _segments(shapes, referenced)
        for _ in run_in_order(workers, stop, (partial(task, segment) for segment in segments)):
            pass
        _sync(files, descriptor, "pack-data")
        files.rename(directory.fd, temporary, pack_name(header.pack_id))
        allocated = os.fstat(descriptor).st_blocks * 512
    try:
        _sync_directory(files, directory, "pack-dir")
    except BaseException:
        files.unlink(directory.fd, pack_name(header.pack_id))
        raise
    return [bytes(part) for part in digests], allocated


def _sync(files: Files, descriptor: int, site: str) -> None:
    try:
        files.sync(descriptor, site)
    except OSError as error:
        raise unsynced(error) from error


def _sync_directory(files: Files, directory: Directory, site: str) -> None:
    try:
        files.sync_directory(directory.fd, site)
    except OSError as error:
        raise unsynced(error) from error


def unsynced(error: OSError) -> Refused:
    """Return the refusal for a failed sync: after it, nothing says which bytes are on the disk."""
    found = f"a sync failed: {error.strerror}"
    return Refused(Reason.UNSYNCED, "publication", found, "check the device; it is tried again")


def _segments(shapes: Sequence[GroupShape], referenced: Sequence[int]) -> Iterator[_Segment]:
    offsets = stored_offsets(shapes, referenced)
    for group, shape in enumerate(shapes):
        step = stride(shape.page_bytes)
        batch = max(1, SEGMENT_BYTES // step)
        for first in range(referenced[group], shape.count, batch):
            count = min(batch, shape.count - first)
            yield _Segment(group, first, count, offsets[group] + (first - referenced[group]) * step)


def _store(
    files: Files,
    workers: Workers,
    descriptor: int,
    shapes: Sequence[GroupShape],
    pages: Sequence[Sequence[Buffer]],
    known: Sequence[list[bytes]],
    digests: list[bytearray],
    segment: _Segment,
) -> None:
    shape = shapes[segment.group]
    padding = stride(shape.page_bytes) - shape.page_bytes
    parts: list[Buffer] = []
    for index in range(segment.first, segment.first + segment.count):
        page = pages[segment.group][index]
        if index >= len(known[segment.group]):
            at = index * DIGEST_BYTES
            digests[segment.group][at : at + DIGEST_BYTES] = page_digest(page)
        parts.append(page)
        if padding:
            parts.append(_ZEROS[:padding])
    offset = segment.offset
    for at in range(0, len(parts), _MAX_PARTS):
        portion = parts[at : at + _MAX_PARTS]
        _write_aligned(files, workers, descriptor, portion, offset)
        offset += sum(map(len, portion))


def _write_aligned(
    files: Files, workers: Workers, descriptor: int, parts: Sequence[Buffer], offset: int
) -> None:
    """Write whole alignment units; through an aligned copy if the kernel asks for one."""
    try:
        write_all(files, descriptor, parts, offset)
    except OSError as error:
        # EINVAL: O_DIRECT, and the memory is not aligned as this device wants it.
        if error.errno != errno.EINVAL:
            raise
        write_all(files, descriptor, [copied(workers, parts)], offset)


def copied(workers: Workers, parts: Sequence[Buffer]) -> memoryview:
    """Return the parts' bytes in this thread's page-aligned scratch memory."""
    size = sum(map(len, parts))
    scratch = aligned_scratch(workers, size)
    at = 0
    for part in parts:
        scratch[at : at + len(part)] = part
        at += len(part)
    return scratch[:size]


def aligned_scratch(workers: Workers, size: int) -> memoryview:
    """Return this thread's page-aligned memory, at least ``size`` bytes long."""
    memory: memoryview | None = getattr(workers.scratch, "memory", None)
    if memory is None or len(memory) < size:
        memory = memoryview(mmap.mmap(-1, max(size, SEGMENT_BYTES)))
        workers.scratch.memory = memory
    return memory
