"""A cache root as commands see it: read only, beside a running engine, without its lock."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sparkcache_connector.store.catalog import (
    CATALOG_NAME,
    IN_MEMORY,
    Catalog,
    CatalogDamaged,
    RootRow,
)
from sparkcache_connector.store.closing import Closing
from sparkcache_connector.store.durable import Files
from sparkcache_connector.store.errors import Miss
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.layout import Area, load_keys, owner_of
from sparkcache_connector.store.reconcile import reconcile


@dataclass
class View(Closing):
    """An open cache root that nobody changes through it."""

    area: Area
    keys: KeyRing
    catalog: Catalog
    from_files: bool
    """The catalog was missing or damaged; this one was made from the manifests."""
    owner: int | None
    """Process id of the running owner; None if there is none."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], key_file: str | None = None) -> View:
        """Open a cache root for reading.

        Raises:
            Unusable: there is none, or it must not be trusted.
        """
        area = Area.open(Files(), path, own=False)
        try:
            keys = load_keys(area, key_file, create=False)
            catalog, from_files = _open_catalog(area, keys)
            return cls(area, keys, catalog, from_files, owner_of(area))
        except BaseException:
            area.close()
            raise

    def find(self, prefix: str) -> list[RootRow]:
        """Return the roots whose context digest begins with hexadecimal digits."""
        return [row for row in self.catalog.roots() if row.context.hex().startswith(prefix)]

    def close(self) -> None:
        """Close everything."""
        self.catalog.close()
        self.area.close()


def _open_catalog(area: Area, keys: KeyRing) -> tuple[Catalog, bool]:
    try:
        # SQLite is given no link and no file of somebody else's.
        os.close(area.root.open_file(CATALOG_NAME))
        catalog = Catalog(f"{area.root.path}/{CATALOG_NAME}", read_only=True)
        catalog.check()
        return catalog, False
    except (Miss, CatalogDamaged):
        catalog = Catalog(IN_MEMORY)
        reconcile(area, keys, catalog, trust_stamps=False)
        return catalog, True
