"""Tries a patch series on another release, hunk by hunk, and says what became of each.

A port is a person's decision. What is automatic is the three-way merge: its base is the old
release with the patches so far, one side is the new release with what fitted so far, the
other side the old release with one hunk more. Per hunk:

=================  =========================================================================
clean              the same lines at the same place
moved              the same lines, further up or down
merged             git's merge fits it, although lines around it are different
already upstream   the new release says what the hunk says
conflict           a person must look; nothing of the hunk is applied
=================  =========================================================================

Hunks that fit prove little: the connector relies on the behaviour of files that no patch
touches. :func:`contract_changes` therefore lists every contract file that is not the same, with
the symbols that changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.git import Git
from builder.patcher import apply_hunks
from builder.patchfile import FileChange, Hunk, Patch
from builder.scratch import export_series, import_series
from builder.source import SourceFile
from verify import symbols
from verify.errors import FormatError

Read = Callable[[str], bytes | None]
"""A release: returns a file's bytes by path, None where it has no such file."""

_MERGE_ANSWERS = range(128)  # git merge-file exits with the number of conflicts, 255 on error


class Outcome(StrEnum):
    """What became of a hunk."""

    CLEAN = "clean"
    MOVED = "moved"
    MERGED = "merged"
    UPSTREAM = "already upstream"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class HunkReport:
    """One hunk's fate.

    ``line`` is where it stands in the old release, ``offset`` how many lines further down
    it stands in the new one; ``note`` says what a person should know.
    """

    path: str
    line: int
    outcome: Outcome
    offset: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class PatchReport:
    """A patch's hunks, and the files as they are after what of it fitted."""

    patch: Patch
    hunks: tuple[HunkReport, ...]
    files: Mapping[str, bytes | None]


