"""The root that the layers of an image make, as an index: nothing is unpacked.

Follows the OCI image-spec 1.1 ("Applying Changesets"). Engines apply layers in different ways:
some unpack over the layers below, some unpack each layer alone and let the kernel merge. A
layer counts here only where all of them come to the same root; everything else is a finding:

1. a name is relative and stays below the root, and occurs once;
2. no entry lies below a symbolic link or a file;
3. a whiteout is an empty regular file, of a known form, for something of the layers below;
4. a hard link names a file that is already there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verify.digest import CHUNK, Digest, Progress, ReadError, digest
from verify.holders import Defect, Item, collect, no_path
from verify.manifest import path_problem
from verify.oci.layer import Entry, Layer

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"

_LINKS = 40  # as many as Linux follows
_PATH_MAX = 4096
_NAMES = {"file": "a file", "directory": "a directory", "link": "a symbolic link"}


@dataclass(slots=True, eq=False)
class Node:
    """A file, directory, link or anything else; a file's bytes lie in ``layer`` at ``offset``."""

    kind: str
    mode: int = 0o755
    size: int = 0
    mtime: int = 0
    target: str = ""
    layer: Layer | None = None
    offset: int = 0
    children: dict[str, Node] = field(default_factory=dict)


class MergedRoot:
    """The merged root; a :class:`~verify.filesystem.FileSystem` of absolute paths in the image."""

    def __init__(self) -> None:
        self._root = Node("directory")

    def apply(self, layer: Layer, entries: Sequence[Entry]) -> list[Defect]:
        """Lay one layer's entries over what is there; return what is wrong with them."""
        changes = _Changes(self._root, layer)
        named = [(entry, changes.parts(entry)) for entry in entries]
        # a whiteout is about the layers below, wherever it stands in its own layer
        for entry, parts in named:
            if parts and parts[-1].startswith(WHITEOUT):
                changes.remove(entry, parts)
        for entry, parts in named:
            if parts is not None and not (parts and parts[-1].startswith(WHITEOUT)):
                changes.add(entry, parts)
        changes.conflicts()
        return changes.defects

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Yield everything but directories by its path without the leading slash."""
        pending = [("", self._root)]
        while pending:
            prefix, folder = pending.pop()
            for name, node in sorted(folder.children.items()):
                if node.kind == "directory":
                    pending.append((f"{prefix}{name}/", node))
                else:
                    yield prefix + name, node

    def folders(self, name: str) -> list[Path]:
        """Return every directory of this name."""
        found: list[Path] = []
        pending = [(Path("/"), self._root)]
        while pending:
            path, folder = pending.pop()
            for child, node in folder.children.items():
                if node.kind == "directory":
                    pending.append((path / child, node))
                    if child == name:
                        found.append(path / child)
        return sorted(found)

    def is_dir(self, path: Path) -> bool:
        """Whether a directory is there, links followed."""
        return self._kind(path) == "directory"

    def is_file(self, path: Path) -> bool:
        """Whether a regular file is there, links followed."""
        return self._kind(path) == "file"

    def is_link(self, path: Path) -> bool:
        """Whether the last part of ``path`` is a symbolic link."""
        node = self._find(path, follow=False)[1]
        return node is not None and node.kind == "link"

    def real(self, path: Path) -> Path:
        """Return ``path`` with every link followed, as far as it exists."""
        return self._find(path)[0]

    def children(self, path: Path) -> list[Path]:
        """Return the entries of a directory; none when there is no directory."""
        node = self._find(path)[1]
        return [path / name for name in node.children] if node is not None else []

    def chunks(self, path: Path, name: str, size: int = CHUNK) -> Iterator[bytes]:
        """Yield a regular file's bytes without following a link in its last part.

        Raises:
            ReadError: when it is none, or cannot be read; ``name`` names it.
        """
        node = self._find(path, follow=False)[1]
        if node is None or node.kind != "file":
            found = "no such file" if node is None else _NAMES.get(node.kind, node.kind)
            raise ReadError(name, "a regular file", found)
        yield from content(node, name)

    def hold(
        self,
        root: Path,
        entries: Collection[str] | None = None,
        unhashed: Callable[[str], bool] = no_path,
    ) -> MergedHolder:
        """Return the files of some entries of the directory ``root``, or of all of them."""
        node = self._find(root)[1]
        return MergedHolder(root, node or Node("directory"), entries, unhashed)

    def _kind(self, path: Path) -> str | None:
        node = self._find(path)[1]
        return node.kind if node is not None else None

    def _find(self, path: Path, *, follow: bool = True) -> tuple[Path, Node | None]:
        """Return where ``path`` leads, and what is there; ``..`` of the root is the root."""
        trail: list[tuple[str, Node]] = []
        pending = [part for part in reversed(path.parts) if part != "/"]
        links = _LINKS
        while pending:
            part = pending.pop()
            if part == "..":
                trail = trail[:-1]
                continue
            node = (trail[-1][1] if trail else self._root).children.get(part)
            if node is not None and node.kind == "link" and (pending or follow):
                links -= 1
                if links < 0:
                    node = None
                else:
                    if node.target.startswith("/"):
                        trail = []
                    pending += [p for p in reversed(node.target.split("/")) if p not in ("", ".")]
                    continue
            if node is None or (pending and node.kind != "directory"):
                rest = [part, *reversed(pending)]
                return Path("/", *(name for name, _ in trail), *rest), None
            trail.append((part, node))
        return Path("/", *(name for name, _ in trail)), trail[-1][1] if trail else self._root


def content(node: Node, name: str) -> Iterator[bytes]:
    """Yield the bytes of a file's node; raises ``ReadError``, where ``name`` names it."""
    if node.size and node.layer is not None:
        yield from node.layer.chunks(name, node.offset, node.size)


