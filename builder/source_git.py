"""The release from a git repository: the exact commit, and only what its id proves.

Everything is fetched by commit id into a fresh bare repository, shallow, without tags, hooks,
submodules or the user's configuration. Reading then proves every byte: (1) the raw commit
hashes to the pinned id; (2) each tree hashes to the id that the commit or its parent tree
names; (3) each blob hashes to the id that its tree names. Git only transports.

Refused by name: other protocols than https, ssh and file; a tag of the target's name that
points elsewhere; replaced objects; repositories that borrow objects from others; submodules
and symbolic links in the tree.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from builder.console import Console
from builder.git import Git, GitError
from builder.source import SourceError, SourceFile
from verify.errors import FormatError
from verify.gitobj import DIRECTORY, EXECUTABLE, FILE, object_id, parse_commit, parse_tree
from verify.manifest import path_problem

PROTOCOLS = ("https", "ssh", "file")

_SETTINGS = {
    "protocol.allow": "never",
    **{f"protocol.{name}.allow": "always" for name in PROTOCOLS},
    "protocol.version": "2",
    "transfer.fsckObjects": "true",
    "fetch.recurseSubmodules": "false",
    "credential.helper": "",
}
_BLOBS_AT_ONCE = 256
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_KINDS = {"120000": "a symbolic link", "160000": "a submodule"}


@dataclass(frozen=True, slots=True)
class RawCommit:
    """The raw objects that tie a commit id to its root tree."""

    commit: bytes
    tree: bytes


class GitSource:
    """The tree of one commit in a bare repository that holds it."""

    whole = True

    def __init__(self, repository: Path, commit: str, replaced: frozenset[str]) -> None:
        self.name = f"git commit {commit}"
        self._git = Git(repository, _SETTINGS)
        self._commit = commit
        self._replaced = replaced

    def raw(self) -> RawCommit:
        """Return the raw commit and root tree, both proven by the commit id.

        Raises:
            SourceError: when they are missing or not what their ids say.
        """
        (commit,) = self._objects("commit", [self._commit])  # (1)
        try:
            root = parse_commit(commit, self.name).tree
        except FormatError as error:
            raise SourceError(self.name, f"malformed: {error}") from error
        (tree,) = self._objects("tree", [root])
        return RawCommit(commit, tree)

    def walk(self) -> Iterator[SourceFile]:
        """Yield every file of the commit's tree, each proven down from the commit id."""
        files: list[tuple[str, str, str]] = []
        level = [("", self.raw().tree)]
        while level:  # (2), one level of folders at a time
            folders: list[tuple[str, str]] = []
            for folder, body in level:
                for path, mode, id_ in self._entries(folder, body):
                    if mode == DIRECTORY:
                        folders.append((path, id_))
                    else:
                        files.append((path, mode, id_))
            bodies = self._objects("tree", [id_ for _, id_ in folders])
            level = [(path, body) for (path, _), body in zip(folders, bodies, strict=True)]
        for at in range(0, len(files), _BLOBS_AT_ONCE):  # (3)
            part = files[at : at + _BLOBS_AT_ONCE]
            blobs = self._objects("blob", [id_ for _, _, id_ in part])
            for (path, mode, _), data in zip(part, blobs, strict=True):
                yield SourceFile(path, mode, data)

    def _entries(self, folder: str, body: bytes) -> Iterator[tuple[str, str, str]]:
        try:
            entries = parse_tree(body, f"{self.name}: {folder or 'the root tree'}")
        except FormatError as error:
            raise SourceError(self.name, f"malformed: {error}") from error
        for entry in entries:
            path = f"{folder}/" * bool(folder) + entry.name.decode("utf-8", "surrogateescape")
            problem = path_problem(path)
            if problem is None and entry.mode not in (FILE, EXECUTABLE, DIRECTORY):
                problem = f"expected files and folders only, found {_KINDS[entry.mode]}"
            if problem is not None:
                raise SourceError(self.name, f"{path!r}: {problem}")
            yield path, entry.mode, entry.id

    def _objects(self, kind: str, ids: Sequence[str]) -> list[bytes]:
        """Read objects and prove each by its id."""
        if not ids:
            return []
        for id_ in ids:
            if id_ in self._replaced:
                raise SourceError(
                    self.name,
                    f"the repository replaces the object {id_} (refs/replace); "
                    "fetch from one that shows it as it is",
                )
        asked = "".join(f"{id_}\n" for id_ in ids).encode()
        answer = self._git.run("cat-file", "--batch", data=asked)
        bodies: list[bytes] = []
        at = 0
        for id_ in ids:
            end = answer.find(b"\n", at)
            head = answer[at:end].decode("ascii", "replace").split(" ")
            if end < 0 or len(head) != 3 or head[:2] != [id_, kind]:
                raise SourceError(
                    self.name,
                    f"expected the {kind} {id_}, found {' '.join(head)[:80] or 'nothing'}",
                )
            size = int(head[2])
            body = answer[end + 1 : end + 1 + size]
            if object_id(kind, body) != id_:
                raise SourceError(
                    self.name,
                    f"expected the {kind} {id_}, found bytes that hash to "
                    f"{object_id(kind, body)}: the repository is damaged",
                )
            bodies.append(body)
            at = end + 1 + size + 1
        return bodies


