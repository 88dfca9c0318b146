"""O3, O6: boundaries that the connector chose, and the stops that they make."""

from __future__ import annotations

from typing import Any

import pytest
from boundary_harness import (
    COARSE,
    GLM_16,
    GLM_16_FINE,
    GLM_256,
    SAME_BLOCK,
    TWO_GROUPS,
    Engine,
    Geometry,
    Group,
    Step,
    make_engine,
    token_ids,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

SMALL = Geometry((Group("full", 4), Group("mamba", 16)), 4, 16)


def chunk_ends(steps: list[Step], request_id: str, start: int = 0) -> list[int]:
    ends = []
    for step in steps:
        start += step.tokens.get(request_id, 0)
        ends.append(start)
    return ends


def boundaries(steps: list[Step], request_id: str) -> list[int]:
    return [t for step in steps for _, _, t in step.blocks.get(request_id, ())]


def check_physics(engine: Engine, step: Step) -> None:
    """To be called once the step has run."""
    for request_id, triples in step.blocks.items():
        for group, block_id, boundary in triples:
            assert engine.holds(group, block_id, request_id, boundary)
            assert block_id in engine.registered(group, request_id, boundary)


# Inside a recurrent block


@pytest.mark.parametrize("prompt", range(8209, 8225))
@pytest.mark.parametrize(
    ("geometry", "speculative", "first"),
    [(GLM_16_FINE, 7, [8192]), (GLM_16, 7, [4608, 8192]), (GLM_256, 0, [6912, 8192])],
    ids=["hash16-fine", "hash16", "hash256"],
)
def test_o6_a_boundary_inside_a_block_is_offered_with_the_step_that_copies_it(
    prompt: int, geometry: Geometry, speculative: int, first: list[int]
) -> None:
    """8,192 is 3 x 2,304 + 1,280."""
    engine = make_engine(geometry, speculative=speculative)
    engine.add("r", prompt, chosen=(8192,))
    steps = [engine.step() for _ in first]
    assert chunk_ends(steps, "r") == first
    assert all(step.blocks == {} and not step.output.kv_cache_block_copies for step in steps)
    running = engine.manager.get_block_ids("r")[1][3]
    step = engine.step()
    ((group, block_id, boundary),) = step.blocks["r"]
    assert (group, boundary) == (1, 8192)
    (copy,) = step.output.kv_cache_block_copies
    assert (copy.src_block_id, copy.dst_block_id) == (running, block_id)
    assert block_id not in engine.manager.get_block_ids("r")[1]
    check_physics(engine, step)
    # vLLM's own tail has the same boundary only where the hash block is 256.
    assert step.tails == ({"r": step.blocks["r"]} if geometry is GLM_256 else {})
    engine.run()
    assert engine.worker.garbage == 0
    assert engine.free_blocks == 2047


def test_o6_several_boundaries_inside_one_block() -> None:
    for geometry in (GLM_256, GLM_16_FINE, TWO_GROUPS, SAME_BLOCK):
        engine = make_engine(geometry)
        chosen = (7168, 7424, 7680, 8192, 9216, 9472)
        engine.add("r", 10000, chosen=chosen)
        seen = []
        while engine.requests["r"].num_output_tokens < 3:
            step = engine.step()
            check_physics(engine, step)
            seen += [t for g, _, t in step.blocks.get("r", ()) if g == 1]
        assert tuple(t for t in seen if t in chosen) == chosen
        assert engine.worker.garbage == 0


@pytest.mark.parametrize("geometry", [GLM_256, GLM_16_FINE], ids=["hash256", "fine"])
def test_o6_no_later_chunk_runs_past_the_end_of_a_block_that_was_stopped_inside(
    geometry: Geometry,
) -> None:
    """Else its slot would be hashed as the block's end, with the state of the stop."""
    engine = make_engine(geometry)
    engine.add("r", 16000, chosen=(8192,), max_tokens=1)
    assert chunk_ends(engine.run(), "r")[:2] == [8192, 9216]
    prefix = token_ids("r", 16000)
    engine.add("s", [*prefix[:9300], *range(200)], max_tokens=2)
    engine.run()
    assert engine.worker.garbage == 0


def test_o6_a_chosen_state_serves_a_local_hit() -> None:
    engine = make_engine(GLM_256)
    prompt = token_ids("r", 9900)
    engine.add("r", prompt, chosen=(8192,), max_tokens=1)
    engine.run()
    engine.add("s", [*prompt[:8200], *range(300)], max_tokens=1)
    steps = engine.run()
    assert steps[0].tokens == {"s": 256}  # from 8,192 to the tail at 8,448
    assert engine.worker.garbage == 0


@pytest.mark.parametrize("chosen", [(8192,), (6912,)])
def test_o6_a_chosen_state_serves_no_hit_in_the_step_that_computes_it(
    chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0")
    engine = make_engine(GLM_256, budget=20000)
    prompt = token_ids("r", 16000)
    engine.add("r", prompt, chosen=chosen, max_tokens=1)
    engine.add("s", prompt[:9000], max_tokens=1)
    assert engine.step().tokens == {"r": chosen[0]}
    first = next(step.tokens["s"] for step in engine.run() if "s" in step.tokens)
    assert first < 9000 - chosen[0]
    assert engine.worker.garbage == 0


def test_o6_the_partial_tail_field_stays_vllms_own() -> None:
    engine = make_engine(GLM_16)
    engine.add("r", 8210, chosen=(8192,))
    steps = engine.run()
    assert [t for s in steps for _, _, t in s.tails.get("r", ())] == [8208]
    assert boundaries(steps, "r") == [8192, 8208]


def test_o6_without_fine_hits_a_boundary_inside_a_block_makes_no_stop() -> None:
    """A sliding window group of another block size switches them off."""
    geometry = Geometry((Group("full", 8), Group("mamba", 16), Group("sliding", 16)), 8, 16)
    engine = make_engine(geometry)
    assert not engine.manager.coordinator.enable_partial_hash_hits
    engine.add("r", 100, chosen=(40, 48))
    steps = engine.run()
    assert chunk_ends(steps, "r")[:2] == [48, 96]
    assert boundaries(steps, "r") == [48]


# Stops and the budget


def test_o3_a_stop_within_the_budget_is_taken_before_the_flooring() -> None:
    engine = make_engine(GLM_256, budget=2400)
    engine.add("r", 20000, chosen=(1280, 4864))
    steps = engine.steps_until("r", 6912)
    assert chunk_ends(steps, "r") == [1280, 2304, 4608, 4864, 6912]
    # From 4,608 the budget reaches 6,912; from 2,304 it would not reach 4,864.
    assert boundaries(steps, "r") == [1280, 4864]


def test_o3_a_stop_that_the_flooring_would_have_made_unreachable() -> None:
    """With 1,300 tokens left in the step vLLM floors a chunk at 6,912 to nothing."""
    engine = make_engine(GLM_256)
    engine.add("r", 20000, chosen=(8192,))
    stock = make_engine(GLM_256, connector=None)
    stock.add("r", 20000)
    for e, expected in ((engine, 1280), (stock, 0)):
        e.scheduler.max_num_scheduled_tokens = 6912
        e.steps_until("r", 6912)
        e.scheduler.max_num_scheduled_tokens = 8192
        stop = e.scheduler.recurrent_boundaries.next_stop(e.requests["r"], 6912, 1300)
        split = e.scheduler._mamba_block_aligned_split(e.requests["r"], 1300, chosen_stop=stop)
        assert split == expected


def test_o3_a_stop_beyond_the_budget_changes_nothing() -> None:
    engine = make_engine(GLM_256, budget=4608)
    engine.add("r", 20000, chosen=(18688,))
    stock = make_engine(GLM_256, budget=4608, connector=None)
    stock.add("r", 20000)
    assert chunk_ends(engine.run(), "r")[:4] == chunk_ends(stock.run(), "r")[:4]


def test_o3_each_missed_stop_offers_nothing() -> None:
    """A chunk that other caps shortened or lengthened past the stop has no proof."""
    for chosen in (2304, 6912, 7168, 8192):
        engine = make_engine(GLM_256)
        request = engine.add("r", 10000, chosen=(chosen,))
        assert engine.manager.allocate_slots(request, chosen + 256) is not None
        engine.manager.take_partial_tail_offloads()
        assert engine.manager.recurrent_boundaries.hand_over() == (None, None)


def test_o3_a_starved_budget_leaves_every_request_schedulable() -> None:
    chosen = tuple(range(256, 9984, 256))
    for budget in (2304, 2400, 3000, 8192):
        engine = make_engine(GLM_256, budget=budget, max_seqs=6)
        stock = make_engine(GLM_256, budget=budget, max_seqs=6, connector=None)
        for i in range(5):
            engine.add(f"r{i}", 9999 + i, max_tokens=20, chosen=chosen)
            stock.add(f"r{i}", 9999 + i, max_tokens=20)
        assert len(engine.run(2000)) < 5 * len(chosen) + len(stock.run(2000))
        assert engine.worker.garbage == 0


def test_o3_a_stop_does_not_block_the_queue_behind_it() -> None:
    """The step that ends at a stop gives what is left of the budget to the next."""
    engine = make_engine(GLM_256, budget=4000)
    engine.add("first", 9000, chosen=(256,))
    engine.add("second", 300)
    step = engine.step()
    assert step.tokens == {"first": 256, "second": 256}


@pytest.mark.parametrize("lookahead", [True, False])
def test_o3_a_stop_near_the_prefills_end_never_stalls_multi_module_mtp(lookahead: bool) -> None:
    """The scheduler shortens a chunk that ends 1 to 6 tokens before the end."""
    geometry = Geometry((Group("full", 4), Group("mamba", 16, 7)), 4, 16)
    engine = make_engine(geometry, speculative=7, multi_module_mtp=lookahead)
    engine.add("r", 100, chosen=(96,), max_tokens=3)
    assert (96 in chunk_ends(engine.run(50), "r")) is (not lookahead)


@pytest.mark.parametrize("stop", [992, 1008, 1024, 1280, 1584, 1600])
def test_o3_a_stop_inside_a_multimodal_item_that_must_stay_whole(stop: int) -> None:
    """Item at 1,008 to 1,600; with a drafter that reads one token ahead."""
    engine = make_engine(GLM_16_FINE, speculative=7, whole_mm_items=True)
    scheduler = engine.scheduler
    scheduler.max_num_encoder_input_tokens = 1000
    scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    item = MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(),
        mm_position=PlaceholderRange(offset=1008, length=592),
        identifier="image",
        modality="image",
    )
    engine.add("r", 3000, chosen=(stop,), max_tokens=2, mm_features=[item])
    steps = engine.run(60)
    assert (stop in chunk_ends(steps, "r")) is (stop in (992, 1600))


# The answer


@pytest.mark.parametrize(
    "answer",
    [
        (0,),
        (-256,),
        (7000,),
        (7168,),
        (7424,),
        (2304, 2305),
        (True,),
        (2304.0,),
        ("2304",),
        (None,),
        2304,
        None,
        "2304",
        {2304: 1},
    ],
    ids=repr,
)
def test_o6_an_invalid_answer_costs_the_request_its_offer_and_is_logged(
    answer: Any, engine_log: list[str]
) -> None:
    engine = make_engine(GLM_256)
    engine.connector.choose = lambda request: answer if request.request_id == "bad" else (2304,)
    stock = make_engine(GLM_256, connector=None)
    for e in (engine, stock):
        e.add("bad", 7168, max_tokens=3)
    steps = engine.run()
    assert [s.tokens for s in steps] == [s.tokens for s in stock.run()]
    assert boundaries(steps, "bad") == [7168]  # vLLM's own tail alone
    (message,) = [m for m in engine_log if "request bad" in m]
    wrong = answer[-1] if isinstance(answer, tuple) and type(answer[-1]) is int else answer
    assert f"Connector OptedIn chose recurrent publication boundary {wrong!r}" in message
    engine.add("good", 7168, max_tokens=3)
    assert boundaries(engine.run(), "good") == [2304, 7168]


def test_o6_a_connector_that_raises_costs_the_request_its_offer(engine_log: list[str]) -> None:
    engine = make_engine(GLM_256)

    def fail(request: Any) -> Any:
        raise RuntimeError("no idea")

    engine.connector.choose = fail
    engine.add("r", 7000)
    assert boundaries(engine.run(), "r") == []
    (message,) = [m for m in engine_log if "OptedIn failed to choose" in m]
    assert "request r" in message
    assert "no idea" in message


def test_o6_an_unsorted_answer_with_duplicates_is_a_set() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 10000, chosen=(4608, 2304, 4608))
    assert boundaries(engine.run(), "r") == [2304, 4608, 9984]


