"""The connector that vLLM loads: translates the engine's objects, decides nothing.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SparkCacheConnector",
      "kv_connector_module_path": "sparkcache_connector.connector",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The scheduler's side feeds :class:`.scheduler.coordinator.Coordinator`, a rank's side
:class:`.worker.rank.Rank`. Loads are always asynchronous: a hybrid reads its state before a
synchronous load would have arrived.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from sparkcache_connector import config as configuration
from sparkcache_connector.config import Config
from sparkcache_connector.connector_stats import SparkCachePromMetrics, SparkCacheStats
from sparkcache_connector.contract import MEMO_ALGORITHM as CONTRACT_MEMO
from sparkcache_connector.contract import require, shipped_contract
from sparkcache_connector.engine_identity import engine_identity
from sparkcache_connector.file_memo import DigestMemo
from sparkcache_connector.geometry import describe, group_shapes, token_dimension_of_backends
from sparkcache_connector.identity import Identity
from sparkcache_connector.messages import Orders, RankReport
from sparkcache_connector.pages import recurrent_groups
from sparkcache_connector.scheduler.quorum import Report
from sparkcache_connector.scheduler_side import SchedulerSide
from sparkcache_connector.startup import EngineFacts, refuse_unsafe
from sparkcache_connector.store.errors import Unusable
from sparkcache_connector.telemetry.health import DIRECTORY as HEALTH
from sparkcache_connector.telemetry.health import HealthPage
from sparkcache_connector.telemetry.metrics import Counts
from sparkcache_connector.weights import MEMO_ALGORITHM as WEIGHT_MEMO
from sparkcache_connector.worker.placement import Fence, PlacementOptions, open_placement
from sparkcache_connector.worker.rank import Rank, open_store

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.sparkcache")


@dataclass
class StepOrders(KVConnectorMetadata):
    """What a step tells the ranks, as the engine carries it."""

    orders: Orders


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """What ranks answer, as the engine carries it."""

    reports: tuple[RankReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Put the answers of several ranks together."""
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports)


@dataclass
class Introduction(KVConnectorHandshakeMetadata):
    """A rank's whole inventory, exchanged before the first request."""

    inventory: tuple[Report, ...]


class SparkCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Persistent KV cache for attention-only and hybrid models."""

    supports_recurrent_boundary_blocks = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        resolution = configuration.resolve(extra, os.environ)
        configuration.warn_legacy(resolution)
        self._config = resolution.config
        self._counts = Counts()
        self._shapes = group_shapes(kv_cache_config)
        recurrent = bool(recurrent_groups(self._shapes))
        refuse_unsafe(_facts(vllm_config, recurrent=recurrent))
        self._root = _cache_root(self._config)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._overlay = _check_contract(self._root, recurrent=recurrent)
        self._side: SchedulerSide | None = None
        self._rank: Rank | None = None
        self._inventory: tuple[Report, ...] = ()
        self._invalid_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._side = SchedulerSide(vllm_config, kv_cache_config, self._config, self._counts)

    @property
    def requires_kv_delivery(self) -> bool:
        """Best effort: what is not stored is computed again."""
        return False

    # A rank's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the engine's memory, name its identity, open the store."""
        # Imports the engine's worker, which the other processes need not.
        from sparkcache_connector.worker.weights_watch import WeightsWatch

        vllm_config = self._vllm_config
        layers = vllm_config.compilation_config.static_forward_context
        backends = {
            name: layers[name].get_attn_backend()
            for name in kv_caches
            if hasattr(layers.get(name), "get_attn_backend")
        }
        cache_dtype = str(vllm_config.cache_config.cache_dtype)
        geometry = describe(
            self._kv_cache_config,
            kv_caches,
            token_dimension_of_backends(backends, cache_dtype),
            {name: isa for name in kv_caches if (isa := _cpu_isa(layers.get(name)))},
        )
        rank = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size
        identity = engine_identity(
            vllm_config,
            self._config,
            groups=geometry.groups,
            backends=backends,
            kv_layout=_kv_layout(),
            engine_version=vllm.__version__,
            overlay=self._overlay,
            rank=rank,
            memo=DigestMemo(self._root / f"weights-{rank}.memo", WEIGHT_MEMO),
        )
        digest = identity.digest()
        _describe_identity(self._root, identity)
        placement = open_placement(geometry.layout, _placement_options(self._config))
        name = _rank_name(vllm_config, rank)
        store = open_store(str(self._root / name), digest, rank, self._config)
        self._rank = Rank(
            store,
            placement,
            geometry,
            rank,
            self._config,
            self._counts,
            weights_changed=WeightsWatch().changed,
            page=_health_page(self._root / HEALTH / f"{name}.json"),
        )
        self._inventory = self._rank.introduce()
        _log.info(
            "SparkCache rank %d: identity %s, %d roots held, %s placement, %d groups",
            rank,
            digest.hex()[:16],
            0 if isinstance(store, Unusable) else len(store.inventory()),
            placement.name,
            len(geometry.shapes),
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The inventory that this rank starts with."""
        return Introduction(self._inventory)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start loads and publications that need nothing of this step's forward."""
        self._worker.before_forward(self._orders, self._fence)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: nothing to wait for."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Whole pages are captured after the forward, not layer by layer."""

    def wait_for_save(self) -> None:
        """Start publications that this step's forward completed; waits for nothing."""
        self._worker.after_forward(self._orders, self._fence)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that ended; publications never hold a request."""
        self._worker.cancel(finished_req_ids)
        ended = self._worker.ended_loads()
        self._invalid_blocks |= ended.invalid_blocks
        self._worker.collect()  # the engine asks for the counts next, then for the report
        return None, set(ended.requests) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, with the very step that reports their requests."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank has to say."""
        report = self._worker.report()
        return StepReports((report,)) if report.says_something else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this role counted since the last step."""
        return SparkCacheStats.taken_from(self._counts)

    def shutdown(self) -> None:
        """Drain restores, finish publications, close the store."""
        if self._rank is not None:
            self._rank.close()

    # The scheduler's side

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn what every rank holds before the first request."""
        for rank, introduction in metadata.items():
            if isinstance(introduction, Introduction):
                self._scheduler.coordinator.absorb(RankReport(rank, introduction.inventory))
        _log.info("SparkCache: %d roots on every rank", len(self._scheduler.coordinator.quorum))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Know the pool whose blocks are referenced while they are copied."""
        self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Digest a request's content once."""
        self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer the longest root that every rank holds."""
        tokens = self._scheduler.coordinator.lookup(request.request_id, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Begin the load of what was offered."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """One step's orders."""
        return StepOrders(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the ranks said."""
        meta = connector_output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, StepReports) else ()
        self._scheduler.absorb(reports, connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request of a one-group model ended."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are referenced by us if they are still needed."""
        self._scheduler.finished(request, block_ids)
        return False, None

    def get_recurrent_publication_boundaries(self, request: Request) -> tuple[int, ...]:
        """Where prefill stops so that a root can be left."""
        return self._scheduler.coordinator.publication_boundaries(request.request_id)

    def take_captured_recurrent_boundaries(self) -> Iterable[int]:
        """Pins are given back at once: what is published is referenced by us."""
        return self._scheduler.take_serials()

    def reset_cache(self) -> bool:
        """The engine's weights may have changed under it: off until it is started again."""
        self._scheduler.coordinator.switch_off("engine_reset")
        _log.warning(
            "SparkCache is off until the engine restarts: its caches were reset together with the "
            "connector's, as is done when weights change, and the identity is not known any more"
        )
        return True

    def has_pending_push_work(self) -> bool:
        """Keep stepping until every publication is reported."""
        return self._scheduler.coordinator.has_work

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics out of their plain data."""
        return SparkCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Metrics of the connector on vLLM's own endpoint."""
        return SparkCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _worker(self) -> Rank:
        assert self._rank is not None, "register_kv_caches comes first"
        return self._rank

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._side is not None, "this is a rank's connector"
        return self._side

    @property
    def _orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        return metadata.orders

    def _fence(self) -> Fence:
        return self._worker.fence()


def _facts(vllm_config: VllmConfig, *, recurrent: bool) -> EngineFacts:
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return EngineFacts(
        kv_role=str(transfer.kv_role),
        load_failure_policy=str(transfer.kv_load_failure_policy),
        prefix_caching=bool(cache.enable_prefix_caching),
        recurrent=recurrent,
        mamba_cache_mode=str(cache.mamba_cache_mode),
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
    )


def _cache_root(config: Config) -> Path:
    if config.root:
        return Path(config.root)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "sparkcache"


def _describe_identity(root: Path, identity: Identity) -> None:
    """Leave what the digest stands for beside the cache roots, for whoever compares two."""
    directory = root / "identities"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / f"{identity.digest().hex()}.json").write_bytes(identity.to_bytes())
    except OSError as error:
        _log.warning("SparkCache: the identity cannot be described on disk: %s", error)


def _health_page(path: Path) -> HealthPage | None:
    try:
        return HealthPage(path)
    except OSError as error:
        _log.warning("SparkCache: the ranks' state cannot be described on disk: %s", error)
        return None


def _rank_name(vllm_config: VllmConfig, rank: int) -> str:
    """Directory of one rank; replicas of one model on one machine have one each."""
    parallel = vllm_config.parallel_config
    replica = f"replica-{parallel.data_parallel_rank}-" if parallel.data_parallel_size > 1 else ""
    return f"{replica}rank-{rank}"


def _check_contract(root: Path, *, recurrent: bool) -> str:
    contract = shipped_contract(vllm.__version__)
    site = Path(vllm.__file__).parent.parent
    memo = DigestMemo(root / "contract.memo", CONTRACT_MEMO)
    state = require(site, contract, memo, recurrent=recurrent)
    _log.info("SparkCache: vLLM %s is in state %r of its contract", contract.target, state)
    return f"{contract.sha256}:{state}"


def _cpu_isa(layer: Any) -> str:
    """The instruction set of a CPU attention layer's kernels; empty for other layers."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = getattr(layer, "impl", None)
    return str(impl.isa) if isinstance(impl, CPUAttentionBackendImpl) else ""


def _kv_layout() -> str:
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return str(get_kv_cache_layout())


def _placement_options(config: Config) -> PlacementOptions:
    library = config.cuda_placement_library
    mode = config.cuda_restore
    assert mode in ("auto", "on", "off")
    return PlacementOptions(
        mode=mode,  # type: ignore[arg-type]
        library=Path(library) if library else None,
        library_sha256=config.cuda_placement_library_sha256 or None,
        arena_bytes=config.cuda_placement_arena_bytes,
    )
