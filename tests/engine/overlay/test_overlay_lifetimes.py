"""O7, O8, O9, O10: how long a handed-over block lives, and who may end that."""

from __future__ import annotations

from typing import Any

import pytest
from boundary_harness import GLM_16, GLM_256, TWO_GROUPS, Engine, Step, make_engine, token_ids
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

ENDS = ["finish", "abort", "preempt"]


def end(engine: Engine, request_id: str, how: str) -> None:
    if how == "abort":
        engine.abort(request_id)
    elif how == "preempt":
        engine.preempt(request_id)
    else:
        engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_STOPPED)


def first_offer(engine: Engine, request_id: str = "r") -> tuple[Step, int, int]:
    while True:
        step = engine.step()
        if request_id in step.blocks:
            return step, step.blocks[request_id][0][1], step.pins[request_id][0]


# O7


def test_o7_each_hand_off_has_a_reference_of_its_own() -> None:
    engine = make_engine(TWO_GROUPS)
    engine.add("r", 7000, max_tokens=50)
    step = engine.step()
    for _, block_id, _ in step.blocks["r"]:
        assert engine.block(block_id).ref_cnt == 2  # the table's and the pin
    assert len(set(step.pins["r"])) == len(step.blocks["r"]) == 2


def test_o7_a_tail_is_pinned_apart_from_vllms_own_pin() -> None:
    engine = make_engine(GLM_16)
    engine.add("r", 7000, max_tokens=50)
    step, block_id, serial = first_offer(engine)
    assert step.tails["r"] == step.blocks["r"]
    assert engine.block(block_id).ref_cnt == 2
    engine.connector.captured = [serial]
    engine.step()
    assert engine.block(block_id).ref_cnt == 1
    assert not engine.is_free(block_id)
    engine.abort("r")
    assert engine.is_free(block_id)


@pytest.mark.parametrize("how", ENDS)
def test_o7_request_cleanup_ends_every_pin(how: str) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 10000, max_tokens=50, chosen=(2304, 4864, 6912, 8192))
    held = []
    while engine.requests["r"].num_output_tokens < 2:
        held += [b for _, b, _ in engine.step().blocks.get("r", ())]
    assert len(set(held)) == 5
    assert not any(engine.is_free(b) for b in held)
    end(engine, "r", how)
    assert all(engine.is_free(b) for b in held)
    assert engine.free_blocks == 2047
    assert len(engine.manager.recurrent_boundaries._pins) == 0


def test_o7_a_finish_that_the_connector_delays_keeps_the_pins() -> None:
    engine = make_engine(GLM_256, extra={"delay_free": True})
    engine.add("r", 7000, max_tokens=2)
    _, block_id, _ = first_offer(engine)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert not engine.is_free(block_id)
    engine.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={"r"}))
    assert engine.is_free(block_id)


def test_o7_the_prefix_cache_can_be_reset_once_all_requests_ended() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7168, max_tokens=2)
    first_offer(engine)
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()


# O8


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize("chosen", [(), (4864,)], ids=["aligned", "copied"])
def test_o8_blocks_wait_for_the_steps_that_were_given_them(
    how: str, asynchronous: bool, role: str, chosen: tuple[int, ...]
) -> None:
    engine = make_engine(GLM_256, depth=2, asynchronous=asynchronous, role=role)
    engine.add("other", 300, max_tokens=100)
    engine.add("r", 10000 if chosen else 6992, max_tokens=50, chosen=chosen)
    while True:
        step = engine.schedule()
        if "r" in step.blocks:
            break
        engine.complete()
    ((_, block_id, _),) = step.blocks["r"]
    later = engine.schedule()  # a second step in flight
    assert "r" in later.tokens
    end(engine, "r", how)
    engine.scheduler.max_num_running_reqs = 1  # keep a preempted request out
    assert not engine.is_free(block_id)
    engine.complete()
    assert not engine.is_free(block_id)
    engine.complete()
    assert engine.is_free(block_id)


def test_o8_without_opt_in_a_producer_keeps_the_old_gate() -> None:
    for connector, deferred in (("Recorder", False), ("Truthy", False), ("OptedIn", True)):
        engine = make_engine(GLM_256, connector, depth=2, role="kv_producer")
        assert engine.scheduler.defer_block_free is deferred
    assert not make_engine(GLM_256, depth=1).scheduler.defer_block_free
    assert make_engine(GLM_256, "Recorder", depth=2, role="kv_consumer").scheduler.defer_block_free


