import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sparkcache_connector.scheduler.publication import (
    Attempt,
    Evidence,
    Poison,
    State,
    Topology,
)

# Three groups as in the deployments: attention, two recurrent ones; hash block 256.
TOPOLOGY = Topology(3, frozenset({1, 2}), 256)
ATTENTION_ONLY = Topology(2, frozenset(), 256)
TARGET, LAST = 6_912, 8_192
COMPUTED = 8_448
FULL = [(1, 42, TARGET), (2, 43, TARGET)]


def fresh(topology=TOPOLOGY, target=TARGET):
    return Attempt.begin(topology, target, LAST)


def evidence(entries, tails=(), computed=COMPUTED):
    return Evidence.parse(entries, list(tails), computed)


def see(attempt, *arguments, **keywords):
    return attempt.observe(TOPOLOGY, evidence(*arguments, **keywords))


def latched():
    return see(fresh(), FULL)


def test_pending_without_an_entry_stays_pending():
    for raw in (None, [], ()):
        assert see(fresh(), raw) == fresh()


@pytest.mark.parametrize(
    "others",
    [
        [(1, 7, 2_304), (2, 8, 2_304)],
        [(1, 7, 2_304)],
        [(1, 7, 8_192)],
        [(1, 7, 7_168), (1, 9, 4_608)],
    ],
)
def test_pending_and_latched_keep_their_state_when_entries_are_at_other_boundaries(others):
    assert see(fresh(), others) == fresh()
    assert see(latched(), others) == latched()


def test_vllms_own_tail_beyond_the_last_target_is_ignored():
    tail = (1, 7, 8_448)
    assert see(fresh(), [tail], tails=[tail]) == fresh()
    assert see(latched(), [tail], tails=[tail]) == latched()
    assert see(fresh(), [*FULL, tail], tails=[tail]).state is State.LATCHED


def test_pending_latches_on_a_complete_mapping_at_the_target():
    attempt = see(fresh(), FULL)
    assert attempt.state is State.LATCHED
    assert attempt.mapping == ((1, 42), (2, 43))


def test_order_of_entries_does_not_matter():
    assert see(fresh(), FULL[::-1]) == latched()


def test_vllms_own_tail_at_the_target_is_proof():
    assert see(fresh(), FULL, tails=FULL) == latched()


def test_latched_stays_latched_on_the_same_mapping():
    assert see(latched(), FULL) == latched()


def test_latched_is_poisoned_by_a_different_mapping():
    attempt = see(latched(), [(1, 42, TARGET), (2, 44, TARGET)])
    assert attempt.state is State.POISONED
    assert (attempt.refusal.reason, attempt.refusal.block) == (Poison.CONFLICT, 44)


POISONS = [
    ("not a sequence", {"a": 1}, Poison.MALFORMED),
    ("text", "abc", Poison.MALFORMED),
    ("entry too short", [(1, 42)], Poison.MALFORMED),
    ("entry too long", [(1, 42, TARGET, 0)], Poison.MALFORMED),
    ("entry not a sequence", [7], Poison.MALFORMED),
    ("text in an entry", [(1, "42", TARGET)], Poison.MALFORMED),
    ("boolean in an entry", [(True, 42, TARGET)], Poison.MALFORMED),
    ("float in an entry", [(1, 42, float(TARGET))], Poison.MALFORMED),
    ("malformed beside a complete mapping", [*FULL, None], Poison.MALFORMED),
    ("malformed at another boundary", [(1, None, 256)], Poison.MALFORMED),
    ("null block", [(1, 0, TARGET), FULL[1]], Poison.NULL),
    ("negative block", [(1, -1, TARGET), FULL[1]], Poison.NULL),
    ("unknown group", [*FULL, (3, 44, TARGET)], Poison.UNKNOWN_GROUP),
    ("negative group", [*FULL, (-1, 44, TARGET)], Poison.UNKNOWN_GROUP),
    ("attention group", [*FULL, (0, 44, TARGET)], Poison.NOT_RECURRENT),
    ("two entries for one group", [*FULL, (2, 44, TARGET)], Poison.TWICE),
    ("one entry twice", [*FULL, FULL[1]], Poison.TWICE),
    ("only part of the groups", FULL[:1], Poison.INCOMPLETE),
    ("future boundary", [(1, 7, 8_448)], Poison.FUTURE),
    ("future boundary beside the mapping", [*FULL, (1, 7, 8_448)], Poison.FUTURE),
    ("boundary off the grid", [(1, 7, 6_900)], Poison.OFF_GRID),
    ("boundary zero", [(1, 7, 0)], Poison.OFF_GRID),
    ("negative boundary", [(1, 7, -256)], Poison.OFF_GRID),
    ("boundary beyond what is computed", [(1, 7, 8_704)], Poison.NOT_COMPUTED),
]


