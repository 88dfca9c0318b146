"""Random page layouts: every shape that an engine has been seen to register, and odd ones."""

from dataclasses import dataclass

from hypothesis import strategies as st

from sparkcache_connector.worker.placement_layout import Extent, LayerPages, MemoryRegion


@dataclass
class Shape:
    """Layers over named regions that do not exist yet: ``sizes[i]`` bytes each."""

    sizes: list
    layers: list  # (region index, dict of LayerPages arguments)

    def layers_over(self, regions: "list[MemoryRegion]"):
        return tuple(LayerPages(region=regions[i], **rest) for i, rest in self.layers)


@st.composite
def extents(draw):
    """Extents of one layer's block, and the bytes that the block occupies from its start."""
    kind = draw(st.sampled_from(["nhd", "hnd", "kernel", "state", "padded"]))
    position_bytes = draw(st.integers(1, 48))
    positions = draw(st.integers(1, 9))
    if kind == "nhd":
        return (Extent(0, positions, position_bytes),), positions * position_bytes
    if kind == "hnd":
        heads = draw(st.integers(2, 4))
        gap = draw(st.sampled_from([0, 0, 3, 16]))
        stride = positions * position_bytes + gap
        return (
            (Extent(0, positions, position_bytes, 0, heads, stride),),
            heads * stride - gap,
        )
    if kind == "kernel":
        pieces = draw(st.integers(2, 3))
        heads = draw(st.integers(1, 3))
        row = positions * position_bytes
        return (
            tuple(
                Extent(k * heads * row, positions, position_bytes, k * positions, heads, row)
                for k in range(pieces)
            ),
            pieces * heads * row,
        )
    if kind == "state":
        sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
        found, at = [], 0
        for size in sizes:
            found.append(Extent(at, 1, size))
            at += size
        return tuple(found), at + draw(st.integers(0, 20))
    lead, tail = draw(st.integers(1, 20)), draw(st.integers(0, 20))
    row = positions * position_bytes
    return (Extent(lead, positions, position_bytes),), lead + row + tail


@st.composite
def shapes(draw):
    """One to three groups of one to three layers in separate, packed, shared or split memory."""
    blocks = draw(st.integers(2, 7))
    groups = draw(st.integers(1, 3))
    placing = draw(st.sampled_from(["separate", "packed", "shared", "planes", "overlay"]))
    per_group = [[draw(extents()) for _ in range(draw(st.integers(1, 3)))] for _ in range(groups)]
    sizes: list[int] = []
    layers: list = []

    def add(region, name, group, base, stride, parts):
        layers.append(
            (
                region,
                {
                    "name": name,
                    "group": group,
                    "base": base,
                    "page_stride": stride,
                    "blocks": blocks,
                    "extents": parts,
                },
            )
        )

    for group, members in enumerate(per_group):
        for index, (parts, used) in enumerate(members):
            name = f"layers.{group}.{index}"
            if placing == "separate":
                stride = used + draw(st.integers(0, 9))
                base = draw(st.integers(0, 5))
                add(len(sizes), name, group, base, stride, parts)
                sizes.append(base + blocks * stride)
            elif placing == "planes":
                # K and V of all blocks apart: the second extent is one whole plane away.
                plane = blocks * used
                second = tuple(
                    Extent(
                        plane + e.offset,
                        e.positions,
                        e.position_bytes,
                        e.first_position,
                        e.repeat,
                        e.repeat_stride,
                    )
                    for e in parts
                )
                add(len(sizes), name, group, 0, used, parts + second)
                sizes.append(2 * plane)
    if placing == "packed":
        # All layers of all groups side by side in each block of one slab.
        stride = sum(used for members in per_group for _, used in members)
        at = 0
        for group, members in enumerate(per_group):
            for index, (parts, used) in enumerate(members):
                add(0, f"layers.{group}.{index}", group, at, stride, parts)
                at += used
        sizes.append(blocks * stride)
    elif placing == "shared":
        # Layer i of every group in one allocation, one stride: block ids keep them apart.
        for index in range(max(map(len, per_group))):
            stride = max(m[index][1] for m in per_group if index < len(m))
            for group, members in enumerate(per_group):
                if index < len(members):
                    add(index, f"layers.{group}.{index}", group, 0, stride, members[index][0])
            sizes.append(blocks * stride)
    elif placing == "overlay":
        # Layers of a group one after the other, groups over each other with other strides.
        longest = 0
        for group, members in enumerate(per_group):
            at = 0
            for index, (parts, used) in enumerate(members):
                add(0, f"layers.{group}.{index}", group, at, used, parts)
                at += blocks * used
            longest = max(longest, at)
        sizes.append(longest)
    return Shape(sizes, layers)
