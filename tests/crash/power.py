"""What a disk may hold after a power cut: a model over a recorded sequence of operations.

A kill loses nothing that was written; a power cut may. POSIX promises only what was synced:
a file's data up to its last data sync, a directory's entries up to its last sync. Everything
after that may be there, be lost, or be torn, each for itself and in any order. The model is
at least as unkind as any file system: it loses renames and keeps unlinks that came later.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkcache_connector.store.catalog import CATALOG_FILES
from sparkcache_connector.store.durable import Buffer
from tests.crash.story import BufferedFiles

BLOCK = 512


@dataclass(frozen=True)
class Entry:
    """A change of one directory: names that it now has, with the file's or directory's number."""

    directory: str
    gone: str | None
    name: str | None
    number: int | None
    """None: the new name is a directory."""


@dataclass(frozen=True)
class Data:
    """A change of one file's data; ``content`` None: its size was reserved."""

    number: int
    offset: int
    content: bytes | None


@dataclass(frozen=True)
class Sync:
    """A sync of a file (by number) or a directory (by path), at a named place in the code."""

    what: int | str
    site: str


@dataclass(frozen=True)
class Promise:
    """Something that the story told; from here on it must hold."""

    line: str


@dataclass(frozen=True)
class Catalog:
    """The catalog's bytes at this moment, by file name."""

    content: dict[str, bytes]


Event = Entry | Data | Sync | Promise | Catalog


@dataclass
class Recording(BufferedFiles):
    """File operations that do what they do and write it down."""

    root: Path
    events: list[Event] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _names: dict[tuple[str, str], int] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def _path(self, directory: int) -> str:
        return str(Path(f"/proc/self/fd/{directory}").readlink())

    def hear(self, line: str) -> None:
        self.events.append(Promise(line))
        self.events.append(
            Catalog(
                {
                    name: (self.root / name).read_bytes()
                    for name in CATALOG_FILES
                    if (self.root / name).exists()
                }
            )
        )

    def mkdir(self, directory: int, name: str) -> None:
        super().mkdir(directory, name)
        self.events.append(Entry(self._path(directory), None, name, None))

    def create(self, directory: int, name: str, *, direct: bool = False) -> int:
        descriptor = super().create(directory, name, direct=direct)
        if name not in CATALOG_FILES:
            self._next += 1
            self._numbers[descriptor] = self._next
            path = self._path(directory)
            self._names[path, name] = self._next
            self.events.append(Entry(path, None, name, self._next))
        return descriptor

    def allocate(self, file: int, size: int) -> None:
        super().allocate(file, size)
        self.events.append(Data(self._numbers[file], size, None))

    def write(self, file: int, parts: Sequence[Buffer], offset: int) -> int:
        written = super().write(file, parts, offset)
        content = b"".join(map(bytes, parts))[:written]
        self.events.append(Data(self._numbers[file], offset, content))
        return written

    def sync(self, file: int, site: str) -> None:
        super().sync(file, site)
        self.events.append(Sync(self._numbers[file], site))

    def sync_directory(self, directory: int, site: str) -> None:
        super().sync_directory(directory, site)
        self.events.append(Sync(self._path(directory), site))

    def rename(self, directory: int, old: str, new: str, target: int | None = None) -> None:
        super().rename(directory, old, new, target)
        source = self._path(directory)
        into = source if target is None else self._path(target)
        number = self._names.pop((source, old))
        self._names[into, new] = number
        if into == source:
            self.events.append(Entry(source, old, new, number))
        else:
            self.events.append(Entry(into, None, new, number))
            self.events.append(Entry(source, old, None, None))

    def unlink(self, directory: int, name: str) -> None:
        super().unlink(directory, name)
        path = self._path(directory)
        if self._names.pop((path, name), None) is not None:
            self.events.append(Entry(path, name, None, None))


def _survives(
    events: Sequence[Event], kind: type[Entry] | type[Data], what: object, chance: random.Random
) -> list[Event]:
    """Return which changes of one file or directory are on the disk, in order."""
    mine = [
        (at, event)
        for at, event in enumerate(events)
        if isinstance(event, kind)
        and what == (event.directory if isinstance(event, Entry) else event.number)
    ]
    synced = max(
        (at for at, event in enumerate(events) if isinstance(event, Sync) and event.what == what),
        default=-1,
    )
    mood = chance.choice(["all", "none", "some"])
    return [
        event
        for at, event in mine
        if at <= synced or mood == "all" or (mood == "some" and chance.random() < 0.5)
    ]


def _content(events: Sequence[Event], number: int, chance: random.Random) -> bytes:
    data = bytearray()
    synced = max(
        (at for at, event in enumerate(events) if isinstance(event, Sync) and event.what == number),
        default=-1,
    )
    for event in _survives(events, Data, number, chance):
        assert isinstance(event, Data)
        content = event.content
        if content is None:
            data.extend(bytes(max(0, event.offset - len(data))))
            continue
        if events.index(event) > synced and chance.random() < 0.3:
            content = content[: chance.randrange(0, len(content) + 1, BLOCK)]
        end = event.offset + len(content)
        data.extend(bytes(max(0, end - len(data))))
        data[event.offset : end] = content
    return bytes(data)


def rebuild(events: Sequence[Event], root: Path, chance: random.Random) -> None:
    """Make one of the states that a power cut after ``events`` may leave.

    The directory that holds the cache root is the only one known to be durable.
    """
    directories = [str(root.parent)]
    while directories:
        directory = directories.pop()
        Path(directory).mkdir(mode=0o700, exist_ok=True)
        entries: dict[str, int | None] = {}
        for event in _survives(events, Entry, directory, chance):
            assert isinstance(event, Entry)
            if event.gone is not None:
                entries.pop(event.gone, None)
            if event.name is not None:
                entries[event.name] = event.number
        for name, number in entries.items():
            if number is None:
                directories.append(f"{directory}/{name}")
                continue
            with open(f"{directory}/{name}", "wb", opener=lambda p, f: os.open(p, f, 0o600)) as new:
                new.write(_content(events, number, chance))
    if root.exists():
        _lose_catalog(events, root, chance)


def _lose_catalog(events: Sequence[Event], root: Path, chance: random.Random) -> None:
    """The catalog may be gone, old, torn or anything else."""
    seen = [event for event in events if isinstance(event, Catalog)]
    how = chance.choice(["gone", "old", "torn", "noise"])
    if how == "noise":
        (root / CATALOG_FILES[0]).write_bytes(chance.randbytes(chance.randrange(9000)))
    elif how != "gone" and seen:
        for name, content in chance.choice(seen).content.items():
            cut = len(content) if how == "old" else chance.randrange(len(content) + 1)
            (root / name).write_bytes(content[:cut])
