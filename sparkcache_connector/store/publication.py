"""Publishes one root: decide what is new, write it durably, make it visible.

The order is the specification's: pack data, pack name, manifest data, manifest name, each
made durable before the next one starts. Only then is the root catalogued, announced and
reported to the caller.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sparkcache_connector.store.catalog import PackRow
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.delta import GroupShape, comparable, compose_groups, pack_size
from sparkcache_connector.store.durable import Buffer, Directory
from sparkcache_connector.store.errors import Miss, Reason, Refused, reason_of
from sparkcache_connector.store.eviction import (
    evict_for,
    make_room,
    remove_dead_packs,
    remove_withdrawn,
)
from sparkcache_connector.store.manifest import (
    DIGEST_BYTES,
    MANIFEST_LIMIT,
    MAX_BOUNDARY,
    MAX_GROUPS,
    GroupKind,
    Manifest,
    PackRef,
    manifest_name,
)
from sparkcache_connector.store.pack import (
    MAX_PACK,
    MAX_PAGE,
    PACK_ID_BYTES,
    PackHeader,
    pack_name,
)
from sparkcache_connector.store.reconcile import root_row
from sparkcache_connector.store.workers import Stop
from sparkcache_connector.store.writer import count_equal_leading, unsynced, write_pack


@dataclass(frozen=True)
class GroupPages:
    """The pages of one KV cache group that a publication hands over.

    ``kind``, ``page_bytes`` and ``first`` are as in :class:`~.manifest.Group`. Every page is a
    contiguous buffer of ``page_bytes`` bytes that stays unchanged until ``publish`` returns.
    Memory that starts at a multiple of 4096 is written without a copy.
    """

    kind: GroupKind
    page_bytes: int
    first: int
    pages: Sequence[Buffer]


@dataclass(frozen=True)
class Receipt:
    """What a publication did. When the caller holds one, the root survives a power cut."""

    context: bytes
    boundary: int
    already_held: bool
    """The root was there; nothing was written."""
    stored_pages: int
    referenced_pages: int
    written_bytes: int
    """Bytes that the publication allocated on disk, manifest included."""


@dataclass(frozen=True)
class _Job:
    context: bytes
    boundary: int
    shapes: tuple[GroupShape, ...]
    pages: tuple[tuple[Buffer, ...], ...]
    base: bytes | None
    stop: Stop


def publish(
    core: Core,
    context: bytes,
    boundary: int,
    groups: Sequence[GroupPages],
    base: bytes | None,
    stop: Stop,
) -> Receipt:
    """Publish a root.

    Raises:
        Refused: with the reason; nothing of this publication is visible.
        Stopped: cancelled or past its deadline; as above.
    """
    core.check_open()
    job = _checked(context, boundary, groups, base, stop)
    off = core.publishing_off()
    if off is not None:
        raise Refused(off, "publication", "publishing is off", "it is tried again by itself")
    with core.lock:
        # One of them may be this very context, which would else go after it has come back.
        with suppress(Refused):
            remove_withdrawn(core)
        if context in core.held or context in core.in_flight:
            core.count("publish", "already-held")
            core.touched[core.identity, context] = core.clock_ns()
            return Receipt(context, boundary, True, 0, 0, 0)
        core.in_flight.add(context)
    try:
        receipt = _publish_guarded(core, job)
    finally:
        with core.lock:
            core.in_flight.discard(context)
    core.count("publish", "referenced" if receipt.referenced_pages else "stored")
    return receipt


def _publish_guarded(core: Core, job: _Job) -> Receipt:
    try:
        try:
            return _publish_once(core, job)
        except OSError as error:
            if reason_of(error) is not Reason.DISK_FULL:
                raise
            # Others may fill the disk below our capacity: make room once and try again.
            make_room(core, pack_size(job.shapes, [0] * len(job.shapes)))
            return _publish_once(core, job)
    except OSError as error:
        reason = reason_of(error)
        core.turn_publishing_off(reason)
        found = f"cannot write: {error.strerror}"
        raise Refused(reason, "publication", found, "serving goes on; check the disk") from error
    except Miss as miss:
        core.turn_publishing_off(miss.reason)
        raise Refused(miss.reason, miss.subject, miss.found, "check the cache root") from miss
    except Refused as refused:
        core.turn_publishing_off(refused.reason)
        raise


def _publish_once(core: Core, job: _Job) -> Receipt:
    with _pinned_base(core, job.base) as base:
        referenced, known = _compare(core, job, base)
        size = pack_size(job.shapes, referenced)
        with _reserved(core, size + _manifest_estimate(job)):
            job.stop.check()
            return _write(core, job, base, referenced, known, size)


def _write(
    core: Core,
    job: _Job,
    base: Manifest | None,
    referenced: list[int],
    known: list[list[bytes]],
    size: int,
) -> Receipt:
    packs: list[PackRow] = []
    reference = None
    if size:
        header = PackHeader(secrets.token_bytes(PACK_ID_BYTES), size)
        digests, allocated = write_pack(
            core.area.packs,
            core.workers,
            job.stop,
            header,
            job.shapes,
            job.pages,
            referenced,
            known,
        )
        reference = PackRef(header.pack_id, size)
        packs.append(PackRow(header.pack_id, size, allocated))
    else:
        digests = [b"".join(part) for part in known]
    pack_refs, groups = compose_groups(job.shapes, digests, referenced, base, reference)
    manifest = Manifest(
        core.identity, job.context, job.boundary, core.rank, core.clock_ns(), pack_refs, groups
    )
    try:
        job.stop.check()
        return _make_visible(core, manifest, packs, sum(referenced))
    except BaseException:
        try:
            for pack in packs:
                core.files.unlink(core.area.packs.fd, pack_name(pack.pack_id))
        except OSError:
            core.exact = False
        raise


def _make_visible(core: Core, manifest: Manifest, packs: list[PackRow], referenced: int) -> Receipt:
    name = manifest_name(manifest.context)
    with core.lock:
        directory = core.area.identity(core.identity, create=True)
        data = manifest.encode(core.keys.current)
        if len(data) > MANIFEST_LIMIT:
            found = f"a manifest of {len(data)} bytes, at most {MANIFEST_LIMIT} are possible"
            raise Refused(Reason.INVALID, "publication", found, "publish larger pages")
        _install(core, directory, name, data, manifest.created_ns)
        status = directory.status(name)
        row = root_row(manifest, status)
        core.with_catalog(lambda catalog: catalog.put_roots([(row, manifest)], packs))
        written = row.allocated + sum(pack.allocated for pack in packs)
        core.allocated += written
        core.note_root(row)
    return Receipt(
        manifest.context,
        manifest.boundary,
        False,
        manifest.page_count - referenced,
        referenced,
        written,
    )


def _install(core: Core, directory: Directory, name: str, data: bytes, used_ns: int) -> None:
    directory.install(name, data, "manifest-data", used_ns=used_ns)
    try:
        core.files.sync_directory(directory.fd, "manifest-dir")
    except OSError as error:
        core.files.unlink(directory.fd, name)
        raise unsynced(error) from error


def _compare(core: Core, job: _Job, base: Manifest | None) -> tuple[list[int], list[list[bytes]]]:
    referenced: list[int] = []
    known: list[list[bytes]] = []
    for shape, pages, group in zip(
        job.shapes, job.pages, comparable(job.shapes, base), strict=True
    ):
        if group is None or not shape.count:
            count, digests = 0, list[bytes]()
        else:
            count, digests = count_equal_leading(core.workers, job.stop, pages, group)
        referenced.append(count)
        known.append(digests)
    return referenced, known


@contextmanager
def _pinned_base(core: Core, base: bytes | None) -> Iterator[Manifest | None]:
    """Give the base's manifest with its packs kept alive; None if it cannot be used."""
    manifest = None
    with core.lock:
        if base is not None and base in core.held:
            try:
                manifest = load_manifest(core, base)
            except Miss as miss:
                core.count("base", miss.reason)
        pinned = [] if manifest is None else [pack.pack_id for pack in manifest.packs]
        core.pins.update(pinned)
    try:
        yield manifest
    finally:
        with core.lock:
            core.pins.subtract(pinned)
            for pack_id in set(pinned):
                if not core.pins[pack_id]:
                    del core.pins[pack_id]
            remove_dead_packs(core)


