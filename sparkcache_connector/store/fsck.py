"""Reads everything in a cache root and says what is wrong; changes nothing, needs no lock.

Beside a running engine, roots may go while they are checked: one that is gone by the time
its pack is missing is not reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sparkcache_connector.store.durable import Directory, is_temporary
from sparkcache_connector.store.errors import Miss, Reason, reason_of
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.layout import Area
from sparkcache_connector.store.manifest import (
    MANIFEST_LIMIT,
    Manifest,
    digest_of_name,
    manifest_name,
)
from sparkcache_connector.store.pack import pack_id_of, pack_name, page_digest, stride
from sparkcache_connector.store.reconcile import read_header, scan_packs
from sparkcache_connector.store.workers import Stop, Workers, run_in_order

Progress = Callable[[int, int], None]
"""Called with (bytes checked, bytes to check)."""

_BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    subject: str
    """The file, relative to the cache root."""
    reason: str
    found: str
    harmless: bool
    """True for debris and for files of newer releases: nothing is lost with them."""


@dataclass
class Checked:
    """What was looked at."""

    roots: int = 0
    packs: int = 0
    pages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _Page:
    pack_id: bytes
    offset: int
    size: int
    digest: bytes


def list_roots(area: Area) -> Iterator[tuple[bytes, bytes, Directory]]:
    """Yield (identity, context, directory) of every file that has a manifest's name."""
    for name in sorted(area.roots.names()):
        identity = digest_of_name(name, "")
        if identity is None:
            continue
        directory = area.identity(identity)
        for entry in sorted(directory.names()):
            context = digest_of_name(entry)
            if context is not None:
                yield identity, context, directory


def read_manifest(
    area: Area, keys: KeyRing, identity: bytes, context: bytes, directory: Directory | None = None
) -> Manifest:
    """Return a root's authenticated manifest.

    Raises:
        Miss: the reason for which it is not one.
    """
    directory = directory or area.identity(identity)
    name = manifest_name(context)
    manifest = Manifest.parse(directory.read(name, MANIFEST_LIMIT), keys, name)
    if (manifest.identity, manifest.context) != (identity, context):
        raise Miss(Reason.MISPLACED, name, "describes another root than its name says")
    return manifest


def check(
    area: Area, keys: KeyRing, workers: Workers, progress: Progress | None = None
) -> tuple[Checked, list[Finding]]:
    """Check every root, pack and page of a cache root.

    Steps: (1) every manifest authenticates and has its own name; (2) every pack that one
    names is there, has the stated size and its own header; (3) every page has its digest;
    (4) what no manifest names is debris, or newer.
    """
    checked = Checked()
    findings: list[Finding] = []
    pages: dict[_Page, bytes] = {}
    named: dict[bytes, tuple[int, bytes, bytes]] = {}
    # (1)
    for identity, context, directory in list_roots(area):
        subject = f"roots/{identity.hex()}/{manifest_name(context)}"
        try:
            manifest = read_manifest(area, keys, identity, context, directory)
        except Miss as miss:
            if miss.reason is not Reason.ABSENT:
                harmless = miss.reason is Reason.NEWER_FORMAT
                findings.append(Finding(subject, miss.reason, miss.found, harmless))
            continue
        checked.roots += 1
        for pack in manifest.packs:
            named.setdefault(pack.pack_id, (pack.size, identity, context))
        pages.update((page, context) for page in _pages_of(manifest))
    # (2)
    bad = set()
    for pack_id, (size, identity, context) in named.items():
        checked.packs += 1
        finding = _check_pack(area, pack_id, size)
        if finding is not None:
            bad.add(pack_id)
            if not _gone(area, identity, context):
                findings.append(finding)
    # (3)
    todo = sorted(
        (page for page in pages if page.pack_id not in bad),
        key=lambda page: (page.pack_id, page.offset),
    )
    findings += _check_pages(area, workers, todo, checked, progress)
    # (4)
    findings += _debris(area, set(named))
    return checked, findings


