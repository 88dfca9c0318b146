"""Keeps a cache root within its bounds: eviction, expiry, compaction, sweeping, key rotation.

Order is what makes each step safe to interrupt: manifests go before the packs they need, and
new packs and manifests are durable before old ones go.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from sparkcache_connector.store.catalog import Catalog, PackRow, RootRow
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.delta import relocate
from sparkcache_connector.store.durable import write_all
from sparkcache_connector.store.errors import Miss, Reason, Refused, reason_of
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.layout import save_keys
from sparkcache_connector.store.manifest import (
    MANIFEST_LIMIT,
    Manifest,
    PackRef,
    authenticate,
    manifest_name,
)
from sparkcache_connector.store.pack import (
    ALIGNMENT,
    PACK_ID_BYTES,
    PackHeader,
    pack_name,
    page_digest,
    stride,
)
from sparkcache_connector.store.reconcile import root_row

_BATCH: Final = 32
"""Roots evicted under one directory sync."""
_PAUSE_SECONDS: Final = 0.02
"""Between two batches while a restore is running."""
_DEAD_SHARE: Final = 0.5
"""Packs of which more than this share is dead are compacted."""


@dataclass(frozen=True)
class Report:
    """What one maintenance did."""

    expired: int = 0
    evicted: int = 0
    compacted: int = 0
    swept: int = 0
    freed_bytes: int = 0


def maintain(core: Core, *, look_around: bool = False) -> Report:
    """Expire, compact, evict down to the low watermark if above the high one, and sweep.

    ``look_around`` also compares the catalog with the files, which finds debris of a killed
    process and files that somebody else put there or took away.
    """
    core.check_open()
    with core.lock:
        before = core.allocated
        core.flush_uses()
        remove_withdrawn(core)
        swept = core.look_around() if look_around else 0
        swept += remove_dead_packs(core)
        expired = _expire(core)
        compacted = _compact_all(core)
        evicted = evict_for(core, 0)
        if evicted:
            compacted += _compact_all(core)
        return Report(expired, evicted, compacted, swept, max(0, before - core.allocated))


def _expire(core: Core) -> int:
    ttl = core.options.ttl_seconds
    if ttl is None:
        return 0
    now = core.clock_ns()
    core.with_catalog(lambda catalog: catalog.clamp_uses(now))
    bound = now - int(ttl * 1e9)
    expired = 0
    while rows := core.with_catalog(lambda c: c.least_recent(_BATCH, used_before=bound)):
        remove_roots(core, rows)
        expired += len(rows)
    if expired:
        core.count("evict", "ttl", expired)
    return expired


def evict_for(core: Core, size: int) -> int:
    """Evict roots until ``size`` more bytes fit; return how many went.

    Nothing happens below the high watermark; beyond it, eviction goes on to the low one.
    """
    with core.lock:
        if core.allocated + core.reserved + size <= core.high:
            return 0
        return _evict_down_to(core, min(core.low, core.high - size))


def make_room(core: Core, size: int) -> int:
    """Evict roots worth ``size`` bytes, because the disk is fuller than our capacity says."""
    with core.lock:
        return _evict_down_to(core, core.allocated + core.reserved - size)


def _evict_down_to(core: Core, target: int) -> int:
    core.flush_uses()
    evicted = 0
    while core.allocated + core.reserved > target:
        oldest = core.with_catalog(lambda catalog: catalog.least_recent(_BATCH))
        if not oldest:
            break
        rows = _enough(oldest, core.allocated + core.reserved - target)
        remove_roots(core, rows)
        evicted += len(rows)
    if evicted:
        core.count("evict", "capacity", evicted)
    return evicted


def _enough(rows: Sequence[RootRow], excess: int) -> Sequence[RootRow]:
    """Return the first rows whose bytes, if nothing were shared, cover the excess."""
    covered = 0
    for number, row in enumerate(rows, start=1):
        covered += row.allocated + row.bytes
        if covered >= excess:
            return rows[:number]
    return rows


def remove_roots(core: Core, rows: Sequence[RootRow]) -> None:
    """Remove roots, then the packs that nobody needs any more.

    While a restore is running, batches leave it room: a restore has somebody waiting for it.

    Raises:
        Refused: if the file system does not let us; what is gone is accounted for.
    """
    with core.lock:
        for at in range(0, len(rows), _BATCH):
            if at and core.reader.active:
                time.sleep(_PAUSE_SECONDS)
            _remove_batch(core, rows[at : at + _BATCH])


def remove_withdrawn(core: Core) -> int:
    """Remove the files of roots that were withdrawn; return how many roots that were.

    Raises:
        Refused: if the file system does not let us; they are still not offered.
    """
    with core.lock:
        rows = core.take_withdrawn()
        if rows:
            remove_roots(core, rows)
            core.count("evict", "removed", len(rows))
        return len(rows)


def _remove_batch(core: Core, rows: Sequence[RootRow]) -> None:
    touched: set[int] = set()
    gone: list[RootRow] = []
    try:
        for row in rows:
            with suppress(Miss):
                directory = core.area.identity(row.identity)
                core.files.unlink(directory.fd, manifest_name(row.context))
                touched.add(directory.fd)
            gone.append(row)
        for descriptor in touched:
            core.files.sync_directory(descriptor, "evict-dir")
    except OSError as error:
        core.exact = False
        raise _refused("eviction", error) from error
    finally:
        core.forget_roots(gone)
    remove_dead_packs(core)


def remove_dead_packs(core: Core) -> int:
    """Remove packs that neither a root nor a publication in progress needs."""
    with core.lock:
        candidates = {pack_id for pack_id in core.dying if not core.pins[pack_id]}
        dead = core.with_catalog(lambda catalog: catalog.unreferenced_packs(candidates))
        core.dying -= candidates - {row.pack_id for row in dead}
        removed = []
        try:
            for row in dead:
                core.files.unlink(core.area.packs.fd, pack_name(row.pack_id))
                removed.append(row)
        except OSError as error:
            core.exact = False
            raise _refused("eviction", error) from error
        finally:
            if removed:
                names = [row.pack_id for row in removed]
                core.dying.difference_update(names)
                core.with_catalog(lambda catalog: catalog.remove_packs(names))
                core.allocated -= sum(row.allocated for row in removed)
        return len(removed)


def _refused(what: str, error: OSError) -> Refused:
    found = f"cannot change the cache root: {error.strerror}"
    return Refused(reason_of(error), what, found, "serving goes on; check the disk")


# -- compaction ----------------------------------------------------------------------------


def _compact_all(core: Core) -> int:
    compacted = 0
    for row in core.with_catalog(lambda catalog: catalog.packs()):
        if core.pins[row.pack_id]:
            continue
        live = core.with_catalog(partial(Catalog.live_extents, pack_id=row.pack_id))
        pages = row.size - ALIGNMENT
        used = sum(stop - start for start, stop in live)
        if live and used < pages * (1 - _DEAD_SHARE):
            compacted += _compact(core, row)
    if compacted:
        core.count("compact", "packs", compacted)
    return compacted


def _compact(core: Core, row: PackRow) -> bool:
    """Copy a pack's live pages to a new one and point its roots there; True if that worked."""
    roots = core.with_catalog(lambda catalog: catalog.roots_in_pack(row.pack_id))
    manifests = []
    for root in roots:
        manifest = _load_any(core, root)
        if manifest is None:
            return False
        manifests.append((root, manifest))
    old = PackRef(row.pack_id, row.size)
    live = _live_pages(old, (manifest for _, manifest in manifests))
    try:
        new, moved, allocated = _copy_pages(core, old, live)
    except Miss as miss:
        # A page is bad: its roots will be found out when they are read; nothing is copied on.
        core.count("compact", miss.reason)
        return False
    except OSError as error:
        core.count("compact", reason_of(error))
        return False
    try:
        _rewrite(
            core,
            [(root, relocate(manifest, old, moved, new)) for root, manifest in manifests],
            [PackRow(new.pack_id, new.size, allocated)],
        )
    except OSError as error:
        raise _refused("compaction", error) from error
    core.allocated += allocated
    core.dying.add(row.pack_id)
    remove_dead_packs(core)
    return True


