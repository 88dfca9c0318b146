"""The catalog: an index of roots, packs, extents and recency that can always be rebuilt.

SQLite in WAL mode. Nothing in it is believed about *content*: a restore reads the manifest,
authenticates it and checks every page. What a wrong catalog can cost is a miss. Commands
read it beside a running engine.

Every ``sqlite3.Error`` leaves this module as :class:`CatalogDamaged`; the store then
rebuilds the catalog from the manifests.
"""

from __future__ import annotations

import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from sparkcache_connector.store.manifest import DIGEST_BYTES, Manifest
from sparkcache_connector.store.pack import MAX_PACK

CATALOG_NAME: Final = "catalog.sqlite"
CATALOG_FILES: Final = (CATALOG_NAME, CATALOG_NAME + "-wal", CATALOG_NAME + "-shm")
SCHEMA_VERSION: Final = 1
IN_MEMORY: Final = ":memory:"

_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE notes (identity BLOB PRIMARY KEY, contexts BLOB NOT NULL, allocated INTEGER NOT NULL);
CREATE TABLE identities (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE roots (
    id INTEGER PRIMARY KEY,
    identity INTEGER NOT NULL REFERENCES identities (id),
    context BLOB NOT NULL,
    boundary INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    pages INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    allocated INTEGER NOT NULL,
    stamp TEXT NOT NULL,
    usable INTEGER NOT NULL,
    created_ns INTEGER NOT NULL,
    used_ns INTEGER NOT NULL,
    UNIQUE (identity, context)
);
CREATE INDEX usable_roots ON roots (identity, context) WHERE usable;
CREATE INDEX roots_by_use ON roots (used_ns);
CREATE TABLE packs (
    id INTEGER PRIMARY KEY,
    name BLOB NOT NULL UNIQUE,
    size INTEGER NOT NULL,
    allocated INTEGER NOT NULL
);
CREATE TABLE extents (
    root INTEGER NOT NULL REFERENCES roots (id) ON DELETE CASCADE,
    pack INTEGER NOT NULL REFERENCES packs (id),
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    PRIMARY KEY (root, pack, start)
) WITHOUT ROWID;
CREATE INDEX extents_by_pack ON extents (pack, start, stop);
CREATE VIEW root_rows AS
    SELECT i.digest AS identity, r.context, r.boundary, r.rank, r.pages, r.bytes, r.allocated,
        r.stamp, r.usable, r.created_ns, r.used_ns, r.id
    FROM roots r JOIN identities i ON i.id = r.identity;
PRAGMA user_version = 1;
"""
"""Sets the version last, so that a half-made schema has none and is made again."""


class CatalogDamaged(Exception):  # noqa: N818 -- says what is so, not what was raised
    """SQLite could not do what was asked; the catalog is rebuilt or kept in memory."""


@dataclass(frozen=True)
class RootRow:
    """A root as the catalog knows it."""

    identity: bytes
    context: bytes
    boundary: int
    rank: int
    pages: int
    bytes: int
    """Bytes that a restore of the whole root writes."""
    allocated: int
    """Bytes that the manifest occupies on disk."""
    stamp: str
    """Inode and change time of the manifest when it was catalogued."""
    usable: bool
    """Whether a key of the ring vouches for it; if not, it only keeps its packs alive."""
    created_ns: int
    used_ns: int


@dataclass(frozen=True)
class PackRow:
    """A pack as the catalog knows it."""

    pack_id: bytes
    size: int
    allocated: int


@dataclass(frozen=True)
class Totals:
    """Sums over the whole cache root."""

    roots: int
    packs: int
    allocated: int


class Catalog:
    """One open catalog; usable from several threads."""

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        self._lock = threading.RLock()
        self._read_only = read_only
        with _damage():
            if read_only and path != IN_MEMORY:
                self._db = sqlite3.connect(
                    f"file:{path}?mode=ro", uri=True, check_same_thread=False, timeout=5
                )
            else:
                self._db = sqlite3.connect(path, check_same_thread=False, timeout=5)
            try:
                self._prepare(read_only and path != IN_MEMORY)
            except BaseException:
                self._db.close()
                raise

    def _prepare(self, read_only: bool) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            # Losing the last transactions in a power cut is fine: they are found again.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            if version == 0:
                self._db.executescript("BEGIN;" + _SCHEMA + "COMMIT;")
                version = SCHEMA_VERSION
        if version != SCHEMA_VERSION:
            raise CatalogDamaged(f"catalog schema {version}, not {SCHEMA_VERSION}")
        # An index made by hand or by another program would fail here rather than later.
        self._db.execute("SELECT * FROM root_rows LIMIT 0")
        self._db.execute("SELECT root, pack, start, stop FROM extents LIMIT 0")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _damage():
            yield self._db

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _damage(), self._db:
            yield self._db

    def close(self) -> None:
        """Close the database; what was committed stays."""
        with self._lock, suppress(sqlite3.Error):
            self._db.close()

    # -- reading ---------------------------------------------------------------------------

    def get_mark(self, name: str) -> str | None:
        """Return a remembered value; None if there is none."""
        with self._reading() as db:
            row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def contexts(self, identity: bytes) -> set[bytes]:
        """Return the context digests of all usable roots of an identity."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT context FROM roots"
                " WHERE usable AND identity = (SELECT id FROM identities WHERE digest = ?)",
                (identity,),
            ).fetchall()
        contexts = {context for (context,) in rows}
        if not set(map(type, contexts)) <= {bytes}:
            raise CatalogDamaged("a context digest is not a blob")
        return contexts

    def noted(self, identity: bytes) -> tuple[set[bytes], int] | None:
        """Return what :meth:`note` noted for an identity; None if it noted another one's."""
        with self._reading() as db:
            row = db.execute(
                "SELECT contexts, allocated FROM notes WHERE identity = ?", (identity,)
            ).fetchone()
        if row is None:
            return None
        _expect(bytes, row[0])
        _expect(int, row[1])
        if len(row[0]) % DIGEST_BYTES:
            raise CatalogDamaged("the noted contexts are cut off")
        return {context for (context,) in struct.iter_unpack(f"{DIGEST_BYTES}s", row[0])}, row[1]

    def root(self, identity: bytes, context: bytes) -> RootRow | None:
        """Return one root; None if it is not catalogued."""
        with self._reading() as db:
            row = db.execute(
                "SELECT * FROM root_rows WHERE identity = ? AND context = ?",
                (identity, context),
            ).fetchone()
        return None if row is None else _root_row(row)

    def roots(self) -> list[RootRow]:
        """Return all roots, least recently used first."""
        with self._reading() as db:
            rows = db.execute("SELECT * FROM root_rows ORDER BY used_ns, id").fetchall()
        return [_root_row(row) for row in rows]

    def least_recent(self, limit: int, *, used_before: int | None = None) -> list[RootRow]:
        """Return up to ``limit`` roots, least recently used first."""
        bound = (1 << 63) - 1 if used_before is None else used_before
        with self._reading() as db:
            rows = db.execute(
                "SELECT * FROM root_rows WHERE used_ns < ? ORDER BY used_ns, id LIMIT ?",
                (bound, limit),
            ).fetchall()
        return [_root_row(row) for row in rows]

    def packs(self) -> list[PackRow]:
        """Return all packs."""
        with self._reading() as db:
            rows = db.execute("SELECT name, size, allocated FROM packs").fetchall()
        return [_pack_row(row) for row in rows]

    def unreferenced_packs(self, among: Iterable[bytes] | None = None) -> list[PackRow]:
        """Return the packs in which no root has a page: all of them, or those among some."""
        query = (
            "SELECT name, size, allocated FROM packs p"
            " WHERE NOT EXISTS (SELECT 1 FROM extents e WHERE e.pack = p.id)"
        )
        with self._reading() as db:
            if among is None:
                rows = db.execute(query).fetchall()
            else:
                rows = [
                    row
                    for name in among
                    for row in db.execute(query + " AND p.name = ?", (name,)).fetchall()
                ]
        return [_pack_row(row) for row in rows]

    def live_extents(self, pack_id: bytes) -> list[tuple[int, int]]:
        """Return the disjoint byte ranges of a pack that roots reference, in order."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT DISTINCT start, stop FROM extents"
                " WHERE pack = (SELECT id FROM packs WHERE name = ?) ORDER BY start",
                (pack_id,),
            ).fetchall()
        merged: list[tuple[int, int]] = []
        for start, stop in rows:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        return merged

    def roots_in_pack(self, pack_id: bytes, offset: int | None = None) -> list[RootRow]:
        """Return the roots with a page in a pack, or with the byte at ``offset`` of it."""
        first, last = (0, MAX_PACK) if offset is None else (offset, offset)
        with self._reading() as db:
            rows = db.execute(
                "SELECT * FROM root_rows WHERE id IN (SELECT e.root FROM extents e"
                " WHERE e.pack = (SELECT p.id FROM packs p WHERE p.name = ?)"
                " AND e.start <= ? AND e.stop > ?) ORDER BY id",
                (pack_id, last, first),
            ).fetchall()
        return [_root_row(row) for row in rows]

    def identities(self) -> list[tuple[bytes, int, int, int]]:
        """Return (identity, roots, restorable bytes, last use) of every identity with roots."""
        with self._reading() as db:
            return db.execute(
                "SELECT i.digest, COUNT(*), SUM(r.bytes), MAX(r.used_ns) FROM roots r"
                " JOIN identities i ON i.id = r.identity GROUP BY i.id ORDER BY i.digest"
            ).fetchall()

    def totals(self) -> Totals:
        """Return the sums over all roots and packs."""
        with self._reading() as db:
            roots, manifests = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(allocated), 0) FROM roots"
            ).fetchone()
            packs, pages = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(allocated), 0) FROM packs"
            ).fetchone()
        return Totals(roots, packs, manifests + pages)

    def check(self) -> None:
        """Look for contradictions inside the database.

        Raises:
            CatalogDamaged: with what SQLite found.
        """
        with self._reading() as db:
            found = db.execute("PRAGMA integrity_check (1)").fetchone()[0]
            if found == "ok" and db.execute("PRAGMA foreign_key_check").fetchone() is not None:
                found = "a row refers to one that is not there"
        if found != "ok":
            raise CatalogDamaged(str(found))

    # -- changing --------------------------------------------------------------------------

    def set_mark(self, name: str, value: str | None) -> None:
        """Remember a value, or forget it."""
        with self._changing() as db:
            if value is None:
                db.execute("DELETE FROM meta WHERE name = ?", (name,))
            else:
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def add_packs(self, rows: Iterable[PackRow]) -> None:
        """Add packs, or correct what is known of them."""
        with self._changing() as db:
            for row in rows:
                _insert_pack(db, row)

    def put_roots(
        self, roots: Iterable[tuple[RootRow, Manifest]], packs: Iterable[PackRow] = ()
    ) -> None:
        """Add or replace roots with their extents, and the packs that came with them, at once."""
        with self._changing() as db:
            for pack in packs:
                _insert_pack(db, pack)
            for row, manifest in roots:
                _insert_root(db, row, manifest)

    def touch(self, used: Iterable[tuple[bytes, bytes, int, str]]) -> None:
        """Record (identity, context, time of last use, new stamp) of roots."""
        with self._changing() as db:
            db.executemany(
                "UPDATE roots SET used_ns = MAX(used_ns, ?), stamp = ?"
                " WHERE identity = (SELECT id FROM identities WHERE digest = ?) AND context = ?",
                [(when, stamp, identity, context) for identity, context, when, stamp in used],
            )

    def note(self, identity: bytes, contexts: Iterable[bytes], allocated: int) -> None:
        """Note at closing what the next opening would have to gather from every row."""
        with self._changing() as db:
            db.execute("DELETE FROM notes")
            values = (identity, b"".join(contexts), allocated)
            db.execute("INSERT INTO notes VALUES (?, ?, ?)", values)

    def set_unusable(self, identity: bytes, context: bytes) -> None:
        """Note that no key of the ring vouches for a root; its packs stay referenced."""
        with self._changing() as db:
            db.execute(
                "UPDATE roots SET usable = 0 WHERE context = ?"
                " AND identity = (SELECT id FROM identities WHERE digest = ?)",
                (context, identity),
            )

    def clamp_uses(self, now_ns: int) -> None:
        """Move uses that lie in the future (the clock went back) to now."""
        with self._changing() as db:
            db.execute("UPDATE roots SET used_ns = ? WHERE used_ns > ?", (now_ns, now_ns))

    def remove_roots(self, keys: Sequence[tuple[bytes, bytes]]) -> set[bytes]:
        """Forget roots, given as (identity, context); return the packs they had pages in."""
        packs: set[bytes] = set()
        with self._changing() as db:
            for identity, context in keys:
                row = db.execute(
                    "SELECT r.id FROM roots r JOIN identities i ON i.id = r.identity"
                    " WHERE i.digest = ? AND r.context = ?",
                    (identity, context),
                ).fetchone()
                if row is None:
                    continue
                packs.update(
                    name
                    for (name,) in db.execute(
                        "SELECT DISTINCT p.name FROM extents e JOIN packs p ON p.id = e.pack"
                        " WHERE e.root = ?",
                        row,
                    )
                )
                db.execute("DELETE FROM roots WHERE id = ?", row)
        return packs

    def remove_packs(self, pack_ids: Iterable[bytes]) -> None:
        """Forget packs that no root references any more."""
        with self._changing() as db:
            db.executemany("DELETE FROM packs WHERE name = ?", [(name,) for name in pack_ids])


def _root_row(row: Any) -> RootRow:
    identity, context, boundary, rank, pages, size, allocated, stamp, usable, made, used, _ = row
    _expect(bytes, identity, context)
    _expect(int, boundary, rank, pages, size, allocated, usable, made, used)
    _expect(str, stamp)
    return RootRow(
        identity=identity,
        context=context,
        boundary=boundary,
        rank=rank,
        pages=pages,
        bytes=size,
        allocated=allocated,
        stamp=stamp,
        usable=bool(usable),
        created_ns=made,
        used_ns=used,
    )


def _pack_row(row: Any) -> PackRow:
    name, size, allocated = row
    _expect(bytes, name)
    _expect(int, size, allocated)
    return PackRow(name, size, allocated)


def _expect(kind: type, *values: object) -> None:
    """SQLite reads whatever type a damaged page spells."""
    if not all(isinstance(value, kind) for value in values):
        raise CatalogDamaged("a column holds a value of another type")


def _insert_pack(db: sqlite3.Connection, row: PackRow) -> None:
    db.execute(
        "INSERT INTO packs (name, size, allocated) VALUES (?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET size = excluded.size, allocated = excluded.allocated",
        (row.pack_id, row.size, row.allocated),
    )


def _insert_root(db: sqlite3.Connection, row: RootRow, manifest: Manifest) -> None:
    db.execute("INSERT OR IGNORE INTO identities (digest) VALUES (?)", (row.identity,))
    db.execute(
        "DELETE FROM roots WHERE context = ?"
        " AND identity = (SELECT id FROM identities WHERE digest = ?)",
        (row.context, row.identity),
    )
    cursor = db.execute(
        "INSERT INTO roots (identity, context, boundary, rank, pages, bytes, allocated, stamp,"
        " usable, created_ns, used_ns) SELECT id, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? FROM identities"
        " WHERE digest = ?",
        (
            row.context,
            row.boundary,
            row.rank,
            row.pages,
            row.bytes,
            row.allocated,
            row.stamp,
            row.usable,
            row.created_ns,
            row.used_ns,
            row.identity,
        ),
    )
    root = cursor.lastrowid
    for pack, start, stop in manifest.extents():
        db.execute(
            "INSERT OR REPLACE INTO extents SELECT ?, id, ?, ? FROM packs WHERE name = ?",
            (root, start, stop, manifest.packs[pack].pack_id),
        )


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        # The module decodes names and messages that come from damaged pages.
        raise CatalogDamaged(str(error)) from error
