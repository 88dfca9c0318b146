"""Takes roots away: by capacity, by age, because somebody withdrew or revoked them.

Manifests go, durably, before the packs that only they need: interrupted anywhere, what is left
is a pack that nothing names, never a root whose pages are gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from sparkcache_connector.store.catalog import RootRow
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.errors import Miss, Refused, reason_of
from sparkcache_connector.store.manifest import manifest_name
from sparkcache_connector.store.pack import pack_name

_BATCH: Final = 32
"""Roots evicted under one directory sync."""
_PAUSE_RATIO: Final = 9.0
"""Seconds that a running restore gets to itself for each second of evicting."""
_LONGEST_PAUSE: Final = 0.2


def expire(core: Core) -> int:
    """Remove roots that nobody used for the time to live; return how many went."""
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
        took = 0.0
        for at in range(0, len(rows), _BATCH):
            if at and core.reader.active:
                time.sleep(min(took * _PAUSE_RATIO, _LONGEST_PAUSE))
            began = time.monotonic()
            _remove_batch(core, rows[at : at + _BATCH])
            took = time.monotonic() - began


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
        raise refused("eviction", error) from error
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
            raise refused("eviction", error) from error
        finally:
            if removed:
                names = [row.pack_id for row in removed]
                core.dying.difference_update(names)
                core.with_catalog(lambda catalog: catalog.remove_packs(names))
                core.allocated -= sum(row.allocated for row in removed)
        return len(removed)


def refused(what: str, error: OSError) -> Refused:
    """Return the refusal of a change that the file system did not let us make."""
    found = f"cannot change the cache root: {error.strerror}"
    return Refused(reason_of(error), what, found, "serving goes on; check the disk")