@contextmanager
def _reserved(core: Core, size: int) -> Iterator[None]:
    """Make room for a publication and keep it until it is accounted for."""
    if size > core.high:
        found = f"needs {size} bytes of a capacity of {core.high}"
        raise Refused(Reason.TOO_LARGE, "publication", found, "give the cache root more capacity")
    with core.lock:
        evict_for(core, size)
        core.reserved += size
    try:
        yield
    finally:
        with core.lock:
            core.reserved -= size


def _manifest_estimate(job: _Job) -> int:
    digests = sum(shape.count for shape in job.shapes) * DIGEST_BYTES
    return (digests // 4096 + 2) * 4096


def load_manifest(core: Core, context: bytes) -> Manifest:
    """Return the authenticated manifest of a context under this store's identity and rank.

    Raises:
        Miss: the reason for which there is none.
    """
    directory = core.area.identity(core.identity)
    name = manifest_name(context)
    subject = f"root {context.hex()}"
    manifest = Manifest.parse(directory.read(name, MANIFEST_LIMIT), core.keys, subject)
    expected = (core.identity, context, core.rank)
    if (manifest.identity, manifest.context, manifest.rank) != expected:
        raise Miss(Reason.MISPLACED, subject, "its manifest describes another root")
    return manifest


def _checked(
    context: bytes,
    boundary: int,
    groups: Sequence[GroupPages],
    base: bytes | None,
    stop: Stop,
) -> _Job:
    def invalid(found: str) -> Refused:
        return Refused(Reason.INVALID, "publication", found, "correct the caller")

    if len(context) != DIGEST_BYTES or (base is not None and len(base) != DIGEST_BYTES):
        raise invalid(f"a context digest has {DIGEST_BYTES} bytes")
    if not 0 < boundary <= MAX_BOUNDARY:
        raise invalid(f"boundary {boundary} is not a positive token count")
    if not 0 < len(groups) <= MAX_GROUPS or not any(group.pages for group in groups):
        raise invalid("there is no page to publish")
    shapes = []
    pages = []
    for index, group in enumerate(groups):
        if not 0 < group.page_bytes <= MAX_PAGE or not 0 <= group.first <= MAX_BOUNDARY:
            raise invalid(f"group {index}: page size {group.page_bytes}, first {group.first}")
        views = tuple(_bytes_view(page) for page in group.pages)
        for number, view in enumerate(views):
            if len(view) != group.page_bytes:
                found = f"group {index}, page {number}: {len(view)} bytes, not {group.page_bytes}"
                raise invalid(found)
        shapes.append(GroupShape(GroupKind(group.kind), group.page_bytes, group.first, len(views)))
        pages.append(views)
    if pack_size(shapes, [0] * len(shapes)) > MAX_PACK:
        raise invalid("more bytes than one pack can hold")
    return _Job(bytes(context), boundary, tuple(shapes), tuple(pages), base, stop)


def _bytes_view(page: Buffer) -> Buffer:
    if isinstance(page, memoryview) and (page.ndim != 1 or page.itemsize != 1):
        return page.cast("B")
    return page
