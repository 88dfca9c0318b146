"""What callers of the store may rely on, one behaviour each."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparkcache_connector.store import (
    GroupPages,
    Miss,
    Options,
    Reason,
    Refused,
    Stopped,
    Store,
    StoreError,
    Unusable,
)
from sparkcache_connector.store.keys import KeyRing
from tests.store_testing import (
    ATTENTION,
    IDENTITY,
    RECURRENT,
    SLIDING,
    attention,
    content,
    digest,
    open_store,
    pack_files,
    page,
    recurrent,
    restore,
    root_files,
)

ONE, TWO, THREE = digest("one"), digest("two"), digest("three")
THREADED = Options(high_bytes=1 << 30, workers=8)


def test_leading_equal_pages_are_referenced_and_recurrent_states_never(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        base = [attention(range(5)), recurrent("same")]
        first = store.publish(ONE, 256, base)
        assert (first.stored_pages, first.referenced_pages) == (6, 0)
        # Page 3 differs; page 4 is equal again but comes after it.
        extended = [attention([0, 1, 2, "other", 4, 5]), recurrent("same")]
        second = store.publish(TWO, 512, extended, base=ONE)
        assert (second.stored_pages, second.referenced_pages) == (4, 3)
        assert restore(store, TWO) == content(extended)


def test_sliding_windows_are_always_stored(tmp_path: Path) -> None:
    window = GroupPages(SLIDING, 4096, 7, [page(n, 4096) for n in range(3)])
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention([0]), window])
        assert store.publish(TWO, 512, [attention([0]), window], base=ONE).stored_pages == 3


@pytest.mark.parametrize(
    "groups",
    [
        [attention(range(3), 8192)],
        [attention(range(3)), recurrent("x")],
        [GroupPages(ATTENTION, 4096, 1, [page(n, 4096) for n in range(3)])],
        [GroupPages(RECURRENT, 4096, 0, [page(0, 4096)])],
    ],
    ids=["page size", "number of groups", "first block", "kind"],
)
def test_a_base_of_another_geometry_offers_nothing(
    tmp_path: Path, groups: list[GroupPages]
) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention(range(3))])
        assert store.publish(TWO, 512, groups, base=ONE).referenced_pages == 0
        assert restore(store, TWO) == content(groups)


def test_an_identical_attention_root_needs_no_pack(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention(range(3))])
        receipt = store.publish(TWO, 512, [attention(range(2))], base=ONE)
        assert receipt.stored_pages == 0
        assert len(pack_files(tmp_path / "root")) == 1
        store.remove([ONE])
        assert restore(store, TWO) == content([attention(range(2))])


def test_depth_is_unlimited_and_every_restore_reads_one_manifest(tmp_path: Path) -> None:
    depth = 60
    with open_store(tmp_path / "root") as store:
        for number in range(depth):
            base = digest(number - 1) if number else None
            store.publish(digest(number), 256, [attention(range(number + 1))], base=base)
        store.remove([digest(number) for number in range(depth - 1)])
        (manifest,) = root_files(tmp_path / "root")
        assert manifest.name.startswith(digest(depth - 1).hex())
        assert restore(store, digest(depth - 1)) == content([attention(range(depth))])


def test_a_base_that_is_not_there_or_is_damaged_costs_only_the_saving(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        assert store.publish(ONE, 256, [attention([0])], base=TWO).stored_pages == 1
        root_files(tmp_path / "root")[0].write_bytes(b"damaged")
        assert store.publish(TWO, 512, [attention([0])], base=ONE).stored_pages == 1
        assert store.stats().counters["base", "malformed"] == 1


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65536, 100_001])
def test_any_page_size_and_alignment_round_trips(tmp_path: Path, size: int, workers: int) -> None:
    options = Options(high_bytes=1 << 30, workers=workers)
    source = page("source", 9 * size + 64)
    pages = [memoryview(source)[3 + n * size :][:size] for n in range(9)]
    with open_store(tmp_path / "root", options=options) as store:
        store.publish(ONE, 256, [GroupPages(ATTENTION, size, 0, pages)])
        room = bytearray(9 * size + 1)
        targets = [memoryview(room)[1 + n * size :][:size] for n in range(9)]
        for _ in range(3):  # past the page cache, through it, from it
            room[:] = bytes(len(room))
            with store.plan(ONE) as plan:
                assert store.read(plan, [targets]) == 9 * size
            assert room[1:] == source[3 : 3 + 9 * size]


def test_pages_that_are_not_wanted_are_not_read_and_not_written(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention(range(6)), recurrent("r")])
        targets: list[list[bytearray | None]] = [
            [None, bytearray(4096), None, None, bytearray(4096), bytearray(4096)],
            [None],
        ]
        seen: list[tuple[int, int, int]] = []
        with store.plan(ONE) as plan:
            size = store.read(plan, targets, verified=lambda *part: seen.append(part))
        assert size == 3 * 4096
        assert seen == [(0, 1, 1), (0, 4, 2)]
        assert [targets[0][n] for n in (1, 4, 5)] == [page(n, 4096) for n in (1, 4, 5)]


def test_verified_is_called_in_manifest_order_with_what_is_verified(tmp_path: Path) -> None:
    groups = [attention(range(20), 1 << 20), recurrent("r")]
    with open_store(tmp_path / "root", options=THREADED) as store:
        store.publish(ONE, 256, groups)
        targets = [[bytearray(group.page_bytes) for _ in group.pages] for group in groups]
        seen: list[tuple[int, int]] = []

        def verified(group: int, first: int, count: int) -> None:
            for number in range(first, first + count):
                assert targets[group][number] == groups[group].pages[number]
                seen.append((group, number))

        with store.plan(ONE) as plan:
            store.read(plan, targets, verified=verified)
        assert seen == [(g, n) for g, group in enumerate(groups) for n in range(len(group.pages))]


def test_an_error_of_verified_ends_the_read_and_nothing_is_written_afterwards(
    tmp_path: Path,
) -> None:
    with open_store(tmp_path / "root", options=THREADED) as store:
        store.publish(ONE, 256, [attention(range(20), 1 << 20)])

        def fail(*part: int) -> None:
            raise RuntimeError("the placement failed")

        with store.plan(ONE) as plan:
            targets = [[bytearray(1 << 20) for _ in range(20)]]
            with pytest.raises(RuntimeError, match="placement"):
                store.read(plan, targets, verified=fail)
        assert store.holds(ONE)


def test_concurrent_restores_of_shared_pages_read_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [attention(range(16), 1 << 20)]
    extended = [attention(range(17), 1 << 20)]
    with open_store(tmp_path / "root", options=THREADED) as store:
        store.publish(ONE, 256, base)
        store.publish(TWO, 512, extended, base=ONE)
        reader = store._core.reader
        fill = reader._fill
        together = threading.Barrier(2)
        results: dict[int, list[list[bytes]]] = {}

        def slow_fill(*arguments: object) -> None:
            gate.wait(5)
            fill(*arguments)

        gate = threading.Event()
        monkeypatch.setattr(reader, "_fill", slow_fill)

        def load(number: int, context: bytes) -> None:
            together.wait()
            results[number] = restore(store, context)

        threads = [threading.Thread(target=load, args=(n, c)) for n, c in ((0, ONE), (1, TWO))]
        for thread in threads:
            thread.start()
        # The gate opens by itself after five seconds, so neither loop can hang.
        while not reader.shared_segments and any(thread.is_alive() for thread in threads):
            pass
        gate.set()
        for thread in threads:
            thread.join()
        assert results == {0: content(base), 1: content(extended)}
        assert reader.shared_segments >= 1
        assert not reader._flights


def test_a_plan_survives_eviction_and_compaction(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention(range(8))])
        store.publish(TWO, 512, [attention([0, "x"])], base=ONE)
        with store.plan(ONE) as one, store.plan(TWO) as two:
            store.remove([ONE])
            assert store.maintain().compacted == 1
            for plan, count in ((one, 8), (two, 2)):
                targets = [[bytearray(4096) for _ in range(count)]]
                store.read(plan, targets)
                assert targets[0][0] == page(0, 4096)
        assert restore(store, TWO) == content([attention([0, "x"])])


def test_longest_inventory_and_changes(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention([0])])
        store.publish(TWO, 512, [attention([0, 1])])
        assert store.longest([THREE, ONE, THREE, TWO, THREE]) == 3
        assert store.longest([THREE]) is None
        assert store.longest([]) is None
        changes = store.drain_changes()
        assert (changes.added, changes.removed) == ({ONE, TWO}, frozenset())
        store.remove([ONE])
        store.publish(THREE, 256, [attention([0])])
        store.quarantine(THREE)
        assert store.drain_changes().removed == {ONE, THREE}
        assert store.inventory() == {TWO}
        assert store.drain_changes().removed == frozenset()
    with open_store(tmp_path / "root") as store:
        assert store.drain_changes().added == frozenset()


def test_a_withdrawn_root_is_not_offered_at_once_and_gone_after_the_next_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "root"
    with open_store(path) as store:
        for context in (ONE, TWO):
            store.publish(context, 256, [attention([context])])
        store.drain_changes()
        with store._core.lock:  # as a maintenance that waits for the disk holds it
            asking = threading.Thread(target=store.withdraw, args=([ONE, THREE],))
            asking.start()
            asking.join(5)
            assert not asking.is_alive()
            assert store.inventory() == {TWO}
            assert store.drain_changes().removed == {ONE}
        with pytest.raises(Miss):
            store.plan(ONE)
        assert len(root_files(path)) == 2
        # Publishing it again first finishes the withdrawal, so that the new root stays.
        store.publish(ONE, 256, [attention(["new"])])
        store.maintain(look_around=True)
        assert restore(store, ONE) == content([attention(["new"])])
        store.withdraw([TWO])
    with open_store(path) as store:
        assert store.inventory() == {ONE}
        assert len(root_files(path)) == len(pack_files(path)) == 1


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([], "no page to publish"),
        ([GroupPages(ATTENTION, 4096, 0, [])], "no page to publish"),
        ([GroupPages(ATTENTION, 0, 0, [b""])], "page size 0"),
        ([GroupPages(ATTENTION, 4096, -1, [bytes(4096)])], "first -1"),
        ([GroupPages(ATTENTION, 4096, 0, [bytes(4096), bytes(4095)])], "page 1: 4095 bytes"),
    ],
)
def test_contradictory_publications_are_refused(
    tmp_path: Path, groups: list[GroupPages], found: str
) -> None:
    with open_store(tmp_path / "root") as store:
        with pytest.raises(Refused, match=found) as caught:
            store.publish(ONE, 256, groups)
        assert caught.value.reason is Reason.INVALID
        assert store.stats().publishing_off is None


def test_contradictory_destinations_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention([0])])
        plan = store.plan(ONE)
        for targets, found in (
            ([], "0 groups of destinations"),
            ([[]], "0 destinations for 1 pages"),
            ([[bytearray(5)]], "5 bytes, not 4096"),
            ([[memoryview(bytes(4096))]], "read-only"),
        ):
            with pytest.raises(Refused, match=found):
                store.read(plan, targets)
        plan.close()
        with pytest.raises(Refused, match="plan is closed"):
            store.read(plan, [[bytearray(4096)]])


def test_a_cancelled_publication_leaves_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with open_store(tmp_path / "root", options=THREADED) as store:
        with pytest.raises(Stopped):
            store.publish(ONE, 256, [attention([0])], cancel=cancel)
        with pytest.raises(Stopped):
            store.publish(ONE, 256, [attention([0])], deadline=0.0)
        assert not pack_files(tmp_path / "root")
        assert not list((tmp_path / "root").rglob(".tmp-*"))
        store.publish(ONE, 256, [attention([0])])


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    store.close()
    store.close()
    for call in (
        lambda: store.publish(ONE, 256, [attention([0])]),
        lambda: store.plan(ONE),
        store.maintain,
        store.rotate_key,
    ):
        with pytest.raises(StoreError, match="closed") as caught:
            call()
        assert caught.value.reason is Reason.CLOSED


def test_ttl_removes_what_was_not_used(tmp_path: Path) -> None:
    now = [10**18]
    options = Options(high_bytes=1 << 30, workers=1, ttl_seconds=60)
    with open_store(tmp_path / "root", options=options, clock_ns=lambda: now[0]) as store:
        store.publish(ONE, 256, [attention([0])])
        store.publish(TWO, 256, [attention([1])])
        now[0] += 50 * 10**9
        restore(store, TWO)
        now[0] += 20 * 10**9
        assert store.maintain().expired == 1
        assert store.inventory() == {TWO}


def test_recency_survives_the_loss_of_the_catalog(tmp_path: Path) -> None:
    path, now = tmp_path / "root", [10**18]

    def clock() -> int:
        now[0] += 10**9
        return now[0]

    with open_store(path, clock_ns=clock) as store:
        for context in (ONE, TWO, THREE):
            store.publish(context, 256, [attention([context])])
        restore(store, ONE)
    (path / "catalog.sqlite").unlink()
    options = Options(high_bytes=50_000, low_bytes=40_000, workers=1)
    with open_store(path, options=options, clock_ns=clock) as store:
        store.publish(digest("four"), 256, [attention(["four"])])
        assert store.inventory() == {ONE, THREE, digest("four")}


def test_an_operators_key_file_is_used_and_rotated_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    old, new = KeyRing.generate(), KeyRing.generate()

    def write(*rings: KeyRing) -> None:
        file.write_bytes(KeyRing(tuple(ring.current for ring in rings)).encode())
        file.chmod(0o600)

    options = Options(high_bytes=1 << 30, workers=1, key_file=str(file))
    write(old)
    with open_store(tmp_path / "root", options=options) as store:
        store.publish(ONE, 256, [attention([0])])
        assert not (tmp_path / "root" / "keys").exists()
        with pytest.raises(Refused, match="change that file"):
            store.rotate_key()
    write(new, old)
    with open_store(tmp_path / "root", options=options) as store:
        assert store.rotate_key(generate=False, destroy_old=False) == 1
    write(new)
    with open_store(tmp_path / "root", options=options) as store:
        assert restore(store, ONE) == content([attention([0])])
    write(old)
    with open_store(tmp_path / "root", options=options) as store:
        assert store.inventory() == frozenset()
        store.maintain(look_around=True)
    write(new)
    with open_store(tmp_path / "root", options=options) as store:
        assert restore(store, ONE) == content([attention([0])])


def test_destroying_a_key_revokes_even_an_old_copy(tmp_path: Path) -> None:
    path = tmp_path / "root"
    with open_store(path) as store:
        store.publish(ONE, 256, [attention([0])])
        (manifest,) = root_files(path)
        copy = manifest.read_bytes()
        key = KeyRing.parse((path / "keys").read_bytes(), "keys").current
        assert store.destroy_key(key.key_id) == 1
        assert store.inventory() == frozenset()
        with pytest.raises(Refused, match="not in the ring"):
            store.destroy_key(key.key_id)
        manifest.write_bytes(copy)
        store.maintain(look_around=True)
        with pytest.raises(Miss):
            restore(store, ONE)


def test_publishing_comes_back_by_itself(tmp_path: Path) -> None:
    options = Options(high_bytes=1 << 30, workers=1, retry_seconds=0.0)
    with open_store(tmp_path / "root", options=options) as store:
        store._core.turn_publishing_off(Reason.DISK_FULL)
        store.publish(ONE, 256, [attention([0])])
        assert store.stats().publishing_off is None


def test_other_identities_share_the_capacity_and_nothing_else(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        store.publish(ONE, 256, [attention([0])])
    with Store.open(tmp_path / "root", identity=digest("other"), options=THREADED) as other:
        assert other.inventory() == frozenset()
        assert other.stats().roots == 1
        with pytest.raises(Miss):
            other.plan(ONE)
        other.publish(ONE, 256, [attention([7])])
    with open_store(tmp_path / "root") as store:
        assert restore(store, ONE) == content([attention([0])])


def test_an_identity_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="identity of 3 bytes"):
        Store.open(tmp_path / "root", identity=b"abc")
    assert len(IDENTITY) == 32


def test_sizes_and_evictions_are_known_without_asking_the_disk(tmp_path: Path) -> None:
    options = Options(high_bytes=256 << 10, workers=1)
    with open_store(tmp_path, options=options) as store:
        assert store.evictions() == {}
        for number in range(12):
            store.publish(digest(number), 256, [attention([number] * 8)])
        gone = 12 - len(store.inventory())
        assert gone > 0
        assert store.evictions() == {"capacity": gone}
        # The lock is what the capture's thread holds while the disk is slow.
        with ThreadPoolExecutor(1) as engine, store._core.lock:
            answer = engine.submit(lambda: (store.allocated_bytes, store.evictions()))
            assert answer.result(10) == (store.stats().allocated_bytes, {"capacity": gone})


def test_roots_that_cannot_be_served_are_counted_by_reason_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "root"
    with open_store(path) as store:
        for context in (ONE, TWO):
            store.publish(context, 256, [attention([0])])
        assert store.found_unusable() == {}
    (path / "keys").unlink()
    with open_store(path) as store:
        assert store.found_unusable() == {"unknown-key": 2}
        store.publish(THREE, 256, [attention([1])])
        assert (store.publishing_off, store.allocated_bytes) == (
            None,
            store.stats().allocated_bytes,
        )
    for pack in pack_files(path):
        pack.unlink()
    with open_store(path) as store:
        assert store.found_unusable() == {"pack-missing": 3}
