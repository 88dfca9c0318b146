"""Reads roots: a plan over pages in manifest order, executed by a bounded pool.

A plan holds its packs open, so eviction and compaction cannot take the bytes away from under
it. Its pages are read in *segments*: neighbouring pages of one run, cut at fixed places of
the run, so that two roots that share pages share segments too. Of several restores that want
one segment at the same time, one reads; the others get a copy.

A segment that is in the page cache is copied from there; any other is read past it, in place
if the caller's memory allows. A pack that is read for the second time by one process
is read through the page cache, because it will be wanted a third time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock
from typing import Final

from sparkcache_connector.store.closing import Closing
from sparkcache_connector.store.durable import Directory
from sparkcache_connector.store.errors import Miss, Reason, reason_of
from sparkcache_connector.store.manifest import DIGEST_BYTES, Manifest
from sparkcache_connector.store.pack import pack_name, page_digest, stride
from sparkcache_connector.store.residency import is_resident
from sparkcache_connector.store.workers import Stop, Workers, run_in_order
from sparkcache_connector.store.writer import SEGMENT_BYTES, aligned_scratch

Writable = bytearray | memoryview
Destinations = Sequence[Sequence[Writable | None]]
"""For each group, for each page, where its bytes go; None for a page that is not wanted."""
Verified = Callable[[int, int, int], None]
"""Called in manifest order with (group, first page, number of pages) that are now verified."""

_REMEMBERED_PACKS: Final = 4096


@dataclass
class OpenPack:
    """The descriptors of one pack: past the page cache if the file system has that, and through."""

    pack_id: bytes
    subject: str
    buffered: int
    direct: int | None
    warm: bool

    def close(self) -> None:
        """Close both descriptors."""
        for descriptor in (self.buffered, self.direct):
            if descriptor is not None:
                with suppress(OSError):
                    os.close(descriptor)


@dataclass
class Plan(Closing):
    """One root, authenticated, with its packs open: everything a restore needs to know.

    Use it as a context manager, or call :meth:`close`.
    """

    manifest: Manifest
    packs: list[OpenPack]
    _closed: bool = False

    def close(self) -> None:
        """Give the packs back; the plan cannot be read any more."""
        if not self._closed:
            self._closed = True
            for pack in self.packs:
                pack.close()

    @property
    def closed(self) -> bool:
        """Whether the plan was closed."""
        return self._closed


@dataclass(frozen=True)
class Segment:
    """Neighbouring pages of one run that are read together."""

    group: int
    first: int
    count: int
    pack: int
    offset: int


class PageMismatch(Miss):
    """A page whose bytes are not the published ones; ``pack_id`` and ``offset`` say which."""

    def __init__(self, subject: str, pack_id: bytes, offset: int, page: int) -> None:
        found = f"page {page} at offset {offset} does not have its digest"
        super().__init__(Reason.PAGE_MISMATCH, subject, found)
        self.pack_id = pack_id
        self.offset = offset


@dataclass
class _Flight:
    """One segment being read, and the other restores' destinations that want a copy."""

    followers: list[Sequence[Writable]] = field(default_factory=list)
    done: Event = field(default_factory=Event)
    error: BaseException | None = None


