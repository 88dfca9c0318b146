import pytest

from sparkcache_connector.config import Config
from sparkcache_connector.context import ContextChain, Scope
from sparkcache_connector.messages import LoadReport, Orders, PublicationReport, RankReport
from sparkcache_connector.pages import FULL, RECURRENT, SLIDING, GroupShape
from sparkcache_connector.scheduler.coordinator import (
    Coordinator,
    RequestContent,
    ScheduledRequest,
    StepInput,
)
from sparkcache_connector.scheduler.ledger import Result
from sparkcache_connector.scheduler.quorum import Report
from sparkcache_connector.telemetry.metrics import Counts

HYBRID = (GroupShape(RECURRENT, 128), GroupShape(FULL, 128))
DENSE = (GroupShape(FULL, 128), GroupShape(SLIDING, 128, 200))
PROMPT = list(range(1_300))
STORED = Result.STORED


class Engine:
    """One coordinator, with the engine's part played by hand."""

    def __init__(self, shapes=HYBRID, ranks=1, **options):
        self.counts = Counts()
        self.config = Config(**{"min_span_tokens": 256, **options})
        self.coordinator = Coordinator(
            self.config,
            shapes=shapes,
            hash_block=128,
            ranks=ranks,
            max_tokens=8_192,
            counts=self.counts,
        )
        self.shapes = shapes
        self.ranks = ranks
        self.sequences = [0] * ranks

    def holds(self, *boundaries, prompt=PROMPT, ranks=None, salt=None):
        """Let ranks report roots of a prompt."""
        chain = ContextChain(Scope(256, salt))
        chain.extend(prompt)
        roots = tuple(chain.digest(b) for b in boundaries)
        for rank in range(self.ranks) if ranks is None else ranks:
            sequence = self.sequences[rank]
            self.sequences[rank] += 1
            report = Report(rank, f"g{rank}", sequence, sequence == 0, roots)
            self.coordinator.absorb(RankReport(rank, (report,)))
        return roots

    def add(self, request="r", prompt=PROMPT, salt=None, may_read=True):
        content = RequestContent(prompt, Scope(256, salt), (), may_read)
        self.coordinator.add(request, content)

    def table(self, tokens, start=10):
        """Distinct blocks for every group; recurrent ones null but for the last slot."""
        tables = []
        for shape in self.shapes:
            count = -(-tokens // shape.block_tokens)
            blocks = list(range(start, start + count))
            if shape.kind == RECURRENT:
                blocks[:-1] = [0] * (count - 1)
            tables.append(blocks)
            start += 100
        return tables

    def step(self, computed=0, scheduled=0, blocks=None, boundary=None, request="r", **more):
        requests = []
        if scheduled:
            requests = [ScheduledRequest(request, computed, scheduled, blocks, computed == 0)]
        idle = self.coordinator.idle and not scheduled and not more
        told = self.coordinator.step(
            StepInput(requests, more.get("preempted", ()), boundary, None, more.get("now", 0.0))
        )
        # Where the coordinator is idle, the caller leaves such a step out.
        assert not idle or (told == (Orders(), []) and not self.coordinator.take_log())
        return told

    def counted(self):
        return {(name, *labels): value for name, labels, value in self.counts.take()}


def private(group, index):
    return True


def test_first_request_after_a_restart_hits_what_every_rank_introduced():
    engine = Engine(ranks=2)
    engine.holds(512, 1_024, 1_280)
    engine.add()
    assert engine.coordinator.lookup("r", 0) == 1_280
    assert engine.coordinator.lookup("r", 256) == 1_024


def test_root_that_one_rank_lacks_is_not_offered():
    engine = Engine(ranks=2)
    engine.holds(512)
    engine.holds(1_280, ranks=[0])
    engine.add()
    assert engine.coordinator.lookup("r", 0) == 512


def test_other_salt_and_other_tokens_are_offered_nothing():
    engine = Engine()
    engine.holds(1_280, salt="a")
    engine.add("r")
    engine.add("s", [*PROMPT[:-1], 7], salt="b")
    engine.add("t", [7, *PROMPT[1:]], salt="a")
    assert [engine.coordinator.lookup(r, 0) for r in "rst"] == [0, 0, 0]


def test_request_that_must_see_every_token_is_offered_nothing_but_publishes():
    engine = Engine()
    engine.holds(1_024)
    engine.add(may_read=False)
    assert engine.coordinator.lookup("r", 0) == 0
    assert engine.coordinator.publication_boundaries("r") == (1_280,)


def test_unknown_and_uncacheable_requests_are_left_alone():
    engine = Engine()
    engine.add(prompt=[-1] * 500)
    assert engine.coordinator.lookup("r", 0) == 0
    assert engine.coordinator.publication_boundaries("r") == ()
    assert engine.counted()[("sparkcache_uncacheable_total", "token_out_of_range")] == 1


def test_load_names_the_recurrent_slot_and_the_attention_pages_past_the_local_prefix():
    engine = Engine()
    (root,) = engine.holds(1_280)
    engine.add()
    external = engine.coordinator.lookup("r", 256)
    tables = engine.table(1_280)
    engine.coordinator.allocated("r", external, tables, private)
    orders, _ = engine.step()
    (load,) = orders.loads
    assert (load.root, load.boundary, load.local_tokens, load.refused) == (root, 1_280, 256, "")
    recurrent, attention = load.groups
    assert (recurrent.first, attention.first) == (9, 2)
    assert attention.blocks == tuple(range(112, 120))
    assert attention.last_positions == 128


def test_recurrent_destination_is_the_slot_of_the_boundary_not_the_last_of_the_table():
    engine = Engine()
    engine.holds(1_024)
    engine.add()
    tables = engine.table(1_024)
    tables[0] += [55, 56, 57]  # running and speculative slots after it
    engine.coordinator.allocated("r", engine.coordinator.lookup("r", 0), tables, private)
    (load,) = engine.step()[0].loads
    assert load.groups[0].blocks == (tables[0][7],)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda t: t[0].__setitem__(9, 0), "destination_missing"),
        (lambda t: t[1].__setitem__(3, 0), "destination_missing"),
        (lambda t: t[1].__delitem__(slice(5, None)), "destination_missing"),
    ],
)
def test_null_or_missing_destination_is_refused_and_never_written(change, refused):
    engine = Engine()
    engine.holds(1_280)
    engine.add()
    external = engine.coordinator.lookup("r", 0)
    tables = engine.table(1_280)
    change(tables)
    engine.coordinator.allocated("r", external, tables, private)
    (load,) = engine.step()[0].loads
    assert load.refused == refused
    assert 0 not in load.blocks


