"""The state that publication, restore and maintenance of one open store share.

It also holds the two policies that all of them follow: what happens when the catalog breaks
(it is rebuilt, at worst in memory), and what happens to a root whose bytes were wrong (it is
moved out of the way, once, with its reason counted).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, RLock
from typing import Final, TypeVar

from sparkcache_connector.store.catalog import (
    CATALOG_FILES,
    CATALOG_NAME,
    IN_MEMORY,
    Catalog,
    CatalogDamaged,
    RootRow,
)
from sparkcache_connector.store.durable import Files, is_temporary
from sparkcache_connector.store.errors import PUBLISHING_STOPS, Miss, Reason, Refused, StoreError
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.layout import Area
from sparkcache_connector.store.manifest import MANIFEST_SUFFIX, manifest_name
from sparkcache_connector.store.reader import Reader
from sparkcache_connector.store.reconcile import reconcile
from sparkcache_connector.store.workers import Workers

log = logging.getLogger("sparkcache.store")

T = TypeVar("T")

_CLEAN: Final = "clean"
_KEYS: Final = "keys"
_TIMESTAMP_STEP_NS: Final = 10_000_000
"""Two changes of a directory that are further apart than this have different times."""
_QUARANTINE_LIMIT: Final = 256
"""Manifests kept in quarantine for the operator; beyond it the oldest go."""


@dataclass(frozen=True)
class Options:
    """How one store behaves. Every default is right for one rank on one machine's NVMe."""

    high_bytes: int | None = None
    """Capacity in allocated bytes; by default four fifths of what the disk has for us."""
    low_bytes: int | None = None
    """Eviction goes on down to this; by default nine tenths of the capacity."""
    ttl_seconds: float | None = None
    """Roots not used for so long are removed; by default never."""
    workers: int = 8
    """Threads that read, write and hash."""
    key_file: str | None = None
    """The operator's key ring; by default the cache root has its own."""
    retry_seconds: float = 60.0
    """After a full, read-only or failing disk, publishing is tried again after so long."""


