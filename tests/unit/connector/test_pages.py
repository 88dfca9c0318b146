import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkcache_connector.pages import (
    FULL,
    RECURRENT,
    SLIDING,
    GroupShape,
    PageRange,
    beyond_local,
    recurrent_groups,
    select,
)


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [(1, (0, 1, 1)), (16, (0, 1, 16)), (17, (0, 2, 1)), (256, (0, 16, 16)), (250, (0, 16, 10))],
)
def test_full_attention_needs_every_block_and_says_what_of_the_last_counts(boundary, expected):
    assert select(GroupShape(FULL, 16), boundary) == PageRange(*expected)


@pytest.mark.parametrize(
    ("boundary", "slot"), [(2_304, 0), (6_912, 2), (8_192, 3), (6_656, 2), (2_305, 1)]
)
def test_recurrent_group_needs_exactly_the_slot_of_its_boundary(boundary, slot):
    assert select(GroupShape(RECURRENT, 2_304), boundary) == PageRange(slot, 1, 2_304)


@pytest.mark.parametrize(
    ("window", "boundary", "first"),
    [(1, 64, 3), (2, 64, 3), (17, 64, 3), (18, 64, 2), (33, 64, 2), (34, 64, 1), (100, 64, 0)],
)
def test_sliding_window_needs_what_the_next_token_can_see(window, boundary, first):
    pages = select(GroupShape(SLIDING, 16, window), boundary)
    assert (pages.first, pages.end) == (first, 4)


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 64))
def test_sliding_window_by_definition(boundary, window, block):
    pages = select(GroupShape(SLIDING, block, window), boundary)
    # The token at the boundary sees itself and window - 1 before it.
    seen = [t for t in range(boundary) if t > boundary - window]
    needed = {t // block for t in seen} or {(boundary - 1) // block}
    assert set(range(pages.first, pages.end)) == needed


@given(
    st.sampled_from([FULL, SLIDING, RECURRENT]),
    st.integers(1, 64),
    st.integers(1, 400),
    st.integers(0, 400),
)
def test_restore_writes_no_block_of_the_local_prefix(kind, block, boundary, local):
    shape = GroupShape(kind, block, 20)
    whole = select(shape, boundary)
    written = beyond_local(shape, boundary, min(local, boundary - 1) // block * block)
    if kind == RECURRENT:
        assert written == whole
        return
    expected = [
        i
        for i in range(whole.first, whole.end)
        if i * block >= min(local, boundary - 1) // block * block
    ]
    got = [] if written is None else list(range(written.first, written.end))
    assert got == expected
    assert written is None or written.last_positions == whole.last_positions


def test_nothing_is_written_when_the_window_lies_in_the_local_prefix():
    assert beyond_local(GroupShape(FULL, 16), 64, 64) is None


def test_recurrent_groups_are_found_by_kind():
    shapes = [GroupShape(RECURRENT, 8), GroupShape(FULL, 8), GroupShape(RECURRENT, 8)]
    assert recurrent_groups(shapes) == {0, 2}


@pytest.mark.parametrize("boundary", [0, -1])
def test_root_without_tokens_is_a_programming_error(boundary):
    with pytest.raises(ValueError, match="a root at boundary"):
        select(GroupShape(FULL, 16), boundary)
