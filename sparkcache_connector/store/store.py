"""The store as its callers see it: one cache root, one identity, one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

from sparkcache_connector.store import eviction, maintenance, publication, rotation
from sparkcache_connector.store.catalog import CatalogDamaged
from sparkcache_connector.store.closing import Closing
from sparkcache_connector.store.core import Core, Options
from sparkcache_connector.store.durable import Files
from sparkcache_connector.store.errors import (
    LEFT_ALONE,
    WRONG_BYTES,
    Miss,
    Reason,
    Refused,
    StoreError,
    Unusable,
    reason_of,
)
from sparkcache_connector.store.layout import Area, load_keys
from sparkcache_connector.store.maintenance import Report
from sparkcache_connector.store.manifest import DIGEST_BYTES
from sparkcache_connector.store.publication import GroupPages, Receipt
from sparkcache_connector.store.reader import Destinations, PageMismatch, Plan, Verified
from sparkcache_connector.store.workers import Stop

_PLAN_TRIES = 3


@dataclass(frozen=True)
class Changes:
    """Roots of this identity that came and went since the last call."""

    added: frozenset[bytes]
    removed: frozenset[bytes]


@dataclass(frozen=True)
class Stats:
    """A store's state at one moment."""

    roots: int
    """Roots of all identities in this cache root."""
    held: int
    """Roots of this identity that can be served."""
    packs: int
    allocated_bytes: int
    high_bytes: int
    low_bytes: int
    publishing_off: str | None
    """Why publications are not taken now; None if they are."""
    counters: dict[tuple[str, str], int]
    """(event, reason) counts since the store was opened."""