class Reader:
    """Opens packs and reads plans; shared by all restores of one store."""

    def __init__(self, directory: Directory, workers: Workers) -> None:
        self._directory = directory
        self._workers = workers
        self._lock = Lock()
        self._flights: dict[tuple[object, ...], _Flight] = {}
        self._seen: dict[bytes, None] = {}
        self.active = 0
        """Restores that are running."""
        self.shared_segments = 0
        """Segments that were copied from another restore instead of being read."""

    def open_packs(self, manifest: Manifest) -> list[OpenPack]:
        """Open the packs of a manifest and compare their sizes with it.

        Raises:
            Miss: ``pack-missing``, ``truncated`` (or extended), ``foreign``, or the
                operating system's reason.
        """
        packs: list[OpenPack] = []
        try:
            for reference in manifest.packs:
                pack = self._open_pack(reference.pack_id)
                packs.append(pack)
                size = os.fstat(pack.buffered).st_size
                if size != reference.size:
                    found = f"{size} bytes where its manifest states {reference.size}"
                    raise Miss(Reason.TRUNCATED, pack.subject, found)
        except BaseException:
            for pack in packs:
                pack.close()
            raise
        return packs

    def _open_pack(self, pack_id: bytes) -> OpenPack:
        name = pack_name(pack_id)
        subject = f"{self._directory.path}/{name}"
        try:
            buffered = self._directory.open_file(name)
        except Miss as miss:
            if miss.reason is Reason.ABSENT:
                raise Miss(Reason.PACK_MISSING, subject, "a manifest needs it") from miss
            raise
        direct = None
        with suppress(Miss):  # no O_DIRECT here, or no descriptor left: buffered reads do
            direct = self._directory.open_file(name, direct=True)
        with self._lock:
            warm = pack_id in self._seen
            self._seen[pack_id] = None
            while len(self._seen) > _REMEMBERED_PACKS:
                del self._seen[next(iter(self._seen))]
        return OpenPack(pack_id, subject, buffered, direct, warm)

    def read(
        self, plan: Plan, destinations: Destinations, stop: Stop, verified: Verified | None
    ) -> int:
        """Read the wanted pages into their destinations, each checked against its digest.

        The destinations' shape must have been checked. Returns the number of bytes.

        Raises:
            Miss: wrong bytes (:class:`PageMismatch`) or a failing disk.
            Stopped: cancelled or past the deadline.
        """
        segments = list(cut(plan.manifest, destinations))
        tasks = (partial(self._read_segment, plan, destinations, part) for part in segments)
        total = 0
        with self._counted():
            for part, size in zip(segments, run_in_order(self._workers, stop, tasks), strict=True):
                total += size
                if verified is not None:
                    verified(part.group, part.first, part.count)
        return total

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.active += 1
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1

    def _read_segment(self, plan: Plan, destinations: Destinations, part: Segment) -> int:
        group = plan.manifest.groups[part.group]
        pages = range(part.first, part.first + part.count)
        targets = [
            target for page in pages if (target := destinations[part.group][page]) is not None
        ]
        pack = plan.packs[part.pack]
        digests = group.digests[part.first * DIGEST_BYTES : (pages.stop) * DIGEST_BYTES]
        key = (pack.pack_id, part.offset, group.page_bytes, digests)
        with self._lock:
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
            else:
                flight.followers.append(targets)
                self.shared_segments += 1
        if not leads:
            flight.done.wait()
            if flight.error is not None:
                # The leader may have failed for a reason of its own: this restore tries itself.
                self._fetch(pack, part, group.page_bytes, targets, digests)
            return part.count * group.page_bytes
        try:
            self._fetch(pack, part, group.page_bytes, targets, digests)
        except BaseException as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
            if flight.error is None:
                for follower in flight.followers:
                    for target, source in zip(follower, targets, strict=True):
                        target[:] = source
            flight.done.set()
        return part.count * group.page_bytes

    def _fetch(
        self,
        pack: OpenPack,
        part: Segment,
        page_bytes: int,
        targets: Sequence[Writable],
        digests: bytes,
    ) -> None:
        try:
            self._fill(pack, part.offset, page_bytes, targets)
        except OSError as error:
            found = f"cannot read at offset {part.offset}: {error.strerror}"
            raise Miss(reason_of(error), pack.subject, found) from error
        step = stride(page_bytes)
        for index, target in enumerate(targets):
            if page_digest(target) != digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
                offset = part.offset + index * step
                raise PageMismatch(pack.subject, pack.pack_id, offset, part.first + index)

    def _fill(
        self, pack: OpenPack, offset: int, page_bytes: int, targets: Sequence[Writable]
    ) -> None:
        """Fill the targets from the pack, in place if the memory's alignment allows it."""
        step = stride(page_bytes)
        span = step * len(targets)
        descriptor = pack.buffered
        cached = pack.direct is None or pack.warm or is_resident(pack.buffered, offset, span)
        if not cached and pack.direct is not None:
            descriptor = pack.direct
        if step == page_bytes:
            try:
                _read_exactly(descriptor, targets, offset, pack.subject)
                return
            except OSError as error:
                # EINVAL: O_DIRECT, and the memory is not aligned as this device wants it.
                if error.errno != errno.EINVAL:
                    raise
        scratch = aligned_scratch(self._workers, span)[:span]
        _read_exactly(descriptor, [scratch], offset, pack.subject)
        for index, target in enumerate(targets):
            target[:] = scratch[index * step : index * step + page_bytes]


def cut(manifest: Manifest, destinations: Destinations) -> Iterator[Segment]:
    """Yield the segments that cover all wanted pages, in manifest order.

    Runs are cut at multiples of the segment size from their own beginning, whatever is
    wanted of them, so that equal runs give equal segments.
    """
    for index, group in enumerate(manifest.groups):
        step = stride(group.page_bytes)
        batch = max(1, SEGMENT_BYTES // step)
        wanted = destinations[index]
        at = 0
        for run in group.runs:
            for begin in range(0, run.count, batch):
                stop = min(begin + batch, run.count)
                first = begin
                while first < stop:
                    if wanted[at + first] is None:
                        first += 1
                        continue
                    last = first + 1
                    while last < stop and wanted[at + last] is not None:
                        last += 1
                    offset = run.offset + first * step
                    yield Segment(index, at + first, last - first, run.pack, offset)
                    first = last
            at += run.count


def _read_exactly(descriptor: int, targets: Sequence[Writable], offset: int, subject: str) -> None:
    rest = [memoryview(target) for target in targets]
    while rest:
        count = os.preadv(descriptor, rest, offset)
        if count == 0:
            raise Miss(Reason.TRUNCATED, subject, f"ends at offset {offset}")
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
