r"""Git's object names, computed from bytes: blobs, trees and commits, without git.

The format is the one of git's documentation ("Git Internals - Git Objects"): the id is the
SHA-1 of ``<kind> <size>\0<body>``. These ids are upstream's *names* for things; decisions
rest on SHA-256 (docs/build.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from verify.errors import FormatError

FILE = "100644"
EXECUTABLE = "100755"
SYMLINK = "120000"
DIRECTORY = "40000"
SUBMODULE = "160000"

_MODES = frozenset({FILE, EXECUTABLE, SYMLINK, DIRECTORY, SUBMODULE})
_ID = re.compile(r"[0-9a-f]{40}\Z")


@dataclass(frozen=True, slots=True)
class File:
    """One file of a tree: its POSIX path from the tree's root, mode and object id."""

    path: str
    mode: str
    id: str


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of a raw tree object."""

    mode: str
    name: bytes
    id: str


@dataclass(frozen=True, slots=True)
class Commit:
    """What a raw commit object names: its tree and its parents."""

    tree: str
    parents: tuple[str, ...]


def object_id(kind: str, body: bytes) -> str:
    """Return the id of an object of ``kind`` ("blob", "tree", "commit", "tag")."""
    return hashlib.sha1(  # noqa: S324 - git's naming scheme, not a security decision
        f"{kind} {len(body)}\0".encode("ascii") + body
    ).hexdigest()


def blob_id(data: bytes) -> str:
    """Return the id of a file's contents."""
    return object_id("blob", data)


class BlobHasher:
    """The id of a blob whose bytes arrive in chunks; its size must be known beforehand."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._digest = hashlib.sha1(  # noqa: S324 - see object_id
            f"blob {size}\0".encode("ascii")
        )

    def update(self, chunk: bytes) -> None:
        """Add the next bytes."""
        self._left -= len(chunk)
        self._digest.update(chunk)

    def id(self) -> str:
        """Return the id.

        Raises:
            ValueError: when more or fewer bytes came than were announced.
        """
        if self._left:
            raise ValueError(f"blob size announced and seen differ by {self._left} bytes")
        return self._digest.hexdigest()


def tree_ids(files: Iterable[File]) -> dict[str, str]:
    """Return the id of every directory that ``files`` imply; the root is ``""``.

    Git keeps no empty directories, so the files determine all trees.

    Raises:
        FormatError: for a path that occurs twice, or is a file and a directory at once.
        ValueError: for a path or mode that no git tree can hold.
    """
    children: dict[str, dict[str, tuple[str, str]]] = {"": {}}
    for file in files:
        _check(file)
        folder, _, name = file.path.rpartition("/")
        _open_folder(children, folder)
        if name in children[folder]:
            raise FormatError(file.path, "", "expected one entry of this name, found two")
        children[folder][name] = (file.mode, file.id)

    ids: dict[str, str] = {}
    # deepest first: a tree needs the ids of the trees that it holds
    for folder in sorted(children, key=lambda path: path.count("/") + bool(path), reverse=True):
        ids[folder] = object_id("tree", _tree_body(children[folder]))
        if folder:
            parent, _, name = folder.rpartition("/")
            if name in children[parent]:
                raise FormatError(folder, "", "expected a file or a directory, found both")
            children[parent][name] = (DIRECTORY, ids[folder])
    return ids


def tree_id(files: Iterable[File]) -> str:
    """Return the id of the tree that holds exactly ``files``."""
    return tree_ids(files)[""]


def parse_tree(body: bytes, what: str) -> tuple[TreeEntry, ...]:
    """Return the entries of a raw tree object.

    Raises:
        FormatError: for a truncated entry, an unknown mode, a name that git forbids,
            or entries that are not in git's order.
    """
    entries: list[TreeEntry] = []
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 7)
        end = body.find(b"\0", space)
        if space < 0 or end < 0 or end + 21 > len(body):
            raise FormatError(what, f"byte {at}", "expected `<mode> <name>\\0<id>`, found an end")
        mode = body[at:space].decode("ascii", "replace")
        name = body[space + 1 : end]
        if mode not in _MODES:
            raise FormatError(what, f"byte {at}", f"expected a mode that git writes, found {mode}")
        if not name or b"/" in name or name in (b".", b"..", b".git"):
            raise FormatError(what, f"byte {space + 1}", f"the name {name!r} is not allowed")
        entries.append(TreeEntry(mode, name, body[end + 1 : end + 21].hex()))
        at = end + 21
    keys = [entry.name + b"/" * (entry.mode == DIRECTORY) for entry in entries]
    names = {entry.name for entry in entries}
    if keys != sorted(keys) or len(names) != len(entries):
        raise FormatError(what, "", "expected entries in git's order, each name once")
    return tuple(entries)


def parse_commit(body: bytes, what: str) -> Commit:
    """Return what a raw commit object names.

    Raises:
        FormatError: when the header does not begin with one tree and its parents.
    """
    header = body.partition(b"\n\n")[0].split(b"\n")
    values: dict[str, list[str]] = {"tree": [], "parent": []}
    for number, line in enumerate(header):
        key, _, value = line.decode("utf-8", "replace").partition(" ")
        if key not in values:
            break
        if not _ID.match(value) or (key == "tree") != (number == 0):
            raise FormatError(what, f"line {number + 1}", f"unexpected {key} line {value[:60]!r}")
        values[key].append(value)
    if not values["tree"]:
        raise FormatError(what, "line 1", "expected `tree <40 hex digits>`")
    return Commit(values["tree"][0], tuple(values["parent"]))


def _check(file: File) -> None:
    parts = file.path.split("/")
    if any(part in ("", ".", "..", ".git") or "\0" in part for part in parts):
        raise ValueError(f"no git tree holds a file named {file.path!r}")
    if file.mode not in _MODES - {DIRECTORY}:
        raise ValueError(f"{file.path}: no git file has the mode {file.mode!r}")
    if not _ID.match(file.id):
        raise ValueError(f"{file.path}: not a git object id: {file.id!r}")


def _open_folder(children: dict[str, dict[str, tuple[str, str]]], folder: str) -> None:
    """Make ``folder`` and its parents known."""
    if folder in children:
        return
    parent, _, _ = folder.rpartition("/")
    _open_folder(children, parent)
    children[folder] = {}


def _tree_body(entries: dict[str, tuple[str, str]]) -> bytes:
    def order(item: tuple[str, tuple[str, str]]) -> bytes:
        name, (mode, _) = item
        return name.encode("utf-8", "surrogateescape") + b"/" * (mode == DIRECTORY)

    return b"".join(
        mode.encode("ascii")
        + b" "
        + name.encode("utf-8", "surrogateescape")
        + b"\0"
        + bytes.fromhex(id_)
        for name, (mode, id_) in sorted(entries.items(), key=order)
    )
