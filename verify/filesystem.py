"""Where installed packages lie: on this machine, or in the merged root of an image.

One role, :class:`FileSystem`, with the questions that finding and judging an installed vLLM
asks. Paths are absolute POSIX paths. Each implementation follows symbolic links as a process
inside of it would: :data:`HOST` asks the kernel, :class:`verify.oci.merged.MergedRoot` follows
them in its index and never looks at this machine's files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from verify.digest import CHUNK
from verify.holders import Holder, collect, no_path
from verify.holders.directory import DirectoryHolder, file_chunks


class Tree(Holder, Protocol):
    """A holder whose files lie below one directory, with their times."""

    @property
    def root(self) -> Path:
        """The directory."""

    def head(self, path: str, size: int) -> bytes:
        """Return at most the first ``size`` bytes of an item; raises ``ReadError``."""


class FileSystem(Protocol):
    """Files and directories by absolute path. Questions about what is not there are False."""

    def is_dir(self, path: Path) -> bool:
        """Whether a directory is there, links followed."""

    def is_file(self, path: Path) -> bool:
        """Whether a regular file is there, links followed."""

    def is_link(self, path: Path) -> bool:
        """Whether the last part of ``path`` is a symbolic link."""

    def real(self, path: Path) -> Path:
        """Return ``path`` with every link followed, as far as it exists."""

    def children(self, path: Path) -> list[Path]:
        """Return the entries of a directory; none when it cannot be listed."""

    def chunks(self, path: Path, name: str, size: int = CHUNK) -> Iterator[bytes]:
        """Yield a regular file's bytes without following a link in its last part.

        Raises:
            ReadError: when it is none, or cannot be read; ``name`` names it.
        """

    def hold(
        self,
        root: Path,
        entries: Collection[str] | None = None,
        unhashed: Callable[[str], bool] = no_path,
    ) -> Tree:
        """Return the files of some entries of the directory ``root``, or of all of them."""


class _Host:
    """The files of this machine."""

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def real(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def children(self, path: Path) -> list[Path]:
        try:
            return list(path.iterdir())
        except OSError:
            return []

    def chunks(self, path: Path, name: str, size: int = CHUNK) -> Iterator[bytes]:
        return file_chunks(path, name, size)

    def hold(
        self,
        root: Path,
        entries: Collection[str] | None = None,
        unhashed: Callable[[str], bool] = no_path,
    ) -> Tree:
        return DirectoryHolder(root, entries, unhashed=unhashed)


HOST: FileSystem = _Host()
"""The files of this machine."""


def read_file(files: FileSystem, path: Path, name: str) -> bytes:
    """Return the bytes of a regular file of at most ``READ_LIMIT`` bytes.

    Raises:
        ReadError: when it is none, or cannot be read; ``name`` names it.
    """
    return collect(files.chunks(path, name), name)


def exists(files: FileSystem, path: Path) -> bool:
    """Whether a file or directory is there, links followed."""
    return files.is_file(path) or files.is_dir(path)