def fetch(
    url: str, commit: str, tag: str | None, cache: Path, console: Console, *, offline: bool = False
) -> GitSource:
    """Return the source of ``commit``, fetched from ``url`` unless ``cache`` has it.

    ``tag`` is the release's tag: where the repository has it, it must point to ``commit``.
    Offline, only the cache is asked.

    Raises:
        SourceError: naming what was refused, what was expected and what was found.
    """
    _check_url(url)
    if not _COMMIT.match(commit):
        raise SourceError(
            _shown(url), f"expected a commit by its 40 lower-case hex digits, found {commit[:60]!r}"
        )
    repository = cache / f"{commit}.git"
    with _lock(cache):
        if not (repository / "HEAD").is_file():
            if offline:
                raise SourceError(
                    url, f"expected commit {commit} in the cache with --offline, found none"
                )
            _fetch(url, commit, tag, repository, console)
    alternates = repository / "objects" / "info" / "alternates"
    if alternates.exists():
        raise SourceError(
            str(repository), "expected no borrowed objects (alternates); remove this folder"
        )
    replaced = (repository / "replaced").read_text("ascii").split()
    return GitSource(repository, commit, frozenset(replaced))


def _fetch(url: str, commit: str, tag: str | None, repository: Path, console: Console) -> None:
    partial = repository.with_name(repository.name + ".partial")
    shown = _shown(url)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        git = Git(partial, _SETTINGS)
        git.run("init", "--quiet", "--bare", "--template=")
        console.say(f"{shown}: asking for {commit}")
        replaced = _check_refs(git, url, commit, tag)
        git.run(
            "fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules",
            "--no-write-fetch-head", "--no-auto-maintenance", url, commit,
        )  # fmt: skip
        kind = git.run("cat-file", "-t", commit).decode().strip()
        if kind != "commit":
            raise SourceError(shown, f"expected {commit} to be a commit, found a {kind}")
        (partial / "replaced").write_text("".join(f"{id_}\n" for id_ in sorted(replaced)), "ascii")
        partial.rename(repository)
    except GitError as error:
        raise SourceError(
            shown, f"expected commit {commit} there, git says: {_redact(error.message, url)}"
        ) from error
    except OSError as error:
        raise SourceError(str(partial), f"cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_refs(git: Git, url: str, commit: str, tag: str | None) -> set[str]:
    """Refuse a moved tag; return the ids of the objects that the repository replaces."""
    listing = git.run("ls-remote", "--quiet", url, "refs/tags/*", "refs/replace/*").decode()
    refs = {ref: id_ for id_, _, ref in (line.partition("\t") for line in listing.splitlines())}
    if tag is not None:
        name = f"refs/tags/{tag}"
        found = refs.get(f"{name}^{{}}", refs.get(name))
        if found is not None and found != commit:
            raise SourceError(
                _shown(url),
                f"the tag {tag} was moved: expected {commit}, found {found}; find out why "
                "before you trust either",
            )
    prefix = "refs/replace/"
    return {ref.removeprefix(prefix) for ref in refs if ref.startswith(prefix)}


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in PROTOCOLS or url.startswith("-") or any(c.isspace() for c in url):
        raise SourceError(
            _shown(url),
            f"expected a URL that begins with {', '.join(f'{name}://' for name in PROTOCOLS)}",
        )
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        for objects in (path / "objects", path / ".git" / "objects"):
            if (objects / "info" / "alternates").exists():
                raise SourceError(
                    _shown(url),
                    "expected a repository with all its objects, this one borrows from others "
                    "(objects/info/alternates)",
                )


def _shown(url: str) -> str:
    """The URL without credentials."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host).geturl() if parts.netloc else url


def _redact(message: str, url: str) -> str:
    return message.replace(url, _shown(url))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        raise SourceError(str(folder), f"cannot be written: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
