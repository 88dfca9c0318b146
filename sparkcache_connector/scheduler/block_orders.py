"""Which physical blocks an order names: block tables and a boundary in, ``GroupBlocks`` out.

Pure arithmetic over the tables of one request; says no where a page has no block of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparkcache_connector.messages import GroupBlocks, LoadOrder
from sparkcache_connector.pages import GroupShape, beyond_local, select
from sparkcache_connector.scheduler.planner import Offer
from sparkcache_connector.scheduler.publication import NULL_BLOCK


def load_order(
    request: str,
    offer: Offer,
    local: int,
    *,
    shapes: Sequence[GroupShape],
    tables: Sequence[Sequence[int]],
    is_private: Callable[[int, int], bool],
) -> LoadOrder:
    """Where the pages of an offered root go, past the ``local`` tokens that are there.

    Args:
        request: its id.
        offer: the root.
        local: tokens that the engine has itself.
        shapes: the KV cache groups.
        tables: per group the whole block table.
        is_private: whether the block at (group, index) belongs to this request alone.
    """
    groups: list[GroupBlocks] = []
    shared: list[GroupBlocks] = []
    refused = ""
    for index, shape in enumerate(shapes):
        pages = beyond_local(shape, offer.boundary, local)
        if pages is None:
            continue
        found = list(enumerate(tables[index]))[pages.first : pages.end]
        here = [(slot, block) for slot, block in found if block != NULL_BLOCK]
        mine = tuple(block for slot, block in here if is_private(index, slot))
        if len(here) != pages.count:
            refused = "destination_missing"
        elif len(mine) != len(here):
            refused = refused or "destination_shared"
        groups.append(GroupBlocks(index, pages.first, mine, pages.last_positions))
        every = tuple(block for _, block in here)
        shared.append(GroupBlocks(index, pages.first, every, pages.last_positions))
    if refused and not any(group.blocks for group in groups):
        # The failure must name some block of this request, or it would go unnoticed.
        groups = shared
    return LoadOrder(request, offer.root, offer.boundary, local, tuple(groups), refused)


def sources(
    boundary: int,
    *,
    shapes: Sequence[GroupShape],
    tables: Sequence[Sequence[int]],
    proven: Mapping[int, int],
) -> tuple[GroupBlocks, ...] | None:
    """Where the pages of a root at ``boundary`` are; None if one of them is nowhere.

    Args:
        boundary: tokens that the root covers.
        shapes: the KV cache groups.
        tables: per group the block table.
        proven: group to block, for recurrent groups; overrides the table.
    """
    groups: list[GroupBlocks] = []
    for index, shape in enumerate(shapes):
        pages = select(shape, boundary)
        if index in proven:
            blocks: tuple[int, ...] = (proven[index],)
        else:
            table = tables[index] if index < len(tables) else []
            blocks = tuple(table[pages.first : pages.end])
        if len(blocks) != pages.count or NULL_BLOCK in blocks:
            return None
        groups.append(GroupBlocks(index, pages.first, blocks, pages.last_positions))
    return tuple(groups)
