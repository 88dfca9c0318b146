"""What a subject must consist of: the composition, computed from pins and manifests alone.

Pure. Every expected path carries its origin, so that a difference is reported by the family
that owns the file.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from verify.manifest import FILE, Entry, Manifest
from verify.pins import Base, Pins


class Origin(enum.Enum):
    """Who put a file where it is."""

    RELEASE = "the release"
    BASE = "the base wheel"
    PATCH = "the patches"
    MODULE = "the overlay"
    PACKAGING = "the packaging rule"


@dataclass(frozen=True, slots=True)
class Expected:
    """One file of the composition. ``pre`` is the release's digest of a touched file."""

    mode: str
    sha256: str
    origin: Origin
    pre: str | None = None


@dataclass(frozen=True, slots=True)
class Composition:
    """All files by path, and the touched paths that must be absent (path -> release digest)."""

    files: Mapping[str, Expected]
    deleted: Mapping[str, str]


def is_native(path: str) -> bool:
    """Whether a path is that of a shared library, whatever its bytes are."""
    name = path.rpartition("/")[2]
    return name.endswith(".so") or ".so." in name


def source(pins: Pins, release: Manifest, *, patched: bool, below: str = "") -> Composition:
    """Return the release's files below ``below``, with patches and modules when ``patched``."""
    files = {
        path: Expected(entry.mode, entry.sha256, Origin.RELEASE)
        for path, entry in release.files.items()
        if path.startswith(below)
    }
    return _patched(pins, files) if patched else Composition(files, {})


def wheel(
    pins: Pins,
    release: Manifest,
    base: Base,
    overlay: Manifest,
    *,
    patched: bool,
    stamped: bool | None = None,
) -> Composition:
    """Return the members of the base wheel, or of the one that we make of it, without RECORD.

    ``overlay`` is ``bases/<base>.manifest``: what the wheel does not have from the release.
    ``stamped`` is whether the packaging rule was applied; what is patched usually is.
    """
    files: dict[str, Expected] = {}
    for path, entry in release.files.items():
        if path.startswith("vllm/") and path not in overlay.absent:
            files[path] = Expected(entry.mode, entry.sha256, Origin.RELEASE)
    for path, entry in overlay.files.items():
        known = release.files.get(path)
        same = known is not None and known.sha256 == entry.sha256
        files[path] = Expected(entry.mode, entry.sha256, Origin.RELEASE if same else Origin.BASE)
    files.pop(f"{base.dist_info}/RECORD", None)
    if not patched:
        return Composition(files, {})
    composition = _patched(pins, files)
    if stamped is False:
        return composition
    packaged = dict(composition.files)
    for each in base.packaged:
        mode = packaged[each.path].mode if each.path in packaged else FILE
        packaged[each.path] = Expected(mode, each.post, Origin.PACKAGING, pre=each.pre)
    renamed = {
        _rename(path, base.dist_info, dist_info(pins, base)): expected
        for path, expected in packaged.items()
    }
    return Composition(renamed, composition.deleted)


def composed_manifest(pins: Pins, release: Manifest) -> Manifest:
    """Return the manifest of ``vllm/`` after patches and modules, before packaging."""
    composition = source(pins, release, patched=True, below="vllm/")
    return Manifest(
        {path: Entry(each.mode, each.sha256) for path, each in composition.files.items()}
    )


def dist_info(pins: Pins, base: Base, *, patched: bool = True) -> str:
    """Return the name of the dist-info directory."""
    if not patched:
        return base.dist_info
    name = base.dist_info.partition("-")[0]
    return f"{name}-{pins.local_version}.dist-info"


def wheel_filename(pins: Pins, base: Base, *, patched: bool = True) -> str:
    """Return the wheel's file name: the base's, with the local version."""
    if not patched:
        return base.wheel.filename
    name, _, rest = base.wheel.filename.partition("-")
    return f"{name}-{pins.local_version}-{rest.partition('-')[2]}"


def _patched(pins: Pins, files: Mapping[str, Expected]) -> Composition:
    changed = dict(files)
    deleted: dict[str, str] = {}
    for each in pins.files:
        pre = each.pre.sha256 if each.pre is not None else None
        known = changed.pop(each.path, None)
        if each.post is not None:
            mode = each.mode if known is None else known.mode
            changed[each.path] = Expected(mode, each.post.sha256, Origin.PATCH, pre=pre)
        elif pre is not None:
            deleted[each.path] = pre
    for module in pins.modules:
        changed[module.path] = Expected(module.mode, module.sha256, Origin.MODULE)
    return Composition(changed, deleted)


def _rename(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path.startswith(old + "/") else path