@dataclass(frozen=True, slots=True)
class ContractChange:
    """A contract file that is not what it was.

    ``symbols`` has a line for each symbol of the contract that is gone or declared otherwise.
    """

    path: str
    gone: bool
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Port:
    """Everything that trying a series found."""

    patches: tuple[PatchReport, ...]
    contract: tuple[ContractChange, ...]
    modules: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every hunk found its place."""
        hunks = (hunk for patch in self.patches for hunk in patch.hunks)
        return not self.modules and all(hunk.outcome is not Outcome.CONFLICT for hunk in hunks)


def try_series(patches: Sequence[Patch], old: Read, new: Read) -> tuple[PatchReport, ...]:
    """Merge every hunk of ``patches`` onto ``new``, in order.

    Raises:
        PatchApplyError: when a patch does not apply to ``old`` either.
        GitError: when git cannot merge at all.
    """
    with TemporaryDirectory() as folder:
        merger = _Merger(Path(folder))
        before: dict[str, bytes | None] = {}
        ours: dict[str, bytes | None] = {}
        reports = []
        for patch in patches:
            hunks: list[HunkReport] = []
            for change in patch.changes:
                base = before[change.path] if change.path in before else old(change.path)
                side = ours[change.path] if change.path in ours else new(change.path)
                found = _try_change(merger, change, base, side, patch.name)
                before[change.path], ours[change.path] = found.base, found.ours
                hunks += found.hunks
            reports.append(PatchReport(patch, tuple(hunks), dict(ours)))
    return tuple(reports)


@dataclass(slots=True)
class _Tried:
    base: bytes | None
    ours: bytes | None
    hunks: list[HunkReport] = field(default_factory=list)


def _try_change(
    merger: _Merger, change: FileChange, base: bytes | None, ours: bytes | None, patch: str
) -> _Tried:
    if change.old_mode is None or change.new_mode is None:
        after = None if change.new_mode is None else apply_hunks(change, b"", patch)
        return _try_whole_file(change.path, base, ours, after)
    tried = _Tried(base or b"", ours)
    for hunk in change.hunks:
        # Earlier hunks of this file are in the base already, so this one stands where it ends.
        here = replace(hunk, old_at=hunk.new_at)
        theirs = apply_hunks(replace(change, hunks=(here,)), tried.base or b"", patch)
        report = HunkReport(change.path, hunk.old_at + 1, Outcome.CONFLICT)
        if tried.ours is None:
            tried.hunks.append(replace(report, note="the new release has no such file"))
        else:
            merged = merger.merge(tried.ours, tried.base or b"", theirs)
            tried.hunks.append(_judge(report, here, tried.ours, tried.base or b"", theirs, merged))
            if merged is not None:
                tried.ours = merged
        tried.base = theirs
    return tried


def _try_whole_file(
    path: str, base: bytes | None, ours: bytes | None, after: bytes | None
) -> _Tried:
    """A file that the patch adds or deletes."""
    if ours == after:
        return _Tried(after, ours, [HunkReport(path, 1, Outcome.UPSTREAM)])
    if ours == base:
        return _Tried(after, after, [HunkReport(path, 1, Outcome.CLEAN)])
    note = "the file exists already" if base is None else "the file to delete is another one"
    return _Tried(after, ours, [HunkReport(path, 1, Outcome.CONFLICT, note=note)])


def _judge(
    report: HunkReport, hunk: Hunk, ours: bytes, base: bytes, theirs: bytes, merged: bytes | None
) -> HunkReport:
    if merged is None:
        return replace(report, note=_nearest(hunk, ours))
    if merged == ours:
        return replace(report, outcome=Outcome.UPSTREAM)
    offset = _first_difference(ours, merged) - _first_difference(base, theirs)
    at = hunk.old_at + offset
    same = _lines(ours)[at : at + len(hunk.old)] == list(hunk.old)
    outcome = Outcome.MERGED if not same else Outcome.MOVED if offset else Outcome.CLEAN
    return replace(report, outcome=outcome, offset=offset)


def _nearest(hunk: Hunk, ours: bytes) -> str:
    """Where the definition that the hunk is in stands in the new release, if anywhere."""
    pattern = re.compile(rb"\s*(?:async )?(?:def|class) (\w+)")
    names = [match[1] for line in hunk.old if (match := pattern.match(line))]
    for number, line in enumerate(_lines(ours), start=1):
        match = pattern.match(line)
        if match and match[1] in names:
            return f"`{match[1].decode()}` is at line {number} there"
    return "the lines that it changes are not there"


def _first_difference(left: bytes, right: bytes) -> int:
    pairs = zip(_lines(left), _lines(right), strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(left.count(b"\n"), right.count(b"\n"))
    )


def _lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")]


class _Merger:
    """git's three-way merge of one file, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._git = Git(folder)
        self._paths = [folder / name for name in ("ours", "base", "theirs")]

    def merge(self, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
        """Return the merged bytes, or None for a conflict."""
        for path, data in zip(self._paths, (ours, base, theirs), strict=True):
            path.write_bytes(data)
        names = [path.name for path in self._paths]
        merged = self._git.run("merge-file", "-p", "-q", *names, ok=_MERGE_ANSWERS)
        return None if b"\n<<<<<<< ours\n" in b"\n" + merged else merged


def contract_changes(
    contract: Mapping[str, Sequence[str]], touched: Iterable[str], old: Read, new: Read
) -> tuple[ContractChange, ...]:
    """Return the files that the connector relies on and that are not what they were.

    ``touched`` are the files that patches change; they belong to the contract too.
    """
    changes = []
    for path in sorted({*contract, *touched}):
        before, after = old(path), new(path)
        if before == after:
            continue
        changes.append(
            ContractChange(
                path, after is None, _symbols(path, contract.get(path, ()), before, after)
            )
        )
    return tuple(changes)


def _symbols(
    path: str, names: Sequence[str], before: bytes | None, after: bytes | None
) -> tuple[str, ...]:
    if before is None or after is None:
        return ()
    try:
        was, now = symbols.fingerprints(before, path), symbols.fingerprints(after, path)
    except FormatError as error:
        return (str(error),)
    lines = []
    for name in names:
        if name in was and name not in now:
            lines.append(f"{name}: gone")
        elif was.get(name) != now.get(name):
            lines.append(f"{name}: {was.get(name, 'not there')} -> {now[name]}")
    return tuple(lines)


def export_port(
    reports: Sequence[PatchReport], new: Read, base: str, trailer: str
) -> dict[str, bytes]:
    """Return the series for the new release as patch files by name.

    The patches keep their messages, except for ``Base:``. One that the new release contains
    altogether is left out.

    Args:
        reports: of a series that fits.
        new: the new release.
        base: what the scratch repository calls it.
        trailer: what ``Base:`` is to say.
    """
    touched = sorted({path for report in reports for path in report.files})
    release = [
        SourceFile(path, "100644", data) for path in touched if (data := new(path)) is not None
    ]
    with TemporaryDirectory() as folder:
        repository = Path(folder) / "port"
        import_series(repository, release, (), base)
        git = Git(repository)
        for report in reports:
            for path, data in report.files.items():
                place = repository / path
                if data is None:
                    place.unlink(missing_ok=True)
                else:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(data)
            git.run("add", "--all")
            if not git.run("status", "--porcelain"):
                continue
            author, date, message = _mail(report.patch.message, trailer)
            git.run(
                "commit", "--quiet", "--cleanup=verbatim", f"--author={author}", f"--date={date}",
                "--file=-", data=message.encode(),
            )  # fmt: skip
        return export_series(repository)


def _mail(message: str, trailer: str) -> tuple[str, str, str]:
    """Author, date and commit message of a patch file's head, with another ``Base:``."""
    head, _, body = message.partition("\n\n")
    fields = dict(
        line.split(": ", 1) for line in head.replace("\n ", " ").split("\n")[1:] if ": " in line
    )
    text = f"{fields['Subject']}\n\n{body.rstrip()}\n"
    return fields["From"], fields["Date"], re.sub(r"(?m)^Base: .*$", f"Base: {trailer}", text)
