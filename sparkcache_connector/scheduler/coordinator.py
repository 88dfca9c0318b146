"""The scheduler's side of the connector, over plain values.

Joins the parts that decide: context chains, restore plans, boundary policy, publication
attempts, the ledger of publications under way and the quorum. ``connector.py`` translates
the engine's objects into calls of this class and its answers into the engine's. Nothing here
blocks, opens a file or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sparkcache_connector.config import Config
from sparkcache_connector.context import ContentItem, ContextChain, Scope, UncacheableError
from sparkcache_connector.messages import LoadOrder, Orders, PublishOrder, RankReport
from sparkcache_connector.pages import GroupShape, recurrent_groups
from sparkcache_connector.scheduler.attempts import AttemptTracker, Granted
from sparkcache_connector.scheduler.block_orders import load_order, sources
from sparkcache_connector.scheduler.boundaries import (
    BoundaryPolicy,
    boundary_unit,
    finish_boundary,
)
from sparkcache_connector.scheduler.ledger import HeldBlocks, PublicationLedger, Refused
from sparkcache_connector.scheduler.planner import Offer, RestorePlan
from sparkcache_connector.scheduler.publication import Evidence, Topology
from sparkcache_connector.scheduler.quorum import Quorum
from sparkcache_connector.telemetry.metrics import Counts


@dataclass(frozen=True, slots=True)
class RequestContent:
    """What a request consists of, as far as its KV content depends on it.

    Attributes:
        prompt: token ids.
        scope: salt and adapter.
        items: multimodal content.
        may_read: False for requests that must see every token computed.
    """

    prompt: Sequence[int]
    scope: Scope
    items: tuple[ContentItem, ...] = ()
    may_read: bool = True


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request in one step.

    Attributes:
        request: its id.
        computed: tokens computed before the step.
        scheduled: tokens that the step computes.
        new_blocks: per group, blocks that joined its table; None for none.
        fresh_table: ``new_blocks`` is the whole table, not an addition.
    """

    request: str
    computed: int
    scheduled: int
    new_blocks: Sequence[Sequence[int]] | None
    fresh_table: bool


@dataclass(frozen=True, slots=True)
class StepInput:
    """One scheduler step.

    Attributes:
        requests: what is computed, new requests and watched ones at least.
        preempted: requests that lost their blocks.
        boundary_blocks: the overlay's field, as it came.
        partial_tails: vLLM's own field, as it came.
        now: monotonic seconds.
    """

    requests: Sequence[ScheduledRequest]
    preempted: Iterable[str]
    boundary_blocks: object
    partial_tails: object
    now: float


@dataclass(slots=True)
class _Request:
    content: RequestContent
    chain: ContextChain
    plan: RestorePlan
    offer: Offer | None = None
    restored: int = 0
    published: dict[int, bytes] = field(default_factory=dict)
    tables: list[list[int]] = field(default_factory=list)
    admitted: bool = False
    counted: bool = False