class _Changes:
    """One layer's changes to the root, and what is wrong with them."""

    def __init__(self, root: Node, layer: Layer) -> None:
        self._root = root
        self._layer = layer
        self._seen: dict[tuple[str, ...], str] = {}
        self._removed: set[tuple[str, ...]] = set()
        self.defects: list[Defect] = []

    def parts(self, entry: Entry) -> tuple[str, ...] | None:
        """Return the parts of an entry's name; None, and a defect, when it must not be used."""
        # (1)
        parts = _parts(entry.name)
        if parts is None:
            self._bad(entry, "a name below the root", "one that leaves it, or has no end")
        elif not parts and entry.kind != "directory":
            self._bad(entry, "a directory as the root", entry.kind)
            return None
        return parts

    def remove(self, entry: Entry, parts: tuple[str, ...]) -> None:
        """Apply a whiteout."""
        # (3)
        *folder, name = parts
        if entry.kind != "file" or entry.size:
            self._bad(entry, "an empty file as the whiteout", f"{entry.kind}, {entry.size} bytes")
            return
        node = self._folder(entry, folder, make=False)
        if name == OPAQUE:
            if node is not None:
                node.children.clear()
        elif name == WHITEOUT or name.startswith(WHITEOUT * 2):
            self._bad(entry, "a whiteout that the specification knows", name)
        else:
            hidden = name.removeprefix(WHITEOUT)
            self._removed.add((*folder, hidden))
            if node is not None:
                node.children.pop(hidden, None)

    def add(self, entry: Entry, parts: tuple[str, ...]) -> None:
        """Add or replace what an entry describes."""
        if not parts:
            self._root.mode = entry.mode
            return
        if any(part.startswith(WHITEOUT) for part in parts):
            self._bad(entry, "whiteouts as files only", "an entry below a whiteout's name")
            return
        # (1)
        if self._seen.get(parts, "directory") != "directory" or (
            parts in self._seen and entry.kind != "directory"
        ):
            self._bad(entry, "each name once", "two entries of this name")
            return
        node = self._node(entry)
        folder = self._folder(entry, parts[:-1], make=True)
        if node is None or folder is None:
            return
        for length in range(1, len(parts)):
            self._seen.setdefault(parts[:length], "directory")
        self._seen[parts] = entry.kind
        old = folder.children.get(parts[-1])
        if old is not None and old.kind == node.kind == "directory":
            old.mode = node.mode
        else:
            folder.children[parts[-1]] = node

    def conflicts(self) -> None:
        """Report names that the layer both removes and adds: the order would decide."""
        for parts in sorted(self._removed & self._seen.keys()):
            message = "the layer removes and adds it: engines disagree what is left"
            self._defect("/".join(parts), message, "one of the two", "both")

    def _node(self, entry: Entry) -> Node | None:
        if entry.kind == "hard link":
            # (4)
            target = self._existing(entry.target)
            if target is None or target.kind == "directory":
                self._bad(entry, "a hard link to a file that is there", entry.target or "none")
                return None
            return target
        node = Node(entry.kind, entry.mode, entry.size, entry.mtime, entry.target)
        if entry.kind == "file":
            node.layer, node.offset = self._layer, entry.offset
        return node

    def _existing(self, target: str) -> Node | None:
        parts = _parts(target)
        node: Node | None = self._root if parts else None
        for part in parts or ():
            node = node.children.get(part) if node is not None else None
        return node

    def _folder(self, entry: Entry, parts: Sequence[str], *, make: bool) -> Node | None:
        # (2)
        node = self._root
        for part in parts:
            child = node.children.get(part)
            if child is None:
                if not make:
                    return None
                child = node.children[part] = Node("directory")
            if child.kind != "directory":
                found = _NAMES.get(child.kind, child.kind)
                self._bad(entry, f"a directory at {part}", found)
                return None
            node = child
        return node

    def _bad(self, entry: Entry, expected: str, actual: str) -> None:
        message = f"expected {expected}, found {actual}"
        self._defect(entry.name, message, expected, actual)

    def _defect(self, path: str, message: str, expected: str, actual: str) -> None:
        self.defects.append(Defect("IMAGE-4", path, message, expected, actual))


