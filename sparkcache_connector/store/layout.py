"""The cache root on disk: its directories, its lock, its key ring.

Opening an :class:`Area` is the one place that decides whether a directory may be used as a
cache root at all. Everything inside it is reached through the descriptors that it holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from sparkcache_connector.store.durable import DIRECTORY_MODE, Directory, Files
from sparkcache_connector.store.errors import Miss, Reason, Unusable, reason_of
from sparkcache_connector.store.keys import KEYS_LIMIT, KeyRing

LOCK_NAME: Final = "lock"
KEYS_NAME: Final = "keys"
PACKS_NAME: Final = "packs"
ROOTS_NAME: Final = "roots"
QUARANTINE_NAME: Final = "quarantine"
ABOUT_NAME: Final = "about.json"


class Area:
    """The open directories of one cache root, held until :meth:`close`."""

    def __init__(self, files: Files, root: Directory, *, create: bool) -> None:
        self.files = files
        self.root = root
        self._open: list[Directory] = [root]
        self._identities: dict[bytes, Directory] = {}
        self._durable: set[bytes] = set()
        self._lock: int | None = None
        try:
            self.packs = self._part(PACKS_NAME, create)
            self.roots = self._part(ROOTS_NAME, create)
            self.quarantine = self._part(QUARANTINE_NAME, create)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, files: Files, path: str | os.PathLike[str], *, own: bool) -> Area:
        """Open a cache root; as its owner, create what is missing and take the lock.

        Raises:
            Unusable: naming what is wrong with the directory and what to do about it.
        """
        text = os.fspath(path)
        if own:
            _create_path(files, Path(text))
        try:
            root = Directory.open(files, text)
        except Miss as miss:
            raise Unusable(
                miss.reason, text, miss.found, _ADVICE.get(miss.reason, _CHECK)
            ) from miss
        lock = None
        try:
            # The lock comes first: nothing is created in a root that someone else owns.
            lock = _take_lock(root, text) if own else None
            area = cls(files, root, create=own)
        except Miss as miss:
            if lock is not None:
                os.close(lock)
            raise Unusable(miss.reason, text, str(miss), _ADVICE.get(miss.reason, _CHECK)) from miss
        except BaseException:
            root_fd = root.fd
            with suppress(OSError):
                os.close(root_fd)
            raise
        area._lock = lock
        return area

    def _part(self, name: str, create: bool) -> Directory:
        try:
            part = self.root.make_child(name) if create else self.root.child(name)
        except OSError as error:
            raise Miss(reason_of(error), f"{self.root.path}/{name}", str(error)) from error
        self._open.append(part)
        return part

    def identity(self, identity: bytes, *, create: bool = False) -> Directory:
        """Return the directory of one identity's manifests, kept open.

        Raises:
            Miss: ``absent`` if there is none, ``foreign`` if it is not to be trusted.
            OSError: if it cannot be created.
        """
        known = self._identities.get(identity)
        if known is None:
            name = identity.hex()
            known = self.roots.make_child(name) if create else self.roots.child(name)
            self._identities[identity] = known
            self._open.append(known)
        if create and identity not in self._durable:
            self.files.sync_directory(self.roots.fd, "identity-dir")
            self._durable.add(identity)
        return known

    def close(self) -> None:
        """Close every directory and give the lock back."""
        for directory in self._open:
            with suppress(OSError):
                directory.close()
        self._open.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def load_keys(area: Area, key_file: str | os.PathLike[str] | None, *, create: bool) -> KeyRing:
    """Return the operator's key ring, or the cache root's own; create the latter if missing.

    When this returns, the layout and the ring are durable.

    Raises:
        Unusable: if the file is missing, malformed, not ours or open to others.
    """
    try:
        ring = _find_keys(area, key_file, create)
        if create:
            area.files.sync_directory(area.root.fd, "layout-dir")
    except OSError as error:
        found = f"the layout cannot be written: {error.strerror}"
        raise Unusable(reason_of(error), area.root.path, found, _CHECK) from error
    return ring


def _find_keys(area: Area, key_file: str | os.PathLike[str] | None, create: bool) -> KeyRing:
    if key_file is not None:
        path = Path(key_file)
        directory = Directory(area.files, os.open(path.parent, os.O_RDONLY), str(path.parent))
        try:
            return _read_keys(directory, path.name, area.root.path)
        finally:
            directory.close()
    try:
        return _read_keys(area.root, KEYS_NAME, area.root.path)
    except Unusable as unusable:
        if unusable.reason is not Reason.ABSENT or not create:
            raise
    ring = KeyRing.generate()
    area.root.install(KEYS_NAME, ring.encode(), "keys-data")
    return ring


def save_keys(area: Area, ring: KeyRing) -> None:
    """Replace the cache root's key ring durably."""
    area.root.install(KEYS_NAME, ring.encode(), "new-keys-data")
    area.files.sync_directory(area.root.fd, "new-keys-dir")