class Coordinator:
    """One engine's scheduler side.

    Args:
        config: the operator's options.
        shapes: the KV cache groups.
        hash_block: tokens per hash block of the engine.
        ranks: tensor-parallel ranks.
        max_tokens: the model's limit.
        counts: where everything is counted.
        divisible_pages: whether a boundary may fall inside an attention page.
    """

    def __init__(
        self,
        config: Config,
        *,
        shapes: Sequence[GroupShape],
        hash_block: int,
        ranks: int,
        max_tokens: int,
        counts: Counts,
        divisible_pages: bool = True,
    ) -> None:
        self._config = config
        self._shapes = tuple(shapes)
        recurrent = recurrent_groups(self._shapes)
        self.hybrid = bool(recurrent)
        self.unit = boundary_unit(config.chunk_tokens, hash_block)
        if not divisible_pages:
            self.unit = math.lcm(self.unit, *(shape.block_tokens for shape in self._shapes))
        self._policy = BoundaryPolicy(
            unit=self.unit,
            interval=config.checkpoint_interval_tokens,
            recurrent_block=max((self._shapes[g].block_tokens for g in recurrent), default=0),
            min_span=config.min_span_tokens,
            max_span=config.max_span_tokens or max_tokens,
        )
        self._counts = counts
        self._requests: dict[str, _Request] = {}
        self._loading: dict[str, LoadOrder] = {}
        self._pending = _Pending()
        self._told = (0, 0, 0)
        self._off = ""
        self.quorum = Quorum(ranks)
        # The caller, who knows the pool, sets its limit.
        self.held = HeldBlocks(ranks)
        self._ledger = PublicationLedger(ranks, config.max_delayed_stores)
        self._tracker = AttemptTracker(
            Topology(len(self._shapes), recurrent, hash_block),
            max_attempts=config.max_pending_publications,
            max_age=config.publication_max_age_seconds,
        )

    def switch_off(self, reason: str) -> None:
        """Offer and publish nothing from now on: what the bytes depend on is not known."""
        if self._off:
            return
        self._off = reason
        self._tracker.clear()
        for what in ("publish", "restore"):
            self._counts.set("sparkcache_switched_off", what, reason, "all", to=1)

    # Requests

    def add(self, request: str, content: RequestContent) -> None:
        """A request arrived. Uncacheable content is counted and never touched again."""
        if self._off:
            return
        chain = ContextChain(content.scope, content.items)
        try:
            chain.extend(content.prompt)
        except UncacheableError as error:
            self.uncacheable(error.reason.value)
            return
        offered = self._config.restores and content.may_read
        candidates = self._boundaries(chain, len(content.prompt) - 1) if offered else []
        plan = RestorePlan(candidates, min_span=self._config.min_span_tokens)
        self._requests[request] = _Request(content, chain, plan)

    def uncacheable(self, reason: str) -> None:
        """Count a request whose content has no digest."""
        self._counts.add("sparkcache_uncacheable_total", reason)
        self._counts.add("sparkcache_lookups_total", "uncacheable")

    def lookup(self, request: str, computed: int) -> int:
        """Tokens that can be loaded beyond ``computed``; asked on every scheduling pass."""
        state = self._requests.get(request)
        if state is None or self._off:
            return 0
        state.offer = None
        if request in self._loading or len(self._loading) >= self._config.max_pending_restores:
            return 0
        state.offer = state.plan.longest(self.quorum, computed=computed)
        return state.offer.boundary - computed if state.offer else 0

    def allocated(
        self,
        request: str,
        external: int,
        tables: Sequence[Sequence[int]],
        is_private: Callable[[int, int], bool],
    ) -> None:
        """Blocks were allocated for a request; with ``external`` tokens its load begins.

        Args:
            request: its id.
            external: tokens to load beyond the local prefix.
            tables: per group the whole block table.
            is_private: whether the block at (group, index) belongs to this request alone.
        """
        state = self._requests.get(request)
        if state is None or not external:
            return
        offer = state.offer
        if offer is None or offer.boundary < external:
            raise RuntimeError(f"{external} tokens of request {request} were never offered")
        local = offer.boundary - external
        order = load_order(
            request, offer, local, shapes=self._shapes, tables=tables, is_private=is_private
        )
        state.restored = offer.boundary
        self._loading[request] = order
        self._pending.loads.append(order)

    def publication_boundaries(self, request: str) -> tuple[int, ...]:
        """Where this request should leave a root; free of side effects."""
        state = self._requests.get(request)
        if state is None or self._off or not self._config.publishes:
            return ()
        targets = self._policy.targets(len(state.content.prompt), after=state.restored)
        return tuple(t for t in targets if not self.quorum.holds(state.chain.digest(t)))

    def finished(
        self,
        request: str,
        tokens: Sequence[int],
        *,
        computed: int,
        in_flight: int,
        tables: Sequence[Sequence[int]],
    ) -> PublishOrder | None:
        """A request ended, before its blocks are freed.

        Args:
            request: its id.
            tokens: its accepted tokens, prompt first.
            computed: tokens that count as computed.
            in_flight: of these, tokens of steps that have not completed.
            tables: per group its block table.

        Returns:
            A last publication, for models without recurrent state.
        """
        state = self._requests.pop(request, None)
        dropped = self._tracker.forget(request)
        if dropped:
            self._counts.add("sparkcache_attempts_dropped_total", "finished", by=dropped)
        if state is None or self._off or self.hybrid or not self._config.publishes:
            return None
        if request in self._loading:
            return None
        boundary = finish_boundary(
            computed=computed, in_flight=in_flight, tokens=len(tokens), unit=self.unit
        )
        seen = state.chain.seen_tokens
        deepest = max([state.restored, *state.published], default=0)
        if boundary <= max(deepest, self._config.min_span_tokens - 1):
            return None
        try:
            state.chain.extend(tokens[seen:])
        except UncacheableError:
            return None
        root = state.chain.digest(boundary)
        if self.quorum.holds(root):
            return None
        state.tables = [list(table) for table in tables]
        return self._order(request, state, boundary, root, {}, ready=True)

    # Steps

    def step(self, step: StepInput) -> tuple[Orders, list[PublishOrder]]:
        """One scheduler step.

        Returns:
            What to tell the ranks, and of it the publications that are new: the caller
            references their blocks before this step is dispatched.
        """
        for request in step.preempted:
            self._preempted(request)
        expired = self._tracker.expire(step.now)
        if expired:
            self._counts.add("sparkcache_attempts_dropped_total", "too_old", by=expired)
        evidence = step.boundary_blocks if isinstance(step.boundary_blocks, dict) else {}
        tails = step.partial_tails if isinstance(step.partial_tails, dict) else {}
        new: list[PublishOrder] = []
        for scheduled in step.requests:
            state = self._requests.get(scheduled.request)
            if state is None:
                continue
            _extend_tables(state, scheduled)
            if not state.admitted:
                self._admit(scheduled.request, state, step.now)
            reached = scheduled.computed + scheduled.scheduled
            raw = evidence.get(scheduled.request) if evidence else None
            found = None
            if raw is not None:
                found = Evidence.parse(raw, tails.get(scheduled.request), reached)
            result = self._tracker.step(scheduled.request, found, reached, self.quorum.holds)
            for refusal in result.refused:
                self._counts.add("sparkcache_proofs_refused_total", refusal.reason.value)
                self._pending.log.append(refusal.describe(scheduled.request))
            for granted in result.granted:
                order = self._grant(scheduled.request, state, granted)
                if order:
                    new.append(order)
        self._gauge()
        pending, self._pending = self._pending, _Pending(log=self._pending.log)
        orders = Orders(
            tuple(pending.loads),
            (*pending.publications, *new),
            tuple(pending.withdrawals),
            self.quorum.out_of_step if pending.resync else frozenset(),
            self._off,
        )
        return orders, new

    def queue(self, order: PublishOrder) -> None:
        """Send a publication with the next step."""
        self._pending.publications.append(order)

    def absorb(self, report: RankReport) -> None:
        """What one rank said with one step."""
        for inventory in report.inventory:
            outcome = self.quorum.absorb(inventory)
            self._counts.add("sparkcache_inventory_reports_total", outcome.value)
            self._pending.resync |= bool(self.quorum.out_of_step)
        for load in report.failed_loads:
            state = self._requests.get(load.request)
            if state:
                state.plan.exclude(load.root)
                state.restored = 0
            if load.quarantined:
                self.quorum.discard(report.rank, load.root)
        if report.switched_off:
            self.switch_off(report.switched_off)
        for number in report.copied:
            self.held.read(report.rank, number)
        for publication in report.publications:
            self.held.read(report.rank, publication.number)
            settled = self._ledger.report(report.rank, publication.number, publication.result)
            if settled and settled.withdraw:
                self._pending.withdrawals.append(settled.root)
                self._counts.add("sparkcache_withdrawals_total")

    def loads_ended(self, requests: Iterable[str]) -> None:
        """Every rank has reported these loads, received or failed."""
        for request in requests:
            self._loading.pop(request, None)

    def take_log(self) -> list[str]:
        """Lines for the operator since the last call."""
        lines, self._pending.log = self._pending.log, []
        return lines

    @property
    def watched(self) -> Collection[str]:
        """Requests that a step may bring further; the steps of others need not be told."""
        return self._tracker.requests

    @property
    def idle(self) -> bool:
        """Whether :meth:`step` would do and say nothing for requests that only decode."""
        pending = self._pending
        return not (
            self._tracker.requests
            or self._off
            or pending.orders_something
            or pending.log
            or self._gauges() != self._told
        )

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping although no request runs."""
        return bool(len(self._ledger) or self._pending.publications or self._pending.withdrawals)

    # Parts

    def _boundaries(self, chain: ContextChain, last: int) -> list[tuple[int, bytes]]:
        end = min(chain.tokens, last)
        return [(b, chain.digest(b)) for b in range(self.unit, end + 1, self.unit)]

    def _preempted(self, request: str) -> None:
        self._tracker.preempt(request)
        state = self._requests.get(request)
        if state:
            state.tables = []

    def _admit(self, request: str, state: _Request, now: float) -> None:
        state.admitted = True
        looked_up = self._config.restores and state.content.may_read
        outcome = ("hit" if state.restored else "miss") if looked_up else "not_allowed"
        self._counts.add("sparkcache_lookups_total", outcome)
        if state.restored:
            self._counts.add("sparkcache_restored_tokens_total", by=state.restored)
        chosen = self.publication_boundaries(request)
        if not chosen:
            return
        targets = [(t, state.chain.digest(t)) for t in chosen]
        last = self._policy.targets(len(state.content.prompt))[-1]
        refused = self._tracker.admit(request, targets, last_target=last, now=now)
        if refused:
            self._counts.add("sparkcache_attempts_dropped_total", "too_many", by=refused)

    def _grant(self, request: str, state: _Request, granted: Granted) -> PublishOrder | None:
        publication = granted.publication
        proven = dict(publication.proven)
        return self._order(request, state, publication.target, granted.root, proven, ready=False)

    def _order(
        self,
        request: str,
        state: _Request,
        boundary: int,
        root: bytes,
        proven: dict[int, int],
        *,
        ready: bool,
    ) -> PublishOrder | None:
        groups = sources(boundary, shapes=self._shapes, tables=state.tables, proven=proven)
        if groups is None:
            self._skip("source_missing")
            return None
        blocks = sum(len(group.blocks) for group in groups)
        if not self.held.room_for(blocks):
            self._skip("too_many_held_blocks")
            return None
        number = self._ledger.open(root)
        if isinstance(number, Refused):
            self._skip(number.value)
            return None
        base = self._base(state, boundary)
        state.published[boundary] = root
        self.held.hold(number, blocks)
        return PublishOrder(number, request, root, boundary, base, groups, ready)

    def _base(self, state: _Request, boundary: int) -> bytes | None:
        """The longest shorter root that is held, or will be by the time it is needed."""
        mine = max((b for b in state.published if b < boundary), default=0)
        for candidate in range((boundary - 1) // self.unit * self.unit, 0, -self.unit):
            if candidate == mine:
                return state.published[mine]
            root = state.chain.digest(candidate)
            if self.quorum.holds(root):
                return root
        return None

    def _skip(self, reason: str) -> None:
        self._counts.add("sparkcache_publication_failures_total", reason)

    def _gauges(self) -> tuple[int, int, int]:
        return len(self.held), self._tracker.alive, len(self.quorum)

    def _gauge(self) -> None:
        """Tell what changed; an idle engine has nothing to tell."""
        now = self._gauges()
        if now != self._told:
            self._told = now
            names = ("sparkcache_publications_held", "sparkcache_attempts", "sparkcache_roots")
            for name, value in zip(names, now, strict=True):
                self._counts.set(name, to=value)


@dataclass(slots=True)
class _Pending:
    """What waits for the next step."""

    loads: list[LoadOrder] = field(default_factory=list)
    publications: list[PublishOrder] = field(default_factory=list)
    withdrawals: list[bytes] = field(default_factory=list)
    resync: bool = False
    log: list[str] = field(default_factory=list)

    @property
    def orders_something(self) -> bool:
        return bool(self.loads or self.publications or self.withdrawals or self.resync)


def _extend_tables(state: _Request, scheduled: ScheduledRequest) -> None:
    if scheduled.new_blocks is None:
        return
    if scheduled.fresh_table or not state.tables:
        state.tables = [list(blocks) for blocks in scheduled.new_blocks]
        return
    for table, blocks in zip(state.tables, scheduled.new_blocks, strict=True):
        table.extend(blocks)
