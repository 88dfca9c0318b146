"""Plans an installation in place: which files change, and to what. Reads, writes nothing.

The environment's own vLLM is the source: all of it must be the pinned release before any
file of it may be replaced, so a foreign preimage refuses the whole installation.
"""

from __future__ import annotations

import hashlib
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.composed import CheckedTarget, check_target, compose_pinned, read_pins
from builder.connector_wheel import PACKAGE as CONNECTOR
from builder.connector_wheel import ConnectorWheel, SourceFile, connector_wheel, read_source
from builder.environment import (
    Environment,
    EnvironmentProblemError,
    EnvironmentSource,
    edit_record,
)
from builder.errors import BuildError
from builder.journal import After, Before, Journal, Operation, State
from builder.package import CONTRACT
from builder.pinned import Pinned
from builder.target import Layout
from builder.wheel_record import Row, dump_record
from builder.wheel_version import WheelName
from verify.manifest import EXECUTABLE, Manifest
from verify.strictjson import Record

_SCRIPT = """\
#!{python}
import sys
from sparkcache_connector.cli import main
sys.exit(main())
"""


class ConnectorMismatchError(BuildError):
    """A given connector wheel is not this checkout's connector."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A journal to begin with, and the bytes that it names."""

    journal: Journal
    contents: Mapping[str, bytes]


def make_plan(layout: Layout, environment: Environment, connector: Path | None) -> Plan:
    """Plan the installation of a target's patches, modules and connector.

    ``connector`` is a connector wheel of this checkout's source (one with the native
    library, from a bundle); without it the connector is made from the source alone.

    Raises:
        EnvironmentProblemError: when the environment holds another vLLM, or a connector.
        SourceError: listing every file of its vLLM that is not the pinned release's.
        BuildError: when the checkout is not as pinned.
    """
    pinned = read_pins(layout)
    checked = check_target(layout, pinned)
    base = _base(environment, layout, pinned)
    composition = compose_pinned(
        checked, EnvironmentSource(environment), pinned.bases[base].differs
    )
    site = environment.site
    plan = _Builder(environment)
    rows: dict[str, Row] = {}
    for path, content in sorted(composition.changes().items()):
        plan.set_file(site / path, None if content is None else content.data, 0o644)
        if content is not None:
            rows[path] = Row.of(content.data)
    _plan_connector(plan, environment, checked, connector)
    record = site / environment.dist_info / "RECORD"
    gone = {path.relative_to(site).as_posix() for path in plan.dropped}
    gone |= {path for path, content in composition.changes().items() if content is None}
    plan.set_file(record, edit_record(record.read_bytes(), gone, rows), 0o644)
    return plan.finish(layout.name, base, pinned.sha256)


def _base(environment: Environment, layout: Layout, pinned: Pinned) -> str:
    """Return the base whose wheel was installed: its name, its tags, and its own Python."""
    bases = Record(pinned.json, "pins.json").record("bases")
    names = {base: bases.record(base).text("dist_info") for base in pinned.bases}
    candidates = [base for base, name in names.items() if name == environment.dist_info]
    if not candidates:
        raise EnvironmentProblemError(
            environment.site,
            f"expected vLLM as one of {', '.join(sorted(set(names.values())))}, found "
            f"{environment.dist_info}; install the target's own version first",
        )
    tags = f"{environment.dist_info}/WHEEL"
    for base in candidates:
        manifest = Manifest.parse(layout.base_manifest(base).read_bytes(), f"bases/{base}.manifest")
        expected = {
            path: manifest.files[path].sha256 for path in (tags, *pinned.bases[base].differs)
        }
        if all(_sha256(environment.site / path) == sha256 for path, sha256 in expected.items()):
            return base
    # the proof of the whole release, which comes next, names what differs
    return candidates[0]


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _plan_connector(
    plan: _Builder, environment: Environment, checked: CheckedTarget, given: Path | None
) -> None:
    site = environment.site
    present = sorted(site.glob(f"{CONNECTOR}*"))
    if present:
        raise EnvironmentProblemError(
            present[0], "expected no connector yet; uninstall this one with what installed it"
        )
    source = read_source(checked.layout.checkout)
    own = connector_wheel(checked.layout.checkout, source, {CONTRACT: checked.contract})
    members = own.members if given is None else _read_connector(given, own)
    info = f"{CONNECTOR}-{own.version}.dist-info"
    files = {**members, f"{info}/INSTALLER": SourceFile("100644", b"sparkcache\n")}
    rows: list[tuple[str, Row]] = []
    for path in sorted(files):
        file = files[path]
        plan.set_file(site / path, file.data, 0o755 if file.mode == EXECUTABLE else 0o644)
        rows.append((path, Row.of(file.data)))
    script = _SCRIPT.format(python=environment.root.absolute() / "bin" / "python").encode()
    plan.set_file(environment.root / "bin" / "sparkcache", script, 0o755)
    up = "../" * len(site.relative_to(environment.root).parts)
    rows.append((f"{up}bin/sparkcache", Row.of(script)))
    record = f"{info}/RECORD"
    plan.set_file(site / record, dump_record(sorted(rows), record), 0o644)


