"""The patch series as commits in a scratch repository, and back, byte for byte.

People edit commits well and patch files badly. ``import`` makes one commit per patch on top
of the release; ``export`` writes the commits as patch files again. An unedited series comes
back as the same bytes, which ``check`` proves.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.errors import BuildError
from builder.git import Git, GitError
from builder.patchfile import Patch
from builder.source import SourceFile

BASE_REF = "refs/sparkcache/base"

# Nothing in the tree may convert line ends or run a filter; this file outranks the tree's.
_ATTRIBUTES = b"* -text -eol -ident -filter -working-tree-encoding !diff !merge\n"
_FORMAT = (
    "--full-index", "--zero-commit", "--no-signature", "--no-stat", "--keep-subject",
    "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--unified=3",
    "--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/", "--no-attach",
    "--no-thread", "--no-cover-letter", "--no-notes", "--no-base",
)  # fmt: skip


class ScratchError(BuildError):
    """The scratch repository is not in the state that the command needs."""


def import_series(
    folder: Path, release: Iterable[SourceFile], patches: Iterable[Patch], base: str
) -> list[str]:
    """Make a repository in ``folder``: the release as one commit, then one per patch.

    Returns the commit ids, the release's first. Dates and names come from the patches, so
    the ids are the same on every machine.

    Raises:
        ScratchError: when the folder exists, or a patch does not give the files that it names.
        GitError: when git refuses a patch.
    """
    if folder.exists():
        raise ScratchError(
            f"{folder}: expected no such folder: it may hold work that is not exported; export "
            "or remove it first"
        )
    folder.mkdir(parents=True)
    git = Git(folder)
    git.run("init", "--quiet", "--template=")
    for setting in ("core.autocrlf", "core.safecrlf"):
        git.run("config", setting, "false")
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "attributes").write_bytes(_ATTRIBUTES)
    git.run("fast-import", "--quiet", "--done", data=_stream(release, f"Release {base}\n"))
    git.run("update-ref", BASE_REF, "refs/heads/series")
    git.run("reset", "--hard", "--quiet")
    commits = [git.line("rev-parse", "HEAD")]
    for patch in patches:
        try:
            git.run(
                "am", "--quiet", "--keep", "--keep-cr", "--no-scissors", "--no-3way",
                "--committer-date-is-author-date", "-", data=patch.data,
            )  # fmt: skip
        except GitError as error:
            raise ScratchError(f"{patch.name}: {error}") from error
        for change in patch.changes:
            found = git.run("rev-parse", "-q", "--verify", f"HEAD:{change.path}", ok=(0, 1))
            expected = "" if change.new_mode is None else change.new_id
            if found.decode().strip() != expected:
                raise ScratchError(
                    f"{patch.name}: {change.path}: expected blob {expected or 'gone'}, found "
                    f"{found.decode().strip() or 'gone'}"
                )
        commits.append(git.line("rev-parse", "HEAD"))
    return commits


def export_series(folder: Path) -> dict[str, bytes]:
    """Return the repository's commits as patch files by name, in order.

    Raises:
        ScratchError: when the repository is not one that :func:`import_series` made, has
            uncommitted changes, merges, or a commit that is no patch of ours.
        PatchFormatError: when a commit holds what we do not apply.
    """
    if not (folder / ".git").is_dir():
        raise ScratchError(f"{folder}: expected a scratch repository; make it with `patch import`")
    git = Git(folder)
    if not git.run("rev-parse", "-q", "--verify", BASE_REF, ok=(0, 1)):
        raise ScratchError(f"{folder}: expected {BASE_REF}: `patch import` did not make this")
    if dirty := git.run("status", "--porcelain", "--untracked-files=normal").decode():
        raise ScratchError(
            f"{folder}: expected no uncommitted changes, found {dirty.splitlines()[0].strip()!r}"
            f"{' and more' if dirty.count(chr(10)) > 1 else ''}; commit or stash them"
        )
    span = f"{BASE_REF}..HEAD"
    if git.run("merge-base", BASE_REF, "HEAD", ok=(0, 1)) != git.run("rev-parse", BASE_REF):
        raise ScratchError(f"{folder}: expected HEAD on top of the release; rebase onto {BASE_REF}")
    if merges := git.run("rev-list", "--merges", span).decode().split():
        raise ScratchError(f"{folder}: expected a line of commits, found the merge {merges[0]}")
    with TemporaryDirectory() as scratch:
        git.run("format-patch", "--quiet", *_FORMAT, "--output-directory", scratch, span)
        files = {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir())}
    for name, data in files.items():
        Patch.parse(data, name)
    return files


def series_text(names: Iterable[str], previous: bytes) -> bytes:
    """Return the ``series`` file: the comment that the previous one opens with, then names."""
    kept: list[bytes] = []
    for line in previous.splitlines(keepends=True):
        if not line.startswith(b"#"):
            break
        kept.append(line)
    return b"".join(kept) + "".join(f"{name}\n" for name in names).encode()


def _stream(release: Iterable[SourceFile], message: str) -> bytes:
    """A fast-import stream of one commit: no checkout, no filters, bytes as they are."""
    text = message.encode()
    parts = [
        b"commit refs/heads/series\n"
        b"committer SparkCache <patches@sparkcache.invalid> 1767225600 +0000\n"
        b"data %d\n%s" % (len(text), text)
    ]
    for file in release:
        path = file.path.encode("utf-8", "surrogateescape")
        parts.append(b"M %s inline %s\n" % ((file.mode or "100644").encode(), path))
        parts.append(b"data %d\n%s\n" % (len(file.data), file.data))
    parts.append(b"\ndone\n")
    return b"".join(parts)
