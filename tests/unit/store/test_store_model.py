"""Any sequence of operations equals a model that is a dict of bytes.

The model also predicts what eviction does: which root goes is decided by the order of last
uses alone, and only to bring the allocated bytes below the watermarks.
"""

import os
import random
from pathlib import Path

import pytest

from sparkcache_connector.store import Options, Refused, Store
from tests.store_testing import (
    attention,
    content,
    digest,
    open_store,
    pack_files,
    recurrent,
    restore,
    root_files,
)

HIGH = 64 * 4096
LARGEST = 24 * 4096


SEEDS = range(2000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 24)
STEPS = 80


class StoreModel:
    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.now = 1_000_000_000
        self.model: dict[bytes, list[list[bytes]]] = {}
        self.tokens: dict[bytes, list[int]] = {}
        self.used: list[bytes] = []
        self.serial = 0
        self.evictions = 0
        self.seen: set[tuple[str, str]] = set()
        self.workers = self.random.choice([1, 3])
        self.store = self.open()

    def run(self) -> None:
        actions = {
            self.publish_alone: 4,
            self.extend: 8,
            self.publish_again: 1,
            self.restore_one: 2,
            self.remove: 3,
            self.maintain: 2,
            self.rotate: 1,
            self.reopen: 1,
            self.refuse_what_can_never_fit: 0.3,
        }
        for _ in range(STEPS):
            (action,) = self.random.choices(list(actions), list(actions.values()))
            action()
            self.check()
        for context in list(self.used):
            assert restore(self.store, context) == self.model[context]
        self.close()

    def close(self) -> None:
        self.seen |= self.store.stats().counters.keys()
        self.store.close()
        self.evictions = 0

    def clock(self) -> int:
        self.now += 1
        return self.now

    def open(self) -> Store:
        options = Options(high_bytes=HIGH, low_bytes=HIGH * 3 // 4, workers=self.workers)
        return open_store(self.path, options=options, clock_ns=self.clock)

    def use(self, context: bytes) -> None:
        if context in self.used:
            self.used.remove(context)
        self.used.append(context)

    def publish(self, tokens: list[int], base: bytes | None) -> None:
        self.serial += 1
        context = digest(self.serial)
        names = [tuple(tokens[: i + 1]) for i in range(min(len(tokens), 20))]
        groups = [attention(names, self.random.choice([4096, 4096, 4096, 5000]))]
        if self.random.random() < 0.3:
            groups.append(recurrent(self.serial, 4096))
        receipt = self.store.publish(context, len(tokens) + 1, groups, base=base)
        assert not receipt.already_held
        self.model[context] = content(groups)
        self.tokens[context] = tokens
        self.use(context)
        self.sync_with_evictions()

    def sync_with_evictions(self) -> None:
        held = self.store.inventory()
        gone = [context for context in self.used if context not in held]
        # The least recently used ones, and no others.
        assert gone == self.used[: len(gone)]
        self.evictions += len(gone)
        assert self.evictions == self.store.stats().counters.get(("evict", "capacity"), 0)
        for context in gone:
            self.used.remove(context)
            del self.model[context], self.tokens[context]

    def some_tokens(self) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(1, 8))]

    def some_root(self) -> bytes | None:
        return self.random.choice(self.used) if self.used else None

    def publish_alone(self) -> None:
        self.publish(self.some_tokens(), None)

    def extend(self) -> None:
        """Extend some root, cut anywhere: the base's and our pages agree as far as tokens do."""
        base = self.some_root()
        kept = self.tokens[base][: self.random.randint(0, 14)] if base else []
        self.publish(kept + self.some_tokens(), base)

    def publish_again(self) -> None:
        if context := self.some_root():
            receipt = self.store.publish(context, 1, [attention([0])])
            assert receipt.already_held
            assert receipt.written_bytes == 0
            self.use(context)

    def restore_one(self) -> None:
        if context := self.some_root():
            assert restore(self.store, context) == self.model[context]
            self.use(context)

    def remove(self) -> None:
        if context := self.some_root():
            assert self.store.remove([context, digest("nobody")]) == 1
            self.used.remove(context)
            del self.model[context], self.tokens[context]

    def maintain(self) -> None:
        report = self.store.maintain(look_around=self.random.random() < 0.5)
        assert report.swept == 0
        self.sync_with_evictions()

    def rotate(self) -> None:
        assert self.store.rotate_key(destroy_old=self.random.random() < 0.5) == len(self.model)

    def reopen(self) -> None:
        self.close()
        how = self.random.choice(["clean", "no catalog", "damaged catalog", "unclean"])
        catalog = self.path / "catalog.sqlite"
        if how == "no catalog":
            catalog.unlink()
        elif how == "damaged catalog":
            catalog.write_bytes(b"SQLite format 3\0" + bytes(5000))
        elif how == "unclean":
            (self.path / "packs" / "touched").touch()
            (self.path / "packs" / "touched").unlink()
        self.store = self.open()

    def refuse_what_can_never_fit(self) -> None:
        with pytest.raises(Refused, match="needs") as caught:
            self.store.publish(digest("huge"), 1, [attention(range(80))])
        assert caught.value.reason == "too-large"

    def check(self) -> None:
        # Exactly the model is held.
        assert self.store.inventory() == self.model.keys()
        # Shared pages are counted once, and the capacity is kept but for one publication.
        files = pack_files(self.path) + root_files(self.path)
        on_disk = sum(path.stat().st_blocks * 512 for path in files)
        assert self.store.stats().allocated_bytes == on_disk
        assert on_disk <= HIGH + LARGEST


@pytest.mark.parametrize("seed", SEEDS)
def test_any_sequence_of_operations_equals_a_dict_of_bytes(tmp_path: Path, seed: int) -> None:
    StoreModel(tmp_path / "root", seed).run()


def test_the_sequences_reach_every_kind_of_maintenance(tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()
    for seed in range(6):
        model = StoreModel(tmp_path / str(seed), seed)
        model.run()
        seen |= model.seen
    assert seen >= {
        ("evict", "capacity"),
        ("compact", "packs"),
        ("rotate", "roots"),
        ("catalog", "rebuilt"),
        ("publish", "referenced"),
    }
