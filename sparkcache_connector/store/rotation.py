"""Changes of the key ring: roots are authenticated anew, their pages stay as they are."""

from __future__ import annotations

from typing import Final

from sparkcache_connector.store.catalog import RootRow
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.errors import Miss, Reason, Refused
from sparkcache_connector.store.eviction import refused, remove_roots
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.layout import save_keys
from sparkcache_connector.store.manifest import (
    MANIFEST_LIMIT,
    Manifest,
    authenticate,
    manifest_name,
)
from sparkcache_connector.store.rewrite import load_any, rewrite

_BATCH: Final = 32
"""Roots rewritten under one directory sync."""


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
            raise refused("key rotation", error) from error
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
            raise refused("key", error) from error
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
        manifest = load_any(core, row)
        if manifest is None:
            continue
        batch.append((row, manifest))
        rewritten += 1
        if len(batch) == _BATCH:
            rewrite(core, batch)
            batch = []
    if batch:
        rewrite(core, batch)
    return rewritten
