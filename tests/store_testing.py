"""Contexts, pages and stores for the store's tests; small enough to make thousands of."""

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path

from sparkcache_connector.store import GroupKind, GroupPages, Options, Store
from sparkcache_connector.store.durable import Files

IDENTITY = hashlib.sha256(b"identity").digest()
ATTENTION, SLIDING, RECURRENT = (
    GroupKind.FULL_ATTENTION,
    GroupKind.SLIDING_WINDOW,
    GroupKind.RECURRENT,
)
SMALL = Options(high_bytes=1 << 30, workers=1)


def digest(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def page(name: object, size: int) -> bytes:
    return random.Random(repr(name)).randbytes(size)


def attention(names: Iterable[object], size: int = 4096) -> GroupPages:
    return GroupPages(ATTENTION, size, 0, [page(name, size) for name in names])


def recurrent(name: object, size: int = 5000, slot: int = 3) -> GroupPages:
    return GroupPages(RECURRENT, size, slot, [page(name, size)])


def open_store(
    path: Path, *, options: Options = SMALL, files: Files | None = None, **more: object
) -> Store:
    return Store.open(path, identity=IDENTITY, options=options, files=files, **more)


def restore(store: Store, context: bytes) -> list[list[bytes]]:
    """Return the bytes of every page of a root, group by group."""
    with store.plan(context) as plan:
        groups = plan.manifest.groups
        targets = [[bytearray(group.page_bytes) for _ in range(group.count)] for group in groups]
        store.read(plan, targets)
    return [[bytes(target) for target in group] for group in targets]


def content(groups: Iterable[GroupPages]) -> list[list[bytes]]:
    return [[bytes(one) for one in group.pages] for group in groups]


def pack_files(path: Path) -> list[Path]:
    return sorted((path / "packs").glob("*.pack"))


def root_files(path: Path) -> list[Path]:
    return sorted((path / "roots").glob("*/*.root"))
