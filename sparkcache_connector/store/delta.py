"""Which pages a publication stores and which it references: pure arithmetic over digests.

Only full-attention groups reference: a page there is a function of the tokens before its end,
so two contexts with a common beginning share their leading pages. The first page that differs
and all after it are stored, even if a later one happens to be equal. Recurrent states and
sliding windows are always stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkcache_connector.store.manifest import Group, GroupKind, Manifest, PackRef, Run, RunList
from sparkcache_connector.store.pack import ALIGNMENT, stride


@dataclass(frozen=True)
class GroupShape:
    """A group to be published: its kind, page size, first block table index, number of pages."""

    kind: GroupKind
    page_bytes: int
    first: int
    count: int


def comparable(shapes: Sequence[GroupShape], base: Manifest | None) -> list[Group | None]:
    """Return for each group the base's group whose leading pages may be referenced.

    A base with another number of groups, or a group of another shape, offers nothing.
    """
    if base is None or len(base.groups) != len(shapes):
        return [None] * len(shapes)
    return [
        group if _same_kind_of_pages(shape, group) else None
        for shape, group in zip(shapes, base.groups, strict=True)
    ]


def _same_kind_of_pages(shape: GroupShape, group: Group) -> bool:
    return (
        shape.kind is GroupKind.FULL_ATTENTION
        and group.kind is GroupKind.FULL_ATTENTION
        and shape.page_bytes == group.page_bytes
        and shape.first == group.first
    )


def pack_size(shapes: Sequence[GroupShape], referenced: Sequence[int]) -> int:
    """Return the size of the pack that holds the pages that are not referenced; 0 if none."""
    pages = sum(
        (shape.count - kept) * stride(shape.page_bytes)
        for shape, kept in zip(shapes, referenced, strict=True)
    )
    return ALIGNMENT + pages if pages else 0


def stored_offsets(shapes: Sequence[GroupShape], referenced: Sequence[int]) -> list[int]:
    """Return for each group the offset in the new pack at which its stored pages begin."""
    offsets = []
    at = ALIGNMENT
    for shape, kept in zip(shapes, referenced, strict=True):
        offsets.append(at)
        at += (shape.count - kept) * stride(shape.page_bytes)
    return offsets


def compose_groups(
    shapes: Sequence[GroupShape],
    digests: Sequence[bytes],
    referenced: Sequence[int],
    base: Manifest | None,
    new_pack: PackRef | None,
) -> tuple[tuple[PackRef, ...], tuple[Group, ...]]:
    """Return a manifest's packs and groups: referenced runs of the base, then the new pack's."""
    table = RunList()
    groups = []
    offsets = stored_offsets(shapes, referenced)
    for index, shape in enumerate(shapes):
        step = stride(shape.page_bytes)
        runs: list[Run] = []
        left = referenced[index]
        if left and base is not None:
            for run in base.groups[index].runs:
                taken = min(left, run.count)
                if taken:
                    table.extend(runs, base.packs[run.pack], run.offset, taken, step)
                left -= taken
        stored = shape.count - referenced[index]
        if stored and new_pack is not None:
            table.extend(runs, new_pack, offsets[index], stored, step)
        groups.append(Group(shape.kind, shape.page_bytes, shape.first, tuple(runs), digests[index]))
    return tuple(table.packs), tuple(groups)


def relocate(manifest: Manifest, old: PackRef, moved: dict[int, int], new: PackRef) -> Manifest:
    """Return the manifest with every page of pack ``old`` at its place in pack ``new``.

    ``moved`` maps a page's offset in the old pack to its offset in the new one.
    """
    table = RunList()
    groups = []
    for group in manifest.groups:
        step = stride(group.page_bytes)
        runs: list[Run] = []
        for run in group.runs:
            pack = manifest.packs[run.pack]
            if pack != old:
                table.extend(runs, pack, run.offset, run.count, step)
                continue
            for page in range(run.count):
                table.extend(runs, new, moved[run.offset + page * step], 1, step)
        groups.append(Group(group.kind, group.page_bytes, group.first, tuple(runs), group.digests))
    return Manifest(
        manifest.identity,
        manifest.context,
        manifest.boundary,
        manifest.rank,
        manifest.created_ns,
        tuple(table.packs),
        tuple(groups),
    )