def test_o6_the_connector_is_asked_once_per_admission() -> None:
    engine = make_engine(GLM_256, budget=2304, max_seqs=1)
    engine.add("r", 7000, chosen=(2304, 4608), max_tokens=30)
    engine.add("waits", 7000, max_tokens=2)
    engine.steps_until("r", 7000)
    assert engine.connector.asked == ["r"]
    # The choice is fixed: a different answer counts only after a preemption.
    engine.connector.chosen["r"] = (6912,)
    engine.pool.evict_blocks(set(range(1, 2048)))
    engine.preempt("r")
    steps = engine.run()
    assert engine.connector.asked == ["r", "r", "waits"]
    assert boundaries(steps, "r") == [6912]


def test_o6_a_waiting_request_is_not_asked_again_and_again() -> None:
    """Asked when its first chunk is cut, also if there was no room for it then."""
    engine = make_engine(SMALL, blocks=30)
    engine.add("first", 60, max_tokens=30, chosen=(16,))
    engine.step()
    engine.add("second", 60, max_tokens=2, chosen=(16,))
    engine.run()
    assert engine.connector.asked == ["first", "second"]


def test_o6_a_streaming_session_whose_prompt_grew_is_asked_again() -> None:
    engine = make_engine(GLM_256)
    request = engine.add("r", 3000, chosen=(2304,), max_tokens=1)
    choices = engine.scheduler.recurrent_boundaries._choices
    assert choices.of(request).stops == (2304,)
    request.num_prompt_tokens += 7000  # what the next part of the session does
    engine.connector.chosen["r"] = (2304, 4608)
    assert choices.of(request).stops == choices.of(request).stops == (2304, 4608)
    assert engine.connector.asked == ["r", "r"]


