"""``pins.json`` and ``contract.json`` as valid objects (docs/build.md holds the schemas).

Pure: bytes in, objects out. Whether the objects agree with each other and with the files
beside them is a judgement (:mod:`verify.checks.base`), not parsing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verify import strictjson
from verify.errors import FormatError
from verify.manifest import EXECUTABLE, FILE, path_problem
from verify.strictjson import Record

PINS_SCHEMA = "sparkcache.pins/v1"
CONTRACT_SCHEMA = "sparkcache.contract/v1"
UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True)
class Blob:
    """A file's bytes by SHA-256, and the name that git gives them."""

    sha256: str
    git: str


@dataclass(frozen=True, slots=True)
class Download:
    """A file of the package index."""

    project: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Named:
    """A file by name and SHA-256, such as a patch."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """The release as source: git's tree ids, and the digests of its manifests."""

    tree: str
    vllm_tree: str
    generated: tuple[str, ...]
    manifest_sha256: str
    vllm_manifest_sha256: str


@dataclass(frozen=True, slots=True)
class Packaged:
    """A member of the base wheel that the packaging rule changes."""

    path: str
    pre: str
    post: str


@dataclass(frozen=True, slots=True)
class Native:
    """The ELF files of a wheel: the tree SHA-256 of their manifest lines, and how many."""

    sha256: str
    count: int


@dataclass(frozen=True, slots=True)
class Base:
    """An upstream wheel that we repack."""

    name: str
    wheel: Download
    dist_info: str
    differs: Mapping[str, str]
    manifest_sha256: str
    native: Native
    rule: str
    packaged: tuple[Packaged, ...]


@dataclass(frozen=True, slots=True)
class Touched:
    """A file that patches add, change or delete."""

    path: str
    mode: str
    pre: Blob | None
    post: Blob | None
    patches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A file that the overlay adds whole."""

    path: str
    mode: str
    sha256: str
    git: str


@dataclass(frozen=True, slots=True)
class Composed:
    """``vllm/`` after patches and modules, before packaging."""

    vllm_tree: str
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class Pins:
    """Everything that a target's artefacts are compared with."""

    target: str
    version: str
    local_version: str
    commit: str | None
    proven: bool
    source: Source
    sdist: Download | None
    bases: Mapping[str, Base]
    patches: tuple[Named, ...]
    files: tuple[Touched, ...]
    modules: tuple[Module, ...]
    composed: Composed
    contract_sha256: str

    @property
    def state(self) -> str:
        """The contract's name of the patched state: the last part of the local version."""
        return self.local_version[self.local_version.rindex("spark.") :]

    @classmethod
    def parse(cls, data: bytes, what: str) -> Pins:
        """Read ``pins.json``; ``what`` names it in errors.

        Raises:
            FormatError: for anything that the schema does not allow.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", PINS_SCHEMA)
        commit = top.record("commit")
        status = commit.text("status")
        if status not in ("proven", "unproven"):
            commit.fail("status", f"expected proven or unproven, found {status!r}")
        commit_id = None if commit.json("id") is None else commit.git_id("id")
        if status == "proven" and commit_id is None:
            commit.fail("id", "expected the id of the proven commit, found null")
        commit.done()
        bases = top.record("bases")
        sdist = top.record_or_null("sdist")
        contract = top.record("contract")
        composed = top.record("composed")
        pins = cls(
            target=top.text("target"),
            version=top.text("version"),
            local_version=top.text("local_version"),
            commit=commit_id,
            proven=status == "proven",
            source=_source(top.record("source")),
            sdist=None if sdist is None else _download(sdist, done=True),
            bases={name: _base(name, bases.record(name)) for name in bases},
            patches=tuple(named(each) for each in top.records("patches")),
            files=tuple(_touched(each) for each in top.records("files")),
            modules=tuple(module(each) for each in top.records("modules")),
            composed=Composed(composed.git_id("vllm_tree"), composed.sha256("manifest_sha256")),
            contract_sha256=contract.sha256("sha256"),
        )
        for record in (bases, contract, composed, top):
            record.done()
        if "spark." not in pins.local_version:
            top.fail("local_version", f"expected `+spark.N`, found {pins.local_version!r}")
        paths = [file.path for file in pins.files] + [added.path for added in pins.modules]
        if len(set(paths)) != len(paths):
            top.fail("files", "expected each path once among files and modules")
        return pins


@dataclass(frozen=True, slots=True)
class ContractFile:
    """A file of the contract: per state the accepted SHA-256 (null: must be absent)."""

    path: str
    sha256: Mapping[str, str | None]
    symbols: Mapping[str, Mapping[str, str | None]]


@dataclass(frozen=True, slots=True)
class Contract:
    """The lease contract: the named states of a tree, and what each file is in each."""

    target: str
    version: str
    states: Mapping[str, str]
    files: tuple[ContractFile, ...]

    @classmethod
    def parse(cls, data: bytes, what: str) -> Contract:
        """Read ``contract.json``; ``what`` names it in errors.

        Raises:
            FormatError: for anything that the schema does not allow.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", CONTRACT_SCHEMA)
        states = top.record("states")
        contract = cls(
            target=top.text("target"),
            version=top.text("version"),
            states={name: states.text(name) for name in states},
            files=tuple(_contract_file(each) for each in top.records("files")),
        )
        top.done()
        names = set(contract.states)
        for file in contract.files:
            for where, mapping in (("sha256", file.sha256), *file.symbols.items()):
                if set(mapping) != names:
                    raise FormatError(
                        what,
                        f"{file.path}: {where}",
                        f"expected the states {sorted(names)}, found {sorted(mapping)}",
                    )
        return contract