def test_o8_a_pin_given_back_under_a_running_step_waits_for_it() -> None:
    engine = make_engine(GLM_256, depth=2)
    engine.add("r", 20000, max_tokens=5, chosen=(4864, 7168))
    step = engine.schedule()
    while "r" not in step.blocks:
        engine.complete()
        step = engine.schedule()
    ((_, block_id, boundary),) = step.blocks["r"]
    assert boundary == 4864
    assert engine.block(block_id).ref_cnt == 2  # the pin, and the copy until it has run
    engine.connector.captured = list(step.pins["r"])
    engine.schedule()
    assert not engine.is_free(block_id)
    engine.complete()
    assert engine.is_free(block_id)


# O9


@pytest.mark.parametrize("how", ENDS)
def test_o9_a_copy_on_its_way_is_dropped_with_its_request(how: str) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 20000, chosen=(8192,), max_tokens=2)
    engine.steps_until("r", 8192)
    end(engine, "r", how)
    assert engine.manager.recurrent_boundaries._undelivered == {}
    step = engine.schedule()
    assert step.blocks == {}
    if how == "preempt":
        # The state itself was registered and is intact: the request resumes from it.
        assert engine.requests["r"].num_preemptions == 1


@pytest.mark.parametrize("pop", [False, True])
def test_o9_a_candidate_is_dropped_with_its_request(pop: bool) -> None:
    engine = make_engine(GLM_256)
    request = engine.add("r", 7000)
    assert engine.manager.allocate_slots(request, 6912) is not None
    if pop:
        engine.pool.free_blocks(reversed(engine.manager.pop_blocks_for_free(request)))
    else:
        engine.manager.free(request)
    assert engine.manager.recurrent_boundaries.hand_over() == (None, None)
    assert engine.free_blocks == 2047


def test_o9_a_request_preempted_in_the_pass_that_computed_it_offers_nothing() -> None:
    """A more urgent request takes the blocks of one that was scheduled already."""
    engine = make_engine(GLM_256, blocks=64, priority=True, budget=8192)
    engine.add("urgent", 300, max_tokens=3000, priority=0)
    engine.steps_until("urgent", 301)
    engine.add("late", 6000, priority=5, chosen=(2304, 4608))
    engine.steps_until("late", 2304)
    # Make "late" first in the running order, and leave the urgent one no room.
    engine.scheduler.running.sort(key=lambda r: -r.priority)
    request = engine.requests["late"]
    taken: list[Any] = []
    allocate = engine.manager.allocate_slots

    def allocate_then_fill(req: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(req, *args, **kwargs)
        if req is request and blocks is not None:
            taken.extend(engine.pool.get_new_blocks(engine.free_blocks))
            # The urgent one needs new blocks now.
            engine.requests["urgent"].append_output_token_ids(list(range(512)))
        return blocks

    engine.manager.allocate_slots = allocate_then_fill
    step = engine.schedule()
    assert taken  # "late" was scheduled, to exactly 4,608, before it was preempted
    assert request.num_preemptions == 1
    assert "late" not in step.tokens
    assert step.blocks == {}


@pytest.mark.parametrize("chosen", [(), (4864, 6912)])
def test_o9_after_a_preemption_fresh_proof_is_offered(chosen: tuple[int, ...]) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7168, max_tokens=50, chosen=chosen)
    engine.steps_until("r", 7169)
    engine.preempt("r")
    engine.pool.evict_blocks(set(range(1, 2048)))
    again = []
    for step in engine.steps_until("r", 7170):
        for group, block_id, boundary in step.blocks.get("r", ()):
            again.append(boundary)
            assert engine.holds(group, block_id, "r", boundary)
    assert again == list(chosen or (6912,))


# O10


def test_o10_a_pin_given_back_frees_a_block_that_nothing_else_holds() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 20000, chosen=tuple(range(2304, 20000, 2304)), max_tokens=4)
    held: dict[int, int] = {}
    most = 0
    while engine.requests["r"].num_output_tokens < 2:
        step = engine.step()
        engine.connector.captured = list(held)  # captured one step later
        held = dict.fromkeys(step.pins.get("r", ()), 0)
        most = max(most, len(engine.manager.recurrent_boundaries._pins))
    assert most <= 2
    engine.run()


def test_o10_unknown_and_spent_serials_do_no_harm() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7000, max_tokens=50)
    _, block_id, serial = first_offer(engine)
    before = engine.block(block_id).ref_cnt
    for junk in (0, -1, 10**9, None, "1", 1.0, True, (serial,), [serial]):
        engine.connector.captured = [junk]
        engine.step()
        assert len(engine.manager.recurrent_boundaries._pins) == 1
    assert not engine.is_free(block_id)
    engine.connector.captured = [serial, serial]
    engine.step()
    engine.connector.captured = [serial]
    engine.step()
    assert len(engine.manager.recurrent_boundaries._pins) == 0
    assert before == 2
    engine.run()
    assert engine.free_blocks == 2047