def test_o6_chosen_boundaries_replace_the_replay_boundary() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7000, chosen=(4608,))
    assert boundaries(engine.run(), "r") == [4608]


def test_o6_a_retention_mask_never_hides_a_chosen_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    geometry = Geometry((Group("full", 8), Group("mamba", 32), Group("mamba", 16)), 8, 16)
    for interval in ("0", "64"):
        monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", interval)
        engine = make_engine(geometry)
        assert engine.manager.coordinator.retention_interval == int(interval)
        engine.add("r", 200, chosen=(32, 48, 96, 104), max_tokens=2)
        offered = set()
        while engine.requests["r"].num_output_tokens < 2:
            step = engine.step()
            check_physics(engine, step)
            offered |= {(g, t) for g, _, t in step.blocks.get("r", ())}
        assert offered >= {(g, t) for g in (1, 2) for t in (32, 48, 96, 104)}
        assert engine.worker.garbage == 0


def test_o6_a_masked_replay_boundary_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask keeps it at scheduler granularity; nothing else is hashed for it."""
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0")
    geometry = Geometry((Group("full", 8), Group("mamba", 32), Group("mamba", 16)), 8, 16)
    engine = make_engine(geometry)
    engine.add("r", 52, max_tokens=2)
    # 48 is vLLM's own tail in the group of 32, and masked in the group of 16.
    offered = [(g, t) for s in engine.run() for g, _, t in s.blocks.get("r", ())]
    assert offered == [(1, 48)]


# Room


@pytest.mark.parametrize(("left", "offered"), [(4, False), (5, False), (6, True)])
def test_o6_a_copy_without_room_is_given_up_and_nothing_is_preempted(
    left: int, offered: bool
) -> None:
    """The next chunk, 8,192 to 9,216, needs four attention blocks and the copy one."""
    engine = make_engine(GLM_256)
    request = engine.add("r", 16000, chosen=(8192,), max_tokens=2)
    engine.add("other", 3000, max_tokens=200)
    engine.scheduler.max_num_scheduled_tokens = 8192
    engine.steps_until("r", 8192)
    taken = engine.pool.get_new_blocks(engine.free_blocks - left)
    running = engine.manager.get_block_ids("r")[1][3]
    assert engine.registered(1, "r", 8192) == {running}
    step = engine.step()
    assert step.tokens["r"] == 1024
    assert request.num_preemptions == 0
    assert bool(step.blocks) is offered
    assert (running in engine.registered(1, "r", 8192)) is False
    engine.pool.free_blocks(taken)
    engine.run()
    assert engine.worker.garbage == 0
    assert engine.requests["other"].status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.free_blocks == 2047


def test_o6_a_given_up_state_is_not_left_in_the_prefix_cache() -> None:
    """The request goes on writing into the block that was registered."""
    engine = make_engine(GLM_16_FINE)
    engine.add("r", 16000, chosen=(8192,), max_tokens=1)
    engine.steps_until("r", 8192)
    assert engine.registered(1, "r", 8192)
    engine.pool.get_new_blocks(engine.free_blocks - 2)
    engine.scheduler.max_num_scheduled_tokens = 16
    assert engine.step().tokens == {"r": 16}
    assert engine.registered(1, "r", 8192) == set()


def test_o6_a_request_whose_own_pins_leave_no_room_runs_without_them() -> None:
    """It may not read the prefix cache, so every attempt would pin the same again."""
    engine = make_engine(SMALL, blocks=62, max_seqs=2)
    request = engine.add("r", 200, chosen=tuple(range(4, 200, 4)), max_tokens=4, prompt_logprobs=1)
    assert request.skip_reading_prefix_cache
    engine.run(300)
    assert request.num_preemptions == 1
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.free_blocks == 61


def test_o6_standing_aside_ends_with_the_next_preemption() -> None:
    engine = make_engine(GLM_256)
    request = engine.add("r", 7000, chosen=(2304,), max_tokens=40)
    engine.scheduler.recurrent_boundaries.offer_nothing_of(request)
    assert boundaries(engine.steps_until("r", 7001), "r") == []
    engine.pool.evict_blocks(set(range(1, 2048)))
    engine.preempt("r")
    assert boundaries(engine.run(), "r") == [2304]


def test_o6_hash_equal_to_block_allows_aligned_choices_only() -> None:
    engine = make_engine(COARSE)
    engine.add("r", 10000, chosen=(2304, 4608))
    assert boundaries(engine.run(), "r") == [2304, 4608]