@pytest.mark.parametrize(("case", "raw", "reason"), POISONS, ids=[p[0] for p in POISONS])
def test_evidence_that_cannot_be_right_poisons(case, raw, reason):
    for before in (fresh(), latched()):
        after = see(before, raw)
        assert (after.state, after.refusal.reason) == (State.POISONED, reason)
        assert after.reach(COMPUTED) == (after, None)
        assert see(after, FULL) == after


def test_target_itself_beyond_what_is_computed_poisons():
    assert see(fresh(), FULL, computed=TARGET - 1).refusal.reason is Poison.NOT_COMPUTED
    assert see(fresh(), FULL, computed=TARGET).state is State.LATCHED


def test_a_tail_excuses_only_the_very_entry_it_names():
    after = see(fresh(), [(1, 7, 8_448)], tails=[(1, 8, 8_448)])
    assert after.refusal.reason is Poison.FUTURE


def test_a_tail_excuses_neither_the_grid_nor_what_is_not_computed():
    for boundary, reason in ((8_447, Poison.OFF_GRID), (8_704, Poison.NOT_COMPUTED)):
        tail = (1, 7, boundary)
        assert see(fresh(), [tail], tails=[tail]).refusal.reason is reason


def test_malformed_tails_poison_when_there_is_an_entry():
    assert see(fresh(), FULL, tails=[(1, 2)]).refusal.reason is Poison.MALFORMED


def test_latched_publishes_when_the_step_reaches_the_target():
    for tokens in (0, TARGET - 1):
        assert latched().reach(tokens) == (latched(), None)
    for tokens in (TARGET, TARGET + 5):
        after, publication = latched().reach(tokens)
        assert after.state is State.PUBLISHED
        assert publication.target == TARGET
        assert publication.proven == ((1, 42), (2, 43))


def test_pending_never_publishes_however_far_the_request_gets():
    assert fresh().reach(10**9) == (fresh(), None)


def test_published_publishes_once():
    after, _ = latched().reach(TARGET)
    assert after.reach(TARGET) == (after, None)
    assert see(after, [(1, 1, TARGET), (2, 2, TARGET)]) == after


def test_preemption_clears_the_latch_and_asks_for_fresh_proof():
    attempt = latched().preempt(TOPOLOGY)
    assert attempt == fresh()
    assert attempt.reach(COMPUTED) == (attempt, None)
    moved = see(attempt, [(1, 50, TARGET), (2, 51, TARGET)])
    assert moved.mapping == ((1, 50), (2, 51))


def test_preemption_does_not_heal_a_poisoned_attempt():
    poisoned = see(fresh(), FULL[:1])
    assert poisoned.preempt(TOPOLOGY) == poisoned


def test_every_rank_holds_the_root_retires_from_any_state():
    for attempt in (fresh(), latched(), see(fresh(), FULL[:1])):
        retired = attempt.retire()
        assert retired.state is State.RETIRED
        assert see(retired, FULL) == retired
        assert see(retired, "not even read") == retired
        assert retired.reach(COMPUTED) == (retired, None)


def test_retiring_does_not_take_back_a_publication():
    published, _ = latched().reach(TARGET)
    assert published.retire() == published


def test_attention_only_needs_no_proof_and_survives_preemption():
    attempt = fresh(ATTENTION_ONLY)
    assert attempt.preempt(ATTENTION_ONLY) == attempt
    assert attempt.reach(TARGET - 1) == (attempt, None)
    _, publication = attempt.reach(TARGET)
    assert publication.proven == ()