def test_destination_that_others_share_is_refused():
    engine = Engine()
    engine.holds(1_280)
    engine.add()
    external = engine.coordinator.lookup("r", 0)
    engine.coordinator.allocated("r", external, engine.table(1_280), lambda g, i: (g, i) != (1, 3))
    (load,) = engine.step()[0].loads
    assert load.refused == "destination_shared"
    # The failure names blocks of this request only: others must not be set back.
    assert 113 not in load.blocks
    assert 112 in load.blocks


def test_refused_load_always_names_a_block_so_that_its_failure_is_noticed():
    engine = Engine()
    engine.holds(1_280)
    engine.add()
    external = engine.coordinator.lookup("r", 0)
    engine.coordinator.allocated("r", external, engine.table(1_280), lambda g, i: False)
    (load,) = engine.step()[0].loads
    assert load.refused == "destination_shared"
    assert load.blocks


def test_failed_load_excludes_the_root_for_this_request_and_the_next_longest_is_offered():
    engine = Engine()
    roots = engine.holds(1_024, 1_280)
    engine.add()
    engine.add("other")
    engine.coordinator.allocated(
        "r", engine.coordinator.lookup("r", 0), engine.table(1_280), private
    )
    assert engine.coordinator.lookup("r", 0) == 0  # while it loads
    failed = LoadReport("r", roots[1], "disk-error", False)
    engine.coordinator.absorb(RankReport(0, failed_loads=(failed,)))
    engine.coordinator.loads_ended(["r"])
    assert engine.coordinator.lookup("r", 0) == 1_024
    assert engine.coordinator.lookup("other", 0) == 1_280