def _pages_of(manifest: Manifest) -> Iterator[_Page]:
    for group in manifest.groups:
        index = 0
        for run in group.runs:
            pack_id = manifest.packs[run.pack].pack_id
            for number in range(run.count):
                offset = run.offset + number * stride(group.page_bytes)
                yield _Page(pack_id, offset, group.page_bytes, group.digest(index))
                index += 1


def _check_pack(area: Area, pack_id: bytes, size: int) -> Finding | None:
    subject = f"packs/{pack_name(pack_id)}"
    try:
        header = read_header(area.packs, pack_id)
        found = area.packs.status(pack_name(pack_id)).st_size
    except Miss as miss:
        reason = Reason.PACK_MISSING if miss.reason is Reason.ABSENT else miss.reason
        return Finding(subject, reason, miss.found, False)
    except OSError as error:
        return Finding(subject, reason_of(error), str(error), False)
    if not size == header.size == found:
        text = f"{found} bytes; its manifest states {size}, its header {header.size}"
        return Finding(subject, Reason.TRUNCATED, text, False)
    return None


def _gone(area: Area, identity: bytes, context: bytes) -> bool:
    try:
        area.identity(identity).status(manifest_name(context))
    except OSError:
        return True
    return False


def _check_pages(
    area: Area,
    workers: Workers,
    pages: Sequence[_Page],
    checked: Checked,
    progress: Progress | None,
) -> list[Finding]:
    total = sum(page.size for page in pages)
    findings = []
    batches: list[list[_Page]] = []
    filled = _BATCH_BYTES
    for page in pages:
        if filled >= _BATCH_BYTES or batches[-1][-1].pack_id != page.pack_id:
            batches.append([])
            filled = 0
        batches[-1].append(page)
        filled += page.size
    tasks = (partial(_check_batch, area, batch) for batch in batches)
    for batch, found in zip(batches, run_in_order(workers, Stop(), tasks), strict=True):
        findings += found
        checked.pages += len(batch)
        checked.bytes += sum(page.size for page in batch)
        if progress is not None:
            progress(checked.bytes, total)
    return findings


def _check_batch(area: Area, batch: Sequence[_Page]) -> list[Finding]:
    name = pack_name(batch[0].pack_id)
    subject = f"packs/{name}"
    try:
        descriptor = area.packs.open_file(name)
    except Miss as miss:
        # It was there a moment ago: the engine has evicted it.
        return [] if miss.reason is Reason.ABSENT else [_bad(subject, miss.reason, miss.found)]
    findings = []
    try:
        for page in batch:
            try:
                data = os.pread(descriptor, page.size, page.offset)
            except OSError as error:
                text = f"offset {page.offset}: {error.strerror}"
                findings.append(_bad(subject, reason_of(error), text))
                continue
            if page_digest(data) != page.digest:
                text = f"the page at offset {page.offset} does not have its digest"
                findings.append(_bad(subject, Reason.PAGE_MISMATCH, text))
    finally:
        os.close(descriptor)
    return findings


def _bad(subject: str, reason: Reason, found: str) -> Finding:
    return Finding(subject, reason, found, False)


def _debris(area: Area, named: set[bytes]) -> list[Finding]:
    findings = []
    for row in scan_packs(area.packs):
        if row.pack_id in named:
            continue
        subject = f"packs/{pack_name(row.pack_id)}"
        try:
            read_header(area.packs, row.pack_id)
            reason, text = "unreferenced", f"{row.allocated} bytes that no root needs"
        except Miss as miss:
            if miss.reason is Reason.ABSENT:
                continue
            reason, text = miss.reason, miss.found
        findings.append(Finding(subject, reason, text, True))
    for name in area.packs.names():
        if is_temporary(name):
            findings.append(Finding(f"packs/{name}", "temporary", "unfinished", True))
        elif pack_id_of(name) is None:
            findings.append(Finding(f"packs/{name}", "unknown", "not a pack's name", True))
    for name in area.quarantine.names():
        findings.append(Finding(f"quarantine/{name}", "quarantined", "taken out earlier", True))
    return findings
