import itertools

import pytest

from sparkcache_connector.scheduler.ledger import HeldBlocks, PublicationLedger, Refused, Result

STORED, HELD, SKIPPED, FAILED = Result


def test_publication_settles_with_the_last_report():
    ledger = PublicationLedger(2, 4)
    number = ledger.open(b"a")
    assert ledger.report(0, number, STORED) is None
    settled = ledger.report(1, number, HELD)
    assert (settled.root, settled.complete, settled.withdraw) == (b"a", True, False)
    assert len(ledger) == 0


@pytest.mark.parametrize("results", list(itertools.product(Result, repeat=3)))
def test_all_ranks_publish_the_same_root_or_none(results):
    ledger = PublicationLedger(3, 4)
    number = ledger.open(b"a")
    settled = [ledger.report(rank, number, result) for rank, result in enumerate(results)][-1]
    holders = sum(result in (STORED, HELD) for result in results)
    assert settled.complete == (holders == 3)
    assert settled.withdraw == (0 < holders < 3)


@pytest.mark.parametrize("order", list(itertools.permutations([0, 0, 1, 1, 2])))
def test_each_rank_counts_once_in_every_interleaving(order):
    ledger = PublicationLedger(3, 4)
    number = ledger.open(b"a")
    settlements = [s for rank in order if (s := ledger.report(rank, number, STORED)) is not None]
    assert len(settlements) == 1
    assert settlements[0].results == {0: STORED, 1: STORED, 2: STORED}


def test_first_word_of_a_rank_is_its_only_one():
    ledger = PublicationLedger(2, 4)
    number = ledger.open(b"a")
    ledger.report(0, number, FAILED)
    ledger.report(0, number, STORED)
    assert not ledger.report(1, number, STORED).complete


def test_number_of_held_publications_is_bounded():
    ledger = PublicationLedger(1, 2)
    first = ledger.open(b"a")
    ledger.open(b"b")
    assert ledger.open(b"c") is Refused.TOO_MANY
    ledger.report(0, first, STORED)
    assert isinstance(ledger.open(b"c"), int)


def test_one_root_is_published_once_at_a_time():
    ledger = PublicationLedger(1, 4)
    number = ledger.open(b"a")
    assert ledger.open(b"a") is Refused.UNDER_WAY
    ledger.report(0, number, FAILED)
    assert isinstance(ledger.open(b"a"), int)


@pytest.mark.parametrize(("rank", "offset"), [(0, 1), (-1, 0), (2, 0), (0, -1)])
def test_unknown_rank_or_number_changes_nothing(rank, offset):
    ledger = PublicationLedger(2, 4)
    number = ledger.open(b"a")
    assert ledger.report(rank, number + offset, STORED) is None
    assert len(ledger) == 1


def test_blocks_are_held_until_every_rank_has_read_them_and_released_once():
    held = HeldBlocks(2)
    held.limit = 10
    held.hold(1, 6)
    assert (held.room_for(4), held.room_for(5)) == (True, False)
    held.read(0, 1)
    held.read(0, 1)
    held.read(0, 99)
    assert (len(held), held.take_released()) == (1, [])
    held.read(1, 1)
    assert (len(held), held.take_released(), held.take_released()) == (0, [1], [])
    held.read(1, 1)
    assert (held.take_released(), held.room_for(10)) == ([], True)