def _read_connector(path: Path, own: ConnectorWheel) -> dict[str, SourceFile]:
    """Return the members of a given connector wheel, whose source must be this checkout's."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {
                info.filename: SourceFile(
                    EXECUTABLE if info.external_attr >> 16 & 0o100 else "100644",
                    archive.read(info),
                )
                for info in archive.infolist()
            }
        name = WheelName.parse(path.name)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConnectorMismatchError(f"{path}: expected a readable wheel: {error}") from error
    found.pop(f"{name.dist_info}/RECORD", None)
    for member, file in own.members.items():
        other = found.get(member)
        if not member.endswith("/WHEEL") and (other is None or other.data != file.data):
            raise ConnectorMismatchError(
                f"{path}: {member} is not this checkout's; build the bundle again"
            )
    return found


class _Builder:
    """Collects operations; every file is read once and named by its bytes."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._operations: dict[str, Operation] = {}
        self._contents: dict[str, bytes] = {}
        self._folders: dict[str, None] = {}
        self._caches: set[str] = set()
        self.dropped: list[Path] = []

    def set_file(self, path: Path, data: bytes | None, mode: int) -> None:
        """Plan that ``path`` becomes ``data``; a file that exists keeps its mode."""
        before = self._before(path)
        after = None
        if data is not None:
            after = After(self._keep(data), before.mode if before is not None else mode)
        for cached in self._environment.bytecode_of(path):
            self.dropped.append(cached)
            self._add(Operation(self._environment.relative(cached), self._before(cached), None))
        cache = path.parent / "__pycache__"
        if path.suffix == ".py" and not cache.exists():
            self._caches.add(self._environment.relative(cache))
        for folder in reversed(path.parents):
            if folder.is_relative_to(self._environment.root) and not folder.exists():
                self._folders[self._environment.relative(folder)] = None
        if before is not None and after is not None and before.sha256 == after.sha256:
            return
        self._add(Operation(self._environment.relative(path), before, after))

    def finish(self, target: str, base: str, pins: str) -> Plan:
        journal = Journal(
            state=State.INSTALLING,
            target=target,
            base=base,
            pins=pins,
            site=self._environment.relative(self._environment.site),
            folders=tuple(self._folders),
            caches=tuple(sorted(self._caches)),
            operations=tuple(self._operations.values()),
        )
        return Plan(journal, self._contents)

    def _add(self, operation: Operation) -> None:
        self._operations[operation.path] = operation

    def _before(self, path: Path) -> Before | None:
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise EnvironmentProblemError(path, "expected a regular file or none")
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnvironmentProblemError(path, f"cannot be read: {error.strerror}") from error
        return Before(self._keep(data), stat.S_IMODE(status.st_mode), status.st_mtime_ns)

    def _keep(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self._contents[digest] = data
        return digest