class Store(Closing):
    """An open cache root. All methods may be called from any thread.

    Open it with :meth:`open`, once per rank; use it as a context manager or :meth:`close` it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        identity: bytes,
        rank: int = 0,
        options: Options | None = None,
        files: Files | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> Store:
        """Open a cache root as its owner; create it if it does not exist.

        Args:
            path: The directory, one per rank. Other identities in it are left in peace, but
                count towards the capacity and are evicted like any other root.
            identity: Digest (32 bytes) of everything that must be equal for reuse.
            rank: This rank; a manifest of another rank is never served.
            options: Capacity, expiry, threads, keys.
            files: The file operations; tests give ones that fail.
            clock_ns: Wall clock for recency and expiry.

        Raises:
            Unusable: the directory cannot be used; the message says why and what to do.
        """
        if len(identity) != DIGEST_BYTES or not 0 <= rank < 1 << 32:
            found = f"identity of {len(identity)} bytes, rank {rank}"
            raise Unusable(Reason.INVALID, os.fspath(path), found, "correct the caller")
        options = options or Options()
        area = Area.open(files or Files(), path, own=True)
        try:
            keys = load_keys(area, options.key_file, create=True)
            return cls(Core(area, keys, bytes(identity), rank, options, clock_ns))
        except OSError as error:
            area.close()
            found = f"cannot be read: {error.strerror}"
            raise Unusable(reason_of(error), os.fspath(path), found, "check the disk") from error
        except BaseException:
            area.close()
            raise

    def close(self) -> None:
        """Wait for running reads and writes and give the cache root back; safe to call twice."""
        core = self._core
        if core.closed:
            return
        core.closed = True
        core.workers.close()
        with core.lock:
            try:
                eviction.remove_withdrawn(core)
                core.flush_uses()
                core.mark_clean()
            except (StoreError, CatalogDamaged, OSError):
                core.count("catalog", "not-clean")
            core.catalog.close()
            core.area.close()

    # -- what is there ---------------------------------------------------------------------

    def holds(self, context: bytes) -> bool:
        """Tell whether a root is there, as far as the catalog knows. No file is touched."""
        return context in self._core.held

    def longest(self, contexts: Sequence[bytes]) -> int | None:
        """Return the index of the last context that is held; None if none is.

        ``contexts`` are the digests of one prompt's boundaries in increasing order. No file
        is touched and nothing is marked as used.
        """
        held = self._core.held
        for index in range(len(contexts) - 1, -1, -1):
            if contexts[index] in held:
                return index
        return None

    def inventory(self) -> frozenset[bytes]:
        """Return the context digests of all roots that can be served, for the quorum."""
        with self._core.held_lock:
            return frozenset(self._core.held)

    def drain_changes(self) -> Changes:
        """Return what changed in the inventory since the last call (at first: since opening)."""
        core = self._core
        with core.held_lock:
            changes = Changes(frozenset(core.added), frozenset(core.removed))
            core.added, core.removed = set(), set()
        return changes

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated on the disk, of every identity; asking never waits for the disk."""
        return self._core.allocated

    def evictions(self) -> dict[str, int]:
        """Roots evicted since opening, by reason; asking never waits for the disk."""
        counted = self._core.counted()
        return {reason: number for (event, reason), number in counted.items() if event == "evict"}

    @property
    def publishing_off(self) -> str | None:
        """Why publications are not taken now; never waits for the disk."""
        off = self._core.publishing_off()
        return None if off is None else str(off)

    def found_unusable(self) -> dict[str, int]:
        """Count the roots found on opening that cannot be served, by reason; ask right then."""
        core = self._core
        found: dict[str, int] = {}
        for (event, reason), number in core.counted().items():
            if event in ("scan", "quarantine"):
                found[reason] = found.get(reason, 0) + number
        # In the catalog, so that they are evicted like others, and come back with their key.
        rows = core.with_catalog(lambda catalog: catalog.roots())
        strangers = sum(row.identity == core.identity and not row.usable for row in rows)
        return found | ({str(Reason.UNKNOWN_KEY): strangers} if strangers else {})

    def stats(self) -> Stats:
        """Return sizes, limits and counters."""
        core = self._core
        with core.lock:
            totals = core.with_catalog(lambda catalog: catalog.totals())
            off = core.publishing_off()
            return Stats(
                totals.roots,
                len(core.held),
                totals.packs,
                totals.allocated,
                core.high,
                core.low,
                None if off is None else str(off),
                core.counted(),
            )

    # -- publishing ------------------------------------------------------------------------

    def publish(
        self,
        context: bytes,
        boundary: int,
        groups: Sequence[GroupPages],
        *,
        base: bytes | None = None,
        cancel: Event | None = None,
        deadline: float | None = None,
    ) -> Receipt:
        """Store a root durably; when this returns, the root survives a power cut.

        Args:
            context: The root's context digest (32 bytes).
            boundary: The token count at which the root can be resumed.
            groups: The pages of every KV cache group, in the groups' order.
            base: A held context that this one extends; its equal leading pages are
                referenced. A base that is not there costs nothing but the saving.
            cancel: Ends the publication when set.
            deadline: :func:`time.monotonic` at which the publication ends.

        Raises:
            Refused: nothing was published; ``reason`` says why. Serving is not affected.
            Stopped: cancelled, or past the deadline; no buffer is read afterwards.
        """
        stop = Stop(cancel, deadline)
        try:
            return publication.publish(self._core, context, boundary, groups, base, stop)
        except StoreError as error:
            self._core.count("publish", error.reason)
            raise

    def withdraw(self, contexts: Sequence[bytes]) -> None:
        """Stop offering roots of this identity at once, e.g. ones that other ranks lack.

        Never waits for the disk; the files go with the next publication or maintenance.
        """
        self._core.check_open()
        self._core.withdraw(set(contexts))

    def remove(self, contexts: Sequence[bytes]) -> int:
        """Remove roots of this identity and wait for it; return how many were there.

        Raises:
            Refused: the file system does not let us.
        """
        core = self._core
        core.check_open()
        with core.lock:
            core.withdraw(set(contexts))
            return eviction.remove_withdrawn(core)

    # -- restoring -------------------------------------------------------------------------

    def plan(self, context: bytes) -> Plan:
        """Open a root for reading: manifest authenticated, packs open and of the right size.

        The caller checks ``plan.manifest`` against its live geometry, then calls
        :meth:`read`. A root whose bytes are wrong is taken out of service here.

        Raises:
            Miss: there is no such root, or it cannot be served; ``reason`` says why.
        """
        core = self._core
        core.check_open()
        if context not in core.held:
            core.count("plan", Reason.ABSENT)
            raise Miss(Reason.ABSENT, f"root {context.hex()}", "is not held")
        try:
            plan = self._plan(context)
        except Miss as miss:
            core.count("plan", miss.reason)
            if miss.reason is Reason.ABSENT or miss.reason in WRONG_BYTES:
                core.take_out(core.identity, context, miss.reason)
            elif miss.reason in LEFT_ALONE:
                core.stop_offering(context)
            raise
        core.touched[core.identity, context] = core.clock_ns()
        core.count("plan", "hit")
        return plan

    def _plan(self, context: bytes) -> Plan:
        core = self._core
        for attempt in range(_PLAN_TRIES):
            manifest = publication.load_manifest(core, context)
            try:
                return Plan(manifest, core.reader.open_packs(manifest))
            except Miss as miss:
                # Compaction may have moved the pages after the manifest was read.
                moved = miss.reason is Reason.PACK_MISSING and attempt + 1 < _PLAN_TRIES
                if not moved or publication.load_manifest(core, context) == manifest:
                    raise
        raise AssertionError("unreachable")

    def read(
        self,
        plan: Plan,
        destinations: Destinations,
        *,
        verified: Verified | None = None,
        cancel: Event | None = None,
        deadline: float | None = None,
    ) -> int:
        """Read a root's pages into the caller's memory and check every one.

        What a destination holds may be used only once this has returned, or ``verified`` has
        named its page. A root with a wrong page is taken out of service.

        Args:
            plan: From :meth:`plan`.
            destinations: For each group, for each page in order, a contiguous writable buffer
                of the group's page size, or None for a page that is not wanted. Memory
                aligned to 4096 bytes is read into without a copy.
            verified: Called on this thread in manifest order as (group, first page, pages).
            cancel: Ends the read when set.
            deadline: :func:`time.monotonic` at which the read ends.

        Returns:
            The number of bytes read.

        Raises:
            Miss: wrong bytes or a failing disk.
            Stopped: cancelled, or past the deadline.
            Whatever is raised, no destination is written to afterwards.
        """
        core = self._core
        core.check_open()
        targets = _checked_destinations(plan, destinations)
        try:
            size = core.reader.read(plan, targets, Stop(cancel, deadline), verified)
        except PageMismatch as mismatch:
            core.count("read", mismatch.reason)
            self._take_out_page(plan, mismatch)
            raise
        except StoreError as error:
            core.count("read", error.reason)
            if error.reason in WRONG_BYTES:
                core.take_out(core.identity, plan.manifest.context, error.reason)
            raise
        core.count("read", "hit")
        core.count("read-bytes", "hit", size)
        return size

    def _take_out_page(self, plan: Plan, mismatch: PageMismatch) -> None:
        """Take every root out of service that has the wrong page, of whatever identity."""
        core = self._core
        with core.lock:
            rows = core.with_catalog(
                lambda catalog: catalog.roots_in_pack(mismatch.pack_id, mismatch.offset)
            )
            roots = {(row.identity, row.context) for row in rows}
            roots.add((core.identity, plan.manifest.context))
            for identity, context in roots:
                core.take_out(identity, context, Reason.PAGE_MISMATCH)

    def quarantine(self, context: bytes) -> None:
        """Take a root out of service because its bytes proved wrong after they were read."""
        self._core.check_open()
        self._core.take_out(self._core.identity, context, Reason.QUARANTINED)

    # -- maintenance -----------------------------------------------------------------------

    def maintain(self, *, look_around: bool = False) -> Report:
        """Expire, compact, evict to the low watermark if above the high one, sweep debris.

        ``look_around`` also compares the catalog with the files. Publications keep the
        capacity by themselves; call this now and then, off the model's thread.

        Raises:
            Refused: the file system does not let us.
        """
        return maintenance.maintain(self._core, look_around=look_around)

    def rotate_key(self, *, generate: bool = True, destroy_old: bool = True) -> int:
        """Bring every manifest under a new key and destroy the old ones.

        With an operator's key file, put the new key in front of it, open the store and call
        this with ``generate=False, destroy_old=False``; then remove the old key from the file.
        Returns how many manifests were rewritten.

        Raises:
            Refused: the file system does not let us; call it again.
        """
        return rotation.rotate(self._core, generate=generate, destroy_old=destroy_old)

    def destroy_key(self, key_id: bytes) -> int:
        """Revoke a key and remove every root that it vouches for; return how many that were.

        Raises:
            Refused: no such key, an operator's key file, or the file system does not let us.
        """
        return rotation.destroy_key(self._core, key_id)


def _checked_destinations(plan: Plan, destinations: Destinations) -> Destinations:
    def invalid(found: str) -> Refused:
        return Refused(Reason.INVALID, "read", found, "correct the caller")

    groups = plan.manifest.groups
    if plan.closed:
        raise invalid("the plan is closed")
    if len(destinations) != len(groups):
        raise invalid(f"{len(destinations)} groups of destinations for {len(groups)} groups")
    result = []
    for index, (group, wanted) in enumerate(zip(groups, destinations, strict=True)):
        if len(wanted) != group.count:
            raise invalid(f"group {index}: {len(wanted)} destinations for {group.count} pages")
        views = [None if page is None else memoryview(page).cast("B") for page in wanted]
        for number, view in enumerate(views):
            if view is not None and (len(view) != group.page_bytes or view.readonly):
                found = f"group {index}, page {number}: {len(view)} bytes, not {group.page_bytes}"
                raise invalid(found + (", read-only" if view.readonly else ""))
        result.append(views)
    return result
