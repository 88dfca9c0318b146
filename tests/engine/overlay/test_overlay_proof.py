"""O1, O2, O3: what may be offered, and what proves it."""

from __future__ import annotations

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
    make_engine,
    token_ids,
)
from vllm.v1.core.kv_cache_utils import get_group_id


def all_offers(engine: Engine) -> list[tuple[str, int, int, int]]:
    offers = []
    for step in engine.run():
        for request_id, triples in step.blocks.items():
            offers += [(request_id, *triple) for triple in triples]
    return offers


def computed_to(engine: Engine, request_id: str, *ends: int) -> list[object]:
    """Drive the KV cache manager alone through calls that end exactly here."""
    request = engine.requests[request_id]
    offers = []
    for end in ends:
        blocks = engine.manager.allocate_slots(request, end - request.num_computed_tokens)
        assert blocks is not None
        request.num_computed_tokens = end
        engine.manager.take_partial_tail_offloads()
        offers.append(engine.manager.recurrent_boundaries.hand_over()[0])
        _, retained = engine.manager.take_kv_cache_block_copies()
        engine.pool.free_blocks(retained)
        engine.manager.new_step_starts()
    return offers


@pytest.mark.parametrize("prompt", [6992, 7168])
def test_o1_o2_the_step_that_computes_to_the_replay_boundary_offers_its_block(prompt: int) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", prompt)
    step = engine.step()
    assert step.tokens == {"r": 6912}
    ((group, block_id, boundary),) = step.blocks["r"]
    assert (group, boundary) == (1, 6912)
    table = engine.manager.get_block_ids("r")[1]
    assert len(table) == 3 + 7
    assert block_id == table[2]
    assert block_id not in table[3:]  # neither running state nor verification slots
    assert step.tails == {}
    assert engine.holds(1, block_id, "r", 6912)
    assert engine.registered(1, "r", 6912) == {block_id}
    block = engine.block(block_id)
    assert (block.block_hash_num_tokens, get_group_id(block.block_hash)) == (6912, 1)


@pytest.mark.parametrize("prompt", [6992, 7168])
def test_o1_the_slot_becomes_null_and_the_pinned_block_lives_on(prompt: int) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", prompt, max_tokens=400)
    ((_, block_id, _),) = engine.step().blocks["r"]
    for _ in range(300):
        engine.step()
        assert not engine.is_free(block_id)
        assert engine.holds(1, block_id, "r", 6912)
    table = engine.manager.get_block_ids("r")[1]
    assert table[2] == 0
    assert block_id not in table
    assert engine.block(block_id).ref_cnt == 1
    engine.abort("r")
    assert engine.is_free(block_id)


@pytest.mark.parametrize("prompt", [6992, 7168])
def test_o3_a_call_that_overshoots_offers_nothing_and_takes_no_pin(prompt: int) -> None:
    engine = make_engine(GLM_256)
    engine.add("r", prompt)
    assert computed_to(engine, "r", prompt) == [None]
    assert engine.manager.get_block_ids("r")[1][:3] == [0, 0, 0]
    assert len(engine.manager.recurrent_boundaries._pins) == 0


def test_o1_not_every_aligned_chunk_end_is_offered() -> None:
    engine = make_engine(GLM_256, budget=2304)
    engine.add("r", 7000)
    steps = engine.run()
    assert [s.tokens["r"] for s in steps[:3]] == [2304, 2304, 2304]
    assert [s.blocks for s in steps[:2]] == [{}, {}]
    assert [t[2] for t in steps[2].blocks["r"]] == [6912]


def test_o1_a_slot_that_a_mid_block_stop_left_behind_is_not_offered() -> None:
    """The prefix cache is fooled by that slot; the hand-off is not."""
    engine = make_engine(GLM_256)
    engine.add("r", 7168)
    # Stop inside block 2, then run past its end: slot 2 keeps a state of 6,000
    # tokens, and vLLM hashes it as the state after 6,912.
    assert computed_to(engine, "r", 6000, 7100) == [None, None]
    poisoned = engine.manager.get_block_ids("r")[1][2]
    assert poisoned != 0
    assert engine.registered(1, "r", 6912) == {poisoned}


def test_o1_an_exact_stop_after_a_mid_block_one_offers_the_running_state() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7168)
    assert computed_to(engine, "r", 6000)[0] is None
    (offer,) = computed_to(engine, "r", 6912)
    assert offer == {"r": [(1, engine.manager.get_block_ids("r")[1][2], 6912)]}


@pytest.mark.parametrize("tamper", ["no hash", "other group", "other boundary", "null"])
def test_o1_each_part_of_the_proof_is_needed(tamper: str) -> None:
    engine = make_engine(GLM_256)
    request = engine.add("r", 7168)
    cache_blocks = engine.manager.coordinator.cache_blocks

    def cache_then_tamper(request: object, num_tokens: int) -> None:
        cache_blocks(request, num_tokens)
        table = engine.manager.coordinator.single_type_managers[1].req_to_blocks["r"]
        block = table[2]
        saved, tokens = block.block_hash, block.block_hash_num_tokens
        block.reset_hash()
        if tamper == "other group":
            block.set_block_hash(saved[:-4] + (0).to_bytes(4, "big"), tokens)
        elif tamper == "other boundary":
            block.set_block_hash(saved, 4608)
        elif tamper == "null":
            block.set_block_hash(saved, tokens)
            table[2] = engine.pool.null_block

    engine.manager.coordinator.cache_blocks = cache_then_tamper
    assert computed_to(engine, request.request_id, 6912) == [None]
    assert len(engine.manager.recurrent_boundaries._pins) == 0