def _load_any(core: Core, root: RootRow) -> Manifest | None:
    """Return a root's manifest if a key of ours vouches for it and it is still the root's."""
    try:
        directory = core.area.identity(root.identity)
        data = directory.read(manifest_name(root.context), MANIFEST_LIMIT)
        manifest = Manifest.parse(data, core.keys)
    except Miss as miss:
        core.count("compact", miss.reason)
        return None
    if (manifest.identity, manifest.context) != (root.identity, root.context):
        return None
    return manifest


def _live_pages(old: PackRef, manifests: Iterable[Manifest]) -> dict[int, tuple[int, bytes]]:
    """Return (page size, digest) by offset of every referenced page of a pack, in order."""
    live: dict[int, tuple[int, bytes]] = {}
    for manifest in manifests:
        for group in manifest.groups:
            step = stride(group.page_bytes)
            page = 0
            for run in group.runs:
                if manifest.packs[run.pack] == old:
                    for index in range(run.count):
                        value = (group.page_bytes, group.digest(page + index))
                        live[run.offset + index * step] = value
                page += run.count
    return dict(sorted(live.items()))


def _copy_pages(
    core: Core, old: PackRef, live: dict[int, tuple[int, bytes]]
) -> tuple[PackRef, dict[int, int], int]:
    """Copy pages, each checked, into a new durable pack; return it, the moves and its bytes."""
    size = ALIGNMENT + sum(stride(page_bytes) for page_bytes, _ in live.values())
    new = PackRef(secrets.token_bytes(PACK_ID_BYTES), size)
    moved: dict[int, int] = {}
    subject = f"{core.area.packs.path}/{pack_name(old.pack_id)}"
    source = core.area.packs.open_file(pack_name(old.pack_id))
    try:
        with core.area.packs.temporary() as (descriptor, temporary):
            core.files.allocate(descriptor, size)
            header = PackHeader(new.pack_id, size).encode()
            write_all(core.files, descriptor, [header], 0)
            at = ALIGNMENT
            for offset, (page_bytes, digest) in live.items():
                page = os.pread(source, page_bytes, offset)
                if page_digest(page) != digest:
                    raise Miss(Reason.PAGE_MISMATCH, subject, f"bad page at offset {offset}")
                write_all(core.files, descriptor, [page], at)
                moved[offset] = at
                at += stride(page_bytes)
            core.files.sync(descriptor, "compact-data")
            core.files.rename(core.area.packs.fd, temporary, pack_name(new.pack_id))
            allocated = os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(source)
    core.files.sync_directory(core.area.packs.fd, "compact-dir")
    return new, moved, allocated


