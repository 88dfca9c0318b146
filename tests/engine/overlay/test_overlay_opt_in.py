"""O4, O5: vLLM's own tails, and an engine whose connector did not opt in."""

from __future__ import annotations

import dataclasses

import pytest
from boundary_harness import (
    GLM_16,
    GLM_256,
    SAME_BLOCK,
    TWO_GROUPS,
    Geometry,
    make_engine,
    token_ids,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput


@pytest.mark.parametrize("geometry", [GLM_16, GLM_256, SAME_BLOCK], ids=["16", "256", "same"])
@pytest.mark.parametrize("prompt", [6992, 7168, 8209, 8224])
def test_o4_tails_are_what_they_are_without_the_overlays_field(
    geometry: object, prompt: int
) -> None:
    engine = make_engine(geometry)  # type: ignore[arg-type]
    other = make_engine(geometry, "Recorder")  # type: ignore[arg-type]
    for e in (engine, other):
        e.add("r", prompt, max_tokens=3)
    steps = engine.run()
    assert [s.tails for s in steps] == [s.tails for s in other.run()]
    assert any(s.tails for s in steps) or prompt == 6992
    for step in steps:
        tails = step.tails.get("r", [])
        assert [t for t in step.blocks.get("r", []) if t in tails] == tails
        if tails:  # neither the lists nor the dicts are shared
            output = step.output
            assert output.partial_tail_offloads is not output.recurrent_boundary_blocks
            assert tails is not output.recurrent_boundary_blocks["r"]


def test_o4_a_tail_that_is_also_chosen_is_offered_once() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 8210, chosen=(8192,), max_tokens=2)
    (step,) = [s for s in engine.run() if s.blocks]
    assert step.blocks == step.tails
    assert len(step.pins["r"]) == 1


def test_o4_a_tail_that_a_step_in_flight_has_advanced_is_not_passed_on() -> None:
    """vLLM 0.28.0 registers a prompt that ends on a hash boundary a second time under
    async scheduling, when its running state is already one token further.
    """
    engine = make_engine(GLM_256, depth=2, asynchronous=True)
    engine.add("r", 7168, max_tokens=20)
    steps = engine.run()
    tails = [(s, *t) for s in steps for t in s.tails.get("r", ())]
    assert [t for _, _, _, t in tails] == [7168, 7168]
    (_, _, first, _), (_, _, second, _) = tails
    offered = [(b, t) for s in steps for _, b, t in s.blocks.get("r", ())]
    assert [t for _, t in offered] == [6912, 7168]
    assert offered[1][0] == first
    assert second not in {b for b, _ in offered}


@pytest.mark.parametrize("geometry", [GLM_256, TWO_GROUPS], ids=["one", "two"])
def test_o4_no_request_resumes_from_a_tail_that_a_step_in_flight_has_advanced(
    geometry: Geometry,
) -> None:
    """The copy of the right state stays cached; once it is evicted, nothing is left."""
    engine = make_engine(geometry, depth=2, asynchronous=True)
    prompt = token_ids("r", 7168)
    engine.add("r", prompt, max_tokens=20)
    engine.run()
    for group in geometry.recurrent:
        (block_id,) = engine.registered(group, "r", 7168)
        assert engine.holds(group, block_id, "r", 7168)
        engine.pool.evict_blocks({block_id})
        assert engine.registered(group, "r", 7168) == set()
    engine.add("s", [*prompt, *range(300)], max_tokens=2)
    engine.run()
    assert engine.worker.garbage == 0


def test_o4_the_tail_of_a_load_is_offered_once_it_is_copied() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 8210, max_tokens=2)
    engine.connector.matched["r"] = 8192
    engine.step()
    engine.finish_load("r", 8192)
    engine.step()
    (step,) = [s for s in engine.run() if s.blocks or s.tails]
    assert step.blocks == step.tails
    assert engine.worker.garbage == 0


def test_o5_the_base_class_says_false_and_chooses_nothing() -> None:
    assert KVConnectorBase_V1.supports_recurrent_boundary_blocks.fget(None) is False
    assert KVConnectorBase_V1.get_recurrent_publication_boundaries(None, None) == ()
    assert list(KVConnectorBase_V1.take_captured_recurrent_boundaries(None)) == []


def test_o5_the_new_fields_are_none_by_default_and_shift_no_argument() -> None:
    names = [f.name for f in dataclasses.fields(SchedulerOutput)]
    assert names[-2:] == ["recurrent_boundary_blocks", "recurrent_boundary_pins"]
    empty = SchedulerOutput.make_empty()
    assert empty.recurrent_boundary_blocks is None
    assert empty.recurrent_boundary_pins is None


@pytest.mark.parametrize("connector", [None, "Recorder", "Truthy"])
def test_o5_without_opt_in_nothing_is_offered_pinned_or_stopped_for(connector: str | None) -> None:
    engine = make_engine(GLM_256, connector)
    if connector:
        engine.connector.get_recurrent_publication_boundaries = lambda request: (256,)
        engine.connector.take_captured_recurrent_boundaries = lambda: 1 / 0
    engine.add("r", 7168, max_tokens=3)
    references = []
    for step in iter(engine.step, None):
        assert step.output.recurrent_boundary_blocks is None
        assert step.output.recurrent_boundary_pins is None
        references.append(
            [b.ref_cnt for b in engine.manager.coordinator.get_blocks("r")[1] if not b.is_null]
        )
        if not engine.scheduler.has_unfinished_requests():
            break
    assert max(max(r, default=0) for r in references) == 1
    tracker = engine.manager.recurrent_boundaries
    assert tracker._undelivered == {}
    assert len(tracker._pins) == 0


def test_o5_a_pure_consumer_saves_nothing_and_is_offered_nothing() -> None:
    engine = make_engine(GLM_256, role="kv_consumer")
    engine.add("r", 7168, max_tokens=3)
    assert not [s for s in engine.run() if s.blocks or s.tails]


def test_o5_an_empty_step_has_none_in_both_fields() -> None:
    engine = make_engine(GLM_256)
    output = engine.scheduler.schedule()
    assert (output.recurrent_boundary_blocks, output.recurrent_boundary_pins) == (None, None)