def test_o10_serials_are_never_reused_even_across_preemption() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7168, max_tokens=500)
    serials: list[int] = []
    for _ in range(4):
        serials += [s for step in engine.steps_until("r", 7169) for s in step.pins.get("r", ())]
        engine.connector.captured = serials[:1]
        engine.preempt("r")
        engine.pool.evict_blocks(set(range(1, 2048)))
        late = list(serials)
        engine.connector.captured = late  # all of them are spent by now
    assert len(serials) == len(set(serials)) == 5
    live = [s for step in engine.steps_until("r", 7169) for s in step.pins.get("r", ())]
    assert not set(live) & set(serials)
    assert set(engine.manager.recurrent_boundaries._pins._request_of) == set(live)


def test_o10_a_connector_that_fails_to_tell_keeps_its_pins(engine_log: list[str]) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7000, max_tokens=3)
    first_offer(engine)

    def fail() -> Any:
        raise RuntimeError("lost count")

    engine.connector.take_captured_recurrent_boundaries = fail
    engine.run()
    assert any("OptedIn failed to tell" in m and "lost count" in m for m in engine_log)
    assert engine.free_blocks == 2047


def test_o10_attention_only_models_drain_it_too() -> None:
    from boundary_harness import Geometry, Group

    engine = make_engine(Geometry((Group("full", 16),), 16, 16))
    engine.add("r", 100, max_tokens=2)
    engine.connector.captured = [1]
    engine.run()
    assert engine.connector.captured == []


# MultiConnector


def children(engine: Engine) -> list[Any]:
    return engine.connector._connectors


def test_o5_multi_connector_opts_in_if_a_child_does() -> None:
    for names, expected in (
        (["OptedIn", "Recorder"], True),
        (["Recorder", "OptedIn"], True),
        (["Recorder", "Recorder"], False),
        (["Truthy", "Recorder"], False),
    ):
        engine = make_engine(GLM_256, "MultiConnector", extra={"children": names})
        assert engine.connector.supports_recurrent_boundary_blocks is expected
        engine.add("r", 7000, max_tokens=2)
        assert bool([s for s in engine.run() if s.blocks]) is expected


def test_o6_multi_connector_takes_the_sorted_union_of_children_that_opted_in() -> None:
    names = ["OptedIn", "Recorder", "OtherOptedIn"]
    engine = make_engine(GLM_256, "MultiConnector", extra={"children": names})
    first, silent, second = children(engine)
    silent.get_recurrent_publication_boundaries = lambda request: (2304,)
    first.chosen["r"] = (8192,)
    second.chosen["r"] = (4096, 8192)
    engine.add("r", 20000, max_tokens=2)
    offered = [t for s in engine.run() for _, _, t in s.blocks.get("r", ())]
    assert offered == [4096, 8192, 19968]
    assert first.asked == second.asked == ["r"]


def test_o6_multi_connector_names_the_child_that_answers_nonsense(engine_log: list[str]) -> None:
    engine = make_engine(GLM_256, "MultiConnector", extra={"children": ["OptedIn", "OtherOptedIn"]})
    children(engine)[1].chosen["r"] = "soon"
    engine.add("r", 7000, max_tokens=2)
    assert not [s for s in engine.run() if s.blocks]
    assert any("OtherOptedIn answered 'soon'" in m for m in engine_log)


def test_o10_under_multi_connector_a_pin_falls_when_every_opted_in_child_released_it() -> None:
    names = ["OptedIn", "Recorder", "OtherOptedIn"]
    engine = make_engine(GLM_256, "MultiConnector", extra={"children": names})
    first, _, second = children(engine)
    engine.add("r", 7000, max_tokens=60)
    _, block_id, serial = first_offer(engine)
    engine.steps_until("r", 7010)
    assert engine.block(block_id).ref_cnt == 1
    for _ in range(2):  # a child counts once, however often it says so
        first.captured = [serial, serial]
        engine.step()
        assert not engine.is_free(block_id)
    second.captured = [serial]
    engine.step()
    assert engine.is_free(block_id)
    first.captured = second.captured = [serial]
    engine.run()
    assert engine.connector._capture_votes._open == {}


@pytest.mark.parametrize("how", ENDS)
def test_o10_votes_end_with_the_pins_that_they_are_about(how: str) -> None:
    names = ["OptedIn", "OtherOptedIn"]
    engine = make_engine(GLM_256, "MultiConnector", extra={"children": names})
    first, second = children(engine)
    engine.add("r", 7168, max_tokens=60)
    _, _, serial = first_offer(engine)
    first.captured = [serial]
    engine.step()
    end(engine, "r", how)
    engine.pool.evict_blocks(set(range(1, 2048)))
    engine.step()
    votes = engine.connector._capture_votes
    assert serial not in votes._open
    second.captured = [serial]
    engine.step()
    assert serial not in votes._open
    engine.abort("r")
    engine.add("s", token_ids("s", 100), max_tokens=1)
    engine.run()
    assert votes._open == votes._serials_of == {}
