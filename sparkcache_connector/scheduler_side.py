"""The scheduler's side of the adapter: vLLM's objects in the coordinator's words.

Translates and keeps the references to blocks that publications read; every decision is
:class:`.scheduler.coordinator.Coordinator`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

from sparkcache_connector.config import Config
from sparkcache_connector.geometry import group_shapes, pages_are_divisible
from sparkcache_connector.messages import Orders, PublishOrder, RankReport
from sparkcache_connector.request_content import Adapters, content_of, items_are_numbered
from sparkcache_connector.scheduler.coordinator import Coordinator, ScheduledRequest, StepInput
from sparkcache_connector.telemetry.metrics import Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.sparkcache")
_NOTHING_TO_DO: Final = Orders()


class SchedulerSide:
    """Translates between the scheduler's objects and the coordinator's values."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: Config,
        counts: Counts,
    ) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        _, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._config = config
        self.coordinator = Coordinator(
            config,
            shapes=group_shapes(kv_cache_config),
            hash_block=hash_block,
            ranks=vllm_config.parallel_config.tensor_parallel_size,
            max_tokens=vllm_config.model_config.max_model_len,
            counts=counts,
            divisible_pages=pages_are_divisible(vllm_config),
        )
        self._adapters = Adapters()
        self._numbered = items_are_numbered(vllm_config)
        self._pool: BlockPool | None = None
        self._held: dict[int, list[KVCacheBlock]] = {}
        self._serials: list[int] = []
        _log.info(
            "SparkCache is on: publish %s, restore %s, boundaries every %d tokens in units of %d",
            config.publishes,
            config.restores,
            config.checkpoint_interval_tokens,
            self.coordinator.unit,
        )

    def bind(self, pool: BlockPool) -> None:
        """Know the pool whose blocks are referenced while they are copied."""
        self._pool = pool
        # However slow the disk: at least half of the pool stays the engine's.
        self.coordinator.held.limit = pool.num_gpu_blocks // 2

    def add(self, request: Request) -> None:
        """A request arrived: digest its content once."""
        content = content_of(request, self._config, self._adapters, numbered=self._numbered)
        if isinstance(content, str):
            self.coordinator.uncacheable(content)
        else:
            self.coordinator.add(request.request_id, content)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks were allocated: begin the load of what was offered, if it was taken."""
        groups = blocks.blocks

        def is_private(group: int, index: int) -> bool:
            block = groups[group][index]
            return block.ref_cnt == 1 and block.block_hash is None

        tables = [[block.block_id for block in group] for group in groups]
        self.coordinator.allocated(request.request_id, external, tables, is_private)

    def step(self, output: SchedulerOutput) -> Orders:
        """One step's orders; what they read is referenced before the step is dispatched."""
        pins = getattr(output, "recurrent_boundary_pins", None)
        for serials in (pins or {}).values():
            self._serials.extend(serials)
        if self.coordinator.idle and not (output.scheduled_new_reqs or output.preempted_req_ids):
            return _NOTHING_TO_DO  # most steps of a busy engine
        orders, new = self.coordinator.step(_step_input(output, self.coordinator.watched))
        for order in new:
            self._hold(order)
        for line in self.coordinator.take_log():
            _log.warning("%s", line)
        return orders

    def absorb(self, reports: Iterable[RankReport], ended_loads: Iterable[str]) -> None:
        """What the ranks said, and which loads every rank has ended."""
        for report in reports:
            self.coordinator.absorb(report)
        self.coordinator.loads_ended(ended_loads)
        for number in self.coordinator.held.take_released():
            assert self._pool is not None
            # The tail of a prefix is evicted before its head, as the engine does it.
            self._pool.free_blocks(reversed(self._held.pop(number)))

    def finished(self, request: Request, tables: tuple[list[int], ...]) -> None:
        """A request ended, before its blocks are freed."""
        order = self.coordinator.finished(
            request.request_id,
            request.all_token_ids,
            computed=request.num_computed_tokens,
            in_flight=request.num_in_flight_tokens,
            tables=tables,
        )
        if order:
            self._hold(order)
            self.coordinator.queue(order)

    def take_serials(self) -> list[int]:
        """Pins handed over since the last call."""
        serials, self._serials = self._serials, []
        return serials

    def _hold(self, order: PublishOrder) -> None:
        assert self._pool is not None
        blocks = [self._pool.blocks[b] for group in order.groups for b in group.blocks]
        self._pool.touch(blocks)
        self._held[order.number] = blocks


def _step_input(output: SchedulerOutput, watched: Collection[str]) -> StepInput:
    """What the coordinator has to know: most requests of most steps only decode."""
    scheduled = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    requests = [
        ScheduledRequest(
            new.req_id, new.num_computed_tokens, scheduled.get(new.req_id, 0), new.block_ids, True
        )
        for new in output.scheduled_new_reqs
    ]
    requests.extend(
        ScheduledRequest(
            request, computed, scheduled.get(request, 0), blocks, request in cached.resumed_req_ids
        )
        for request, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        )
        if request in watched
    )
    return StepInput(
        requests,
        output.preempted_req_ids or (),
        getattr(output, "recurrent_boundary_blocks", None),
        output.partial_tail_offloads,
        time.monotonic(),
    )
