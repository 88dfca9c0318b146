"""The download cache: files named by their SHA-256, checked each time they are used.

Layout below ``$XDG_CACHE_HOME/sparkcache/downloads``: ``sha256/<hex>`` holds whole files,
``partial/<name>`` what an interrupted download left. A partial file becomes a whole one by
a rename after its bytes were hashed, never before; it is never given out.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from builder.errors import BuildError

_CHUNK = 1 << 20


class CacheError(BuildError):
    """The cache cannot be read or written, or a file in it is not what its name says.

    Attributes:
        path: the file or folder.
        problem: what was expected and what was found.
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"download cache: {path}: {problem}")


@dataclass(frozen=True, slots=True)
class Digest:
    """A file's SHA-256 and size."""

    sha256: str
    size: int


def default_folder() -> Path:
    """Where the cache is: below ``$XDG_CACHE_HOME``, or ``~/.cache`` (XDG base directories)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # relative values are to be ignored, says the specification
    root = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return root / "sparkcache" / "downloads"


def digest_of(path: Path) -> Digest:
    """Hash a file.

    Raises:
        CacheError: when it cannot be read.
    """
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise CacheError(path, f"expected a readable file: {error.strerror}") from error
    return Digest(digest.hexdigest(), size)


class Cache:
    """One cache folder. Several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self._whole = folder / "sha256"
        self._partial = folder / "partial"

    def find(self, wanted: Digest) -> Path | None:
        """Return the whole file that ``wanted`` names, or None when there is none.

        Raises:
            CacheError: when a file has that name but not those bytes: somebody edited it, or
                the disk did. It is left in place for :meth:`discard`.
        """
        path = self.path_of(wanted.sha256)
        if not path.exists():
            return None
        found = digest_of(path)
        if found != wanted:
            raise CacheError(
                path,
                f"expected SHA-256 {wanted.sha256} ({wanted.size} bytes), found {found.sha256} "
                f"({found.size} bytes): the file was changed after it was downloaded; "
                "remove it to download it again",
            )
        return path

    def path_of(self, sha256: str) -> Path:
        """Where the file of that SHA-256 is, whether it exists or not."""
        return self._whole / sha256

    def discard(self, sha256: str) -> None:
        """Remove a whole file that :meth:`find` refused."""
        with _named(self.path_of(sha256)):
            self.path_of(sha256).unlink(missing_ok=True)

    @contextmanager
    def partial(self, name: str) -> Iterator[Path]:
        """Hold the partial file ``name`` for one writer; others wait their turn.

        The file stays when the block is left early, so that a later download resumes it.
        """
        path = self._partial / name
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._whole.mkdir(parents=True, exist_ok=True)
            # lock files stay: removing one would let two writers hold two locks of one name
            lock = (self._partial / f"{name}.lock").open("ab")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path

    def commit(self, partial: Path, found: Digest) -> Path:
        """Make a partial file whole under the name that its bytes have; return its path."""
        path = self.path_of(found.sha256)
        with _named(partial):
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())
            partial.chmod(0o444)
            partial.replace(path)
        return path


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            path, f"cannot write: {error.strerror}; set XDG_CACHE_HOME to a folder with room"
        ) from error