def _parts(name: str) -> tuple[str, ...] | None:
    """Return the parts of a name below the root; every engine reads ``/a`` and ``./a`` as ``a``."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    return None if ".." in parts or len(name) > _PATH_MAX else parts


class MergedHolder:
    """The files below a directory of the merged root; a :class:`~verify.filesystem.Tree`."""

    archive = False

    def __init__(
        self,
        root: Path,
        node: Node,
        entries: Collection[str] | None,
        unhashed: Callable[[str], bool],
    ) -> None:
        self.root = root
        self._unhashed = unhashed
        self._items: dict[str, Item] = {}
        self._nodes: dict[str, Node] = {}
        self._defects: list[Defect] = []
        pending: list[tuple[str, Node]] = []
        for name, child in sorted(node.children.items()):
            if entries is None:
                self._add(name, child, pending)
            elif name in entries:
                if child.kind == "directory":
                    pending.append((name, child))
                else:
                    self._defect(name, _NAMES.get(child.kind, child.kind), "a directory")
        while pending:
            folder, node = pending.pop()
            for name, child in sorted(node.children.items()):
                self._add(f"{folder}/{name}", child, pending)

    @property
    def items(self) -> Mapping[str, Item]:
        """The plain files."""
        return self._items

    @property
    def defects(self) -> Sequence[Defect]:
        """Links, devices and unusual names."""
        return self._defects

    def digests(self, git: Collection[str], progress: Progress) -> Mapping[str, Digest | ReadError]:
        """Hash every item in the order of its layers' bytes; those in ``git`` as blobs, too."""
        found: dict[str, Digest | ReadError] = {}
        for path, node in sorted(
            self._nodes.items(), key=lambda each: (id(each[1].layer), each[1].offset)
        ):
            if not self._unhashed(path):
                try:
                    found[path] = digest(
                        content(node, path), node.size, git=path in git, progress=progress
                    )
                except ReadError as error:
                    found[path] = error
        return found

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield one item's bytes; raises :class:`~verify.digest.ReadError`."""
        return content(self._nodes[path], path)

    def read(self, path: str) -> bytes:
        """Return one item's bytes.

        Raises:
            ReadError: when it cannot be read, or is larger than ``READ_LIMIT``.
        """
        return collect(self.chunks(path), path)

    def head(self, path: str, size: int) -> bytes:
        """Return at most the first ``size`` bytes of an item; raises ``ReadError``."""
        return next(self.chunks(path), b"")[:size]

    def _add(self, path: str, node: Node, pending: list[tuple[str, Node]]) -> None:
        problem = path_problem(path)
        if problem is not None:
            self._defect(path, problem, "an ordinary name")
        elif node.kind == "directory":
            pending.append((path, node))
        elif node.kind == "file":
            self._items[path] = Item(node.size, node.mode, node.mtime)
            self._nodes[path] = node
        else:
            self._defect(path, _NAMES.get(node.kind, node.kind), "a regular file")

    def _defect(self, path: str, actual: str, expected: str) -> None:
        self._defects.append(
            Defect("TREE-5", path, f"expected {expected}, found {actual}", expected, actual)
        )