def test_o1_a_hash_of_another_prefix_is_no_proof() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7168)
    other = engine.add("other", 7168)
    cache_blocks = engine.manager.coordinator.cache_blocks

    def cache_then_swap(request: object, num_tokens: int) -> None:
        cache_blocks(request, num_tokens)
        block = engine.manager.coordinator.single_type_managers[1].req_to_blocks["r"][2]
        foreign = other.block_hashes[6912 // 256 - 1] + (1).to_bytes(4, "big")
        block.reset_hash()
        block.set_block_hash(foreign, 6912)

    engine.manager.coordinator.cache_blocks = cache_then_swap
    assert computed_to(engine, "r", 6912) == [None]


def test_o1_a_hash_that_is_stripped_before_the_hand_over_is_no_proof() -> None:
    engine = make_engine(GLM_256)
    request = engine.add("r", 7168)
    assert engine.manager.allocate_slots(request, 6912) is not None
    engine.pool.evict_blocks({engine.manager.get_block_ids("r")[1][2]})
    assert engine.manager.recurrent_boundaries.hand_over() == (None, None)


def test_o1_one_group_short_offers_nothing() -> None:
    engine = make_engine(TWO_GROUPS)
    request = engine.add("r", 7168)
    assert engine.manager.allocate_slots(request, 6912) is not None
    engine.pool.evict_blocks({engine.manager.get_block_ids("r")[2][2]})
    assert engine.manager.recurrent_boundaries.hand_over() == (None, None)


def test_o1_two_recurrent_groups_are_offered_together() -> None:
    engine = make_engine(TWO_GROUPS)
    engine.add("r", 7000)
    step = engine.step()
    assert [(g, t) for g, _, t in step.blocks["r"]] == [(1, 6912), (2, 6912)]
    for group, block_id, boundary in step.blocks["r"]:
        assert engine.registered(group, "r", boundary) == {block_id}
        assert engine.holds(group, block_id, "r", boundary)


def test_o1_groups_of_different_block_size_arrive_in_one_output() -> None:
    """8,064 ends a block of one group and lies inside one of the other."""
    geometry = Geometry((Group("full", 128), Group("mamba", 2304), Group("mamba", 1152)), 128, 1152)
    engine = make_engine(geometry)
    engine.add("r", 10000, chosen=(8064,))
    steps = engine.run()
    (step,) = [s for s in steps if any(t[2] == 8064 for t in s.blocks.get("r", ()))]
    assert [(g, t) for g, _, t in step.blocks["r"] if t == 8064] == [(1, 8064), (2, 8064)]
    for group, block_id, boundary in step.blocks["r"]:
        assert engine.registered(group, "r", boundary) == {block_id}


def test_o1_a_local_hit_that_starts_past_the_boundary_offers_nothing_for_it() -> None:
    engine = make_engine(GLM_256)
    prompt = token_ids("shared", 7168)
    engine.add("first", prompt, max_tokens=1)
    assert [t for *_, t in all_offers(engine)] == [6912]
    engine.add("second", prompt[:7000], max_tokens=1)
    steps = engine.run()
    assert steps[0].tokens == {"second": 88}  # resumed at 6,912
    assert all(not s.blocks for s in steps)


def test_o1_a_loaded_boundary_is_not_offered_as_computed() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 7168, max_tokens=1)
    engine.connector.matched["r"] = 6912
    assert engine.step().tokens == {}
    engine.finish_load("r", 6912)
    engine.step()
    steps = engine.run()
    assert [t[2] for s in steps for t in s.blocks.get("r", ())] in ([], [7168])
    assert engine.worker.garbage == 0


def test_o2_a_prompt_shorter_than_a_hash_block_has_no_boundary() -> None:
    engine = make_engine(GLM_256)
    engine.add("r", 200)
    engine.add("s", 256)
    engine.add("t", 257)
    # What "s" offers is vLLM's own tail: its prompt ends on a hash boundary.
    assert sorted((r, t) for r, _, _, t in all_offers(engine)) == [("s", 256), ("t", 256)]


@pytest.mark.parametrize("prompt", [2304, 2305, 4608, 4609, 6912])
def test_o2_block_equal_to_hash_block_offers_once(prompt: int) -> None:
    engine = make_engine(COARSE, budget=2304)
    engine.add("r", prompt, max_tokens=40)
    offers = all_offers(engine)
    expected = (prompt - 1) // 2304 * 2304
    assert [t for *_, t in offers] == ([expected] if expected else [])


@pytest.mark.parametrize("geometry", [GLM_16, GLM_16_FINE], ids=["whole", "fine"])
def test_o2_with_an_eagle_draft_group(geometry: object) -> None:
    engine = make_engine(geometry, speculative=7)  # type: ignore[arg-type]
    engine.add("r", 8210, max_tokens=20)
    offers = all_offers(engine)
    assert [(g, t) for _, g, _, t in offers] == [(1, 8208)]


def test_o3_the_replay_boundary_makes_no_stop_of_its_own() -> None:
    """At a multiple of the hash block vLLM stops elsewhere, and so do we."""
    engine = make_engine(SAME_BLOCK)
    stock = make_engine(SAME_BLOCK, connector=None)
    for prompt in (7936, 8192):
        for e in (engine, stock):
            e.add(f"r{prompt}", prompt, max_tokens=2)
        assert [s.tokens for s in engine.run()] == [s.tokens for s in stock.run()]
