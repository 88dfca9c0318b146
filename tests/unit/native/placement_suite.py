"""The behaviour of a placement, run against every implementation.

A test module subclasses :class:`PlacementSuite`, names how memory is made and how a placement
is opened, and inherits the tests.
"""

import hashlib
import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sparkcache_connector.worker.placement import (
    Page,
    PageLayout,
    PlacementOptions,
    SealedPage,
    Span,
    VerifiedPage,
    region_of_buffer,
)
from sparkcache_connector.worker.placement_errors import (
    CoverageError,
    PlacementArgumentError,
    PlacementStateError,
    PlacementTimeoutError,
    UnverifiedPageError,
)
from sparkcache_connector.worker.placement_layout import Extent, LayerPages
from tests.unit.native.geometries import shapes
from tests.unit.native.naive import page_addresses

ARENA = 16384
WAIT = 20.0

SLOW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


class BufferRig:
    """Host memory in bytearrays."""

    def __init__(self, sizes):
        self.buffers = [bytearray(size) for size in sizes]
        self.regions = [region_of_buffer(buffer) for buffer in self.buffers]

    def read(self):
        return [bytes(buffer) for buffer in self.buffers]

    def write(self, contents):
        for buffer, content in zip(self.buffers, contents, strict=True):
            buffer[:] = content


class Memory:
    """A copy of a rig's memory, addressed as the rig's."""

    def __init__(self, rig):
        self.regions = rig.regions
        self.contents = [bytearray(c) for c in rig.read()]

    def _at(self, address):
        for region, content in zip(self.regions, self.contents, strict=True):
            if region.address <= address < region.address + region.nbytes:
                return content, address - region.address
        raise AssertionError(f"{address} is in no region")

    def encode(self, layout, group, block, positions=None):
        found = bytearray()
        for address in page_addresses(layout, group, block, positions):
            if address is None:
                found.append(0)
            else:
                content, at = self._at(address)
                found.append(content[at])
        return bytes(found)

    def decode(self, layout, group, block, encoded):
        for address, value in zip(page_addresses(layout, group, block), encoded, strict=True):
            content, at = self._at(address)
            content[at] = value


def digest(data):
    return hashlib.sha256(data).digest()


def distinct_pages(layout, order, count):
    """At most ``count`` pages that share no byte, in the order that ``order`` deals."""
    every = [(g, b) for g, n in layout.blocks.items() for b in range(1, n)]
    order.shuffle(every)
    taken, used = [], set()
    for group, block in every:
        addresses = page_addresses(layout, group, block)
        if len(set(addresses)) == len(addresses) and used.isdisjoint(addresses):
            used.update(addresses)
            taken.append((group, block))
    return taken[:count]


def cut(order, sizes, pieces):
    """Spans that cover pages of ``sizes``, interleaved, each page in ascending order."""
    queues = []
    for page, size in enumerate(sizes):
        edges = sorted({0, size, *(order.randrange(size + 1) for _ in range(pieces))})
        queues.append([(page, a, b - a) for a, b in pairwise(edges)])
    spans = []
    while queues:
        queue = order.choice(queues)
        spans.append(queue.pop(0))
        queues = [q for q in queues if q]
    return spans