def path(record: Record, key: str) -> str:
    """Take a path that a tree of ours may hold."""
    value = record.text(key)
    problem = path_problem(value)
    if problem is not None:
        record.fail(key, f"{problem}, found {value[:80]!r}")
    return value


def mode(record: Record, key: str) -> str:
    """Take a git mode of a regular file."""
    value = record.text(key)
    if value not in (FILE, EXECUTABLE):
        record.fail(key, f"expected {FILE} or {EXECUTABLE}, found {value!r}")
    return value


def named(record: Record) -> Named:
    """Take a ``{"name", "sha256"}`` object."""
    value = Named(path(record, "name"), record.sha256("sha256"))
    record.done()
    return value


def module(record: Record) -> Module:
    """Take a module of the overlay."""
    value = Module(
        path(record, "path"), mode(record, "mode"), record.sha256("sha256"), record.git_id("git")
    )
    record.done()
    return value


def native(record: Record) -> Native:
    """Take the digest and the count of native files."""
    value = Native(record.sha256("sha256"), record.integer("count"))
    record.done()
    return value


def _download(record: Record, *, done: bool = False) -> Download:
    value = Download(
        record.text("project"),
        path(record, "filename"),
        record.sha256("sha256"),
        record.integer("size"),
    )
    if done:
        record.done()
    return value


def _source(record: Record) -> Source:
    manifest = record.record("manifest")
    value = Source(
        tree=record.git_id("tree"),
        vllm_tree=record.git_id("vllm_tree"),
        generated=tuple(record.texts("generated")),
        manifest_sha256=manifest.sha256("sha256"),
        vllm_manifest_sha256=record.sha256("vllm_manifest_sha256"),
    )
    manifest.done()
    record.done()
    return value


def _base(name: str, record: Record) -> Base:
    manifest = record.record("manifest")
    differs = record.record("differs")
    packaging = record.record("packaging")
    packaged: list[Packaged] = []
    for each in packaging.records("files"):
        packaged.append(Packaged(path(each, "path"), each.sha256("pre"), each.sha256("post")))
        each.done()
    base = Base(
        name=name,
        wheel=_download(record),
        dist_info=path(record, "dist_info"),
        differs={file: differs.sha256(file) for file in differs},
        manifest_sha256=manifest.sha256("sha256"),
        native=native(record.record("native")),
        rule=packaging.text("rule"),
        packaged=tuple(packaged),
    )
    for part in (manifest, differs, packaging, record):
        part.done()
    if not base.dist_info.endswith(".dist-info") or base.dist_info.count("-") != 2:
        record.fail("dist_info", f"expected <name>-<version>.dist-info, found {base.dist_info!r}")
    return base


def _touched(record: Record) -> Touched:
    pre, post = (_blob(record.record_or_null(key)) for key in ("pre", "post"))
    value = Touched(
        path(record, "path"), mode(record, "mode"), pre, post, tuple(record.texts("patches"))
    )
    record.done()
    if pre is None and post is None:
        record.fail("post", "a file is absent before and after: nothing touches it")
    return value


def _blob(record: Record | None) -> Blob | None:
    if record is None:
        return None
    value = Blob(record.sha256("sha256"), record.git_id("git"))
    record.done()
    return value


def _contract_file(record: Record) -> ContractFile:
    hashes = record.record("sha256")
    symbols = record.record("symbols")
    fingerprints: dict[str, dict[str, str | None]] = {}
    for name in symbols:
        states = symbols.record(name)
        fingerprints[name] = {state: states.text_or_null(state) for state in states}
    value = ContractFile(
        path=path(record, "path"),
        sha256={
            state: None if hashes.json(state) is None else hashes.sha256(state) for state in hashes
        },
        symbols=fingerprints,
    )
    for part in (hashes, symbols, record):
        part.done()
    return value
