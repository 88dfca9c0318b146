"""The only place that changes files: directories by descriptor, and syncs that have names.

Every path is a plain name relative to an open directory, every open refuses symbolic links,
and every file must be a regular file of this user. The store's durability rests on two
compositions, which ``docs/format.md`` specifies:

* :meth:`Directory.install` — temporary name, write, *sync*, rename, *directory sync*;
* removal in order — manifests first, *directory sync*, packs after.

Each sync names its call site. ``tests/crash/test_power_loss.py`` removes one name at a time
and shows what is lost without it; ``tests/crash/test_kill.py`` ends the process before each
operation. Both do so by giving :class:`Files` an observer, so that the code under test is
the code that runs.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from sparkcache_connector.store.errors import Miss, Reason, reason_of

Buffer = bytes | bytearray | memoryview

TEMPORARY_PREFIX: Final = ".tmp-"
DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600

_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Observer = Callable[[str, tuple[object, ...]], None]
"""Called before each operation with its name and arguments; may raise, or end the process."""


def is_temporary(name: str) -> bool:
    """Tell whether a name is debris of an unfinished installation."""
    return name.startswith(TEMPORARY_PREFIX)


class Files:
    """The changing file operations, each announced to an observer before it happens."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer

    def _tell(self, operation: str, *arguments: object) -> None:
        if self._observer is not None:
            self._observer(operation, arguments)

    def mkdir(self, directory: int, name: str) -> None:
        """Create a directory that only this user can enter."""
        self._tell("mkdir", directory, name)
        os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)

    def create(self, directory: int, name: str, *, direct: bool = False) -> int:
        """Create a new file that only this user can read and return its descriptor."""
        self._tell("create", directory, name)
        flags = _CREATE_FLAGS | (os.O_DIRECT if direct else 0)
        return os.open(name, flags, FILE_MODE, dir_fd=directory)

    def allocate(self, file: int, size: int) -> None:
        """Reserve ``size`` bytes, so that a full disk is known before data is written."""
        self._tell("allocate", file, size)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(file, size)

    def write(self, file: int, parts: Sequence[Buffer], offset: int) -> int:
        """Write buffers at an offset; like ``pwritev``, it may write less."""
        self._tell("write", file, parts, offset)
        return os.pwritev(file, parts, offset)

    def sync(self, file: int, site: str) -> None:
        """Make a file's data durable. ``site`` names the call for the power-loss tests."""
        self._tell("sync", file, site)
        os.fdatasync(file)

    def sync_directory(self, directory: int, site: str) -> None:
        """Make a directory's entries durable."""
        self._tell("sync_directory", directory, site)
        os.fsync(directory)

    def rename(self, directory: int, old: str, new: str, target: int | None = None) -> None:
        """Rename within a directory, or into ``target``; replaces what is there."""
        into = directory if target is None else target
        self._tell("rename", directory, old, into, new)
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=into)

    def unlink(self, directory: int, name: str) -> None:
        """Remove a file; one that is not there is fine."""
        self._tell("unlink", directory, name)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

    def set_times(self, file: int, used_ns: int) -> None:
        """Record a root's last use in the manifest's times, where a lost catalog finds it."""
        os.utime(file, ns=(used_ns, used_ns))


