"""The fault table: whatever happens to the files, wrong bytes are never served.

Each case names its fault; each outcome is the published bytes or a miss with its counted
reason. ``test_bit_flips`` alone is ten thousand cases.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkcache_connector.store import (
    Miss,
    Options,
    Reason,
    Refused,
    Stopped,
    Store,
    Unusable,
)
from sparkcache_connector.store.keys import KeyRing
from sparkcache_connector.store.manifest import Manifest
from tests.store_testing import (
    SMALL,
    attention,
    content,
    digest,
    open_store,
    pack_files,
    recurrent,
    restore,
    root_files,
)

ROUNDS, ROOTS = 52, 200
GROUPS = (attention(range(3)), recurrent("state"))
WANTED = content(GROUPS)
ONE, TWO = digest("one"), digest("two")


@pytest.fixture
def root(scratch: Path) -> Iterator[Path]:
    path = scratch / "root"
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root) as store:
        store.publish(ONE, 256, GROUPS)
        yield store


def reason_of_miss(store: Store, context: bytes = ONE) -> Reason:
    """Restore a root that must be a miss; check that the reason is counted; return it."""
    before = Counter(store.stats().counters)
    with pytest.raises(Miss, match="recomputed") as caught:
        restore(store, context)
    reason = caught.value.reason
    counted = Counter(store.stats().counters) - before
    assert counted["plan", reason] + counted["read", reason] == 1
    return reason


def only(paths: list[Path]) -> Path:
    (path,) = paths
    return path


def flip(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def test_bit_flips_at_random_offsets_are_never_served(scratch: Path) -> None:
    pristine, path = scratch / "pristine", scratch / "flipped"
    wanted: dict[bytes, list[list[bytes]]] = {}
    with open_store(pristine) as store:
        base = None
        for number in range(ROOTS):
            context = digest(number)
            tail = [f"{number} tail"] if number % 4 else []
            groups = (attention([number // 4, *tail], 1000), recurrent(number, 300))
            store.publish(context, 256, groups, base=base if number % 4 else None)
            base = context
            wanted[context] = content(groups)
    chance = random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(ROUNDS):
        shutil.copytree(pristine, path, copy_function=shutil.copy2)
        (path / "lock").unlink()
        with open_store(path) as store:
            manifests = {file.stem: file for file in root_files(path)}
            packs = {context: store_packs(store, context) for context in wanted}
            for context, expected in wanted.items():
                in_manifest = chance.random() < 0.5
                files = [manifests[context.hex()]] if in_manifest else packs[context]
                # A wrong page that they share may have taken this root out already.
                if there := [file for file in files if file.exists()]:
                    flip(chance.choice(there), chance)
                try:
                    assert restore(store, context) == expected
                    outcomes["served"] += 1
                except Miss as miss:
                    outcomes[miss.reason] += 1
        shutil.rmtree(path)
    assert outcomes.total() == ROUNDS * ROOTS >= 10_000
    # Headers and paddings of packs are not part of any page; everything else was noticed.
    assert outcomes.keys() <= {
        "served",
        "absent",
        "forged",
        "malformed",
        "newer-format",
        "unknown-key",
        "page-mismatch",
    }
    assert min(outcomes[name] for name in ("served", "forged", "page-mismatch")) > 100


def store_packs(store: Store, context: bytes) -> list[Path]:
    with store.plan(context) as plan:
        return [Path(pack.subject) for pack in plan.packs]


def test_zero_filled_pack(store: Store, root: Path) -> None:
    path = only(pack_files(root))
    path.write_bytes(bytes(path.stat().st_size))
    assert reason_of_miss(store) is Reason.PAGE_MISMATCH


def test_zero_filled_manifest(store: Store, root: Path) -> None:
    path = only(root_files(root))
    path.write_bytes(bytes(path.stat().st_size))
    assert reason_of_miss(store) is Reason.MALFORMED


@pytest.mark.parametrize("size", [0, 1, 4096, -1, -4096])
def test_truncated_pack(store: Store, root: Path, size: int) -> None:
    path = only(pack_files(root))
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert reason_of_miss(store) is Reason.TRUNCATED


def test_extended_pack(store: Store, root: Path) -> None:
    with only(pack_files(root)).open("ab") as file:
        file.write(b"more")
    assert reason_of_miss(store) is Reason.TRUNCATED


def test_truncated_while_it_is_read(store: Store, root: Path) -> None:
    with store.plan(ONE) as plan:
        os.truncate(only(pack_files(root)), 4096)
        targets = [[bytearray(g.page_bytes) for _ in range(g.count)] for g in plan.manifest.groups]
        with pytest.raises(Miss) as caught:
            store.read(plan, targets)
    assert caught.value.reason is Reason.TRUNCATED
    assert not store.holds(ONE)


@pytest.mark.parametrize("size", [0, 10, 24, 100, -1])
def test_truncated_manifest(store: Store, root: Path, size: int) -> None:
    path = only(root_files(root))
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert reason_of_miss(store) is Reason.MALFORMED


def test_extended_manifest(store: Store, root: Path) -> None:
    with only(root_files(root)).open("ab") as file:
        file.write(b"\0")
    assert reason_of_miss(store) is Reason.MALFORMED


def test_huge_manifest_is_not_read(store: Store, root: Path) -> None:
    os.truncate(only(root_files(root)), 1 << 40)
    assert reason_of_miss(store) is Reason.MALFORMED


def test_missing_pack(store: Store, root: Path) -> None:
    only(pack_files(root)).unlink()
    assert reason_of_miss(store) is Reason.PACK_MISSING


def test_missing_manifest(store: Store, root: Path) -> None:
    only(root_files(root)).unlink()
    assert reason_of_miss(store) is Reason.ABSENT
    assert store.inventory() == frozenset()


def test_swapped_packs(store: Store, root: Path) -> None:
    other = (attention([7, 8, 9]), recurrent("other"))
    store.publish(TWO, 256, other)
    one, two = pack_files(root)
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)
    assert reason_of_miss(store, ONE) is Reason.PAGE_MISMATCH
    assert reason_of_miss(store, TWO) is Reason.PAGE_MISMATCH


def test_swapped_manifests(store: Store, root: Path) -> None:
    store.publish(TWO, 256, (attention([7, 8, 9]), recurrent("other")))
    one, two = root_files(root)
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)
    assert reason_of_miss(store, ONE) is Reason.MISPLACED
    assert reason_of_miss(store, TWO) is Reason.MISPLACED


def test_manifest_under_another_identity(store: Store, root: Path) -> None:
    store.close()
    manifest = only(root_files(root))
    other = root / "roots" / digest("another identity").hex()
    other.mkdir(mode=0o700)
    shutil.copy2(manifest, other / manifest.name)
    with Store.open(root, identity=digest("another identity"), options=SMALL) as second:
        with pytest.raises(Miss):
            restore(second, ONE)
        assert second.stats().counters["quarantine", "misplaced"] == 1


def test_manifest_of_another_rank(store: Store, root: Path) -> None:
    store.close()
    with open_store(root, rank=1) as second:
        assert reason_of_miss(second) is Reason.MISPLACED


def test_manifest_planted_with_another_key(store: Store, root: Path) -> None:
    path = only(root_files(root))
    ring = KeyRing.parse((root / "keys").read_bytes(), "keys")
    manifest = Manifest.parse(path.read_bytes(), ring)
    path.write_bytes(manifest.encode(KeyRing.generate().current))
    assert reason_of_miss(store) is Reason.UNKNOWN_KEY
    store.close()
    with open_store(root) as second:
        assert reason_of_miss(second) is Reason.ABSENT


def test_newer_manifest_is_left_alone(store: Store, root: Path) -> None:
    path = only(root_files(root))
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    assert reason_of_miss(store) is Reason.NEWER_FORMAT
    store.close()
    with open_store(root) as second:
        second.maintain(look_around=True)
        assert second.stats().counters["scan", "newer-format"] >= 1
        assert path.read_bytes() == data


def test_newer_pack_is_left_alone(store: Store, root: Path) -> None:
    store.remove([ONE])
    newer = root / "packs" / ("0" * 32 + ".pack")
    newer.write_bytes(b"SPKVpack\2\0".ljust(8192, b"\0"))
    older = root / "packs" / ("1" * 32 + ".pack")
    older.write_bytes(b"SPKVpack\1\0".ljust(8192, b"\0"))
    store.maintain(look_around=True)
    store.maintain(look_around=True)
    assert pack_files(root) == [newer]


@pytest.mark.parametrize("which", ["manifest", "pack", "root"])
def test_symbolic_link(store: Store, root: Path, which: str) -> None:
    if which == "root":
        store.close()
        link = root.parent / "link"
        link.symlink_to(root)
        with pytest.raises(Unusable, match="without a link") as caught:
            open_store(link)
        link.unlink()
        assert caught.value.reason is Reason.FOREIGN
        return
    path = only(root_files(root) if which == "manifest" else pack_files(root))
    path.rename(root / "aside")
    path.symlink_to(root / "aside")
    assert reason_of_miss(store) is Reason.FOREIGN


def test_a_fifo_does_not_hang_a_restore(store: Store, root: Path) -> None:
    path = only(pack_files(root))
    path.unlink()
    os.mkfifo(path)
    assert reason_of_miss(store) is Reason.FOREIGN


@pytest.mark.parametrize("name", ["", "packs", "roots", "quarantine"])
def test_directory_open_to_others(store: Store, root: Path, name: str) -> None:
    store.close()
    (root / name).chmod(0o750)
    with pytest.raises(Unusable, match="chmod 700") as caught:
        open_store(root)
    assert caught.value.reason is Reason.FOREIGN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_and_directories_of_another_user(store: Store, root: Path) -> None:
    os.chown(only(pack_files(root)), 12345, 12345)
    assert reason_of_miss(store) is Reason.FOREIGN
    store.close()
    os.chown(root, 12345, 12345)
    with pytest.raises(Unusable, match="belongs to uid 12345"):
        open_store(root)
    os.chown(root, os.geteuid(), os.getegid())


def test_keys_open_to_others(store: Store, root: Path) -> None:
    store.close()
    (root / "keys").chmod(0o640)
    with pytest.raises(Unusable, match="chmod 600"):
        open_store(root)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EIO, Reason.DISK_ERROR),
        (errno.ENOMEM, Reason.NO_MEMORY),
        (errno.ETIMEDOUT, Reason.DISK_ERROR),
    ],
)
def test_failing_read_keeps_the_root(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, reason: Reason
) -> None:
    def preadv(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        assert reason_of_miss(store) is reason
    assert restore(store, ONE) == WANTED


def test_short_reads_are_continued(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
        return whole(fd, [memoryview(parts[0])[:512]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert restore(store, ONE) == WANTED


def test_no_descriptors_left(store: Store) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        assert reason_of_miss(store) is Reason.TOO_MANY_FILES
        with pytest.raises(Refused) as caught:
            store.publish(TWO, 256, GROUPS)
        assert caught.value.reason is Reason.TOO_MANY_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in spare:
            os.close(descriptor)
    assert restore(store, ONE) == WANTED
    store.publish(TWO, 256, GROUPS)


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    whole = os.preadv

    def preadv(*arguments: object) -> int:
        time.sleep(seconds)
        return whole(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_slow_disk_ends_by_deadline_or_cancel_and_touches_nothing_afterwards(
    root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    groups = (attention(range(12), 1 << 20),)
    with open_store(root, options=Options(high_bytes=1 << 30, workers=2)) as store:
        store.publish(ONE, 256, groups)
        with store.plan(ONE) as plan:
            targets = [[bytearray(1 << 20) for _ in range(12)]]
            slow_reads(monkeypatch, 0.3)
            cancel = threading.Event()
            deadline = time.monotonic() + 0.1 if how == "deadline" else None
            if how == "cancelled":
                threading.Timer(0.1, cancel.set).start()
            with pytest.raises(Stopped) as caught:
                store.read(plan, targets, cancel=cancel, deadline=deadline)
            assert caught.value.reason == how
            seen = [bytes(target) for target in targets[0]]
            time.sleep(0.5)
            assert [bytes(target) for target in targets[0]] == seen
            monkeypatch.undo()
            store.read(plan, targets)
            assert content(groups) == [[bytes(target) for target in targets[0]]]


@pytest.mark.parametrize("name", ["catalog.sqlite", "catalog.sqlite-wal"])
def test_catalog_deleted_while_closed(store: Store, root: Path, name: str) -> None:
    store.close()
    (root / name).unlink(missing_ok=True)
    with open_store(root) as second:
        assert restore(second, ONE) == WANTED


def test_catalog_damaged_anywhere_is_rebuilt_or_right(store: Store, root: Path) -> None:
    store.publish(TWO, 512, GROUPS, base=ONE)
    store.close()
    catalog = root / "catalog.sqlite"
    whole = catalog.read_bytes()
    chance = random.Random(3)
    for _ in range(150):
        damaged = bytearray(whole)
        at = chance.randrange(len(whole))
        damaged[at : at + chance.choice([1, 64, 4096])] = chance.randbytes(64)
        catalog.write_bytes(damaged[: len(whole)])
        with open_store(root) as second:
            for context in second.inventory() & {ONE, TWO}:
                assert restore(second, context) == WANTED
        catalog.unlink()
        with open_store(root) as third:
            assert third.inventory() >= {ONE, TWO}


def test_catalog_that_is_a_link_is_replaced_not_followed(store: Store, root: Path) -> None:
    store.close()
    victim = root.parent / "victim"
    victim.write_bytes(b"not yours")
    (root / "catalog.sqlite").unlink()
    (root / "catalog.sqlite").symlink_to(victim)
    with open_store(root) as second:
        assert restore(second, ONE) == WANTED
    assert victim.read_bytes() == b"not yours"


def test_catalog_deleted_under_a_running_store(store: Store, root: Path) -> None:
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (root / name).unlink(missing_ok=True)
    store.publish(TWO, 512, GROUPS)
    assert restore(store, ONE) == WANTED
    store.close()
    with open_store(root) as second:
        assert second.inventory() == {ONE, TWO}


def test_clock_going_back_expires_nothing_and_keeps_the_order(root: Path) -> None:
    now = [10**18]
    options = Options(high_bytes=1 << 30, workers=1, ttl_seconds=100)
    with open_store(root, options=options, clock_ns=lambda: now[0]) as store:
        store.publish(ONE, 256, GROUPS)
        now[0] -= 10**15
        store.publish(TWO, 256, GROUPS)
        assert store.maintain().expired == 0
    with open_store(root, options=options, clock_ns=lambda: now[0]) as store:
        assert store.maintain().expired == 0
        now[0] += 99 * 10**9
        assert store.maintain().expired == 0
        now[0] += 2 * 10**9
        assert store.maintain().expired == 2


def test_two_owners(store: Store, root: Path) -> None:
    with pytest.raises(Unusable, match=f"owned by process {os.getpid()}") as caught:
        open_store(root)
    assert caught.value.reason is Reason.OWNED
    store.close()
    open_store(root).close()


def test_disk_full_evicts_and_goes_on_then_turns_publishing_off(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real limit: RLIMIT_FSIZE makes the pack impossible, as a full disk would."""
    # What is imported meanwhile would leave its bytecode cut off at the limit.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with open_store(root) as store:
        store.publish(ONE, 256, GROUPS)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        try:
            with pytest.raises(Refused):
                store.publish(TWO, 256, GROUPS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert store.stats().publishing_off == "disk-error"
        with pytest.raises(Refused, match="publishing is off"):
            store.publish(TWO, 256, GROUPS)
        assert restore(store, ONE) == WANTED


def test_a_wrong_page_takes_every_root_out_that_has_it_and_the_context_can_come_back(
    store: Store, root: Path
) -> None:
    store.publish(TWO, 512, (attention(range(4)), recurrent("later")), base=ONE)
    shared = only([path for path in pack_files(root) if path.stat().st_size > 5 * 4096])
    with shared.open("r+b") as file:
        file.seek(4096)
        file.write(b"wrong")
    assert reason_of_miss(store, TWO) is Reason.PAGE_MISMATCH
    assert store.inventory() == frozenset()
    assert store.drain_changes().removed >= {TWO}
    store.publish(TWO, 512, GROUPS)
    assert restore(store, TWO) == WANTED