class Core:
    """One open cache root under one identity.

    ``lock`` guards what is on the disk and what describes it, and is held while the disk is
    waited for. ``held`` and the changes of it have a lock of their own that never is: the
    engine asks for them on the thread that computes.
    """

    def __init__(
        self,
        area: Area,
        keys: KeyRing,
        identity: bytes,
        rank: int,
        options: Options,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.area = area
        self.files: Files = area.files
        self.keys = keys
        self.identity = identity
        self.rank = rank
        self.options = options
        self.clock_ns = clock_ns
        self.lock = RLock()
        self._count_lock = Lock()
        self.held_lock = Lock()
        self.counters: Counter[tuple[str, str]] = Counter()
        self.workers = Workers(options.workers)
        self.reader = Reader(area.packs, self.workers)
        self.pins: Counter[bytes] = Counter()
        """Packs that a publication in progress relies on."""
        self.in_flight: set[bytes] = set()
        """Contexts being published."""
        self.reserved = 0
        """Bytes that publications in progress are about to allocate."""
        self.dying: set[bytes] = set()
        """Packs that lost a root, or were found without one: to be removed if nobody needs them."""
        self.touched: dict[tuple[bytes, bytes], int] = {}
        self.added: set[bytes] = set()
        self.removed: set[bytes] = set()
        self.withdrawn: set[bytes] = set()
        """Contexts that are not offered any more and whose files are still to go."""
        self.exact = True
        """Whether the catalog is known to say what the files say; not after a failed change."""
        self.closed = False
        self._off: tuple[Reason, float] | None = None
        self.held: set[bytes] = set()
        self.allocated = 0
        self.catalog = self._open_catalog()
        self.high, self.low = self._watermarks()

    # -- catalog ---------------------------------------------------------------------------

    def _open_catalog(self) -> Catalog:
        """Open the catalog; bring it up to date unless it was closed and nothing moved since."""
        path = f"{self.area.root.path}/{CATALOG_NAME}"
        try:
            self._check_catalog_file()
            catalog = Catalog(path)
            try:
                keys_known = catalog.get_mark(_KEYS) == self._keys_mark()
                if keys_known and catalog.get_mark(_CLEAN) == self._clean_mark():
                    catalog.set_mark(_CLEAN, None)
                    self._load(catalog, noted=True)
                    return catalog
                catalog.check()
                catalog.set_mark(_CLEAN, None)
                self._reconcile(catalog, trust_stamps=keys_known)
                self._load(catalog)
            except BaseException:
                catalog.close()
                raise
            return catalog
        except CatalogDamaged as damage:
            self.count("catalog", "rebuilt")
            log.warning("catalog of %s: %s; it is rebuilt", self.area.root.path, damage)
        return self._rebuilt_catalog(path)

    def _rebuilt_catalog(self, path: str) -> Catalog:
        for place in (path, IN_MEMORY):
            try:
                if place == path:
                    for name in CATALOG_FILES:
                        self.files.unlink(self.area.root.fd, name)
                catalog = Catalog(place)
                self._reconcile(catalog, trust_stamps=False)
                self._load(catalog, first=not hasattr(self, "catalog"))
            except (CatalogDamaged, OSError) as error:
                if place == IN_MEMORY:
                    raise Refused(
                        Reason.DISK_ERROR, "catalog", str(error), "check the cache root"
                    ) from error
                log.warning("catalog of %s: %s; it is kept in memory", self.area.root.path, error)
                self.count("catalog", "in-memory")
                continue
            return catalog
        raise AssertionError("unreachable")

    def _check_catalog_file(self) -> None:
        """Refuse to hand SQLite a link or somebody else's file."""
        try:
            os.close(self.area.root.open_file(CATALOG_NAME))
        except Miss as miss:
            if miss.reason is not Reason.ABSENT:
                raise CatalogDamaged(str(miss)) from miss
            with suppress(OSError):
                os.close(self.files.create(self.area.root.fd, CATALOG_NAME))

    def _reconcile(self, catalog: Catalog, *, trust_stamps: bool) -> None:
        found = reconcile(self.area, self.keys, catalog, trust_stamps=trust_stamps)
        for reason, number in found.skipped.items():
            self.count("scan", reason, number)
        for identity, context, reason in found.wrong:
            self.move_to_quarantine(identity, context, reason)
        if not self.in_flight:
            self.sweep_temporaries()
            self.dying.update(row.pack_id for row in catalog.unreferenced_packs())
        catalog.set_mark(_KEYS, self._keys_mark())

    def with_catalog(self, action: Callable[[Catalog], T]) -> T:
        """Run an action on the catalog; if SQLite fails, rebuild it and run it once more."""
        with self.lock:
            try:
                return action(self.catalog)
            except CatalogDamaged as damage:
                self.count("catalog", "rebuilt")
                log.warning("catalog of %s: %s; it is rebuilt", self.area.root.path, damage)
                self.catalog.close()
                self.catalog = self._rebuilt_catalog(f"{self.area.root.path}/{CATALOG_NAME}")
            try:
                return action(self.catalog)
            except CatalogDamaged as damage:
                raise Refused(
                    Reason.DISK_ERROR, "catalog", str(damage), "check the cache root's disk"
                ) from damage

    def look_around(self) -> int:
        """Compare the catalog with the files and sweep debris; return what was swept.

        While a publication is in progress nothing is swept: its files look like debris.
        """
        with self.lock:
            before = self.counters.total()
            swept = 0 if self.in_flight else self.sweep_temporaries()
            self.with_catalog(Catalog.check)
            self.with_catalog(lambda catalog: self._reconcile(catalog, trust_stamps=True))
            self.with_catalog(partial(self._load, first=False))
            return swept + self.counters.total() - before

    def _load(self, catalog: Catalog, *, noted: bool = False, first: bool = True) -> None:
        """Take over what a catalog says that agrees with the files.

        ``noted``: it was closed in order, so what it noted then is still so.
        """
        catalog.clamp_uses(self.clock_ns())
        found = catalog.noted(self.identity) if noted else None
        if found is None:
            found = catalog.contexts(self.identity), catalog.totals().allocated
        held, self.allocated = found
        with self.held_lock:
            held -= self.withdrawn
            if not first:
                self._changed(held - self.held, self.held - held)
            self.held = held

    def _keys_mark(self) -> str:
        return ",".join(key.key_id.hex() for key in self.keys.keys)

    def _clean_mark(self) -> str:
        """Return what names the directories' state: the times of their last changes."""
        marks = [str(os.fstat(self.area.packs.fd).st_mtime_ns)]
        for name in sorted(self.area.roots.names()):
            marks.append(f"{name}={self.area.roots.status(name).st_mtime_ns}")
        return ",".join(marks)

    def mark_clean(self) -> None:
        """Note that the catalog is complete, so that the next opening need not look around.

        A directory's time has the kernel's clock tick as its step: a change right after the
        mark could leave the same time. So the mark waits until the last change is older.
        """
        if not self.exact:
            return
        newest = os.fstat(self.area.packs.fd).st_mtime_ns
        for name in self.area.roots.names():
            newest = max(newest, self.area.roots.status(name).st_mtime_ns)
        age = time.time_ns() - newest
        if 0 <= age < _TIMESTAMP_STEP_NS:
            time.sleep((_TIMESTAMP_STEP_NS - age) / 1e9)
        self.catalog.set_mark(_KEYS, self._keys_mark())
        self.catalog.note(self.identity, self.held, self.allocated)
        self.catalog.set_mark(_CLEAN, self._clean_mark())

    def flush_uses(self) -> None:
        """Write the collected times of last use to the catalog and the manifests' own times."""
        with self.lock:
            touched, self.touched = self.touched, {}
            if not touched:
                return
            rows = []
            for (identity, context), when in touched.items():
                name = manifest_name(context)
                with suppress(OSError, Miss):
                    directory = self.area.identity(identity)
                    os.utime(name, ns=(when, when), dir_fd=directory.fd, follow_symlinks=False)
                    rows.append((identity, context, when, stamp_of(directory.status(name))))
            self.with_catalog(lambda catalog: catalog.touch(rows))

    # -- roots -----------------------------------------------------------------------------

    def _watermarks(self) -> tuple[int, int]:
        high = self.options.high_bytes
        if high is None:
            space = os.fstatvfs(self.area.root.fd)
            high = (space.f_bavail * space.f_frsize + self.allocated) * 4 // 5
        low = self.options.low_bytes
        return high, min(high, high * 9 // 10 if low is None else low)

    def note_root(self, row: RootRow) -> None:
        """Account for a root that has just become visible (its catalog row is written)."""
        if row.identity == self.identity:
            with self.held_lock:
                self.held.add(row.context)
                self._changed({row.context}, set())

    def forget_roots(self, rows: Sequence[RootRow]) -> None:
        """Account for roots whose manifests are gone."""
        keys = [(row.identity, row.context) for row in rows]
        self.dying |= self.with_catalog(lambda catalog: catalog.remove_roots(keys))
        for row in rows:
            self.allocated -= row.allocated
            self.touched.pop((row.identity, row.context), None)
            if row.identity == self.identity:
                self.unhold({row.context})

    def unhold(self, contexts: set[bytes]) -> None:
        """Stop offering roots of this identity, at once."""
        with self.held_lock:
            gone = self.held & contexts
            self.held -= gone
            self._changed(set(), gone)

    def withdraw(self, contexts: set[bytes]) -> None:
        """Stop offering roots at once; :meth:`take_withdrawn` says later which files go."""
        with self.held_lock:
            gone = self.held & contexts
            self.held -= gone
            self._changed(set(), gone)
            self.withdrawn |= gone

    def take_withdrawn(self) -> list[RootRow]:
        """Return the roots that were withdrawn since the last call; ``lock`` is held."""
        with self.held_lock:
            contexts, self.withdrawn = self.withdrawn, set()
        find = partial(Catalog.root, identity=self.identity)
        rows = [self.with_catalog(partial(find, context=context)) for context in contexts]
        return [row for row in rows if row is not None]

    def _changed(self, added: set[bytes], removed: set[bytes]) -> None:
        self.added = (self.added - removed) | added
        self.removed = (self.removed - added) | removed

    def take_out(self, identity: bytes, context: bytes, reason: Reason) -> None:
        """Stop serving a root: forget one that is gone, quarantine one whose bytes are wrong."""
        with self.lock:
            row = self.with_catalog(lambda catalog: catalog.root(identity, context))
            if reason is not Reason.ABSENT:
                self.move_to_quarantine(identity, context, reason)
            if row is not None:
                self.forget_roots([row])
            elif identity == self.identity:
                self.unhold({context})

    def stop_offering(self, context: bytes) -> None:
        """Leave a root where it is, because it may be somebody's, but do not offer it again."""
        with self.lock:
            self.with_catalog(lambda catalog: catalog.set_unusable(self.identity, context))
            self.unhold({context})

    def move_to_quarantine(self, identity: bytes, context: bytes, reason: Reason) -> None:
        """Move a manifest to the quarantine directory; remove it if it cannot be moved."""
        name = manifest_name(context)
        kept = f"{identity.hex()[:16]}-{context.hex()}.{reason}{MANIFEST_SUFFIX}"
        self.count("quarantine", reason)
        log.warning(
            "root %s of identity %s: %s; it is not served again",
            context.hex(),
            identity.hex()[:16],
            reason,
        )
        try:
            directory = self.area.identity(identity)
            try:
                self.files.rename(directory.fd, name, kept, self.area.quarantine.fd)
            except OSError:
                self.files.unlink(directory.fd, name)
            self._bound_quarantine()
        except (OSError, Miss):
            self.exact = False

    def _bound_quarantine(self) -> None:
        names = self.area.quarantine.names()
        if len(names) > _QUARANTINE_LIMIT:
            by_age = sorted(names, key=lambda name: self.area.quarantine.status(name).st_ctime_ns)
            for name in by_age[: len(names) - _QUARANTINE_LIMIT]:
                self.files.unlink(self.area.quarantine.fd, name)

    def sweep_temporaries(self) -> int:
        """Remove what unfinished installations left; only sensible while none is running."""
        removed = 0
        directories = [self.area.root, self.area.packs]
        for name in self.area.roots.names():
            with suppress(Miss, ValueError):
                directories.append(self.area.identity(bytes.fromhex(name)))
        for directory in directories:
            for name in directory.names():
                if is_temporary(name):
                    with suppress(OSError):
                        self.files.unlink(directory.fd, name)
                        removed += 1
        return removed

    # -- reasons ---------------------------------------------------------------------------

    def count(self, event: str, reason: str, number: int = 1) -> None:
        """Count an event under its reason."""
        with self._count_lock:
            self.counters[event, reason] += number

    def counted(self) -> dict[tuple[str, str], int]:
        """Return a copy of the counters."""
        with self._count_lock:
            return dict(self.counters)

    def publishing_off(self) -> Reason | None:
        """Return why publications are not taken now; None if they are."""
        off = self._off  # without the lock, which may be held while the disk is waited for
        return None if off is None or time.monotonic() >= off[1] else off[0]

    def turn_publishing_off(self, reason: Reason) -> None:
        """Stop publishing for a while, if the reason is of that kind."""
        if reason in PUBLISHING_STOPS:
            with self.lock:
                self._off = (reason, time.monotonic() + self.options.retry_seconds)
            log.warning("publishing to %s is off: %s", self.area.root.path, reason)

    def turn_publishing_on(self) -> None:
        """Publishing worked, or what stopped it is gone."""
        with self.lock:
            self._off = None

    def check_open(self) -> None:
        """Raise if the store was closed.

        Raises:
            StoreError: reason ``closed``.
        """
        if self.closed:
            raise StoreError(Reason.CLOSED, "the store is closed; open it again")


def stamp_of(status: os.stat_result) -> str:
    """Return what tells one version of a manifest file from the next."""
    return f"{status.st_ino}.{status.st_ctime_ns}"
