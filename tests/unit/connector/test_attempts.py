import pytest

from sparkcache_connector.scheduler.attempts import AttemptTracker
from sparkcache_connector.scheduler.publication import Evidence, Poison, Topology

HYBRID = Topology(2, frozenset({1}), 256)
DENSE = Topology(1, frozenset(), 256)
TARGETS = [(512, b"a"), (1_024, b"b"), (1_536, b"c")]


def nobody(root):
    return False


def tracker(topology=HYBRID, max_attempts=100, max_age=60.0):
    return AttemptTracker(topology, max_attempts=max_attempts, max_age=max_age)


def admitted(topology=HYBRID, **keywords):
    t = tracker(topology, **keywords)
    t.admit("r", TARGETS, last_target=1_536, now=0.0)
    return t


def proof(boundary, block=7, computed=None):
    return Evidence.parse([(1, block, boundary)], None, computed or boundary)


def grants(result):
    return [(g.publication.target, g.root, g.publication.proven) for g in result.granted]


def test_each_boundary_is_granted_in_the_step_that_proves_it():
    t = admitted()
    assert grants(t.step("r", None, 256, nobody)) == []
    assert grants(t.step("r", proof(512), 512, nobody)) == [(512, b"a", ((1, 7),))]
    assert grants(t.step("r", proof(1_024, 9), 1_024, nobody)) == [(1_024, b"b", ((1, 9),))]
    assert t.alive == 1


def test_proof_that_comes_a_step_late_is_granted_in_that_step():
    t = admitted()
    assert grants(t.step("r", None, 512, nobody)) == []
    assert grants(t.step("r", proof(512, computed=600), 600, nobody)) == [(512, b"a", ((1, 7),))]


def test_attention_only_grants_every_boundary_that_the_step_reaches():
    t = admitted(DENSE)
    assert grants(t.step("r", None, 511, nobody)) == []
    assert grants(t.step("r", None, 1_100, nobody)) == [(512, b"a", ()), (1_024, b"b", ())]
    assert grants(t.step("r", None, 1_536, nobody)) == [(1_536, b"c", ())]
    assert t.alive == 0


def test_root_that_every_rank_holds_is_retired_without_reading_the_evidence():
    t = admitted()
    result = t.step("r", Evidence.parse("nonsense", None, 512), 512, lambda root: True)
    assert (result.retired, result.refused, t.alive) == (3, (), 0)


def test_malformed_evidence_poisons_every_attempt_of_that_request_only():
    t = admitted()
    t.admit("other", TARGETS, last_target=1_536, now=0.0)
    result = t.step("r", Evidence.parse([7], None, 512), 512, nobody)
    assert [r.reason for r in result.refused] == [Poison.MALFORMED] * 3
    assert t.alive == 3
    assert grants(t.step("r", proof(512), 512, nobody)) == []
    assert len(t.step("other", proof(512), 512, nobody).granted) == 1


def test_preemption_clears_latches_and_fresh_proof_publishes():
    t = admitted()
    t.preempt("r")
    t.preempt("unknown")
    assert len(t.step("r", proof(512), 512, nobody).granted) == 1


def test_requests_without_attempts_cost_nothing_and_grant_nothing():
    t = tracker()
    assert grants(t.step("unknown", proof(512), 512, nobody)) == []
    assert t.forget("unknown") == 0


def test_finished_request_is_gone_and_tells_what_went_unfulfilled():
    t = admitted()
    t.step("r", proof(512), 512, nobody)
    assert t.forget("r") == 2
    assert t.alive == 0
    assert grants(t.step("r", proof(1_024), 1_024, nobody)) == []


def test_attempts_are_bounded_in_number_and_the_deepest_are_kept():
    t = tracker(max_attempts=4)
    assert t.admit("r", TARGETS, last_target=1_536, now=0.0) == 0
    assert t.admit("s", TARGETS, last_target=1_536, now=0.0) == 2
    assert t.admit("u", TARGETS, last_target=1_536, now=0.0) == 3
    assert t.alive == 4
    assert grants(t.step("s", proof(512), 512, nobody)) == []
    assert len(t.step("s", proof(1_536), 1_536, nobody).granted) == 1


def test_attempts_are_bounded_in_age():
    t = admitted(max_age=60.0)
    t.admit("s", TARGETS[:1], last_target=512, now=50.0)
    assert t.expire(60.0) == 0
    assert t.expire(60.1) == 3
    assert t.alive == 1
    assert t.expire(111.0) == 1


def test_admitting_again_replaces_what_was_there():
    t = admitted()
    t.admit("r", TARGETS[1:], last_target=1_536, now=1.0)
    assert t.alive == 2


@pytest.mark.parametrize("topology", [HYBRID, DENSE])
def test_number_of_live_attempts_is_exact_after_any_ending(topology):
    t = admitted(topology)
    t.step("r", proof(512) if topology is HYBRID else None, 512, nobody)
    assert t.alive == 2
    t.step("r", Evidence.parse([7], None, 600), 600, nobody)
    assert t.alive == 0
