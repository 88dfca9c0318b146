"""Repacks a base wheel: some members replaced, all others copied as they are.

What may change is exactly what the caller names, plus what the packaging rule
(:mod:`builder.wheel_version`) says of the version. Steps of :func:`repack`:

1. read the container without trust (:mod:`builder.wheel_read`);
2. RECORD and the members are the same files, and nothing signs RECORD;
3. every change fits the base: what is replaced or removed is there, what is added is not;
4. stamp the version, rename the dist-info directory;
5. write members sorted by path, dist-info last, RECORD the very last.

The result depends on the base's bytes and the changes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from builder.errors import BuildError
from builder.wheel_read import Member, read_member, read_members
from builder.wheel_record import (
    SIGNATURES,
    RecordError,
    Row,
    check_record,
    dump_record,
    parse_record,
)
from builder.wheel_version import (
    VERSION_MODULE,
    WheelName,
    stamp_metadata,
    stamp_version_module,
)
from builder.wheel_write import ArchiveWriter, Sink


class ChangeError(BuildError):
    """A change does not fit the base wheel.

    Attributes:
        wheel: the base wheel's file name.
        path: the member that the change names.
    """

    def __init__(self, wheel: str, path: str, problem: str) -> None:
        self.wheel = wheel
        self.path = path
        super().__init__(
            f"{wheel}: {path}: {problem}; the composition was made for another base: "
            "run `python -m builder pin --check`"
        )


@dataclass(frozen=True, slots=True)
class Replace:
    """New bytes of a member that the base has; its mode stays as the base has it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Add:
    """A member that the base does not have."""

    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """A member of the base that the result does not have."""


Change = Replace | Add | Remove


@dataclass(frozen=True, slots=True)
class Repacked:
    """The result: its file name, and the members that the packaging rule stamped.

    ``stamped`` holds ``(path in the base, bytes before, bytes after)``.
    """

    filename: str
    stamped: tuple[tuple[str, bytes, bytes], ...]


def repack(
    base: BinaryIO,
    filename: str,
    sink: Sink,
    *,
    version: str,
    changes: Mapping[str, Change],
) -> Repacked:
    """Write the repacked wheel to ``sink``.

    Args:
        base: the base wheel, seekable.
        filename: the base's file name; it decides the tags, and the dist-info directory.
        sink: receives the result from its first byte on.
        version: the version that the result tells, as of :func:`.wheel_version.local_version`.
        changes: what happens to which member, by its path in the base.

    Raises:
        WheelFormatError: when the base's container is odd.
        RecordError: when the base's RECORD does not describe its members.
        ChangeError: when a change does not fit the base.
        VersionRuleError: when the packaging rule does not fit the base.
    """
    name = WheelName.parse(filename)
    renamed = name.with_version(version)
    members = {member.path: member for member in read_members(base, filename)}  # (1)
    rows = _record(base, members, name, filename)  # (2)
    _check_changes(members, name, filename, changes)  # (3)

    metadata = f"{name.dist_info}/METADATA"
    stamped: list[tuple[str, bytes, bytes]] = []  # (4)
    for path in (VERSION_MODULE, metadata):
        if path not in members:
            raise ChangeError(filename, path, "the packaging rule stamps it, the base has none")
        before = read_member(base, members[path], filename)
        if path == metadata:
            after = stamp_metadata(before, name.version, version, path)
        else:
            after = stamp_version_module(before, name.version, version)
        stamped.append((path, before, after))
    new = {path: change.data for path, change in changes.items() if not isinstance(change, Remove)}
    new |= {path: after for path, _, after in stamped}

    paths = members.keys() | new.keys()  # (5)
    paths -= {path for path, change in changes.items() if isinstance(change, Remove)}
    record = f"{renamed.dist_info}/RECORD"
    writer = ArchiveWriter(sink)
    written: list[tuple[str, Row]] = []
    for path in sorted(paths - {f"{name.dist_info}/RECORD"}, key=lambda path: _order(path, name)):
        target = _renamed(path, name, renamed)
        if path in new:
            writer.store(target, new[path], executable=_executable(path, members, changes))
            written.append((target, Row.of(new[path])))
        else:
            writer.copy(members[path], base, target)
            written.append((target, rows[path]))
    writer.store(record, dump_record(written, record))
    writer.finish()
    return Repacked(renamed.filename, tuple(stamped))


def _record(
    base: BinaryIO, members: Mapping[str, Member], name: WheelName, wheel: str
) -> dict[str, Row]:
    """(2) Return the base's RECORD rows, checked against its members."""
    record = f"{name.dist_info}/RECORD"
    if record not in members:
        raise RecordError(wheel, record, "the wheel has none")
    for signature in SIGNATURES:
        if f"{name.dist_info}/{signature}" in members:
            raise RecordError(wheel, signature, "RECORD is signed; it cannot change and stay true")
    rows = parse_record(read_member(base, members[record], wheel), record, wheel)
    sizes = {path: member.size for path, member in members.items() if path != record}
    check_record(rows, sizes, wheel)
    return rows


def _check_changes(
    members: Mapping[str, Member], name: WheelName, wheel: str, changes: Mapping[str, Change]
) -> None:
    """(3) Refuse a change that the base or the packaging rule contradicts."""
    for path, change in sorted(changes.items()):
        if path == VERSION_MODULE or path.startswith(f"{name.dist_info}/"):
            raise ChangeError(wheel, path, "only the packaging rule changes this file")
        if isinstance(change, Add) and path in members:
            raise ChangeError(wheel, path, "it is to be added, the base has it already")
        if not isinstance(change, Add) and path not in members:
            raise ChangeError(wheel, path, "it is to be changed, the base does not have it")


def _order(path: str, name: WheelName) -> tuple[bool, bytes]:
    return path.startswith(f"{name.dist_info}/"), path.encode("utf-8")


def _renamed(path: str, name: WheelName, renamed: WheelName) -> str:
    if path.startswith(f"{name.dist_info}/"):
        return renamed.dist_info + path.removeprefix(name.dist_info)
    return path


def _executable(path: str, members: Mapping[str, Member], changes: Mapping[str, Change]) -> bool:
    change = changes.get(path)
    return change.executable if isinstance(change, Add) else members[path].executable
