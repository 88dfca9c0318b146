import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.scheduler.boundaries import (
    BoundaryPolicy,
    boundary_unit,
    finish_boundary,
    last_boundary,
)

units = st.sampled_from([1, 16, 32, 128, 256, 768])
policies = st.builds(
    BoundaryPolicy,
    unit=units,
    interval=st.integers(1, 9_000),
    recurrent_block=st.sampled_from([0, 16, 128, 400, 2_304]),
)


@given(policies, st.integers(0, 20_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_any_shared_prefix_is_found_up_to_one_interval(policy, shared, more_one, more_two):
    first, second = shared + more_one, shared + more_two
    stored = policy.targets(first)
    cached = max((b for b in stored if b <= min(shared, second - 1)), default=0)
    assert cached >= shared - max(policy.interval, policy.unit)


@given(policies, st.integers(0, 20_000))
def test_the_same_prompt_again_is_found_up_to_one_unit(policy, prompt):
    cached = max(policy.targets(prompt), default=0)
    assert cached >= prompt - policy.unit
    assert cached == last_boundary(prompt, policy.unit)


@given(policies, st.integers(0, 20_000), st.integers(0, 20_000))
def test_targets_are_ascending_multiples_of_the_unit_below_the_end(policy, prompt, after):
    targets = policy.targets(prompt, after=after)
    assert list(targets) == sorted(set(targets))
    assert all(after < b < prompt and b % policy.unit == 0 for b in targets)


@given(policies, st.integers(0, 20_000), st.integers(0, 5_000))
def test_prompts_of_any_length_share_the_grid(policy, prompt, more):
    shorter, longer = policy.targets(prompt), policy.targets(prompt + more)
    assert set(shorter[:-1]) <= set(longer)


@given(policies, st.integers(0, 20_000))
def test_preference_for_aligned_checkpoints_at_most_doubles_their_number(policy, prompt):
    plain = BoundaryPolicy(policy.unit, policy.interval)
    assert len(policy.targets(prompt)) <= 2 * len(plain.targets(prompt)) + 1


@given(policies, st.integers(0, 20_000), st.integers(0, 20_000))
def test_what_is_stored_already_is_not_stored_again(policy, prompt, after):
    assert policy.targets(prompt, after=after) == tuple(
        b for b in policy.targets(prompt) if b > after
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (256, ()),
        (257, (256,)),
        (2_304, (2_048,)),
        (2_305, (2_304,)),
        (6_912, (2_304, 4_608, 6_656)),
        (6_992, (2_304, 4_608, 6_912)),
        (7_168, (2_304, 4_608, 6_912)),
        (8_209, (2_304, 4_608, 6_912, 8_192)),
        (8_224, (2_304, 4_608, 6_912, 8_192)),
    ],
)
def test_recurrent_block_of_2304_and_unit_256(prompt, expected):
    assert BoundaryPolicy(256, 4_096, 2_304).targets(prompt) == expected


def test_sparse_recurrent_blocks_do_not_hide_checkpoints():
    targets = BoundaryPolicy(256, 1_024, 2_304).targets(5_000)
    assert targets == (1_024, 2_048, 3_072, 4_096, 4_864)


def test_interval_below_the_unit_means_every_unit():
    assert BoundaryPolicy(256, 1).targets(1_025) == (256, 512, 768, 1_024)


def test_spans_limit_what_is_stored():
    assert BoundaryPolicy(256, 512, min_span=1_024, max_span=1_536).targets(9_000) == (1_024, 1_536)


@pytest.mark.parametrize(("chunk", "block"), [(256, 16), (256, 128), (256, 784), (256, 2_304)])
def test_unit_ends_a_chunk_and_a_hash_block(chunk, block):
    unit = boundary_unit(chunk, block)
    assert unit % chunk == unit % block == 0
    assert unit == math.lcm(chunk, block)


@pytest.mark.parametrize(
    ("computed", "in_flight", "tokens", "expected"),
    [
        (1_030, 0, 1_031, 1_024),
        (1_024, 0, 1_025, 1_024),
        (1_024, 0, 1_024, 768),
        (1_030, 10, 1_031, 768),
        (1_040, 0, 1_020, 768),
        (5, 9, 6, 0),
        (0, 0, 0, 0),
    ],
)
def test_finish_publishes_accepted_and_completed_tokens_only(computed, in_flight, tokens, expected):
    assert (
        finish_boundary(computed=computed, in_flight=in_flight, tokens=tokens, unit=256) == expected
    )


@pytest.mark.parametrize("arguments", [(0, 1), (256, 0), (256, 256, -1)])
def test_impossible_policy_is_refused(arguments):
    with pytest.raises(ValueError, match="impossible policy"):
        BoundaryPolicy(*arguments)
