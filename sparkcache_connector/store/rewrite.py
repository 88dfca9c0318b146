"""Replaces manifests by others that say the same: of moved pages, or under another key."""

from __future__ import annotations

from collections.abc import Sequence

from sparkcache_connector.store.catalog import PackRow, RootRow
from sparkcache_connector.store.core import Core
from sparkcache_connector.store.errors import Miss
from sparkcache_connector.store.manifest import MANIFEST_LIMIT, Manifest, manifest_name
from sparkcache_connector.store.reconcile import root_row


def load_any(core: Core, root: RootRow) -> Manifest | None:
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


def rewrite(
    core: Core, changed: Sequence[tuple[RootRow, Manifest]], packs: Sequence[PackRow] = ()
) -> None:
    """Replace manifests durably under the current key, and catalogue them."""
    touched: set[int] = set()
    for root, manifest in changed:
        directory = core.area.identity(root.identity)
        data = manifest.encode(core.keys.current)
        name = manifest_name(root.context)
        directory.install(name, data, "rewrite-data", used_ns=root.used_ns)
        touched.add(directory.fd)
    for descriptor in touched:
        core.files.sync_directory(descriptor, "rewrite-dir")
    rows = []
    for root, manifest in changed:
        directory = core.area.identity(root.identity)
        status = directory.status(manifest_name(root.context))
        row = root_row(manifest, status)
        core.allocated += row.allocated - root.allocated
        rows.append((row, manifest))
    core.with_catalog(lambda catalog: catalog.put_roots(rows, packs))