def test_quarantined_root_is_offered_to_nobody():
    engine = Engine()
    roots = engine.holds(1_024, 1_280)
    engine.add("other")
    failed = LoadReport("gone", roots[1], "page-mismatch", True)
    engine.coordinator.absorb(RankReport(0, failed_loads=(failed,)))
    assert engine.coordinator.lookup("other", 0) == 1_024


def test_number_of_loads_is_bounded_and_further_requests_recompute():
    engine = Engine(max_pending_restores=1)
    engine.holds(1_280)
    engine.add()
    engine.add("s")
    engine.coordinator.allocated(
        "r", engine.coordinator.lookup("r", 0), engine.table(1_280), private
    )
    assert engine.coordinator.lookup("s", 0) == 0
    engine.coordinator.loads_ended(["r"])
    assert engine.coordinator.lookup("s", 0) == 1_280


def test_hybrid_publishes_in_the_step_that_proves_the_boundary_with_the_proven_block():
    engine = Engine()
    engine.holds()
    engine.add()
    assert engine.coordinator.publication_boundaries("r") == (1_280,)
    _, new = engine.step(0, 1_024, engine.table(1_024))
    assert new == []
    _, new = engine.step(1_024, 256, [[0, 20], [118, 119]], {"r": [(0, 77, 1_280)]})
    (order,) = new
    assert order.groups[0].blocks == (77,)
    assert order.groups[1].blocks == tuple(range(110, 120))
    assert (order.boundary, order.ready) == (1_280, False)


def test_hybrid_never_publishes_from_the_table_alone():
    engine = Engine()
    engine.holds()
    engine.add()
    orders, new = engine.step(0, 1_300, engine.table(1_300))
    assert (new, orders.publications) == ([], ())


def test_dense_publishes_what_the_step_reaches_from_the_table():
    engine = Engine(DENSE, checkpoint_interval_tokens=512)
    engine.holds()
    engine.add()
    _, new = engine.step(0, 1_300, engine.table(1_300))
    assert [order.boundary for order in new] == [512, 1_024, 1_280]
    window = new[-1].groups[1]
    assert (window.first, window.blocks) == (8, (118, 119))
    # Each root may reference the pages of the one before it.
    assert [order.base for order in new] == [None, new[0].root, new[1].root]


def test_root_that_every_rank_holds_is_not_published_again():
    engine = Engine(DENSE)
    engine.holds(1_280)
    engine.add()
    assert engine.step(0, 1_300, engine.table(1_300))[1] == []


def test_restored_boundary_is_not_published_again_and_serves_as_base():
    engine = Engine()
    (root,) = engine.holds(512)
    engine.add()
    engine.coordinator.allocated(
        "r", engine.coordinator.lookup("r", 0), engine.table(1_300), private
    )
    engine.coordinator.loads_ended(["r"])
    assert engine.coordinator.publication_boundaries("r") == (1_280,)
    table = engine.table(1_300)
    engine.step(512, 512, table, {"r": [(0, 5, 512)]})
    _, new = engine.step(1_024, 256, None, {"r": [(0, 77, 1_280)]})
    assert [(order.boundary, order.base) for order in new] == [(1_280, root)]


def test_blocks_are_released_once_every_rank_has_copied_and_not_before():
    engine = Engine(DENSE, ranks=2)
    engine.holds()
    engine.add()
    (order,) = engine.step(0, 1_300, engine.table(1_300))[1]
    coordinator = engine.coordinator
    coordinator.absorb(RankReport(0, copied=(order.number,)))
    coordinator.absorb(RankReport(0, copied=(order.number,)))
    assert coordinator.held.take_released() == []
    coordinator.absorb(RankReport(1, copied=(order.number,)))
    assert coordinator.held.take_released() == [order.number]
    for rank in (0, 1):
        said = PublicationReport(order.number, STORED)
        coordinator.absorb(RankReport(rank, publications=(said,)))
    assert coordinator.held.take_released() == []
    assert not coordinator.has_work


