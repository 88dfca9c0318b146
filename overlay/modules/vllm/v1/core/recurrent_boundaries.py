# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the SparkCache authors
"""Hands recurrent boundary blocks to a KV connector, with proof.

A recurrent group (Mamba "align") keeps one state per request, and which physical
block holds the state of a given token boundary cannot be told from its position
in the block table. It is known for certain at one moment only: in the call that
computes to exactly that boundary, where the state is the running one.

* Boundary at the end of a recurrent block: the running block itself is the
  candidate, and is offered with the step that computes it.
* Boundary inside a recurrent block: the request goes on writing into the running
  block, so the state is registered like vLLM's own partial tail, and the next
  allocation of the request copies it into a block of its own. That copy is the
  candidate, and is offered with the step that makes it.

A candidate is offered when every recurrent group has one for the boundary, and
each is still proven: not null, referenced, and hashed as exactly this prefix in
exactly this group. Anything less offers nothing. See docs/overlay.md of
SparkCache for vLLM for the rules by number.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.recurrent_boundary_choice import BoundaryChoices, StopRules, opts_in
from vllm.v1.core.recurrent_boundary_pins import BoundaryPins
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.request import Request

logger = init_logger(__name__)

Triples = dict[str, list[tuple[int, int, int]]]
Serials = dict[str, list[int]]


@dataclass(slots=True)
class Candidate:
    """A block that holds the state of one group at one boundary.

    ``block_hash`` is what the block must be hashed as while that is true.
    """

    group_id: int
    block: KVCacheBlock
    boundary: int
    block_hash: BlockHashWithGroupId

    @property
    def is_proven(self) -> bool:
        return (
            not self.block.is_null
            and self.block.ref_cnt > 0
            and self.block.block_hash == self.block_hash
            and self.block.block_hash_num_tokens == self.boundary
        )


@dataclass(slots=True)
class Undelivered:
    """What one request has ready, or on the way, for one boundary.

    ``moving`` maps the groups whose state the next allocation copies to the hash
    that the copy must carry. ``is_own_tail`` says that vLLM made the copies by
    itself, so that they are offered whether the mapping is complete or not.
    """

    ready: dict[int, Candidate] = field(default_factory=dict)
    moving: dict[int, BlockHashWithGroupId] = field(default_factory=dict)
    is_own_tail: bool = False


class RecurrentBoundaries:
    """The candidates of all requests, from their computation to their hand-off.

    Without any effect until a connector that opts in is attached to an engine
    with recurrent groups and prefix caching.
    """

    def __init__(self, coordinator: "KVCacheCoordinator") -> None:
        self._coordinator = coordinator
        self._pool = coordinator.block_pool
        self._recurrent: dict[int, MambaManager] = {
            manager.kv_cache_group_id: manager
            for manager in coordinator.single_type_managers
            if isinstance(manager, MambaManager) and manager.mamba_cache_mode == "align"
        }
        self._connector: Any = None
        self._choices: BoundaryChoices | None = None
        self._pins = BoundaryPins(self._pool)
        self._undelivered: dict[str, dict[int, Undelivered]] = {}

    def attach(
        self,
        connector: Any,
        is_kv_producer: bool,
        prefill_lookahead: int = 0,
        whole_mm_items: bool = False,
    ) -> None:
        """Serve this connector from now on, if it opts in and saves at all."""
        if not (opts_in(connector) and is_kv_producer):
            return
        self._connector = connector
        if not (self._recurrent and self._coordinator.enable_caching):
            return
        rules = StopRules(
            block_sizes=tuple({m.block_size for m in self._recurrent.values()}),
            hash_block_size=self._pool.hash_block_size,
            inside_blocks=self._coordinator.enable_partial_hash_hits,
            prefill_lookahead=prefill_lookahead,
            whole_mm_items=whole_mm_items,
        )
        self._choices = BoundaryChoices(rules, connector)

    # Stops of a prefill

    def next_stop(self, request: "Request", start: int, num_new_tokens: int) -> int:
        """See `BoundaryChoices.next_stop`; 0 while no connector is served."""
        if self._choices is None:
            return 0
        return self._choices.next_stop(request, start, num_new_tokens)

    def offer_nothing_of(self, request: "Request") -> None:
        """Settle that the next admission of a request takes no block but its own.

        For a request that was alone and still found no room: pins of its earlier
        boundaries may be what was missing, and would be so again.
        """
        if self._choices is not None:
            self._choices.nothing_for(request)

    # Candidates

    def computed(self, request: "Request", num_tokens: int) -> None:
        """Note that a call computes the request to exactly ``num_tokens``.

        To be called once the blocks of that very call were cached.
        """
        if self._choices is None or num_tokens > request.num_prompt_tokens:
            return
        self._expect_own_tail(request, num_tokens)
        choice = self._choices.of(request)
        if num_tokens not in choice.targets:
            return
        chosen = num_tokens in choice.stops
        entries = self._undelivered.setdefault(request.request_id, {})
        entry = entries.get(num_tokens) or Undelivered()
        inside: list[MambaManager] = []
        for group_id, manager in self._recurrent.items():
            if num_tokens % manager.block_size:
                inside.append(manager)
                continue
            candidate = self._at_block_end(manager, request, num_tokens, chosen)
            if candidate is None:
                return
            entry.ready[group_id] = candidate
        if inside and not entry.is_own_tail:
            # Without a choice, vLLM's own tail is all that is registered inside a block.
            registered = chosen and self._register_inside(inside, request, num_tokens, entry)
            if not registered:
                return
        entries[num_tokens] = entry

    def cached(self, request: "Request", num_tokens: int) -> None:
        """Note that blocks were cached outside of an allocation: a load has ended.

        Async scheduling caches here too, while a later step already advances the
        running state: what vLLM registers then is not the state that it says.
        """
        if self._choices is None:
            return
        if num_tokens == request.num_computed_tokens:
            self._expect_own_tail(request, num_tokens)
        else:
            self._hide_advanced_tail(request, num_tokens)

    def _hide_advanced_tail(self, request: "Request", num_tokens: int) -> None:
        """Let no request resume from a state that is not the one it is hashed as.

        The state at the boundary has a copy of its own by then, which stays
        cached. vLLM's hand-off of the tail is left as vLLM makes it.
        """
        for manager in self._recurrent.values():
            registered = manager._producer_partial_tail_reqs.get(request.request_id)
            running = manager._partial_hit_reqs.get(request.request_id)
            if registered == num_tokens and running is not None:
                self._pool.evict_blocks({running[1].block_id})

    def _expect_own_tail(self, request: "Request", num_tokens: int) -> None:
        """Await the copy of the partial tail, if vLLM has just registered it."""
        moving = {
            group_id: self._expected_hash(manager, request, num_tokens)
            for group_id, manager in self._recurrent.items()
            if manager._producer_partial_tail_reqs.get(request.request_id) == num_tokens
        }
        if moving:
            self._undelivered.setdefault(request.request_id, {})[num_tokens] = Undelivered(
                moving=moving, is_own_tail=True
            )

    def _at_block_end(
        self, manager: MambaManager, request: "Request", boundary: int, chosen: bool
    ) -> Candidate | None:
        slot = boundary // manager.block_size - 1
        blocks = manager.req_to_blocks[request.request_id]
        if slot >= len(blocks):
            return None
        block = blocks[slot]
        if (
            chosen
            and not block.is_null
            and block.block_hash is None
            and slot < manager.num_cached_block.get(request.request_id, 0)
        ):
            # The prefix cache came by and a retention mask hid this slot. The
            # connector asked for the boundary, so it is hashed all the same.
            self._pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=slot,
                num_full_blocks=slot + 1,
                block_size=manager.block_size,
                kv_cache_group_id=manager.kv_cache_group_id,
            )
            manager.cached_blocks_this_step.add(block.block_hash)
        candidate = Candidate(
            manager.kv_cache_group_id,
            block,
            boundary,
            self._expected_hash(manager, request, boundary),
        )
        return candidate if candidate.is_proven else None

    def _register_inside(
        self,
        managers: list[MambaManager],
        request: "Request",
        boundary: int,
        entry: Undelivered,
    ) -> bool:
        """Have the next allocation copy the running states of these groups."""
        if not self._coordinator.enable_partial_hash_hits:
            return False
        if any(self._may_be_prefilled_again(manager) for manager in managers):
            return False
        for manager in managers:
            block_hash = manager.register_partial_boundary(request, boundary)
            if block_hash is None:
                self._cancel_moves(request.request_id, entry)
                return False
            # The state is only there once this step has run: no hit before that.
            manager.cached_blocks_this_step.add(block_hash)
            entry.moving[manager.kv_cache_group_id] = block_hash
        return True

    def _may_be_prefilled_again(self, manager: MambaManager) -> bool:
        # Multi-module MTP rewrites the last tokens of a chunk in these groups.
        return manager.use_eagle and self._coordinator.num_reprefillable_tokens > 0

    def _expected_hash(
        self, manager: MambaManager, request: "Request", boundary: int
    ) -> BlockHashWithGroupId:
        prefix = request.block_hashes[boundary // self._pool.hash_block_size - 1]
        return make_block_hash_with_group_id(prefix, manager.kv_cache_group_id)

    def takes_copy(
        self, request_id: str, group_id: int, block: KVCacheBlock, boundary: int
    ) -> bool:
        """Receive the copy of a state that was registered inside a block.

        Returns:
            Whether the copy was made for a chosen boundary only. vLLM's own
            partial tails are False, and go where they always went.
        """
        entry = self._undelivered.get(request_id, {}).get(boundary)
        if entry is None or group_id not in entry.moving:
            return False
        block_hash = entry.moving.pop(group_id)
        entry.ready[group_id] = Candidate(group_id, block, boundary, block_hash)
        return not entry.is_own_tail

    def give_up_copies(self, request_id: str) -> bool:
        """Cancel the copies that the next allocation would make for a connector.

        Returns:
            Whether there were any: the allocation may then need fewer blocks.
        """
        entries = self._undelivered.get(request_id, {})
        cancelled = [
            boundary
            for boundary, entry in entries.items()
            if entry.moving and not entry.is_own_tail
        ]
        for boundary in cancelled:
            self._cancel_moves(request_id, entries.pop(boundary))
        return bool(cancelled)

    def _cancel_moves(self, request_id: str, entry: Undelivered) -> None:
        for group_id in entry.moving:
            manager = self._recurrent[group_id]
            _, block = manager._partial_hit_reqs.pop(request_id)
            del manager._producer_partial_tail_reqs[request_id]
            # The request goes on writing into this block.
            self._pool.evict_blocks({block.block_id})

    # Hand-off

    def hand_over(self) -> tuple[Triples | None, Serials | None]:
        """Pin and return what the step that is being scheduled offers.

        To be called after the step's copies were taken, and before the
        references that protect them are released.
        """
        triples: Triples = {}
        serials: Serials = {}
        for request_id, entries in self._undelivered.items():
            for boundary in sorted(entries):
                entry = entries[boundary]
                if entry.moving:
                    continue
                for candidate in self._offered(entry):
                    triples.setdefault(request_id, []).append(
                        (candidate.group_id, candidate.block.block_id, boundary)
                    )
                    serials.setdefault(request_id, []).append(
                        self._pins.take(request_id, candidate.block)
                    )
        self._undelivered = {
            request_id: pending
            for request_id, entries in self._undelivered.items()
            if (pending := {b: e for b, e in entries.items() if e.moving})
        }
        return triples or None, serials or None

    def _offered(self, entry: Undelivered) -> list[Candidate]:
        proven = [entry.ready[g] for g in sorted(entry.ready) if entry.ready[g].is_proven]
        if len(proven) == len(self._recurrent):
            return proven
        # vLLM's own partial tail covers the groups that it ends inside of.
        return [
            candidate
            for candidate in proven
            if entry.is_own_tail
            and candidate.boundary % self._recurrent[candidate.group_id].block_size
        ]

    # Lifetimes

    def forget(self, request_id: str) -> list[KVCacheBlock]:
        """Drop all that a request has undelivered, and end its pins.

        Returns:
            The pinned blocks, for the caller to return to the pool.
        """
        if self._choices is None:
            return []
        self._undelivered.pop(request_id, None)
        self._choices.forget(request_id)
        return self._pins.end_all_of(request_id)

    def take_captured(self) -> list[KVCacheBlock]:
        """End the pins that the connector gives back.

        Returns:
            Their blocks, for the caller to return to the pool.
        """
        if self._connector is None:
            return []
        try:
            serials = list(self._connector.take_captured_recurrent_boundaries())
        except Exception:
            logger.exception(
                "Connector %s failed to tell which recurrent boundary blocks it "
                "has captured; their pins stay until the requests end.",
                type(self._connector).__name__,
            )
            return []
        return self._pins.end(serials)
