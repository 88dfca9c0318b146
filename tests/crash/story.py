"""One store's life in a few hundred file operations: the story that every crash test tells.

It publishes, extends, removes, evicts by capacity, expires, compacts, rotates keys, takes a
damaged root out of service and reopens. It is told to an :class:`Audience`, which notes
what the store promised, so that whoever interrupts the story knows what must have survived.

``python -m tests.crash.story DIRECTORY`` tells it once in a process of its own, for the
sweep that kills at system calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sparkcache_connector.store import GroupPages, Options, Store, StoreError
from sparkcache_connector.store.durable import Files
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

HIGH = 60 * 4096
OPTIONS = Options(high_bytes=HIGH, low_bytes=36 * 4096, workers=1, ttl_seconds=1.0)
_SECOND = 1_000_000_000

CHAPTERS: dict[str, tuple[GroupPages, ...]] = {
    "a": (attention(range(8)),),
    "b": (attention([0, 1, 2, "b3", "b4"]), recurrent("b", 4096)),
    "c": (attention(["c0", "c1"], 5000), recurrent("c", 3000)),
    "d": (attention([0, 1, 2, "b3", "d4", "d5"]), recurrent("d", 4096)),
    "e": (attention(["e0", "e1", "e2", "e3"]),),
    "f": (attention([("f", i) for i in range(20)]),),
    "g": (attention([*(("f", i) for i in range(3)), "g3"]),),
    "h": (attention([("h", i) for i in range(18)]),),
    "i": (attention([("i", i) for i in range(9)]), recurrent("i", 5000)),
    "j": (attention([*(("i", i) for i in range(3)), "j3"]), recurrent("j", 5000)),
    "k": (attention([*(("i", i) for i in range(3)), "j3", "k4"]), recurrent("k", 5000)),
    "l": (attention([("i", i) for i in range(2)]),),
}
CONTENT = {digest(name): content(groups) for name, groups in CHAPTERS.items()}


@dataclass
class Audience:
    """What the store promised so far."""

    tell: Callable[[str], None] = lambda line: None
    promised: set[bytes] = field(default_factory=set)
    """Roots whose publication was reported and whose removal has not begun."""

    def hear(self, line: str) -> None:
        verb, name = line.split()
        if verb == "published":
            self.promised.add(digest(name))
        elif verb == "going":
            self.promised.discard(digest(name))
        self.tell(line)


class BufferedFiles(Files):
    """File operations through the page cache only.

    Past it, a write that the device finds misaligned is tried twice; which ones that are
    depends on where Python put the bytes, and the sweeps need the same points in every run.
    """

    def create(self, directory: int, name: str, *, direct: bool = False) -> int:
        return super().create(directory, name)


class Clock:
    """Time as the story tells it, so that its expiry comes when it should."""

    def __init__(self) -> None:
        self.now = 10 * _SECOND

    def __call__(self) -> int:
        self.now += 1000
        return self.now


def tell_story(
    path: Path,
    audience: Audience,
    files: Files | None = None,
    forgive: type[Exception] | tuple[type[Exception], ...] = (),
) -> None:
    """Tell the whole story; errors of kind ``forgive`` end one act, not the story."""
    clock = Clock()

    def act(action: Callable[[], object]) -> None:
        try:
            action()
        except forgive:
            return

    def publish(store: Store, name: str, base: str | None = None) -> None:
        def action() -> None:
            store.publish(
                digest(name), 256, CHAPTERS[name], base=None if base is None else digest(base)
            )
            audience.hear(f"published {name}")

        act(action)

    def going(names: Iterable[str]) -> None:
        for name in names:
            audience.hear(f"going {name}")

    def tell(store: Store, acts: Callable[[Store], None]) -> None:
        try:
            acts(store)
        finally:
            # With errors, the store may have to evict more than the story foresees; what it
            # says itself that it gave up is no promise any more.
            audience.promised -= store.drain_changes().removed
            store.close()

    def first(store: Store) -> None:
        publish(store, "a")
        publish(store, "b", "a")
        publish(store, "c")
        publish(store, "a")
        going("a")
        act(lambda: store.remove([digest("a")]))
        act(store.maintain)  # compacts: three of a's eight pages live on in b
        publish(store, "d", "b")
        act(lambda: store.rotate_key(destroy_old=False))
        publish(store, "e")

    def second(store: Store) -> None:
        act(lambda: store.rotate_key(destroy_old=True))
        going("bcde")  # f needs more than the capacity has left
        publish(store, "f")
        publish(store, "g", "f")
        going("f")
        act(lambda: store.quarantine(digest("f")))
        act(lambda: store.maintain(look_around=True))

    def third(store: Store) -> None:
        publish(store, "h")
        clock.now += 5 * _SECOND
        going("gh")
        act(store.maintain)  # everything expires
        publish(store, "c")

    def fourth(store: Store) -> None:
        publish(store, "i")
        publish(store, "j", "i")
        publish(store, "k", "j")
        publish(store, "l", "i")  # references all of its pages: no pack
        going("i")
        act(lambda: store.remove([digest("i")]))
        act(store.maintain)
        act(lambda: store.rotate_key(destroy_old=True))

    for acts in (first, second, third, fourth):
        act(
            lambda acts=acts: tell(
                open_store(path, options=OPTIONS, files=files, clock_ns=clock), acts
            )
        )


def check_survivors(path: Path, promised: Iterable[bytes]) -> Store:
    """Open what an interruption left and hold it to the promises; return the open store.

    Whole roots are served byte-exactly, nothing else is; no manifest is there that cannot
    be served; maintenance leaves no debris and accounts for every byte.
    """
    store = open_store(path, options=Options(high_bytes=1 << 30, workers=1))
    try:
        held = store.inventory()
        missing = set(promised) - held
        assert not missing, f"lost: {[one.hex()[:8] for one in missing]}, {store.stats()}"
        for context in held:
            assert restore(store, context) == CONTENT[context]
        store.maintain(look_around=True)
        assert store.inventory() == held
        wrong = {
            key: number
            for key, number in store.stats().counters.items()
            if key[0] in ("quarantine", "scan", "read") and key[1] != "hit"
        }
        assert not wrong, f"debris that looked like a root: {wrong}"
        assert not list(path.rglob(".tmp-*"))
        files = pack_files(path) + root_files(path)
        on_disk = sum(one.stat().st_blocks * 512 for one in files)
        assert store.stats().allocated_bytes == on_disk
        assert len(pack_files(path)) == store.stats().packs
        assert len(root_files(path)) == len(held)
        if not held:
            assert not pack_files(path), "leaked packs"
    except BaseException:
        store.close()
        raise
    return store


def main() -> None:
    """Tell the story in this process and its promises on stdout, unbuffered."""

    def tell(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    tell_story(Path(sys.argv[1]), Audience(tell), forgive=StoreError if len(sys.argv) > 2 else ())


if __name__ == "__main__":
    main()
