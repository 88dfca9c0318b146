import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkcache_connector.scheduler.quorum import Absorbed, Journal, Quorum, Report

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def journals(*inventories):
    made = []
    for rank, roots in enumerate(inventories):
        journal = Journal(rank, f"life-{rank}")
        journal.replace(roots)
        made.append(journal)
    return made


def exchange(quorum, *speakers):
    return [quorum.absorb(report) for journal in speakers for report in journal.drain()]


def test_inventories_exchanged_at_start_let_the_first_request_hit():
    quorum = Quorum(2)
    assert quorum.out_of_step == {0, 1}
    exchange(quorum, *journals([A, B], [B, C]))
    assert (quorum.holds(A), quorum.holds(B), quorum.holds(C)) == (False, True, False)
    assert quorum.out_of_step == frozenset()
    assert len(quorum) == 1


def test_rank_with_nothing_to_tell_is_still_known():
    quorum = Quorum(1)
    assert exchange(quorum, *journals([])) == [Absorbed.APPLIED]
    assert quorum.out_of_step == frozenset()


def test_changes_follow_and_the_version_tells_that_answers_may_differ():
    quorum = Quorum(1)
    (journal,) = journals([A])
    exchange(quorum, journal)
    version = quorum.version
    assert journal.next_report() is None
    journal.add(B)
    journal.remove(A)
    exchange(quorum, journal)
    assert (quorum.holds(A), quorum.holds(B)) == (False, True)
    assert quorum.version > version


def test_change_and_its_opposite_between_two_reports_are_not_reported():
    (journal,) = journals([A])
    journal.drain()
    journal.add(B)
    journal.remove(B)
    journal.remove(A)
    journal.add(A)
    assert journal.next_report() is None


def test_missing_report_withdraws_the_rank_until_it_starts_over():
    quorum = Quorum(2)
    one, two = journals([A], [A])
    exchange(quorum, one, two)
    one.add(B)
    one.next_report()  # lost
    one.add(C)
    assert exchange(quorum, one) == [Absorbed.RESYNC]
    assert not quorum.holds(A)
    assert quorum.out_of_step == {0}
    one.remove(C)
    assert exchange(quorum, one) == [Absorbed.RESYNC]
    one.start_over()
    assert exchange(quorum, one) == [Absorbed.APPLIED]
    assert quorum.holds(A)


def test_repeated_and_reordered_reports_change_nothing():
    quorum = Quorum(1)
    (journal,) = journals([A])
    first = journal.drain()
    journal.remove(A)
    second = journal.drain()
    for report in [*first, *second]:
        quorum.absorb(report)
    for report in [*first, *second, *first]:
        assert quorum.absorb(report) is Absorbed.STALE
    assert not quorum.holds(A)


def test_restarted_rank_replaces_its_former_life_and_the_dead_cannot_speak():
    quorum = Quorum(1)
    (old,) = journals([A])
    exchange(quorum, old)
    new = Journal(0, "second-life")
    new.add(B)
    exchange(quorum, new)
    assert (quorum.holds(A), quorum.holds(B)) == (False, True)
    old.start_over()
    assert exchange(quorum, old) == [Absorbed.STALE]
    assert (quorum.holds(A), quorum.holds(B)) == (False, True)


def test_report_of_a_life_that_never_introduced_itself_is_not_applied():
    quorum = Quorum(1)
    assert quorum.absorb(Report(0, "x", 0, False, (A,))) is Absorbed.RESYNC
    assert not quorum.holds(A)


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_rank_that_cannot_be_is_ignored(rank):
    quorum = Quorum(2)
    assert quorum.absorb(Report(rank, "x", 0, True, (A,))) is Absorbed.STALE