class PlacementSuite:
    """Subclass it; ``rig`` makes memory, ``open`` opens the implementation under test."""

    rig = staticmethod(BufferRig)

    @staticmethod
    def open(layout, options):
        raise NotImplementedError

    def case(self, shape, seed):
        order = random.Random(seed)
        rig = self.rig(shape.sizes)
        rig.write([order.randbytes(size) for size in shape.sizes])
        layout = PageLayout(shape.layers_over(rig.regions))
        assume(layout.largest_page <= ARENA // 4)
        return order, rig, layout

    def opened(self, layout):
        return self.open(layout, PlacementOptions(arena_bytes=ARENA, arenas=3))

    @SLOW
    @given(shapes(), st.integers(0, 2**32))
    def test_capture_reads_exactly_the_pages_and_zeroes_what_is_not_kept(self, shape, seed):
        order, rig, layout = self.case(shape, seed)
        before = Memory(rig)
        pages = [
            Page(g, b, order.choice([None, 1, order.randrange(1, 30)]))
            for g, b in distinct_pages(layout, order, 4)
        ]
        assume(pages)
        sizes = [layout.page_sizes[p.group] for p in pages]
        got = [bytearray(size) for size in sizes]
        placement = self.opened(layout)
        fence = placement.fence()
        with placement.begin_capture(pages, fence) as capture:
            fence.close()
            spans, at = [], order.randrange(64)
            for page, page_offset, length in cut(order, sizes, 2):
                spans.append(Span(page, page_offset, at, length))
                at += length + order.randrange(3)
            arena = capture.acquire(WAIT)
            poison = bytes([0xA5]) * placement.arena_bytes
            arena.view[:] = poison
            capture.submit(arena, spans)
            view = capture.wait(arena, WAIT)
            for s in spans:
                piece = view[s.source_offset : s.source_offset + s.length]
                got[s.page][s.page_offset : s.page_offset + s.length] = piece
            arena.release()
            capture.finish(WAIT)
        for page, found in zip(pages, got, strict=True):
            assert found == before.encode(layout, page.group, page.block, page.positions)
        assert rig.read() == before.contents
        placement.close()

    @SLOW
    @given(shapes(), st.integers(0, 2**32))
    def test_placement_writes_exactly_the_pages(self, shape, seed):
        order, rig, layout = self.case(shape, seed)
        pages = [Page(g, b) for g, b in distinct_pages(layout, order, 4)]
        assume(pages)
        expected = Memory(rig)
        encoded = [order.randbytes(layout.page_sizes[p.group]) for p in pages]
        for page, data in zip(pages, encoded, strict=True):
            expected.decode(layout, page.group, page.block, data)
        placement = self.opened(layout)
        fence = placement.fence()
        with placement.begin_placement(pages, fence) as placing:
            fence.close()
            spans = cut(order, list(map(len, encoded)), 3)
            while spans:
                part, spans = spans[:3], spans[3:]
                source, named = bytearray(order.randbytes(order.randrange(9))), []
                for page, page_offset, length in part:
                    named.append(Span(page, page_offset, len(source), length))
                    source += encoded[page][page_offset : page_offset + length]
                    source += order.randbytes(order.randrange(3))
                placing.submit(order.choice([bytes, bytearray, memoryview])(source), named)
                source[:] = bytes(len(source))  # free again: this must not reach the pages
            placing.finish(WAIT)
            assert placing.closed
        assert rig.read() == expected.contents
        placement.close()

    @SLOW
    @given(shapes(), st.integers(0, 2**32))
    def test_direct_restore_writes_exactly_the_pages(self, shape, seed):
        order, rig, layout = self.case(shape, seed)
        named = distinct_pages(layout, order, 6)
        assume(named)
        expected = Memory(rig)
        encoded = [order.randbytes(layout.page_sizes[g]) for g, _ in named]
        for (group, block), data in zip(named, encoded, strict=True):
            expected.decode(layout, group, block, data)
        pages = [
            SealedPage(g, b, digest(data)) for (g, b), data in zip(named, encoded, strict=True)
        ]
        placement = self.opened(layout)
        fence = placement.fence()
        with placement.begin_restore(pages, fence) as restore:
            fence.close()
            todo = list(range(len(pages)))
            order.shuffle(todo)
            while todo:
                part, todo = todo[:2], todo[2:]
                arena, verified, at = restore.acquire(WAIT), [], order.randrange(40)
                for page in part:
                    size = len(encoded[page])
                    arena.view[at : at + size] = encoded[page]
                    found = digest(arena.view[at : at + size])
                    verified.append(VerifiedPage(page, at, found))
                    at += size + order.randrange(40)
                restore.submit(arena, verified)
            restore.finish(WAIT)
        assert rig.read() == expected.contents
        placement.close()

    @SLOW
    @given(shapes(), st.integers(0, 2**32))
    def test_pages_that_share_bytes_are_refused_and_all_others_are_not(self, shape, seed):
        order, _, layout = self.case(shape, seed)
        every = [(g, b) for g, n in layout.blocks.items() for b in range(1, n)]
        named = [order.choice(every) for _ in range(order.randrange(1, 4))]
        flat = [a for g, b in named for a in page_addresses(layout, g, b)]
        pages = [Page(g, b) for g, b in named]
        placement = self.opened(layout)
        for begin in (placement.begin_placement, placement.begin_capture):
            if len(set(flat)) < len(flat):
                with pytest.raises(CoverageError, match=r"share bytes|overlap"):
                    begin(pages)
            else:
                begin(pages).abort(WAIT)
        placement.close()

    # -- plain cases, each malformed in one way ---------------------------------------------

    def small(self, blocks=6, arenas=2):
        """Two groups: attention (two layers, four positions of 8 bytes) and a state."""
        rig = self.rig([blocks * 32, blocks * 32, blocks * 50])
        rig.write([bytes(range(1, 33)) * blocks, bytes(range(33, 65)) * blocks, b"s" * blocks * 50])
        a, b, c = rig.regions
        layout = PageLayout(
            (
                LayerPages("attn.0", 0, a, 0, 32, blocks, (Extent(0, 4, 8),)),
                LayerPages("attn.1", 0, b, 0, 32, blocks, (Extent(0, 4, 8),)),
                LayerPages("mamba", 1, c, 0, 50, blocks, (Extent(0, 1, 37),)),
            )
        )
        return rig, layout, self.open(layout, PlacementOptions(arena_bytes=4096, arenas=arenas))

    @pytest.mark.parametrize(
        ("group", "block", "problem"),
        [
            (0, 0, "null block"),
            (1, 0, "null block"),
            (0, 6, "block 6"),
            (0, 2**40, "block"),
            (0, -1, "block"),
            (2, 1, "group 2"),
            (-1, 1, "group"),
        ],
    )
    def test_a_page_that_cannot_be_is_refused(self, group, block, problem):
        _, _, placement = self.small()
        for begin, page in (
            (placement.begin_placement, Page(group, block)),
            (placement.begin_capture, Page(group, block)),
            (placement.begin_restore, SealedPage(group, block, bytes(32))),
        ):
            with pytest.raises(PlacementArgumentError, match=problem):
                begin([page])
        placement.close()

    def test_no_pages_are_refused(self):
        _, _, placement = self.small()
        for begin in (
            placement.begin_placement,
            placement.begin_capture,
            placement.begin_restore,
        ):
            with pytest.raises(PlacementArgumentError, match="no pages"):
                begin([])
        placement.close()

    def test_positions_below_one_are_refused(self):
        _, _, placement = self.small()
        for positions in (0, -1):
            with pytest.raises(PlacementArgumentError, match="position"):
                placement.begin_capture([Page(0, 1, positions)])
        placement.close()

    def test_a_repeated_page_is_refused(self):
        _, _, placement = self.small()
        with pytest.raises(CoverageError):
            placement.begin_capture([Page(0, 1), Page(1, 2), Page(0, 1)])
        with pytest.raises(CoverageError):
            placement.begin_restore([SealedPage(1, 1, bytes(32)), SealedPage(1, 1, bytes(32))])
        placement.close()

    def test_direct_restore_and_page_placement_refuse_each_others_values(self):
        _, _, placement = self.small()
        with pytest.raises(PlacementArgumentError, match="not interchangeable"):
            placement.begin_restore([Page(0, 1)])
        with pytest.raises(PlacementArgumentError, match="not interchangeable"):
            placement.begin_placement([SealedPage(0, 1, bytes(32))])
        with (
            placement.begin_placement([Page(0, 1)]) as placing,
            pytest.raises(PlacementArgumentError, match="not interchangeable"),
        ):
            placing.submit(bytes(64), [VerifiedPage(0, 0, bytes(32))])
        with placement.begin_restore([SealedPage(0, 1, bytes(32))]) as restore:
            arena = restore.acquire(WAIT)
            with pytest.raises(PlacementArgumentError, match="not interchangeable"):
                restore.submit(arena, [Span(0, 0, 0, 64)])
        placement.close()

    def test_a_digest_that_the_manifest_does_not_name_writes_nothing(self):
        rig, _, placement = self.small()
        before = rig.read()
        with placement.begin_restore(
            [SealedPage(0, 1, b"a" * 32), SealedPage(0, 2, b"b" * 32)]
        ) as restore:
            arena = restore.acquire(WAIT)
            arena.view[:128] = b"x" * 128
            with pytest.raises(UnverifiedPageError, match="digest"):
                restore.submit(
                    arena, [VerifiedPage(0, 0, b"a" * 32), VerifiedPage(1, 64, b"a" * 32)]
                )
            # Refused as a whole: the good page of that call is still due, and can be placed.
            restore.submit(arena, [VerifiedPage(0, 0, b"a" * 32)])
            with pytest.raises(CoverageError):
                restore.finish(WAIT)
        after = rig.read()
        assert after[0][32:64] == b"x" * 32
        assert after[0][64:] == before[0][64:]
        placement.close()

    def test_a_seal_of_another_length_is_refused(self):
        _, _, placement = self.small()
        with pytest.raises(PlacementArgumentError, match="digest"):
            placement.begin_restore([SealedPage(0, 1, bytes(31))])
        placement.close()

    @pytest.mark.parametrize(
        ("span", "error", "problem"),
        [
            (Span(1, 0, 0, 64), PlacementArgumentError, "page"),
            (Span(-1, 0, 0, 64), PlacementArgumentError, "page"),
            (Span(0, 0, 0, 65), PlacementArgumentError, "end"),
            (Span(0, 0, 0, 0), PlacementArgumentError, "pan|length"),
            (Span(0, 0, 0, -1), PlacementArgumentError, "pan|length"),
            (Span(0, 0, 100, 64), PlacementArgumentError, "end"),
            (Span(0, 0, 2**63, 64), PlacementArgumentError, "end"),
            (Span(0, 0, -1, 64), PlacementArgumentError, "pan|end"),
            (Span(0, 2**63, 0, 64), PlacementArgumentError, "end"),
            (Span(0, 8, 0, 56), CoverageError, "once|gap"),
        ],
    )
    def test_a_span_that_cannot_be_writes_nothing(self, span, error, problem):
        rig, _, placement = self.small()
        before = rig.read()
        with (
            placement.begin_placement([Page(0, 1)]) as placing,
            pytest.raises(error, match=problem),
        ):
            placing.submit(bytes(128), [span])
        assert rig.read() == before
        placement.close()

    def test_a_byte_submitted_twice_is_refused(self):
        _, _, placement = self.small()
        with placement.begin_placement([Page(0, 1)]) as placing:
            placing.submit(bytes(40), [Span(0, 0, 0, 40)])
            with pytest.raises(CoverageError):
                placing.submit(bytes(40), [Span(0, 0, 0, 40)])
            with pytest.raises(CoverageError):
                placing.submit(bytes(64), [Span(0, 40, 0, 10), Span(0, 40, 0, 10)])
            placing.submit(bytes(64), [Span(0, 40, 0, 10), Span(0, 50, 10, 14)])
            with pytest.raises(CoverageError):
                placing.submit(bytes(64), [Span(0, 0, 0, 64)])
            placing.finish(WAIT)
        placement.close()

    def test_short_coverage_cannot_finish_and_stays_open(self):
        _, _, placement = self.small()
        with placement.begin_placement([Page(0, 1), Page(1, 2)]) as placing:
            placing.submit(bytes(64), [Span(0, 0, 0, 64)])
            placing.submit(bytes(36), [Span(1, 0, 0, 36)])
            with pytest.raises(CoverageError, match=r"short|36 of 37"):
                placing.finish(WAIT)
            assert not placing.closed
            placing.submit(bytes(1), [Span(1, 36, 0, 1)])
            placing.finish(WAIT)
        with placement.begin_capture([Page(0, 1)]) as capture, pytest.raises(CoverageError):
            capture.finish(WAIT)
        placement.close()

    def test_an_arena_of_another_transaction_is_refused(self):
        _, _, placement = self.small()
        with (
            placement.begin_capture([Page(0, 1)]) as first,
            placement.begin_capture([Page(0, 2)]) as second,
        ):
            arena = first.acquire(WAIT)
            with pytest.raises(PlacementStateError):
                second.submit(arena, [Span(0, 0, 0, 64)])
            arena.release()
            with pytest.raises(PlacementStateError):
                first.submit(arena, [Span(0, 0, 0, 64)])
            arena.release()
        placement.close()

    def test_a_closed_transaction_refuses_everything(self):
        _, _, placement = self.small()
        placing = placement.begin_placement([Page(0, 1)])
        placing.abort(WAIT)
        restore = placement.begin_restore([SealedPage(0, 1, bytes(32))])
        restore.abort(WAIT)
        for call in (
            lambda: placing.submit(bytes(64), [Span(0, 0, 0, 64)]),
            lambda: placing.finish(WAIT),
            lambda: placing.abort(WAIT),
            lambda: restore.acquire(WAIT),
            lambda: restore.finish(WAIT),
        ):
            with pytest.raises(PlacementStateError):
                call()
        placement.close()

    def test_a_placement_with_an_open_transaction_does_not_close(self):
        _, _, placement = self.small()
        capture = placement.begin_capture([Page(0, 1)])
        with pytest.raises(PlacementStateError):
            placement.close()
        capture.abort(WAIT)
        placement.close()

    def test_a_partial_page_keeps_its_positions_in_every_layer_and_no_other(self):
        _, _, placement = self.small()
        with placement.begin_capture([Page(0, 3, 3), Page(1, 3)]) as capture:
            arena = capture.acquire(WAIT)
            capture.submit(arena, [Span(0, 0, 0, 64), Span(1, 0, 64, 37)])
            got = bytes(capture.wait(arena, WAIT)[:101])
            arena.release()
            capture.finish(WAIT)
        first, second = bytes(range(1, 25)) + bytes(8), bytes(range(33, 57)) + bytes(8)
        assert got == first + second + b"s" * 37
        placement.close()

    def test_spans_that_share_an_arenas_bytes_are_refused(self):
        _, _, placement = self.small()
        with placement.begin_capture([Page(0, 1), Page(0, 2)]) as capture:
            arena = capture.acquire(WAIT)
            with pytest.raises(CoverageError, match="share"):
                capture.submit(arena, [Span(0, 0, 0, 64), Span(1, 0, 63, 64)])
            capture.submit(arena, [Span(0, 0, 64, 64), Span(1, 0, 0, 64)])
            capture.wait(arena, WAIT)
            capture.finish(WAIT)
        placement.close()

    def test_an_arena_is_gathered_into_once(self):
        _, _, placement = self.small()
        with placement.begin_capture([Page(0, 1), Page(0, 2)]) as capture:
            arena = capture.acquire(WAIT)
            capture.submit(arena, [Span(0, 0, 0, 64)])
            capture.wait(arena, WAIT)
            with pytest.raises(PlacementStateError):
                capture.submit(arena, [Span(1, 0, 64, 64)])
        placement.close()

    def test_more_arenas_than_there_are_time_out_and_come_back(self):
        _, _, placement = self.small(arenas=2)
        with placement.begin_restore([SealedPage(0, 1, bytes(32))]) as restore:
            first, second = restore.acquire(WAIT), restore.acquire(WAIT)
            with pytest.raises(PlacementTimeoutError):
                restore.acquire(0.01)
            first.release()
            third = restore.acquire(WAIT)
            restore.submit(third, [VerifiedPage(0, 0, bytes(32))])
            restore.acquire(WAIT).release()
            second.release()
            restore.finish(WAIT)
        placement.close()

    def test_counters_count(self):
        _, _, placement = self.small()
        with placement.begin_placement([Page(0, 1)]) as placing:
            placing.submit(bytes(64), [Span(0, 0, 0, 64)])
            placing.finish(WAIT)
        with placement.begin_capture([Page(1, 1)]):
            pass
        stats = placement.stats()
        assert (stats.bytes_restored, stats.pages_restored) == (64, 1)
        assert (stats.bytes_captured, stats.pages_captured) == (0, 0)
        assert (stats.transactions_finished, stats.transactions_aborted) == (1, 1)
        assert stats.launches >= 1
        placement.close()

    def test_an_arena_is_aligned_for_direct_io(self):
        _, _, placement = self.small()
        assert placement.arena_bytes % 4096 == 0
        placement.close()
