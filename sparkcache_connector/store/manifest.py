"""Manifests: the authenticated description of one root, and its strict encoding.

A manifest lists the pages of every group in order, as *runs* of pages that lie one after the
other in a pack, and the digest of each page. A delta is a manifest whose first runs point
into older packs; nothing else distinguishes it, so reading one never needs another manifest.

The encoding is canonical: one manifest has one byte string, and :meth:`Manifest.parse`
accepts only that. Nothing is parsed before the tag has been checked except the fixed prefix
that says which key and version to check with. ``docs/format.md`` specifies every field.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from sparkcache_connector.store.errors import Miss, Reason
from sparkcache_connector.store.keys import KEY_ID_BYTES, Key, KeyRing
from sparkcache_connector.store.pack import ALIGNMENT, MAX_PACK, MAX_PAGE, stride

MANIFEST_MAGIC: Final = b"SPKVroot"
MANIFEST_VERSION: Final = 1
MANIFEST_LIMIT: Final = 64 << 20
"""Largest manifest in bytes; a longer file is not read."""
MANIFEST_SUFFIX: Final = ".root"
DIGEST_BYTES: Final = 32
TAG_BYTES: Final = 32
MAX_GROUPS: Final = 4096
MAX_BOUNDARY: Final = (1 << 63) - 1

_PREFIX: Final = struct.Struct("<8sHHI8s")
_BODY: Final = struct.Struct("<32s32sQQIHHI")
_PACK: Final = struct.Struct("<16sQ")
_GROUP: Final = struct.Struct("<IIQII")
_RUN: Final = struct.Struct("<III")


class GroupKind(IntEnum):
    """What a vLLM KV cache group keeps; decides what a delta may reference."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    RECURRENT = 3


@dataclass(frozen=True)
class PackRef:
    """A pack that a manifest names, with the size it must have."""

    pack_id: bytes
    size: int


@dataclass(frozen=True)
class Run:
    """``count`` pages one after the other in a pack.

    ``pack`` indexes the manifest's packs, ``offset`` is in bytes from the pack's beginning.
    """

    pack: int
    offset: int
    count: int


