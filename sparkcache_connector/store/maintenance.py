"""Keeps a cache root within its bounds: sweeping, expiry, compaction, eviction, in that order."""

from __future__ import annotations

from dataclasses import dataclass

from sparkcache_connector.store.compaction import compact_all
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.eviction import (
    evict_for,
    expire,
    remove_dead_packs,
    remove_withdrawn,
)


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
        expired = expire(core)
        compacted = compact_all(core)
        evicted = evict_for(core, 0)
        if evicted:
            compacted += compact_all(core)
        return Report(expired, evicted, compacted, swept, max(0, before - core.allocated))
