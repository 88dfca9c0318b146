"""Installs in place and takes it back: journaled, atomic per file, killed anywhere.

:func:`install`: (1) plan; (2) keep every byte that will be needed, before and after;
(3) write the journal; (4) bring each file to its new content; (5) say so in the journal.
:func:`uninstall`: (1) check that every file is explained by the journal; (2) say in the
journal that the way is back; (3) bring each file to its old content, mode and time;
(4) remove the journal, then what it named.

A file is replaced by a rename of a new file, never written: package managers link files into
many environments at once. Every step may be repeated, so a killed run is continued by the
same command, or taken back by the other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from builder.console import Console
from builder.durable import sync_folder
from builder.environment import Environment, EnvironmentProblemError
from builder.errors import BuildError
from builder.install_plan import Plan, make_plan
from builder.journal import Journal, Operation, State
from builder.target import Layout
from verify.errors import FormatError

FOLDER = ".sparkcache"
JOURNAL = "journal.json"

_PARTIAL = ".sparkcache-partial"
_SHOWN = 20


class InstallError(BuildError):
    """An environment cannot be changed, or is not what its journal explains."""


def install(layout: Layout, root: Path, connector: Path | None, console: Console) -> Journal:
    """Install a target into the environment ``root``, or finish an interrupted installation.

    ``connector`` is as of :func:`~builder.install_plan.make_plan`.

    Raises:
        BuildError: when nothing was changed; the message names the reason.
    """
    return carry_out(root, lambda: make_plan(layout, Environment.open(root), connector), console)


def carry_out(root: Path, planner: Callable[[], Plan], console: Console) -> Journal:
    """Do what ``planner`` plans; it is asked only when nothing is under way in ``root``.

    Raises:
        BuildError: as of :func:`install`.
    """
    with _locked(root):
        store = _Store(root)
        journal = store.read()
        if journal is None:
            store.clear()  # a run that was killed before its journal existed changed nothing
            journal = store.begin(planner())  # (1), (2), (3)
        elif journal.state is State.UNINSTALLING:
            raise InstallError(
                f"{root}: an uninstallation was interrupted; finish it first with "
                "`python -m builder uninstall`"
            )
        elif journal.state is State.INSTALLED:
            _refuse_foreign(root, journal, installed_only=True)
            console.say(f"{root}: {journal.target} is installed already")
            return journal
        else:
            console.say(f"{root}: continuing an installation that was interrupted")
            _refuse_foreign(root, journal)
        with _disk(root):
            for folder in journal.folders:
                (root / folder).mkdir(exist_ok=True)
            for operation in journal.operations:  # (4)
                store.forward(operation)
        journal = journal.moved_to(State.INSTALLED)
        store.write(journal)  # (5)
        return journal


def uninstall(root: Path, console: Console) -> None:
    """Take an installation back, finished or not.

    Raises:
        InstallError: when there is none, or a file was changed by somebody else since; then
            nothing is touched.
    """
    with _locked(root):
        store = _Store(root)
        journal = store.read()
        if journal is None:
            if store.clear():
                console.say(f"{root}: removed what an interrupted run left; nothing was installed")
                return
            raise InstallError(f"{root}: expected an installation in place, found none")
        _refuse_foreign(root, journal)  # (1)
        journal = journal.moved_to(State.UNINSTALLING)
        store.write(journal)  # (2)
        with _disk(root):
            _drop_bytecode(root, journal)
            for operation in reversed(journal.operations):  # (3)
                store.back(operation)
            for folder in (*journal.caches, *reversed(journal.folders)):
                with suppress(FileNotFoundError):
                    _remove_empty(root / folder)
        store.clear()  # (4)


class _Store:
    """The folder of the journal, and the moves that it allows."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / FOLDER

    def read(self) -> Journal | None:
        path = self._folder / JOURNAL
        try:
            return Journal.parse(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except (OSError, FormatError) as error:
            raise InstallError(
                f"{path}: expected a journal of ours: {error}; without it nothing can be taken "
                "back: restore it, or make the environment anew"
            ) from error

    def begin(self, plan: Plan) -> Journal:
        with _disk(self._root):
            for kind in ("before", "after"):
                (self._folder / kind).mkdir(parents=True)
            for operation in plan.journal.operations:
                for kind, side in (("before", operation.before), ("after", operation.after)):
                    if side is not None:
                        kept = self._folder / kind / side.sha256
                        if not kept.exists():
                            _write(kept, plan.contents[side.sha256], 0o600)
            for kind in ("before", "after"):
                sync_folder(self._folder / kind)
        self.write(plan.journal)
        return plan.journal

    def write(self, journal: Journal) -> None:
        with _disk(self._root):
            partial = self._folder / (JOURNAL + _PARTIAL)
            partial.unlink(missing_ok=True)
            _write(partial, journal.dump(), 0o644)
            partial.replace(self._folder / JOURNAL)
            sync_folder(self._folder)

    def clear(self) -> bool:
        """Remove the folder, its journal first; say whether there was anything."""
        if not self._folder.exists():
            return False
        with _disk(self._root):
            (self._folder / JOURNAL).unlink(missing_ok=True)
            sync_folder(self._folder)
            shutil.rmtree(self._folder)
        return True

    def forward(self, operation: Operation) -> None:
        path = self._root / operation.path
        partial = _partial(path)
        partial.unlink(missing_ok=True)
        wanted = operation.after
        if _digest(path) == (wanted.sha256 if wanted is not None else None):
            return
        if wanted is None:
            path.unlink()
        else:
            _write(partial, self._kept("after", wanted.sha256), wanted.mode)
            _own_like(partial, path)
            partial.replace(path)
        sync_folder(path.parent)

    def back(self, operation: Operation) -> None:
        path = self._root / operation.path
        wanted = operation.before
        if not path.parent.exists():
            return  # the folder was ours and is gone already
        partial = _partial(path)
        partial.unlink(missing_ok=True)
        if _digest(path) == (wanted.sha256 if wanted is not None else None):
            return
        if wanted is None:
            path.unlink()
        else:
            _write(partial, self._kept("before", wanted.sha256), wanted.mode)
            _own_like(partial, path)
            os.utime(partial, ns=(wanted.mtime_ns, wanted.mtime_ns))
            partial.replace(path)
        sync_folder(path.parent)

    def _kept(self, kind: str, sha256: str) -> bytes:
        path = self._folder / kind / sha256
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise InstallError(f"{path}: expected the bytes that its name says, found others")
        return data


def _refuse_foreign(root: Path, journal: Journal, *, installed_only: bool = False) -> None:
    """Refuse when a file is neither what it was nor what it becomes."""
    foreign: list[str] = []
    for operation in journal.operations:
        sides = [operation.after] if installed_only else [operation.before, operation.after]
        known = {side.sha256 if side is not None else None for side in sides}
        found = _digest(root / operation.path)
        # bytecode comes back whenever Python runs; it is dropped, not judged
        if found not in known and not operation.path.endswith(".pyc"):
            foreign.append(f"{operation.path}: {f'SHA-256 {found}' if found else 'gone'}")
    if foreign:
        lines = foreign[:_SHOWN] + ["…"] * (len(foreign) > _SHOWN)
        raise InstallError(
            "\n  ".join(
                [
                    f"{root}: expected each file as it was before or after the installation, "
                    "these were changed by somebody else; nothing was touched: put them back, or "
                    "make the environment anew",
                    *lines,
                ]
            )
        )


def _drop_bytecode(root: Path, journal: Journal) -> None:
    """Remove the bytecode of everything that changes; the old one is put back with the rest."""
    kept = {operation.path for operation in journal.operations if operation.before is not None}
    for operation in journal.operations:
        path = root / operation.path
        if path.suffix == ".py":
            for cached in sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")):
                if cached.relative_to(root).as_posix() not in kept or _stale(root, journal, cached):
                    cached.unlink()


def _stale(root: Path, journal: Journal, cached: Path) -> bool:
    name = cached.relative_to(root).as_posix()
    before = next(o.before for o in journal.operations if o.path == name)
    return before is not None and _digest(cached) != before.sha256


def _remove_empty(folder: Path) -> None:
    """Remove a folder that has become empty; one with other people's files stays."""
    if not any(folder.iterdir()):
        folder.rmdir()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PARTIAL}")


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentProblemError(path, f"cannot be read: {error.strerror}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    """Make a new file, whole and on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def _own_like(partial: Path, path: Path) -> None:
    """Give the new file the old one's owner, where we may and it matters."""
    with suppress(FileNotFoundError, PermissionError):
        status = path.lstat()
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(partial, status.st_uid, status.st_gid)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the environment for one installer at a time; the lock leaves nothing behind."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise EnvironmentProblemError(root, f"expected a folder: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _disk(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InstallError(
            f"{error.filename or root}: {error.strerror}; the environment is between two states: "
            "make room or permission, then run the same command to continue, or "
            "`python -m builder uninstall` to go back"
        ) from error
