"""The journal of an installation in place: what each file was, and what it becomes.

The journal lies in ``<environment>/.sparkcache/`` beside the bytes that it names:
``before/<sha256>`` holds what was there, ``after/<sha256>`` what comes. It is written before
the first file of the environment is touched and removed after the last one is back, so that
at every instant the environment is explained by it (docs/build.md, "Installed in place").
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from verify import strictjson
from verify.errors import FormatError
from verify.manifest import path_problem
from verify.strictjson import Json, Record

SCHEMA = "sparkcache.install/v1"


class State(enum.Enum):
    """Where an installation is on its way."""

    INSTALLING = "installing"
    INSTALLED = "installed"
    UNINSTALLING = "uninstalling"


@dataclass(frozen=True, slots=True)
class Before:
    """A file as it was found: its bytes, permission bits and time of change."""

    sha256: str
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class After:
    """A file as it is installed."""

    sha256: str
    mode: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One file; ``before`` or ``after`` is None where it does not exist."""

    path: str
    before: Before | None
    after: After | None


@dataclass(frozen=True, slots=True)
class Journal:
    """One installation. All paths are relative to the environment.

    ``folders`` are made by it, outermost first; ``caches`` are bytecode folders that were
    not there before and may appear when Python runs.
    """

    state: State
    target: str
    base: str
    pins: str
    site: str
    folders: tuple[str, ...]
    caches: tuple[str, ...]
    operations: tuple[Operation, ...]

    def moved_to(self, state: State) -> Journal:
        """The same installation in another state."""
        return replace(self, state=state)

    def dump(self) -> bytes:
        """Return the journal's bytes: canonical JSON."""
        operations: list[Json] = [
            {
                "path": operation.path,
                "before": None if operation.before is None else {
                    "sha256": operation.before.sha256,
                    "mode": operation.before.mode,
                    "mtime_ns": operation.before.mtime_ns,
                },
                "after": None if operation.after is None else {
                    "sha256": operation.after.sha256,
                    "mode": operation.after.mode,
                },
            }
            for operation in self.operations
        ]  # fmt: skip
        return strictjson.dump(
            {
                "schema": SCHEMA,
                "state": self.state.value,
                "target": self.target,
                "base": self.base,
                "pins": {"sha256": self.pins},
                "site": self.site,
                "folders": list(self.folders),
                "caches": list(self.caches),
                "operations": operations,
            }
        )

    @classmethod
    def parse(cls, data: bytes, what: str) -> Journal:
        """Read a journal; ``what`` names it in errors.

        Raises:
            FormatError: for anything that the schema does not allow, paths that lead out of
                the environment included.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", SCHEMA)
        state = top.text("state")
        if state not in {known.value for known in State}:
            top.fail("state", f"expected a known state, found {state!r}")
        pins = top.record("pins")
        journal = cls(
            state=State(state),
            target=top.text("target"),
            base=top.text("base"),
            pins=pins.sha256("sha256"),
            site=top.text("site"),
            folders=tuple(top.texts("folders")),
            caches=tuple(top.texts("caches")),
            operations=tuple(_operation(record) for record in top.records("operations")),
        )
        pins.done()
        top.done()
        paths = [operation.path for operation in journal.operations]
        for path in (journal.site, *journal.folders, *journal.caches, *paths):
            problem = path_problem(path)
            if problem is not None:
                raise FormatError(what, path, problem)
        if len(set(paths)) != len(paths):
            raise FormatError(what, "operations", "expected each path once")
        return journal


def _operation(record: Record) -> Operation:
    before, after = record.record_or_null("before"), record.record_or_null("after")
    operation = Operation(
        record.text("path"),
        None if before is None else Before(
            before.sha256("sha256"), before.integer("mode"), before.integer("mtime_ns")
        ),
        None if after is None else After(after.sha256("sha256"), after.integer("mode")),
    )  # fmt: skip
    for part in (before, after, record):
        if part is not None:
            part.done()
    if before is None and after is None:
        record.fail("after", "expected a file before or after")
    for side in (operation.before, operation.after):
        if side is not None and side.mode > 0o7777:
            record.fail("mode", f"expected permission bits, found {side.mode}")
    return operation
