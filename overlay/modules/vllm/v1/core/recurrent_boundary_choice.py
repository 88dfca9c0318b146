# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the SparkCache authors
"""Which token boundaries of a request are worth a recurrent state.

A request's boundaries are those that its connector chose, or else the replay
boundary: the last hash boundary that leaves a token to compute. The choice is
asked for once per admission and holds until the request is preempted.

Chosen boundaries become exact prefill stops. A stop that the scheduler could
not honour (the caps that follow would take the chunk down to nothing, forever)
is not taken: its state is not offered, and nothing else changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)


def opts_in(connector: Any) -> bool:
    """Whether a connector takes recurrent boundary blocks.

    Exactly True counts: a test double that answers every attribute with
    something truthy must not be handed references that it never returns.
    """
    return getattr(connector, "supports_recurrent_boundary_blocks", False) is True


def union_of_choices(connectors: Iterable[Any], request: "Request") -> tuple[int, ...]:
    """The sorted union of what several opted-in connectors choose.

    Raises:
        ValueError: If an answer is no tuple of integers; names the connector.
    """
    union: set[int] = set()
    for connector in filter(opts_in, connectors):
        answer = connector.get_recurrent_publication_boundaries(request)
        if not _is_tuple_of_ints(answer):
            raise ValueError(f"{type(connector).__name__} answered {answer!r}")
        union.update(answer)
    return tuple(sorted(union))


def replay_boundary(num_prompt_tokens: int, hash_block_size: int) -> int:
    """The last hash boundary below the prompt's end; 0 if there is none."""
    return (num_prompt_tokens - 1) // hash_block_size * hash_block_size


@dataclass(frozen=True, slots=True)
class StopRules:
    """What the engine's configuration allows a chosen stop to do.

    Attributes:
        block_sizes: Distinct block sizes of the recurrent groups.
        hash_block_size: Granularity of the boundaries.
        inside_blocks: Whether a state inside a recurrent block can be
            registered at all (fine-grained prefix hits are active).
        prefill_lookahead: No chunk may end closer to the prefill's end
            (multi-module MTP); the scheduler would shrink it.
        whole_mm_items: Multimodal items may not be split between chunks.
    """

    block_sizes: tuple[int, ...]
    hash_block_size: int
    inside_blocks: bool
    prefill_lookahead: int = 0
    whole_mm_items: bool = False

    def is_inside_block(self, boundary: int) -> bool:
        return any(boundary % size for size in self.block_sizes)

    def block_end(self, num_tokens: int) -> int:
        """The nearest end of a recurrent block that ``num_tokens`` is inside of."""
        return min(
            ((num_tokens // size + 1) * size for size in self.block_sizes if num_tokens % size),
            default=num_tokens,
        )

    def allow(self, request: "Request", stop: int) -> bool:
        """Whether a chunk of this request may end at ``stop``."""
        if self.is_inside_block(stop):
            # The chunk that follows must be able to stop at the block's end:
            # running past it would leave this state in a slot that the prefix
            # cache then takes for the block's end.
            end = self.block_end(stop)
            if not self.inside_blocks or not self._survives_caps(request, end):
                return False
        return self._survives_caps(request, stop)

    def _survives_caps(self, request: "Request", stop: int) -> bool:
        if 0 < request.num_tokens - stop < self.prefill_lookahead:
            return False
        if not self.whole_mm_items:
            return True
        return not any(
            item.mm_position.offset - self.prefill_lookahead
            < stop
            < item.mm_position.offset + item.mm_position.length
            for item in request.mm_features
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The boundaries of one request, for one admission.

    ``stops`` are the chosen ones, ascending; empty if the connector chose none.
    ``targets`` are those whose state is handed over.
    """

    num_prompt_tokens: int
    stops: tuple[int, ...]
    targets: frozenset[int]


class BoundaryChoices:
    """Asks the connector, checks the answer, and remembers it."""

    def __init__(self, rules: StopRules, connector: Any) -> None:
        self.rules = rules
        self._connector = connector
        self._choices: dict[str, Choice] = {}

    def of(self, request: "Request") -> Choice:
        choice = self._choices.get(request.request_id)
        # A streaming session that comes back with a longer prompt is admitted anew.
        if choice is None or choice.num_prompt_tokens != request.num_prompt_tokens:
            choice = self._choices[request.request_id] = self._ask(request)
        return choice

    def forget(self, request_id: str) -> None:
        self._choices.pop(request_id, None)

    def nothing_for(self, request: "Request") -> None:
        """Settle that this admission of the request offers no state."""
        self._choices[request.request_id] = Choice(request.num_prompt_tokens, (), frozenset())

    def next_stop(self, request: "Request", start: int, num_new_tokens: int) -> int:
        """Where a chunk of at most ``num_new_tokens`` from ``start`` must end.

        Returns:
            The first mandatory stop in ``(start, start + num_new_tokens]``: a
            chosen boundary, or the end of a recurrent block in whose middle the
            chunk starts. 0 if there is none.
        """
        if start >= request.num_prompt_tokens:
            return 0
        stops = self.of(request).stops
        if not stops:
            return 0
        end = start + num_new_tokens
        candidates = [b for b in stops if start < b <= end]
        block_end = self.rules.block_end(start)
        if start < block_end <= end:
            candidates.append(block_end)
        return min(
            (stop for stop in candidates if self.rules.allow(request, stop)),
            default=0,
        )

    def _ask(self, request: "Request") -> Choice:
        num_prompt_tokens = request.num_prompt_tokens
        name = type(self._connector).__name__
        try:
            answer = self._connector.get_recurrent_publication_boundaries(request)
        except Exception:
            logger.exception(
                "Connector %s failed to choose recurrent publication boundaries "
                "for request %s; the request offers none.",
                name,
                request.request_id,
            )
            return Choice(num_prompt_tokens, (), frozenset())
        unit = self.rules.hash_block_size
        if not _is_tuple_of_ints(answer):
            wrong: Any = answer
        else:
            wrong = next((b for b in answer if not 0 < b < num_prompt_tokens or b % unit), None)
            if wrong is None:
                stops = tuple(sorted(set(answer)))
                targets = stops or (replay_boundary(num_prompt_tokens, unit),)
                return Choice(num_prompt_tokens, stops, frozenset(targets))
        logger.error(
            "Connector %s chose recurrent publication boundary %r for request %s: "
            "expected multiples of %d tokens below the %d tokens of its prompt. "
            "The request offers none.",
            name,
            wrong,
            request.request_id,
            unit,
            num_prompt_tokens,
        )
        return Choice(num_prompt_tokens, (), frozenset())


def _is_tuple_of_ints(answer: Any) -> bool:
    # bool is an int to isinstance, never to us.
    return isinstance(answer, (tuple, list)) and all(type(b) is int for b in answer)