class Directory:
    """An open directory of this user's, and the names directly in it."""

    def __init__(self, files: Files, descriptor: int, path: str) -> None:
        self.files = files
        self.fd = descriptor
        self.path = path

    @classmethod
    def open(
        cls, files: Files, path: str, *, parent: int | None = None, name: str = ""
    ) -> Directory:
        """Open ``path``, or ``name`` relative to ``parent``.

        Raises:
            Miss: reason ``foreign`` if it is a link, belongs to someone else, or can be
                entered or written by others; the errno's reason otherwise.
        """
        try:
            descriptor = os.open(name or path, _DIRECTORY_FLAGS, dir_fd=parent)
        except OSError as error:
            raise Miss(
                reason_of(error), path, f"cannot open the directory: {error.strerror}"
            ) from error
        status = os.fstat(descriptor)
        problem = _not_private(status)
        if problem:
            os.close(descriptor)
            raise Miss(Reason.FOREIGN, path, problem)
        return cls(files, descriptor, path)

    def child(self, name: str) -> Directory:
        """Open a directory in this one."""
        return Directory.open(self.files, f"{self.path}/{name}", parent=self.fd, name=name)

    def make_child(self, name: str) -> Directory:
        """Open a directory in this one; create it if it is missing.

        It is durable once the caller has synced this directory. That is due even if the
        directory was there: whoever created it may have been killed before its own sync.
        """
        try:
            return self.child(name)
        except Miss as miss:
            if miss.reason is not Reason.ABSENT:
                raise
        self.files.mkdir(self.fd, name)
        return self.child(name)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def names(self) -> list[str]:
        """Return all names in the directory, in no order."""
        return os.listdir(self.fd)  # noqa: PTH208 -- pathlib has no descriptors

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry, links not followed."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def open_file(self, name: str, *, direct: bool = False) -> int:
        """Open a regular file of this user for reading and return its descriptor.

        Raises:
            Miss: ``absent``, ``foreign``, or the errno's reason.
        """
        flags = _READ_FLAGS | (os.O_DIRECT if direct else 0)
        try:
            descriptor = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            subject = f"{self.path}/{name}"
            raise Miss(reason_of(error), subject, f"cannot open: {error.strerror}") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(descriptor)
            found = "not a regular file of this user"
            raise Miss(Reason.FOREIGN, f"{self.path}/{name}", found)
        return descriptor

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes.

        Raises:
            Miss: ``malformed`` if it is longer than ``limit``, else as :meth:`open_file`.
        """
        descriptor = self.open_file(name)
        try:
            size = os.fstat(descriptor).st_size
            if size > limit:
                found = f"{size} bytes where at most {limit} are possible"
                raise Miss(Reason.MALFORMED, f"{self.path}/{name}", found)
            chunks = []
            while size > 0 and (chunk := os.read(descriptor, size)):
                chunks.append(chunk)
                size -= len(chunk)
            return b"".join(chunks)
        except OSError as error:
            found = f"cannot read: {error.strerror}"
            raise Miss(reason_of(error), f"{self.path}/{name}", found) from error
        finally:
            os.close(descriptor)

    def install(self, name: str, data: Buffer, site: str, *, used_ns: int | None = None) -> None:
        """Write a small file durably up to, but without, the directory's sync.

        The caller syncs the directory once for all files that it installs together.
        """
        with self.temporary() as (descriptor, temporary):
            write_all(self.files, descriptor, [data], 0)
            if used_ns is not None:
                self.files.set_times(descriptor, used_ns)
            self.files.sync(descriptor, site)
            self.files.rename(self.fd, temporary, name)

    @contextmanager
    def temporary(self, *, direct: bool = False) -> Iterator[tuple[int, str]]:
        """Give an open file under a temporary name; on failure it is removed, if that works."""
        name = TEMPORARY_PREFIX + secrets.token_hex(8)
        descriptor = self._create(name, direct)
        try:
            yield descriptor, name
        except BaseException:
            with suppress(OSError):
                self.files.unlink(self.fd, name)
            raise
        finally:
            os.close(descriptor)

    def _create(self, name: str, direct: bool) -> int:
        if direct:
            try:
                return self.files.create(self.fd, name, direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system has no O_DIRECT; some create the file before they say so.
                self.files.unlink(self.fd, name)
        return self.files.create(self.fd, name)


def write_all(files: Files, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
    """Write buffers completely, however little each call takes."""
    rest = [memoryview(part).cast("B") for part in parts]
    while rest:
        written = files.write(descriptor, rest, offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write of a regular file made no progress")
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def _not_private(status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return f"belongs to uid {status.st_uid}, not to uid {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"mode {stat.S_IMODE(status.st_mode):04o} lets others in; run chmod 700 on it"
    return ""