@dataclass(frozen=True)
class Group:
    """The pages of one KV cache group.

    ``first`` is the block table index of the first page: zero for full attention, the first
    block inside the window for sliding windows, the state's slot for recurrent groups.
    """

    kind: GroupKind
    page_bytes: int
    first: int
    runs: tuple[Run, ...]
    digests: bytes
    """The pages' digests, 32 bytes each, in order."""

    @property
    def count(self) -> int:
        """Number of pages."""
        return len(self.digests) // DIGEST_BYTES

    def digest(self, index: int) -> bytes:
        """Return the digest of the page at a position in this group."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class Manifest:
    """One restorable context of one rank under one identity."""

    identity: bytes
    context: bytes
    boundary: int
    rank: int
    created_ns: int
    packs: tuple[PackRef, ...]
    groups: tuple[Group, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes that a restore of the whole root writes."""
        return sum(group.page_bytes * group.count for group in self.groups)

    @property
    def page_count(self) -> int:
        """Pages over all groups."""
        return sum(group.count for group in self.groups)

    def extents(self) -> Iterator[tuple[int, int, int]]:
        """Yield (pack index, first byte, end byte) of every run."""
        for group in self.groups:
            step = stride(group.page_bytes)
            for run in group.runs:
                yield run.pack, run.offset, run.offset + run.count * step

    def encode(self, key: Key) -> bytes:
        """Return the manifest's bytes, authenticated by ``key``.

        The fields are taken as they are; only :meth:`parse` judges.
        """
        runs = [run for group in self.groups for run in group.runs]
        parts = [
            _BODY.pack(
                self.identity,
                self.context,
                self.boundary,
                self.created_ns,
                self.rank,
                len(self.groups),
                0,
                len(self.packs),
            ),
            *(_PACK.pack(pack.pack_id, pack.size) for pack in self.packs),
            *(
                _GROUP.pack(g.kind, g.page_bytes, g.first, g.count, len(g.runs))
                for g in self.groups
            ),
            *(_RUN.pack(run.pack, run.offset // ALIGNMENT, run.count) for run in runs),
            *(group.digests for group in self.groups),
        ]
        size = _PREFIX.size + sum(map(len, parts)) + TAG_BYTES
        prefix = _PREFIX.pack(MANIFEST_MAGIC, MANIFEST_VERSION, 0, size, key.key_id)
        data = b"".join([prefix, *parts])
        return data + key.tag(data)

    @classmethod
    def parse(cls, data: bytes, keys: KeyRing, subject: str = "manifest") -> Manifest:
        """Return the manifest that authenticated bytes describe.

        Steps: (1) the prefix has the magic, this version and the data's length; (2) its key
        is in the ring; (3) the tag is that key's; (4) the counts fit the length; (5) packs,
        groups and runs are within limits, inside their packs, and canonical.

        Raises:
            Miss: ``malformed``, ``newer-format``, ``unknown-key`` or ``forged``.
        """
        authenticate(data, keys, subject)
        return _Parser(data, subject).manifest()


def manifest_name(context: bytes) -> str:
    """Return the file name of a context's manifest."""
    return context.hex() + MANIFEST_SUFFIX


def digest_of_name(name: str, suffix: str = MANIFEST_SUFFIX) -> bytes | None:
    """Return the 32-byte digest that a file or directory name spells; None if it spells none."""
    stem = name.removesuffix(suffix)
    if len(stem) != 2 * DIGEST_BYTES or stem + suffix != name or stem != stem.lower():
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def authenticate(data: bytes, keys: KeyRing, subject: str = "manifest") -> Key:
    """Do steps 1 to 3 of :meth:`Manifest.parse`; return the key that vouches."""
    # (1)
    if len(data) < _PREFIX.size + TAG_BYTES or not data.startswith(MANIFEST_MAGIC):
        raise Miss(Reason.MALFORMED, subject, "does not begin as a manifest does")
    _, version, flags, size, key_id = _PREFIX.unpack_from(data)
    if version > MANIFEST_VERSION or flags:
        raise Miss(Reason.NEWER_FORMAT, subject, f"manifest version {version}, flags {flags}")
    if version != MANIFEST_VERSION:
        raise Miss(Reason.MALFORMED, subject, f"manifest version {version}")
    if size != len(data):
        raise Miss(Reason.MALFORMED, subject, f"{len(data)} bytes where {size} are stated")
    # (2)
    key = keys.find(key_id)
    if key is None:
        raise Miss(Reason.UNKNOWN_KEY, subject, f"authenticated by key {key_id.hex()}")
    # (3)
    if not hmac.compare_digest(key.tag(memoryview(data)[:-TAG_BYTES]), data[-TAG_BYTES:]):
        raise Miss(Reason.FORGED, subject, "the authentication tag does not match")
    return key


def parse_unauthenticated(data: bytes, subject: str = "manifest") -> Manifest:
    """Return what a manifest of this version says although nobody vouches for it.

    Only for keeping the packs alive of a root whose key may come back; never for serving.
    The prefix must have passed step (1).
    """
    return _Parser(data, subject).manifest()


def key_id_of(data: bytes) -> bytes:
    """Return the key id in a manifest's prefix, which must have been authenticated."""
    return data[_PREFIX.size - KEY_ID_BYTES : _PREFIX.size]


class _Parser:
    """Steps (4) and (5) over bytes whose tag has been checked."""

    def __init__(self, data: bytes, subject: str) -> None:
        self._data = memoryview(data)[_PREFIX.size : -TAG_BYTES]
        self._subject = subject
        self._at = 0

    def _wrong(self, found: str) -> Miss:
        return Miss(Reason.MALFORMED, self._subject, found)

    def _take(self, size: int) -> memoryview:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise self._wrong("its parts are longer than the whole")
        self._at += size
        return part

    def manifest(self) -> Manifest:
        fields = _BODY.unpack(self._take(_BODY.size))
        identity, context, boundary, created_ns, rank, group_count, reserved, pack_count = fields
        if reserved or group_count > MAX_GROUPS or not 0 < boundary <= MAX_BOUNDARY:
            raise self._wrong("a field is outside its limits")
        packs = tuple(
            PackRef(pack_id, size)
            for pack_id, size in _PACK.iter_unpack(self._take(pack_count * _PACK.size))
        )
        if any(not ALIGNMENT < pack.size <= MAX_PACK for pack in packs):
            raise self._wrong("a pack's size is outside its limits")
        if len({pack.pack_id for pack in packs}) != len(packs):
            raise self._wrong("names a pack twice")
        heads = list(_GROUP.iter_unpack(self._take(group_count * _GROUP.size)))
        # (4) Every count is bounded by the bytes that are really there before it is used.
        pages = sum(head[3] for head in heads)
        run_total = sum(head[4] for head in heads)
        if self._at + run_total * _RUN.size + pages * DIGEST_BYTES != len(self._data):
            raise self._wrong("its counts do not add up to its length")
        runs = self._runs(heads, packs)
        groups = tuple(
            self._group(head, group_runs) for head, group_runs in zip(heads, runs, strict=True)
        )
        return Manifest(identity, context, boundary, rank, created_ns, packs, groups)

    def _group(self, head: tuple[int, ...], runs: tuple[Run, ...]) -> Group:
        kind, page_bytes, first, count, _ = head
        digests = bytes(self._take(count * DIGEST_BYTES))
        return Group(GroupKind(kind), page_bytes, first, runs, digests)

    def _runs(
        self, heads: Sequence[tuple[int, ...]], packs: tuple[PackRef, ...]
    ) -> list[tuple[Run, ...]]:
        # (5)
        known_kinds = frozenset(GroupKind)
        used = 0
        result = []
        for kind, page_bytes, first, count, run_count in heads:
            if kind not in known_kinds or not 0 < page_bytes <= MAX_PAGE or first > MAX_BOUNDARY:
                raise self._wrong("a group is outside its limits")
            step = stride(page_bytes)
            group: list[Run] = []
            for pack, units, length in _RUN.iter_unpack(self._take(run_count * _RUN.size)):
                run = Run(pack, units * ALIGNMENT, length)
                if pack > used or pack >= len(packs):
                    raise self._wrong("packs are not listed in the order of their use")
                used = max(used, pack + 1)
                end = run.offset + length * step
                if not length or run.offset < ALIGNMENT or end > packs[pack].size:
                    raise self._wrong("a run lies outside its pack")
                if group and _continues(group[-1], run, step):
                    raise self._wrong("two runs are really one")
                group.append(run)
            if sum(run.count for run in group) != count:
                raise self._wrong("a group's runs do not hold its pages")
            result.append(tuple(group))
        if used != len(packs):
            raise self._wrong("names a pack that it does not use")
        return result


def _continues(before: Run, run: Run, step: int) -> bool:
    return run.pack == before.pack and run.offset == before.offset + before.count * step


class RunList:
    """Builds a group's runs in canonical form; shares the pack table over groups."""

    def __init__(self) -> None:
        self.packs: dict[PackRef, int] = {}

    def extend(self, runs: list[Run], pack: PackRef, offset: int, count: int, step: int) -> None:
        """Append pages at ``offset`` of ``pack``, merged with the last run if they touch it."""
        index = self.packs.setdefault(pack, len(self.packs))
        run = Run(index, offset, count)
        if runs and _continues(runs[-1], run, step):
            run = Run(index, runs[-1].offset, runs.pop().count + count)
        runs.append(run)