def _read_keys(directory: Directory, name: str, root: str) -> KeyRing:
    path = f"{directory.path}/{name}"
    try:
        if directory.status(name).st_mode & 0o077:
            found = f"the key file {path} can be read by others"
            raise Unusable(Reason.FOREIGN, root, found, f"run chmod 600 {path}")
        data = directory.read(name, KEYS_LIMIT)
    except OSError as error:
        found = f"the key file {path}: {error.strerror}"
        raise Unusable(reason_of(error), root, found, _CHECK) from error
    except Miss as miss:
        raise Unusable(miss.reason, root, f"the key file {path}: {miss.found}", _CHECK) from miss
    return KeyRing.parse(data, path)


def _create_path(files: Files, path: Path) -> None:
    """Create a cache root and the directories above it, each entry durable."""
    missing = []
    at = path.absolute()
    while not at.exists() and not at.is_symlink():
        missing.append(at)
        at = at.parent
    try:
        for directory in reversed(missing):
            _make_durably(files, directory)
    except OSError as error:
        found = f"cannot be created: {error.strerror}"
        raise Unusable(reason_of(error), str(path), found, _CHECK) from error
    if not missing:
        # Whoever created it may have been killed before the sync. Directories above that
        # are not ours to read are somebody else's to keep.
        with suppress(OSError):
            _make_durably(files, path.absolute())


def _make_durably(files: Files, path: Path) -> None:
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not path.exists():
            with suppress(FileExistsError):
                files.mkdir(parent, path.name)
        files.sync_directory(parent, "root-dir")
    finally:
        os.close(parent)


def _take_lock(root: Directory, path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(LOCK_NAME, flags, 0o600, dir_fd=root.fd)
    except OSError as error:
        if error.errno != errno.EROFS:
            found = f"the lock file cannot be opened: {error.strerror}"
            raise Unusable(reason_of(error), path, found, _CHECK) from error
        # A read-only file system still serves; its lock works if the file was there before.
        lock = root.open_file(LOCK_NAME)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            found = f"cannot be locked: {error.strerror}"
            raise Unusable(reason_of(error), path, found, _CHECK) from error
        found = f"is owned by process {holder}"
        advice = "give each rank of each engine a cache root of its own, or stop that process"
        raise Unusable(Reason.OWNED, path, found, advice) from error
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def owner_of(area: Area) -> int | None:
    """Return the process id of the running owner of a cache root; None if nobody owns it.

    The kernel's list of locks is asked; trying the lock could get in the way of an engine
    that starts at this moment.
    """
    try:
        inode = area.root.status(LOCK_NAME).st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    return None


_CHECK: Final = "check the directory, its owner and its file system"
_ADVICE: Final = {
    Reason.FOREIGN: "use a directory of your own with mode 0700 that is reached without a link",
    Reason.ABSENT: f"create it (mode {DIRECTORY_MODE:04o}) or correct the path",
}