def test_reports_are_bounded_and_together_complete():
    quorum = Quorum(1)
    journal = Journal(0, "x", max_changes=3)
    roots = [bytes([i]) * 32 for i in range(10)]
    journal.replace(roots)
    reports = journal.drain()
    assert [len(r.added) for r in reports] == [3, 3, 3, 1]
    assert [r.reset for r in reports] == [True, False, False, False]
    for report in reports:
        quorum.absorb(report)
    assert len(quorum) == 10


def test_inventory_is_bounded_and_the_newest_roots_are_told():
    journal = Journal(0, "x", max_roots=2)
    journal.replace([A, B, C])
    assert (len(journal), A in journal, C in journal) == (2, False, True)
    (report,) = journal.drain()
    assert set(report.added) == {B, C}


def test_discarded_root_is_not_offered_before_its_ranks_report_it_gone():
    quorum = Quorum(1)
    exchange(quorum, *journals([A]))
    version = quorum.version
    quorum.discard(0, A)
    assert not quorum.holds(A)
    assert quorum.version > version
    quorum.discard(0, A)


def test_root_that_one_rank_lost_is_held_again_once_that_rank_alone_reports_it():
    quorum = Quorum(2)
    first, second = journals([A], [A])
    exchange(quorum, first, second)
    second.remove(A)
    exchange(quorum, first, second)
    quorum.discard(1, A)
    assert not quorum.holds(A)
    second.add(A)
    exchange(quorum, first, second)
    assert quorum.holds(A)


def test_quorum_of_nobody_is_a_programming_error():
    with pytest.raises(ValueError, match="a quorum of 0 ranks"):
        Quorum(0)


class UnreliableChannel(RuleBasedStateMachine):
    """Reports are lost, repeated and delayed, ranks die; a false hit never appears."""

    def __init__(self):
        super().__init__()
        self.quorum = Quorum(2)
        self.lives = 2
        self.journals = [Journal(0, "0", max_changes=2), Journal(1, "1", max_changes=2)]
        self.sent = []
        self.ever = [set(), set()]  # what each rank's current life has ever held

    @rule(rank=st.integers(0, 1), root=st.sampled_from([A, B, C]))
    def add(self, rank, root):
        self.journals[rank].add(root)
        self.ever[rank].add(root)

    @rule(rank=st.integers(0, 1), root=st.sampled_from([A, B, C]))
    def remove(self, rank, root):
        self.journals[rank].remove(root)

    @rule(rank=st.integers(0, 1), lost=st.booleans())
    def speak(self, rank, lost):
        report = self.journals[rank].next_report()
        if report is None:
            return
        self.sent.append(report)
        if not lost and self.quorum.absorb(report) is Absorbed.RESYNC:
            self.journals[rank].start_over()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver_again(self, data):
        report = data.draw(st.sampled_from(self.sent))
        before = copy.deepcopy(self.quorum._holders)
        late_but_first = self.quorum.absorb(report) is Absorbed.APPLIED
        if not late_but_first:
            gained = {r for r, m in self.quorum._holders.items() if m & ~before.get(r, 0)}
            assert not gained

    @rule(rank=st.integers(0, 1))
    def restart(self, rank):
        self.journals[rank] = Journal(rank, str(self.lives), max_changes=2)
        self.lives += 1

    @rule()
    def heal_and_compare(self):
        for journal in self.journals:
            journal.start_over()
            for report in journal.drain():
                self.quorum.absorb(report)
        for root in (A, B, C):
            assert self.quorum.holds(root) == all(root in j for j in self.journals)

    @invariant()
    def no_rank_counts_for_a_root_it_never_held(self):
        for root in (A, B, C):
            if self.quorum.holds(root):
                assert all(root in ever for ever in self.ever)

    @invariant()
    def number_of_complete_roots_is_exact(self):
        assert len(self.quorum) == sum(self.quorum.holds(root) for root in (A, B, C))


TestUnreliableChannel = UnreliableChannel.TestCase
TestUnreliableChannel.settings = settings(max_examples=60, stateful_step_count=30)
