"""Where a request should leave a root behind: the boundary policy.

Boundaries are multiples of the unit, the least common multiple of the chunk and the engine's
hash block. The grid of checkpoints depends on nothing but the configuration, so two prompts
that share a prefix share its checkpoints; a prompt adds the last boundary below its own end.

For two prompts that share ``s`` tokens, the second finds at least
``s - max(interval, unit)`` of them stored (``s`` beyond ``min_span``), because neighbours on
the grid are never further apart and the last boundary is less than one unit from the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoundaryPolicy:
    """The configuration that the grid depends on.

    Attributes:
        unit: tokens of which every boundary is a multiple.
        interval: largest distance of neighbouring checkpoints; at least one unit is used.
        recurrent_block: tokens per block of the recurrent groups, 0 without such groups. A
            state at its multiples is handed over in place, elsewhere by a copy.
        min_span: shorter boundaries are not worth a lookup.
        max_span: longer ones are not stored.
    """

    unit: int
    interval: int
    recurrent_block: int = 0
    min_span: int = 1
    max_span: int = 1 << 30

    def __post_init__(self) -> None:
        if self.unit < 1 or self.interval < 1 or self.recurrent_block < 0:
            raise ValueError(f"impossible policy {self}")

    def targets(self, prompt_tokens: int, *, after: int = 0) -> tuple[int, ...]:
        """Boundaries of a prompt, ascending, those up to ``after`` left out.

        Each is below ``prompt_tokens``: the last token is always computed.
        """
        last = last_boundary(prompt_tokens, self.unit)
        chosen = {b for b in self._grid(last) if b > after}
        if last > after:
            chosen.add(last)
        return tuple(sorted(b for b in chosen if self.min_span <= b <= self.max_span))

    def _grid(self, last: int) -> Iterator[int]:
        reach = max(self.interval // self.unit, 1) * self.unit
        aligned = math.lcm(self.recurrent_block or self.unit, self.unit)
        boundary = 0
        while True:
            furthest = boundary + reach
            candidate = furthest // aligned * aligned
            # An aligned checkpoint is cheaper, but not at any density: it must lie in the
            # further half of the step, so that their number at most doubles.
            boundary = candidate if candidate - boundary > reach // 2 else furthest
            if boundary > last:
                return
            yield boundary


def boundary_unit(chunk_tokens: int, hash_block_tokens: int) -> int:
    """The least common multiple: a boundary ends a chunk and a hash block."""
    return math.lcm(chunk_tokens, hash_block_tokens)


def last_boundary(prompt_tokens: int, unit: int) -> int:
    """The last boundary below the prompt's end; 0 if there is none."""
    return max(prompt_tokens - 1, 0) // unit * unit


def finish_boundary(*, computed: int, in_flight: int, tokens: int, unit: int) -> int:
    """Where an attention-only request may publish when it finishes; 0 if nowhere.

    Args:
        computed: tokens that the scheduler counts as computed, rejected drafts taken back.
        in_flight: of these, tokens of steps that have not completed.
        tokens: accepted tokens of the request; the last one has no KV yet.
        unit: boundary unit.
    """
    return max(min(computed - in_flight, tokens - 1), 0) // unit * unit
