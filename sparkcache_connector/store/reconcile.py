"""Brings a catalog up to date with the files, which are the truth.

Cost is one directory listing for what the catalog already knows, and one manifest read for
what it does not: manifests that are new, or whose inode or change time is another one.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from sparkcache_connector.store.catalog import Catalog, PackRow, RootRow
from sparkcache_connector.store.durable import Directory
from sparkcache_connector.store.errors import WRONG_BYTES, Miss, Reason, reason_of
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.layout import Area
from sparkcache_connector.store.manifest import (
    MANIFEST_LIMIT,
    Manifest,
    digest_of_name,
    parse_unauthenticated,
)
from sparkcache_connector.store.pack import ALIGNMENT, PackHeader, pack_id_of, pack_name


@dataclass
class Findings:
    """What is wrong in a cache root. Nothing has been moved or removed yet."""

    wrong: list[tuple[bytes, bytes, Reason]] = field(default_factory=list)
    """(identity, context, reason) of manifests that cannot be right."""
    skipped: Counter[Reason] = field(default_factory=Counter)
    """Reasons for which manifests were left alone: newer formats, other keys, other owners."""


def reconcile(area: Area, keys: KeyRing, catalog: Catalog, *, trust_stamps: bool) -> Findings:
    """Make the catalog say what the files say.

    Steps: (1) packs that exist; (2) manifests, read where they changed; (3) rows without a
    file are forgotten; (4) roots whose pack is missing are wrong; (5) packs that nobody
    references and that a newer release wrote are forgotten, so that nothing removes them.
    """
    findings = Findings()
    # (1)
    packs = {row.pack_id: row for row in scan_packs(area.packs)}
    before = {row.pack_id for row in catalog.packs()}
    catalog.add_packs(packs.values())
    # (2)
    known = {(row.identity, row.context): row for row in catalog.roots()}
    seen: set[tuple[bytes, bytes]] = set()
    fresh: list[tuple[RootRow, Manifest]] = []
    for identity, directory in _identities(area, findings):
        for name in directory.names():
            context = digest_of_name(name)
            if context is None:
                continue
            row = known.get((identity, context))
            try:
                entry = read_root(
                    directory, name, identity, context, keys, packs, row, trust_stamps=trust_stamps
                )
            except Miss as miss:
                _note(findings, identity, context, miss.reason)
                continue
            seen.add((identity, context))
            if entry is not None:
                fresh.append(entry)
    # (3)
    catalog.remove_roots([key for key in known if key not in seen])
    catalog.put_roots(fresh)
    gone = [row.pack_id for row in catalog.packs() if row.pack_id not in packs]
    # (4)
    for pack_id in gone:
        for root in catalog.roots_in_pack(pack_id):
            findings.wrong.append((root.identity, root.context, Reason.PACK_MISSING))
            catalog.remove_roots([(root.identity, root.context)])
    catalog.remove_packs(gone)
    # (5)
    newer = [
        row.pack_id
        for row in catalog.unreferenced_packs()
        if row.pack_id not in before and _is_newer(area.packs, row.pack_id)
    ]
    if newer:
        findings.skipped[Reason.NEWER_FORMAT] += len(newer)
    catalog.remove_packs(newer)
    return findings


def _is_newer(directory: Directory, pack_id: bytes) -> bool:
    try:
        read_header(directory, pack_id)
    except Miss as miss:
        return miss.reason is Reason.NEWER_FORMAT
    return False


def read_header(directory: Directory, pack_id: bytes) -> PackHeader:
    """Return the header of a pack file.

    Raises:
        Miss: if it cannot be read, is not this pack's, or is from a newer release.
    """
    name = pack_name(pack_id)
    subject = f"{directory.path}/{name}"
    descriptor = directory.open_file(name)
    try:
        block = os.pread(descriptor, ALIGNMENT, 0)
    except OSError as error:
        raise Miss(reason_of(error), subject, f"cannot read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    header = PackHeader.parse(block, subject)
    if header.pack_id != pack_id:
        raise Miss(Reason.MISPLACED, subject, f"is pack {header.pack_id.hex()}")
    return header


def _note(findings: Findings, identity: bytes, context: bytes, reason: Reason) -> None:
    if reason in WRONG_BYTES:
        findings.wrong.append((identity, context, reason))
    else:
        findings.skipped[reason] += 1


def _identities(area: Area, findings: Findings) -> list[tuple[bytes, Directory]]:
    result = []
    for name in sorted(area.roots.names()):
        identity = digest_of_name(name, "")
        if identity is None:
            continue
        try:
            result.append((identity, area.identity(identity)))
        except Miss as miss:
            findings.skipped[miss.reason] += 1
    return result


def scan_packs(directory: Directory) -> list[PackRow]:
    """Return every file that has a pack's name, is a regular file and is ours."""
    rows = []
    with os.scandir(directory.fd) as entries:
        for entry in entries:
            pack_id = pack_id_of(entry.name)
            if pack_id is None or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                rows.append(PackRow(pack_id, status.st_size, status.st_blocks * 512))
    return rows


def read_root(
    directory: Directory,
    name: str,
    identity: bytes,
    context: bytes,
    keys: KeyRing,
    packs: dict[bytes, PackRow],
    before: RootRow | None,
    *,
    trust_stamps: bool,
) -> tuple[RootRow, Manifest] | None:
    """Return a manifest file's catalog row; None if the one that is known still holds.

    Raises:
        Miss: the reason for which it is not a root.
    """
    try:
        status = directory.status(name)
    except OSError as error:
        raise Miss(Reason.ABSENT, name, "vanished while it was listed") from error
    stamp = f"{status.st_ino}.{status.st_ctime_ns}"
    if trust_stamps and before is not None and before.stamp == stamp and before.usable:
        return None
    data = directory.read(name, MANIFEST_LIMIT)
    usable = True
    try:
        manifest = Manifest.parse(data, keys, name)
    except Miss as miss:
        if miss.reason is not Reason.UNKNOWN_KEY:
            raise
        # Nobody vouches for it, so it is never served; but the key may come back, and until
        # the root is evicted like any other, its packs stay.
        manifest, usable = parse_unauthenticated(data, name), False
    if manifest.identity != identity or manifest.context != context:
        raise Miss(Reason.MISPLACED, name, "describes another root than its name says")
    for pack in manifest.packs:
        row = packs.get(pack.pack_id)
        if row is None:
            raise Miss(Reason.PACK_MISSING, name, f"needs pack {pack.pack_id.hex()}")
        if row.size != pack.size:
            raise Miss(Reason.TRUNCATED, name, f"pack {pack.pack_id.hex()} has {row.size} bytes")
    return root_row(manifest, status, usable=usable), manifest


def root_row(manifest: Manifest, status: os.stat_result, *, usable: bool = True) -> RootRow:
    """Return the catalog row of a manifest and its file."""
    return RootRow(
        manifest.identity,
        manifest.context,
        manifest.boundary,
        manifest.rank,
        manifest.page_count,
        manifest.page_bytes,
        status.st_blocks * 512,
        f"{status.st_ino}.{status.st_ctime_ns}",
        usable,
        min(manifest.created_ns, (1 << 63) - 1),
        min(max(status.st_mtime_ns, 0), (1 << 63) - 1),
    )