def test_attention_only_refuses_a_proof_that_nobody_can_give():
    attempt = fresh(ATTENTION_ONLY).observe(ATTENTION_ONLY, evidence([(0, 7, TARGET)]))
    assert attempt.refusal.reason is Poison.NOT_RECURRENT


def test_refusal_says_request_group_block_observed_and_target_boundary():
    line = see(fresh(), [(1, 7, 8_448)]).refusal.describe("req-9")
    assert line == (
        "publication of request req-9 at boundary 6912 given up: future_boundary "
        "(group 1, block 7, observed boundary 8448)"
    )


@pytest.mark.parametrize("target", [0, -256, 100, LAST + 256])
def test_target_that_cannot_be_is_a_programming_error(target):
    with pytest.raises(ValueError, match=f"target {target} cannot be"):
        fresh(target=target)


def test_topology_that_cannot_be_is_a_programming_error():
    with pytest.raises(ValueError, match="impossible topology"):
        Topology(2, frozenset({2}), 256)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner, inner),
    max_leaves=12,
)


@given(anything, anything, st.integers(-10, 10_000))
def test_no_input_crashes_it_and_none_latches_without_a_whole_mapping(raw, tails, computed):
    after = fresh().observe(TOPOLOGY, Evidence.parse(raw, tails, computed))
    assert after.state in (State.PENDING, State.POISONED)


TARGET_M = 4
blocks = st.integers(-1, 3)
groups = st.integers(-1, 3)
entries = st.lists(
    st.tuples(groups, blocks, st.sampled_from([2, 3, 4, 4, 4, 6, 8]))
    | st.sampled_from([(1, 1, 4), (2, 2, 4), None, (1, 1)]),
    max_size=3,
) | st.sampled_from([[(1, 1, 4), (2, 2, 4)], [(2, 2, 4), (1, 1, 4)], [(1, 1, 4), (2, 3, 4)]])


class AgainstTheModel(RuleBasedStateMachine):
    """The automaton against a model that keeps the whole history and nothing else."""

    def __init__(self):
        super().__init__()
        self.topology = Topology(3, frozenset({1, 2}), 2)
        self.attempt = Attempt.begin(self.topology, TARGET_M, 6)
        self.history = []  # what was handed over at the target since the last preemption
        self.over = False

    def model_allows(self):
        return not self.over and bool(self.history) and len(set(self.history)) == 1

    @rule(raw=entries, tail=st.booleans(), computed=st.sampled_from([3, 4, 8]))
    def observe(self, raw, tail, computed):
        tails = raw if tail else []
        self.attempt = self.attempt.observe(self.topology, Evidence.parse(raw, tails, computed))
        proper = all(isinstance(e, tuple) and len(e) == 3 for e in raw)
        possible = proper and all(
            b > 0 and b % 2 == 0 and b <= computed and (b <= 6 or tail) for _, _, b in raw
        )
        here = sorted(e[:2] for e in raw if e[2] == TARGET_M) if possible else []
        whole = [g for g, _ in here] == [1, 2] and all(b > 0 for _, b in here)
        if not possible or (here and not whole):
            self.over = True
        elif here:
            self.history.append(tuple(here))
            self.over |= len(set(self.history)) > 1

    @rule(tokens=st.integers(0, 8))
    def reach(self, tokens):
        allowed = self.model_allows() and tokens >= TARGET_M
        self.attempt, publication = self.attempt.reach(tokens)
        assert (publication is not None) == allowed
        if publication:
            assert publication.proven == self.history[0]
            self.over = True

    @rule()
    def preempt(self):
        self.attempt = self.attempt.preempt(self.topology)
        self.history = []

    @rule()
    def retire(self):
        self.attempt = self.attempt.retire()
        self.over = True

    @invariant()
    def latched_exactly_when_the_model_would_publish(self):
        assert (self.attempt.state is State.LATCHED) == self.model_allows()


TestAgainstTheModel = AgainstTheModel.TestCase