def _rewrite(
    core: Core, changed: Sequence[tuple[RootRow, Manifest]], packs: Sequence[PackRow] = ()
) -> None:
    """Replace manifests durably under the current key, and catalogue them."""
    entries: dict[int, list[tuple[RootRow, Manifest]]] = defaultdict(list)
    for root, manifest in changed:
        directory = core.area.identity(root.identity)
        data = manifest.encode(core.keys.current)
        name = manifest_name(root.context)
        directory.install(name, data, "rewrite-data", used_ns=root.used_ns)
        entries[directory.fd].append((root, manifest))
    for descriptor in entries:
        core.files.sync_directory(descriptor, "rewrite-dir")
    rows = []
    for root, manifest in changed:
        directory = core.area.identity(root.identity)
        status = directory.status(manifest_name(root.context))
        row = root_row(manifest, status)
        core.allocated += row.allocated - root.allocated
        rows.append((row, manifest))
    core.with_catalog(lambda catalog: catalog.put_roots(rows, packs))


# -- keys ----------------------------------------------------------------------------------


def rotate(core: Core, *, generate: bool, destroy_old: bool) -> int:
    """Re-authenticate every root under the current key; return how many were rewritten.

    Steps: (1) a new key becomes current, durably; (2) every root that a key of the ring
    vouches for is rewritten under it, durably; (3) the other keys are destroyed. Interrupted
    anywhere, both keys are still in the ring or no manifest needs the old one.

    Raises:
        Refused: if the disk does not let us; run it again.
    """
    core.check_open()
    with core.lock:
        try:
            # (1)
            if generate:
                _use_ring(core, core.keys.with_new_current())
            # (2)
            rewritten = _reauthenticate(core)
            # (3)
            if destroy_old:
                _use_ring(core, core.keys.only_current())
        except OSError as error:
            raise _refused("key rotation", error) from error
    core.count("rotate", "roots", rewritten)
    return rewritten


def destroy_key(core: Core, key_id: bytes) -> int:
    """Revoke a key: remove it from the ring, and every root that only it vouches for.

    The current key is replaced by a new one first. Returns how many roots were removed.

    Raises:
        Refused: if the key is not in the ring, or the disk does not let us.
    """
    core.check_open()
    with core.lock:
        if core.keys.find(key_id) is None:
            found = f"key {key_id.hex()} is not in the ring"
            raise Refused(Reason.UNKNOWN_KEY, "key", found, "list the keys and choose one")
        revoked = [
            row
            for row in core.with_catalog(lambda catalog: catalog.roots())
            if _key_of(core, row) == key_id
        ]
        try:
            ring = core.keys
            if ring.current.key_id == key_id:
                ring = ring.with_new_current()
            _use_ring(core, KeyRing(tuple(key for key in ring.keys if key.key_id != key_id)))
        except OSError as error:
            raise _refused("key", error) from error
        if revoked:
            remove_roots(core, revoked)
            core.count("evict", "revoked", len(revoked))
    return len(revoked)


def _use_ring(core: Core, ring: KeyRing) -> None:
    if core.options.key_file is not None:
        found = f"the keys are in {core.options.key_file}"
        raise Refused(Reason.INVALID, "key", found, "change that file and open the store again")
    save_keys(core.area, ring)
    core.keys = ring


def _key_of(core: Core, row: RootRow) -> bytes | None:
    try:
        directory = core.area.identity(row.identity)
        data = directory.read(manifest_name(row.context), MANIFEST_LIMIT)
        return authenticate(data, core.keys).key_id
    except Miss:
        return None


def _reauthenticate(core: Core) -> int:
    rewritten = 0
    batch: list[tuple[RootRow, Manifest]] = []
    for row in core.with_catalog(lambda catalog: catalog.roots()):
        key_id = _key_of(core, row)
        if key_id is None or key_id == core.keys.current.key_id:
            continue
        manifest = _load_any(core, row)
        if manifest is None:
            continue
        batch.append((row, manifest))
        rewritten += 1
        if len(batch) == _BATCH:
            _rewrite(core, batch)
            batch = []
    if batch:
        _rewrite(core, batch)
    return rewritten
