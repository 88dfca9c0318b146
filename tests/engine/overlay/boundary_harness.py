"""A real vLLM scheduler on a hybrid geometry, and a model of what its worker does.

Only the worker is modelled, because its physics are the independent oracle: a
recurrent block holds the state of one exact prefix, and advancing it from any
other state gives garbage. The module also runs on the unpatched vLLM 0.28.0, so
that both engines can be driven by one script.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}


# Geometry


@dataclass(frozen=True)
class Group:
    kind: str  # "full", "mamba" or "sliding"
    block: int
    speculative_blocks: int = 0
    eagle: bool = False

    def spec(self) -> KVCacheGroupSpec:
        if self.kind == "mamba":
            spec: Any = MambaSpec(
                block_size=self.block,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=self.speculative_blocks,
            )
        elif self.kind == "full":
            spec = FullAttentionSpec(
                block_size=self.block, num_kv_heads=1, head_size=1, dtype=torch.float32
            )
        else:
            spec = SlidingWindowSpec(
                block_size=self.block,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=4 * self.block,
            )
        return KVCacheGroupSpec([f"{self.kind}{id(self)}"], spec, is_eagle_group=self.eagle)


@dataclass(frozen=True)
class Geometry:
    """KV cache groups, the hash block, and the block size that chunks are floored to.

    ``chunk_block`` is what the engine calls ``cache_config.block_size``: the
    smallest group's, which is the recurrent one's when all groups share a size.
    """

    groups: tuple[Group, ...]
    hash_block: int
    chunk_block: int

    @property
    def scheduler_block(self) -> int:
        return math.lcm(*(g.block for g in self.groups))

    @property
    def recurrent(self) -> tuple[int, ...]:
        return tuple(i for i, g in enumerate(self.groups) if g.kind == "mamba")


# Hybrid of a real deployment: recurrent block 2,304, seven speculative slots.
GLM_256 = Geometry((Group("full", 256), Group("mamba", 2304, 7)), 256, 2304)
GLM_16 = Geometry(
    (Group("full", 256), Group("mamba", 2304, 7), Group("full", 16, eagle=True)), 16, 2304
)
# The same as the engine itself configures it: chunks are floored to the draft's block.
GLM_16_FINE = Geometry(GLM_16.groups, 16, 16)
TWO_GROUPS = Geometry(
    (Group("full", 256), Group("mamba", 2304, 7), Group("mamba", 2304, 7)), 256, 2304
)
# Every group has the same block, as on CPU and on most GPUs.
SAME_BLOCK = Geometry((Group("full", 2304), Group("mamba", 2304)), 256, 2304)
COARSE = Geometry((Group("full", 2304), Group("mamba", 2304)), 2304, 2304)


# Connectors


class Metadata(KVConnectorMetadata):
    pass


class Recorder(KVConnectorBase_V1, SupportsHMA):
    """A connector that does not know of recurrent boundaries."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.matched: dict[str, int] = {}
        self.outputs: list[Any] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        matched = self.matched.get(request.request_id, 0) - num_computed
        return (matched, True) if matched > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if num_external:
            self.matched.pop(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        self.outputs.append(scheduler_output)
        return Metadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return bool(self.extra.get("delay_free")), None


class OptedIn(Recorder):
    """Opts in; what it chooses and gives back is set by the test."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.chosen: dict[str, Any] = {}
        self.choose: Callable[[Any], Any] | None = None
        self.captured: list[Any] = []
        self.asked: list[str] = []

    @property
    def supports_recurrent_boundary_blocks(self) -> bool:
        return True

    def get_recurrent_publication_boundaries(self, request: Any) -> Any:
        self.asked.append(request.request_id)
        if self.choose is not None:
            return self.choose(request)
        return self.chosen.get(request.request_id, ())

    def take_captured_recurrent_boundaries(self) -> Iterable[int]:
        captured, self.captured = self.captured, []
        return captured


class OtherOptedIn(OptedIn):
    """A second class, so that MultiConnector has two different children."""


class Truthy(Recorder):
    """A double that answers with something truthy that is not True."""

    supports_recurrent_boundary_blocks = 1  # type: ignore[assignment]


# The worker

State = tuple[Any, ...]


class Worker:
    """Contents of every block, changed in the order in which the worker changes them."""

    def __init__(self, geometry: Geometry, requests: dict[str, Request]) -> None:
        self.geometry = geometry
        self.requests = requests
        self.content: dict[int, State] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.slot: dict[tuple[str, int], int] = {}
        self.garbage = 0
        # Tokens that a step samples are in the state before the scheduler hears of them.
        self.sampled: dict[str, list[int]] = {}

    def state(self, group: int, request_id: str, num_tokens: int) -> State:
        known = self.requests[request_id]._all_token_ids
        tokens = [*known, *self.sampled.get(request_id, ())][:num_tokens]
        return ("state", group, num_tokens, hash(tuple(tokens)))

    def load(self, request_id: str, table: tuple[list[int], ...], num_tokens: int) -> None:
        """An external load arrives: the states after exactly this many tokens."""
        for group in self.geometry.recurrent:
            slot = cdiv(num_tokens, self.geometry.groups[group].block) - 1
            self.content[table[group][slot]] = self.state(group, request_id, num_tokens)

    def run(self, output: Any, accepted: dict[str, int], sampled: dict[str, list[int]]) -> None:
        """Execute one step; ``accepted`` tells how many scheduled tokens survive."""
        self.sampled = sampled
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            for group in self.geometry.recurrent:
                self.slot.pop((request_id, group), None)
        self._update_tables(output)
        before = dict(self.content)
        for move in output.kv_cache_block_copies or ():
            self.content[move.dst_block_id] = before.get(move.src_block_id, ("empty",))
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            start = computed[request_id]
            kept = accepted.get(request_id, scheduled)
            for group, spec in enumerate(self.geometry.groups):
                table = self.tables[request_id][group]
                if spec.kind == "mamba":
                    self._advance(request_id, group, table, start, scheduled, kept)
                else:
                    for slot in range(start // spec.block, cdiv(start + scheduled, spec.block)):
                        if table[slot]:
                            self.content[table[slot]] = ("kv", group, request_id, slot)

    def _update_tables(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for table, ids in zip(self.tables[request_id], new_ids, strict=True):
                    table.extend(ids)

    def _advance(
        self, request_id: str, group: int, table: list[int], start: int, scheduled: int, kept: int
    ) -> None:
        spec = self.geometry.groups[group]
        previous = self.slot.get((request_id, group), (start - 1) // spec.block)
        current = cdiv(start + scheduled, spec.block) - 1
        self.slot[request_id, group] = current
        if previous not in (-1, current):
            self.content[table[current]] = self.content.get(table[previous], ("empty",))
        found = self.content.get(table[current], ("empty",))
        if start > self.requests[request_id].num_tokens:
            # A step of a request that has ended: its tokens are not known any more.
            self.content[table[current]] = ("ended", request_id)
        elif start == 0 or found == self.state(group, request_id, start):
            self.content[table[current]] = self.state(group, request_id, start + kept)
            # Speculation may have crossed the end of a block inside one step.
            end = (start + kept) // spec.block * spec.block
            if kept < scheduled and end > start and table[end // spec.block - 1]:
                self.content[table[end // spec.block - 1]] = self.state(group, request_id, end)
        else:
            self.garbage += 1
            self.content[table[current]] = ("garbage", self.garbage, found, start)
        for slot in range(current + 1, len(table)):
            self.content[table[slot]] = ("speculation", request_id)


# The engine


@functools.cache
def _model_config() -> ModelConfig:
    with tempfile.TemporaryDirectory(prefix="sparkcache-overlay-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        return ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float32")


@dataclass
class Step:
    """One scheduled step and what it handed over."""

    output: Any
    tokens: dict[str, int]
    blocks: dict[str, list[tuple[int, int, int]]]
    pins: dict[str, list[int]]
    tails: dict[str, list[tuple[int, int, int]]]


@dataclass
class Engine:
    scheduler: Scheduler
    geometry: Geometry
    worker: Worker
    depth: int = 1
    draft: Callable[[str], list[int]] | None = None
    accept: Callable[[str, list[int]], int] | None = None
    inflight: deque[tuple[Any, dict[str, Any]]] = field(default_factory=deque)
    requests: dict[str, Request] = field(default_factory=dict)
    load_results: list[tuple[str, set[int] | None]] = field(default_factory=list)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def manager(self) -> Any:
        return self.scheduler.kv_cache_manager

    @property
    def pool(self) -> Any:
        return self.manager.block_pool

    @property
    def free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()

    def block(self, block_id: int) -> Any:
        return self.pool.blocks[block_id]

    def is_free(self, block_id: int) -> bool:
        return any(b.block_id == block_id for b in self.pool.free_block_queue.get_all_free_blocks())

    def add(
        self,
        request_id: str,
        prompt: int | list[int],
        max_tokens: int = 16,
        chosen: Any = None,
        priority: int = 0,
        mm_features: list[Any] | None = None,
        **sampling: Any,
    ) -> Request:
        tokens = prompt if isinstance(prompt, list) else token_ids(request_id, prompt)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **sampling
            ),
            pooling_params=None,
            mm_features=mm_features,
            priority=priority,
            arrival_time=float(len(self.requests)),
            block_hasher=get_request_block_hasher(self.geometry.hash_block, sha256),
        )
        if chosen is not None:
            self.connector.chosen[request_id] = chosen
        self.requests[request_id] = request
        self.worker.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Step:
        output = self.scheduler.schedule()
        # The worker gets a snapshot: what it samples is decided when it runs.
        ends = {
            request_id: not self.scheduler.requests[request_id].is_prefill_chunk
            for request_id in output.num_scheduled_tokens
        }
        self.inflight.append((output, ends))
        return Step(
            output,
            dict(output.num_scheduled_tokens),
            dict(getattr(output, "recurrent_boundary_blocks", None) or {}),
            dict(getattr(output, "recurrent_boundary_pins", None) or {}),
            dict(output.partial_tail_offloads or {}),
        )

    def complete(self) -> Any:
        """Run the oldest step in flight and give its results to the scheduler."""
        output, ends = self.inflight.popleft()
        sampled: list[list[int]] = []
        accepted: dict[str, int] = {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            if not ends[request_id]:
                sampled.append([])
                continue
            kept = self.accept(request_id, drafts) if drafts and self.accept else 0
            position = self.requests[request_id].num_tokens
            sampled.append([(position + i) % 500 for i in range(kept + 1)])
            accepted[request_id] = scheduled - len(drafts) + kept
        self.worker.run(
            output, accepted, dict(zip(output.num_scheduled_tokens, sampled, strict=True))
        )
        self.worker.sampled = {}
        connector_output = None
        if self.load_results:
            connector_output = KVConnectorOutput(
                finished_recving={r for r, _ in self.load_results if r} or None,
                invalid_block_ids=set().union(*(bad or set() for _, bad in self.load_results)),
            )
            self.load_results = []
        req_ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={r: i for i, r in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=connector_output,
        )
        outputs = self.scheduler.update_from_output(output, result)
        if self.draft is not None:
            ids = [r for r in req_ids if r in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [self.draft(r) for r in ids]))
        return outputs

    def step(self) -> Step:
        """Schedule one step and complete the oldest, keeping ``depth - 1`` in flight."""
        step = self.schedule()
        if len(self.inflight) >= self.depth:
            self.complete()
        return step

    def drain(self) -> None:
        while self.inflight:
            self.complete()

    def run(self, steps: int = 400) -> list[Step]:
        """Step until every request has ended."""
        taken = []
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                self.drain()
                return taken
            taken.append(self.step())
        raise AssertionError(f"requests still unfinished after {steps} steps: {self.requests}")

    def steps_until(self, request_id: str, computed: int) -> list[Step]:
        """Step until a request has been scheduled up to at least this many tokens."""
        taken = []
        while self.requests[request_id].num_computed_tokens < computed:
            taken.append(self.step())
            assert len(taken) < 200, "no progress"
        return taken

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def finish_load(self, request_id: str, num_tokens: int) -> None:
        self.worker.load(request_id, self.manager.get_block_ids(request_id), num_tokens)
        self.load_results.append((request_id, None))

    def holds(self, group: int, block_id: int, request_id: str, boundary: int) -> bool:
        """The oracle: does the block physically hold the state of that prefix?"""
        return self.worker.content.get(block_id) == self.worker.state(group, request_id, boundary)

    def registered(self, group: int, request_id: str, boundary: int) -> set[int]:
        """The prefix cache's own answer: blocks hashed as that prefix in that group."""
        prefix = self.requests[request_id].block_hashes[boundary // self.geometry.hash_block - 1]
        found = self.pool.get_cached_block(prefix, [group])
        return {block.block_id for block in found or ()}


def token_ids(seed: str, count: int) -> list[int]:
    start = sum(seed.encode()) % 97
    return [(start + i * (1 + i // 251)) % 500 for i in range(count)]


@contextlib.contextmanager
def concurrent_batches(count: int) -> Iterator[None]:
    """CPU forces one batch at a time; overlap is a property of the configuration."""
    with patch.object(VllmConfig, "max_concurrent_batches", PropertyMock(return_value=count)):
        yield


def make_engine(
    geometry: Geometry = GLM_256,
    connector: str | None = "OptedIn",
    *,
    budget: int = 8192,
    blocks: int = 2048,
    max_seqs: int = 4,
    depth: int = 1,
    asynchronous: bool = False,
    role: str = "kv_both",
    policy: str = "recompute",
    priority: bool = False,
    speculative: int = 0,
    multi_module_mtp: bool = False,
    whole_mm_items: bool = False,
    long_prefill: int = 0,
    extra: dict[str, Any] | None = None,
) -> Engine:
    init_none_hash(sha256)
    transfer = None
    if connector is not None:
        options: dict[str, Any] = {"kv_role": role, "kv_load_failure_policy": policy}
        if connector == "MultiConnector":
            children = [
                {
                    "kv_connector": name,
                    "kv_connector_module_path": __name__,
                    "kv_role": role,
                    "kv_connector_extra_config": {},
                }
                for name in (extra or {})["children"]
            ]
            extra = {"connectors": children}
        else:
            options["kv_connector_module_path"] = __name__
        transfer = KVTransferConfig(
            kv_connector=connector, kv_connector_extra_config=extra or {}, **options
        )
    speculative_config = None
    if speculative:
        speculative_config = SpeculativeConfig(model="ngram", num_speculative_tokens=speculative)
        speculative_config.method = "mtp"
    model = copy.copy(_model_config())
    cache = CacheConfig(block_size=16, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            long_prefill_token_threshold=long_prefill,
            disable_chunked_mm_input=whole_mm_items,
            policy="priority" if priority else "fcfs",
            watermark=0.0,
        ),
        speculative_config=speculative_config,
        kv_transfer_config=transfer,
    )
    cache.block_size = geometry.chunk_block
    cache.mamba_cache_mode = "align"
    cache.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    kv_cache_config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[group.spec() for group in geometry.groups],
    )
    register_all_kvcache_specs(config)
    scheduler_class = AsyncScheduler if asynchronous else Scheduler
    mtp = patch.object(SpeculativeConfig, "use_multi_module_mtp", lambda self: multi_module_mtp)
    with concurrent_batches(depth), mtp:
        scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=geometry.scheduler_block,
            hash_block_size=geometry.hash_block,
        )
    return Engine(scheduler, geometry, Worker(geometry, {}), depth)
