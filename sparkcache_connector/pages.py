"""Which pages make up a root: plain arithmetic over the engine's groups.

The pages of a root at boundary ``B``, per group with blocks of ``b`` tokens:

* full attention: blocks ``0 .. ceil(B / b) - 1``;
* sliding window ``w``: those of them that a token at ``B`` can still see, i.e. from the block
  of token ``B - (w - 1)`` on;
* recurrent: the one block in slot ``ceil(B / b) - 1``, the state at ``B``.

Positions of the last attention page beyond ``B`` belong to other tokens: stored as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FULL: Final = "full"
SLIDING: Final = "sliding"
RECURRENT: Final = "recurrent"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the scheduler knows of a group.

    Attributes:
        kind: ``full``, ``sliding`` or ``recurrent``.
        block_tokens: tokens per block.
        window_tokens: the window of a sliding group, else 0.
    """

    kind: str
    block_tokens: int
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PageRange:
    """The pages of one group: block table indices ``first .. first + count - 1``.

    Attributes:
        first: index of the first page.
        count: number of pages, at least 1.
        last_positions: token positions of the last page that belong to the context.
    """

    first: int
    count: int
    last_positions: int

    @property
    def end(self) -> int:
        """Index after the last page."""
        return self.first + self.count


def select(shape: GroupShape, boundary: int) -> PageRange:
    """The pages of one group in a root at ``boundary``."""
    if boundary < 1:
        raise ValueError(f"a root at boundary {boundary}")
    end = -(-boundary // shape.block_tokens)
    last_positions = boundary - (end - 1) * shape.block_tokens
    first = 0
    if shape.kind == RECURRENT:
        first, last_positions = end - 1, shape.block_tokens
    elif shape.kind == SLIDING:
        oldest_visible = max(boundary - (shape.window_tokens - 1), 0)
        first = min(oldest_visible // shape.block_tokens, end - 1)
    return PageRange(first, end - first, last_positions)


def beyond_local(shape: GroupShape, boundary: int, local_tokens: int) -> PageRange | None:
    """The pages that a restore writes: those past the locally computed prefix.

    Blocks of the prefix are shared with other requests and are never written. A recurrent
    state is at one boundary only, so it is written whatever the prefix is.
    """
    pages = select(shape, boundary)
    if shape.kind == RECURRENT:
        return pages
    first = max(pages.first, local_tokens // shape.block_tokens)
    if first >= pages.end:
        return None
    return PageRange(first, pages.end - first, pages.last_positions)


def recurrent_groups(shapes: Sequence[GroupShape]) -> frozenset[int]:
    """Indices of the recurrent groups."""
    return frozenset(i for i, shape in enumerate(shapes) if shape.kind == RECURRENT)
