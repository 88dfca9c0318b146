"""A target's intent: ``overlay/targets/<target>/target.yaml``, written by hand.

YAML is read without its traps: a duplicate key is an error, and so is a value whose type
YAML guessed differently from what the schema says (docs/build.md).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from builder.errors import BuildError
from verify.errors import FormatError
from verify.manifest import path_problem
from verify.strictjson import Json, Record

SCHEMA = "sparkcache.target/v1"
BASES = ("cuda-x86_64", "cuda-aarch64", "cpu-x86_64")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


class TargetError(BuildError):
    """A target does not exist, or its file does not say what the schema asks for."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file of a project on the package index."""

    project: str
    version: str
    filename: str


@dataclass(frozen=True, slots=True)
class BaseIntent:
    """An accepted base wheel, and the Python files in which it may differ from the release."""

    name: str
    file: IndexFile
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """One exact vLLM commit that we support, as a person described it.

    ``sdist`` is None where none was published: then the release comes from git.
    """

    name: str
    version: str
    commit: str | None
    git: str
    revision: int
    sdist: IndexFile | None
    bases: Mapping[str, BaseIntent]
    contract: Mapping[str, tuple[str, ...]]

    @property
    def base_trailer(self) -> str:
        """What the ``Base:`` trailer of every patch says."""
        return f"{self.name} {self.commit}" if self.commit else self.name

    @classmethod
    def parse(cls, data: bytes, what: str) -> Target:
        """Read a ``target.yaml``; ``what`` names it in errors.

        Raises:
            TargetError: for YAML that is malformed, or anything outside the schema.
        """
        try:
            return _target(Record(_load(data, what), what))
        except FormatError as error:
            raise TargetError(f"{error}; docs/build.md describes the file") from error


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkout keeps what belongs to one target."""

    checkout: Path
    name: str

    @classmethod
    def open(cls, checkout: Path, name: str) -> Layout:
        """Return the layout of an existing target.

        Raises:
            TargetError: when there is no such target.
        """
        layout = cls(checkout, name)
        if not _NAME.match(name) or not layout.target_yaml.is_file():
            known = sorted(path.parent.name for path in checkout.glob("overlay/targets/*/*.yaml"))
            raise TargetError(
                f"unknown target {name!r}; known: {', '.join(known) or 'none'} (overlay/targets/)"
            )
        return layout

    @property
    def folder(self) -> Path:
        """``overlay/targets/<target>``."""
        return self.checkout / "overlay" / "targets" / self.name

    @property
    def target_yaml(self) -> Path:
        """The intent, by hand."""
        return self.folder / "target.yaml"

    @property
    def pins(self) -> Path:
        """The generated pins."""
        return self.folder / "pins.json"

    @property
    def contract(self) -> Path:
        """The generated lease contract."""
        return self.folder / "contract.json"

    @property
    def source_manifest(self) -> Path:
        """The generated manifest of the release."""
        return self.folder / "source.manifest"

    def base_manifest(self, base: str) -> Path:
        """The generated manifest of what a base wheel does not have from the release."""
        return self.folder / "bases" / f"{base}.manifest"

    @property
    def patches(self) -> Path:
        """The folder of the patch series."""
        return self.checkout / "patches" / self.name

    @property
    def modules(self) -> Path:
        """The folder of the files that we add; paths below it are paths in the wheel."""
        return self.checkout / "overlay" / "modules"

    def read_target(self) -> Target:
        """Return the intent.

        Raises:
            TargetError: when the file is unreadable, malformed or for another target.
        """
        what = str(self.target_yaml.relative_to(self.checkout))
        try:
            target = Target.parse(self.target_yaml.read_bytes(), what)
        except OSError as error:
            raise TargetError(f"{what}: expected a readable file: {error.strerror}") from error
        if target.name != self.name:
            raise TargetError(f"{what}: name: expected {self.name!r}, found {target.name!r}")
        return target


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, minus duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _load(data: bytes, what: str) -> Json:
    try:
        # The loader is a SafeLoader: it constructs plain values only.
        return cast("Json", yaml.load(data, Loader=_StrictLoader))  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}" if mark else ""
        raise FormatError(what, place, f"not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise FormatError(what, "", f"not YAML: {error}") from error


def _target(record: Record) -> Target:
    record.expect("schema", SCHEMA)
    name, version = record.text("name"), record.text("version")
    if not _NAME.match(name):
        record.fail("name", f"expected letters, digits, `.`, `_`, `-`, found {name!r}")
    commit = record.text_or_null("commit")
    if commit is not None and not _COMMIT.match(commit):
        record.fail("commit", f"expected 40 lower-case hex digits or null, found {commit!r}")
    revision = record.integer("revision")
    if revision < 1:
        record.fail("revision", "expected 1 or more")
    bases = record.record("bases")
    contract = record.record("contract")
    sdist = record.record_or_null("sdist")
    target = Target(
        name=name,
        version=version,
        commit=commit,
        git=record.text("git"),
        revision=revision,
        sdist=None if sdist is None else _index_file(sdist, version),
        bases={base: _base(base, version, bases) for base in bases},
        contract={path: _contract_file(path, contract) for path in contract},
    )
    for part in (sdist, bases, contract, record):
        if part is not None:
            part.done()
    if target.sdist is None and target.commit is None:
        record.fail("sdist", "expected an sdist or a commit: the release comes from one of them")
    return target


def _index_file(record: Record, version: str) -> IndexFile:
    filename = record.text("filename")
    if "/" in filename or path_problem(filename) is not None:
        record.fail("filename", f"expected a file's name without a folder, found {filename!r}")
    return IndexFile(record.text("project"), version, filename)


def _base(name: str, version: str, bases: Record) -> BaseIntent:
    if name not in BASES:
        bases.fail(name, f"expected one of {', '.join(BASES)}")
    record = bases.record(name)
    base = BaseIntent(name, _index_file(record, version), tuple(record.texts("differs")))
    record.done()
    return base


def _contract_file(path: str, contract: Record) -> tuple[str, ...]:
    problem = path_problem(path)
    if problem is not None or not path.startswith("vllm/") or not path.endswith(".py"):
        contract.fail(
            path, f"expected a Python file below vllm/{f': {problem}' if problem else ''}"
        )
    symbols = contract.texts(path)
    if len(set(symbols)) != len(symbols):
        contract.fail(path, "expected each symbol once")
    return tuple(symbols)
