"""Writes outputs whole or not at all: a bundle's directory, and single files.

:class:`Staging` collects a bundle's files in a directory beside its final place and swaps the
two in one step when everything is there. Whatever goes wrong before (a full disk, a
read-only folder, Ctrl-C, a failed judgement) leaves the earlier bundle untouched and removes
what was begun; what a killed process left is removed by the next one. One process at a time
writes below one target: the target's directory is the lock.

Bytes, modes and names of the result depend on nothing but what is written: not on the umask,
not on the clock.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from builder.durable import sync_folder
from builder.errors import BuildError
from builder.wheel_write import Sink

_BUFFER = 1 << 19
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# The kernel or the file system has no exchange; anything else is a real failure.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP)
_ADVICE = {
    errno.ENOSPC: "free some space or choose another folder with --out",
    errno.EDQUOT: "free some of your quota or choose another folder with --out",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another folder with --out",
    errno.EROFS: "choose a folder on a writable file system with --out",
    errno.EACCES: "make the folder writable for you or choose another one with --out",
    errno.EPERM: "make the folder writable for you or choose another one with --out",
}


class OutputError(BuildError):
    """An output could not be written; nothing of it is left behind.

    Attributes:
        path: what was to be written.
        errno: the operating system's error number.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        self.path = path
        self.errno = error.errno or 0
        advice = _ADVICE.get(self.errno, "see the message above, then build again")
        super().__init__(
            f"{path}: cannot be written: {error.strerror or error}; nothing was left "
            f"half-written and an earlier output stays as it was; {advice}"
        )


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a bundle: the SHA-256 and the size of its bytes."""

    sha256: str
    size: int


class Staging:
    """The files of a bundle that is not published yet; made by :func:`staging`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._artifacts: dict[str, Artifact] = {}

    @property
    def artifacts(self) -> Mapping[str, Artifact]:
        """What was written so far, by file name."""
        return dict(self._artifacts)

    def write(self, name: str, data: bytes) -> Artifact:
        """Add a file with these bytes.

        Raises:
            OutputError: when it cannot be written.
        """
        return self.stream(name, lambda sink: sink.write(data))

    def stream(self, name: str, produce: Callable[[Sink], object]) -> Artifact:
        """Add a file that ``produce`` writes from its first byte to its last.

        Raises:
            OutputError: when it cannot be written.
        """
        path = self.path / name
        with _File(path, path) as file:
            produce(file)
            file.settle(0o644)
        self._artifacts[name] = Artifact(file.digest.hexdigest(), file.size)
        return self._artifacts[name]


class _File:
    """A file that is only appended to; knows what was written, and names itself in errors.

    It buffers by itself: closing it after a failed write must not try to write again, as
    Python's own buffers do.
    """

    def __init__(self, path: Path, place: Path) -> None:
        self._path = path
        with _named(path):
            self._file = place.open("xb", buffering=0)
        self._pending = bytearray()
        self.digest = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        self.size += len(data)
        if len(self._pending) + len(data) > _BUFFER:
            self._flush(self._pending)
            self._pending.clear()
        if len(data) > _BUFFER:
            self._flush(data)
        else:
            self._pending += data
        return len(data)

    def _flush(self, data: bytes | bytearray | memoryview) -> None:
        self.digest.update(data)
        done = 0
        with _named(self._path), memoryview(data) as view:
            while done < len(view):
                done += self._file.write(view[done:])

    def settle(self, mode: int) -> None:
        """Give the file its mode, whatever the umask, and bring it to the disk."""
        self._flush(self._pending)
        self._pending.clear()
        with _named(self._path):
            os.fchmod(self._file.fileno(), mode)
            os.fsync(self._file.fileno())


@contextmanager
def staging(final: Path, *, waiting: Callable[[Path], None] | None = None) -> Iterator[Staging]:
    """Collect a bundle and publish it as the directory ``final`` when the block ends well.

    Args:
        final: the bundle's directory; its parent is made when missing, and locked.
        waiting: called once when another process holds the lock, before waiting for it.

    Raises:
        OutputError: when something cannot be written. Whatever the block raises passes
            through. In both cases nothing of the new bundle stays.
    """
    partial = final.parent / f".{final.name}.partial"
    with _locked(final.parent, waiting):
        with _named(partial):
            _clear(partial, final)  # a killed build's
            partial.mkdir()
            partial.chmod(0o755)
        try:
            yield Staging(partial)
            with _named(final):
                sync_folder(partial)
                _swap(partial, final)
                sync_folder(final.parent)
        finally:
            # the new files if the block failed, else the earlier bundle
            with suppress(OSError):
                _clear(partial, final)


def write_file(final: Path, produce: Callable[[Sink], object], *, mode: int = 0o644) -> None:
    """Write one file whole or not at all, replacing an earlier one in one step.

    Raises:
        OutputError: when it cannot be written.
    """
    partial = final.parent / f".{final.name}.partial"
    with _locked(final.parent, None):
        with _named(final):
            _remove(partial)
        try:
            with _File(final, partial) as file:
                produce(file)
                file.settle(mode)
            with _named(final):
                partial.replace(final)
                sync_folder(final.parent)
        finally:
            with suppress(OSError):
                _remove(partial)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise OutputError(path, error) from error


@contextmanager
def _locked(folder: Path, waiting: Callable[[Path], None] | None) -> Iterator[None]:
    """Hold the exclusive lock of ``folder``, which is made when missing."""
    with _named(folder):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _named(folder):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    waiting(folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _swap(new: Path, final: Path) -> None:
    """Put ``new`` in the place of ``final``; an earlier one ends up as ``new`` or aside."""
    if not final.exists():
        new.rename(final)
        return
    if _exchange(new, final):
        return
    final.rename(_aside(new))
    try:
        new.rename(final)
    except OSError:
        _aside(new).rename(final)
        raise


def _aside(partial: Path) -> Path:
    """Where the earlier bundle waits, on a file system that cannot exchange directories."""
    return partial.with_name(f"{partial.name}.old")


def _clear(partial: Path, final: Path) -> None:
    """Remove what is not published, and put back an earlier bundle that was moved aside."""
    if not final.exists() and _aside(partial).exists():
        _aside(partial).rename(final)
    _remove(partial)
    _remove(_aside(partial))


def _exchange(left: Path, right: Path) -> bool:
    """Swap two directories in one step (renameat2); False where that does not exist."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    left_name, right_name = os.fsencode(left), os.fsencode(right)
    if not libc.renameat2(_AT_FDCWD, left_name, _AT_FDCWD, right_name, _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(right))


def _remove(path: Path) -> None:
    """Remove a file or a directory of ours, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
