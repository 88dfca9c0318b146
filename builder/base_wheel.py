"""What a base wheel is, compared with the release: the facts that its pins record."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.source import Release, SourceError
from builder.wheel_version import (
    RULE,
    VERSION_MODULE,
    local_version,
    stamp_metadata,
    stamp_version_module,
)
from verify.manifest import Entry, Manifest, mode_of, path_problem

_ELF = b"\x7fELF"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """A base wheel compared with the release (docs/build.md: ``bases.<base>``).

    ``manifest`` is what the wheel does not have from the release; ``native`` its ELF files;
    ``differs`` the release's Python files that it has otherwise; ``packaging`` the members
    that the packaging rule changes, as (path, SHA-256 before, SHA-256 after).
    """

    dist_info: str
    manifest: Manifest
    native: Manifest
    differs: Mapping[str, str]
    rule: str
    packaging: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class _Members:
    entries: dict[str, Entry]
    elf: frozenset[str]
    kept: dict[str, bytes]


def examine(
    path: Path,
    release: Release,
    version: str,
    revision: int,
    differs: Collection[str],
    progress: Callable[[int], None] = lambda _: None,
) -> BaseFacts:
    """Read a base wheel whole and return its facts; ``progress`` hears of bytes read.

    Raises:
        SourceError: when the wheel is unreadable, or its Python differs from the release in
            other files than ``differs`` names.
        VersionRuleError: when the packaging rule does not fit it.
    """
    members = _read(path, progress)
    folders = {name.split("/")[0] for name in members.entries if ".dist-info/" in name}
    if len(folders) != 1:
        raise SourceError(path.name, f"expected one .dist-info folder, found {sorted(folders)}")
    (dist_info,) = folders
    ours: dict[str, Entry] = {}
    found_differs: dict[str, str] = {}
    for name, entry in members.entries.items():
        known = release.manifest.files.get(name) if name.startswith("vllm/") else None
        if known != entry:
            ours[name] = entry
        sha256 = known.sha256 if known is not None else release.generated.get(name)
        if sha256 is not None and sha256 != entry.sha256 and name.startswith("vllm/"):
            found_differs[name] = entry.sha256
    if set(found_differs) != set(differs):
        raise SourceError(
            path.name,
            f"expected it to differ from the release in {sorted(differs) or 'no file'}, "
            "found otherwise; correct `differs` in target.yaml only if that is meant",
            sorted(set(found_differs) ^ set(differs)),
        )
    absent = frozenset(
        name
        for name in release.manifest.files
        if name.startswith("vllm/") and name not in members.entries
    )
    packaging = []
    metadata = f"{dist_info}/METADATA"
    new = local_version(version, revision)
    for name, stamped in (
        (VERSION_MODULE, stamp_version_module(_kept(members, path, VERSION_MODULE), version, new)),
        (metadata, stamp_metadata(_kept(members, path, metadata), version, new, metadata)),
    ):
        after = hashlib.sha256(stamped).hexdigest()
        packaging.append((name, members.entries[name].sha256, after))
    return BaseFacts(
        dist_info=dist_info,
        manifest=Manifest(ours, absent),
        native=Manifest({name: members.entries[name] for name in members.elf}),
        differs=found_differs,
        rule=RULE,
        packaging=tuple(packaging),
    )


def _kept(members: _Members, path: Path, name: str) -> bytes:
    try:
        return members.kept[name]
    except KeyError:
        raise SourceError(path.name, f"expected the member {name}, found none") from None


def _read(path: Path, progress: Callable[[int], None]) -> _Members:
    """Hash every member; keep the bytes of those that the packaging rule changes."""
    entries: dict[str, Entry] = {}
    elf: set[str] = set()
    kept: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename
                problem = path_problem(name)
                if problem is None and name in entries:
                    problem = "expected each member once"
                if problem is not None:
                    raise SourceError(path.name, f"{name!r}: {problem}")
                digest = hashlib.sha256()
                head = b""
                with archive.open(info) as stream:
                    while chunk := stream.read(_CHUNK):
                        head = head or chunk[:4]
                        digest.update(chunk)
                        progress(len(chunk))
                entries[name] = Entry(mode_of(info.external_attr >> 16), digest.hexdigest())
                if head == _ELF:
                    elf.add(name)
                if name == VERSION_MODULE or name.endswith(".dist-info/METADATA"):
                    kept[name] = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
        raise SourceError(path.name, f"expected a readable wheel: {error}") from error
    return _Members(entries, frozenset(elf), kept)
