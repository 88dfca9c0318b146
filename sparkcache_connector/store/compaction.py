"""Copies what is still wanted out of packs that are mostly dead.

The new pack and the manifests that name it are durable before the old pack goes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from functools import partial
from typing import Final

from sparkcache_connector.store.catalog import Catalog, PackRow
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.delta import relocate
from sparkcache_connector.store.durable import write_all
from sparkcache_connector.store.errors import Miss, Reason, reason_of
from sparkcache_connector.store.eviction import refused, remove_dead_packs
from sparkcache_connector.store.manifest import Manifest, PackRef
from sparkcache_connector.store.pack import (
    ALIGNMENT,
    PACK_ID_BYTES,
    PackHeader,
    pack_name,
    page_digest,
    stride,
)
from sparkcache_connector.store.rewrite import load_any, rewrite

_DEAD_SHARE: Final = 0.5
"""Packs of which more than this share is dead are compacted."""


def compact_all(core: Core) -> int:
    """Compact every pack that is mostly dead and that no publication needs; return how many.

    Raises:
        Refused: if the file system does not let us.
    """
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
        manifest = load_any(core, root)
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
        rewrite(
            core,
            [(root, relocate(manifest, old, moved, new)) for root, manifest in manifests],
            [PackRow(new.pack_id, new.size, allocated)],
        )
    except OSError as error:
        raise refused("compaction", error) from error
    core.allocated += allocated
    core.dying.add(row.pack_id)
    remove_dead_packs(core)
    return True


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