def test_failed_rank_releases_blocks_too_and_withdraws_the_root_from_the_others():
    engine = Engine(DENSE, ranks=2)
    engine.holds()
    engine.add()
    (order,) = engine.step(0, 1_300, engine.table(1_300))[1]
    for rank, result in ((0, STORED), (1, Result.FAILED)):
        said = PublicationReport(order.number, result, "x")
        engine.coordinator.absorb(RankReport(rank, publications=(said,)))
    assert engine.coordinator.held.take_released() == [order.number]
    assert engine.coordinator.has_work
    assert engine.step()[0].withdrawals == (order.root,)
    assert not engine.coordinator.has_work


def test_number_of_held_publications_is_bounded_and_the_rest_is_skipped_with_a_reason():
    engine = Engine(DENSE, checkpoint_interval_tokens=256, max_delayed_stores=2)
    engine.holds()
    engine.add()
    assert len(engine.step(0, 1_300, engine.table(1_300))[1]) == 2
    skipped = engine.counted()[("sparkcache_publication_failures_total", "too_many_delayed_stores")]
    assert skipped == 3


def test_poisoned_evidence_is_counted_and_logged_and_disturbs_nothing_else():
    engine = Engine()
    engine.holds()
    engine.add()
    engine.step(0, 1_024, engine.table(1_024))
    _, new = engine.step(1_024, 256, None, {"r": [(1, 77, 1_280)]})
    assert new == []
    assert engine.counted()[("sparkcache_proofs_refused_total", "group_not_recurrent")] == 1
    (line,) = engine.coordinator.take_log()
    assert "request r at boundary 1280" in line


def test_finish_publishes_the_answer_of_attention_only_models():
    engine = Engine(DENSE)
    engine.holds()
    engine.add()
    engine.step(0, 1_300, engine.table(1_300))
    tokens = [*PROMPT, *range(300)]
    order = engine.coordinator.finished(
        "r", tokens, computed=1_599, in_flight=0, tables=engine.table(1_600)
    )
    assert (order.boundary, order.ready) == (1_536, True)
    chain = ContextChain(Scope(256))
    chain.extend(tokens)
    assert order.root == chain.digest(1_536)
    engine.coordinator.queue(order)
    assert engine.coordinator.has_work
    assert engine.step()[0].publications == (order,)


@pytest.mark.parametrize(
    ("shapes", "computed", "in_flight"),
    [(HYBRID, 1_599, 0), (DENSE, 1_599, 300), (DENSE, 1_300, 0)],
)
def test_finish_publishes_nothing_unproven_unfinished_or_already_published(
    shapes, computed, in_flight
):
    engine = Engine(shapes)
    engine.holds()
    engine.add()
    engine.step(0, 1_300, engine.table(1_300))
    tokens = [*PROMPT, *range(300)]
    order = engine.coordinator.finished(
        "r", tokens, computed=computed, in_flight=in_flight, tables=engine.table(1_600)
    )
    assert order is None


def test_preempted_request_proves_again_and_publishes_its_new_blocks():
    engine = Engine()
    engine.holds()
    engine.add()
    engine.step(0, 1_024, engine.table(1_024))
    engine.step(preempted=["r"])
    table = engine.table(1_280, start=300)
    _, new = engine.step(0, 1_280, table, {"r": [(0, 99, 1_280)]})
    assert new[0].groups[0].blocks == (99,)
    assert new[0].groups[1].blocks == tuple(table[1])


def test_rank_that_lost_a_report_is_asked_to_start_over():
    engine = Engine(ranks=2)
    engine.holds(512)
    engine.sequences[1] += 1
    engine.holds(1_024, ranks=[1])
    engine.add()
    assert engine.coordinator.lookup("r", 0) == 0
    assert engine.step()[0].start_over == {1}


def test_switched_off_directions_do_nothing():
    reader = Engine(DENSE, access_mode="restore-only")
    reader.holds(1_024)
    reader.add()
    assert reader.coordinator.lookup("r", 0) == 1_024
    assert reader.step(0, 1_300, reader.table(1_300))[1] == []
    writer = Engine(DENSE, access_mode="store-only")
    writer.holds(1_024)
    writer.add()
    assert writer.coordinator.lookup("r", 0) == 0
    assert len(writer.step(0, 1_300, writer.table(1_300))[1]) == 1


