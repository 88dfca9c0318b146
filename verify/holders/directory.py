"""Files below a directory: source trees and installed packages."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from verify.digest import CHUNK, Digest, Progress, ReadError, digest_all
from verify.holders import Defect, Item, collect, no_path
from verify.manifest import path_problem

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}


def kind_of(mode: int) -> str:
    """Name what a file that is not regular is."""
    return _KINDS.get(stat.S_IFMT(mode), "an unknown kind of file")


class DirectoryHolder:
    """The files of ``root``, or of some entries of it.

    Args:
        root: the directory; it may itself be reached through a symbolic link.
        entries: the entries of ``root`` to list, by name; None lists all of them.
        skip: top-level names that are left out, such as ``.git``.
        unhashed: says which files are listed and not hashed.
    """

    archive = False

    def __init__(
        self,
        root: Path,
        entries: Collection[str] | None = None,
        skip: Collection[str] = (),
        unhashed: Callable[[str], bool] = no_path,
    ) -> None:
        self.root = root
        self._unhashed = unhashed
        self._items: dict[str, Item] = {}
        self._defects: list[Defect] = []
        self._folders: list[str] = []
        if entries is None:
            self._walk([""], skip)
        else:
            self._walk([name for name in sorted(entries) if self._is_folder(name)], skip)

    @property
    def items(self) -> Mapping[str, Item]:
        """The plain files."""
        return self._items

    @property
    def folders(self) -> Sequence[str]:
        """The directories below the root, also empty ones."""
        return self._folders

    @property
    def defects(self) -> Sequence[Defect]:
        """Links, devices, unreadable directories and unusual names."""
        return self._defects

    def digests(self, git: Collection[str], progress: Progress) -> Mapping[str, Digest | ReadError]:
        """Hash every item; those in ``git`` get their git blob id, too."""
        sizes = {path: item.size for path, item in self._items.items() if not self._unhashed(path)}
        return digest_all(sizes, self.chunks, git, progress)

    def read(self, path: str) -> bytes:
        """Return one item's bytes.

        Raises:
            ReadError: when it cannot be read, or is larger than ``READ_LIMIT``.
        """
        return collect(file_chunks(self.root / path, path), path)

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield one item's bytes; raises :class:`~verify.digest.ReadError`."""
        seen = 0
        for chunk in file_chunks(os.path.join(self.root, path), path):  # noqa: PTH118 - hot
            seen += len(chunk)
            yield chunk
        if seen != self._items[path].size:
            size = self._items[path].size
            raise ReadError(path, f"{size} bytes", f"{seen}: the file changed while it was read")

    def head(self, path: str, size: int) -> bytes:
        """Return at most the first ``size`` bytes of an item; raises ``ReadError``."""
        return next(file_chunks(self.root / path, path, size), b"")

    def _is_folder(self, name: str) -> bool:
        try:
            mode = (self.root / name).lstat().st_mode
        except OSError:
            return False
        if stat.S_ISDIR(mode):
            return True
        self._defect(name, kind_of(mode) if not stat.S_ISREG(mode) else "a file", "a directory")
        return False

    def _walk(self, pending: list[str], skip: Collection[str]) -> None:
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(self.root / folder) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                self._defect(folder or ".", _reason(error), "a directory that can be listed")
                continue
            for entry in found:
                if not folder and entry.name in skip:
                    continue
                self._add(f"{folder}/{entry.name}" if folder else entry.name, entry, pending)

    def _add(self, path: str, entry: os.DirEntry[str], pending: list[str]) -> None:
        problem = path_problem(path)
        if problem is not None:
            self._defect(path, problem, "an ordinary name")
            return
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError as error:
            self._defect(path, _reason(error), "a file that can be examined")
            return
        if stat.S_ISDIR(found.st_mode):
            self._folders.append(path)
            pending.append(path)
        elif stat.S_ISREG(found.st_mode):
            self._items[path] = Item(
                found.st_size, stat.S_IMODE(found.st_mode), int(found.st_mtime)
            )
        else:
            self._defect(path, kind_of(found.st_mode), "a regular file")

    def _defect(self, path: str, actual: str, expected: str) -> None:
        self._defects.append(
            Defect("TREE-5", path, f"expected {expected}, found {actual}", expected, actual)
        )


def file_chunks(file: str | Path, path: str, size: int = CHUNK) -> Iterator[bytes]:
    """Yield a regular file's bytes without following a link in its last part.

    Raises:
        ReadError: when it is not a regular file or cannot be read; ``path`` names it.
    """
    try:
        # a pipe in the file's place must not block the judge
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ReadError(path, "a regular file", kind_of(found.st_mode))
            while chunk := os.read(descriptor, size):
                yield chunk
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise ReadError(path, "a readable file", _reason(error)) from error


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