def test_tokens_that_were_never_offered_are_a_programming_error():
    engine = Engine()
    engine.holds()
    engine.add()
    with pytest.raises(RuntimeError, match="never offered"):
        engine.coordinator.allocated("r", 256, engine.table(1_300), private)


def test_boundaries_never_fall_inside_pages_that_cannot_be_divided():
    for divisible, unit in ((True, 256), (False, 768)):
        coordinator = Coordinator(
            Config(),
            shapes=(GroupShape(FULL, 384),),
            hash_block=128,
            ranks=1,
            max_tokens=8_192,
            counts=Counts(),
            divisible_pages=divisible,
        )
        assert coordinator.unit == unit


def test_blocks_held_for_publications_are_bounded_and_the_rest_is_skipped():
    engine = Engine(DENSE, checkpoint_interval_tokens=512)
    engine.coordinator.held.limit = 11
    engine.holds()
    engine.add()
    (order,) = engine.step(0, 1_300, engine.table(1_300))[1]
    assert order.boundary == 512
    assert engine.counted()[("sparkcache_publication_failures_total", "too_many_held_blocks")] == 2
    engine.coordinator.absorb(RankReport(0, copied=(order.number,)))
    engine.add("s", [7, *PROMPT])
    assert len(engine.step(0, 1_300, engine.table(1_300), request="s")[1]) == 1


def test_switched_off_engine_offers_and_publishes_nothing_any_more():
    engine = Engine(DENSE)
    engine.holds(1_024)
    engine.add()
    engine.coordinator.switch_off("engine_reset")
    engine.add("later")
    assert [engine.coordinator.lookup(r, 0) for r in ("r", "later")] == [0, 0]
    assert engine.step(0, 1_300, engine.table(1_300))[1] == []
    tokens = [*PROMPT, *range(300)]
    order = engine.coordinator.finished(
        "r", tokens, computed=1_599, in_flight=0, tables=engine.table(1_600)
    )
    assert order is None
    counted = engine.counted()
    assert counted[("sparkcache_switched_off", "restore", "engine_reset", "all")] == 1
    assert counted[("sparkcache_switched_off", "publish", "engine_reset", "all")] == 1


@pytest.mark.parametrize("shapes", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_only_requests_that_may_still_publish_are_watched(shapes):
    engine = Engine(shapes, checkpoint_interval_tokens=4_096)
    engine.holds()
    engine.add()
    coordinator = engine.coordinator
    assert "r" not in coordinator.watched  # a new request is told of in any case
    engine.step(0, 600, engine.table(1_300))
    assert "r" in coordinator.watched
    engine.step(600, 680, None, {"r": [(0, 77, 1_280)]} if shapes is HYBRID else None)
    assert "r" not in coordinator.watched


@pytest.mark.parametrize("shapes", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_a_step_is_left_out_only_while_it_has_nothing_to_do_or_to_say(shapes):
    engine = Engine(shapes, checkpoint_interval_tokens=4_096)
    coordinator = engine.coordinator
    assert coordinator.idle
    engine.holds(256)
    assert not coordinator.idle  # a gauge has changed
    engine.step()
    assert coordinator.idle
    engine.add()
    engine.step(0, 600, engine.table(1_300))
    assert not coordinator.idle  # its boundary is ahead
    evidence = {"r": [(0, 77, 1_280)]} if shapes is HYBRID else None
    (order,) = engine.step(600, 680, None, evidence)[1]
    assert coordinator.idle  # the publication is told, and nobody has answered
    stored = PublicationReport(order.number, Result.FAILED)
    coordinator.absorb(RankReport(0, (), (order.number,), (stored,)))
    coordinator.held.take_released()
    assert not coordinator.idle  # its blocks are not held any more
    engine.step()
    assert coordinator.idle
    coordinator.queue(order)
    assert not coordinator.idle
    assert engine.step()[0].publications == (order,)
    assert coordinator.idle
    coordinator.switch_off("engine_reset")
    assert not coordinator.idle  # every step repeats it
