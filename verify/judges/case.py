"""What all judges share: the options, the anchor's part, and the judgement of a vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from verify import expect
from verify.anchor import Anchor, ConnectorAnchor, find, read_connector
from verify.checks import base, connector, contract, native, patch, tree
from verify.checks.attestation import Demands
from verify.checks.base import Basis
from verify.digest import Digest, Progress, ReadError, quiet
from verify.errors import ConfigError
from verify.expect import Composition, Origin
from verify.holders import Holder
from verify.holders.directory import file_chunks
from verify.pins import UPSTREAM, Base, Contract
from verify.receipt import Receipt
from verify.report import Recorder, Report

Digests = Mapping[str, Digest | ReadError]


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller asked for beside the subject.

    ``home`` is the checkout whose pins are used; None finds them (:func:`verify.anchor.find`).
    ``site``, ``platform`` and ``layer`` are for images: where vLLM is, which platform's image is
    meant, and whether a layer without its base is.
    """

    target: str | None = None
    base: str | None = None
    pins: str | None = None
    patched: bool = True
    in_place: bool = False
    known_startup: frozenset[str] = frozenset()
    attestations: Demands = field(default_factory=Demands)
    commit_proof: bool = False
    connector: Path | None = None
    site: str | None = None
    platform: str | None = None
    layer: bool = False
    home: Path | None = None
    progress: Progress = quiet

    @property
    def stamped(self) -> bool:
        """Whether the packaging rule gave the subject the local version."""
        return self.patched and not self.in_place

    def upstream(self) -> Options:
        """Return the same options for a subject that no patches touch."""
        return replace(self, patched=False)


class Case:
    """One judgement under way. The anchor is judged once, for every part of a subject.

    Args:
        kind: the subject's kind, as on the command line.
        subject: the subject, as the caller named it.
        options: what was asked for.
        roots: the places that are judged; an anchor inside of them authenticates nothing.

    Raises:
        ConfigError: when no anchor can be chosen.
        FormatError: when the pins cannot be read.
    """

    def __init__(self, kind: str, subject: str, options: Options, roots: Iterable[Path]) -> None:
        self.kind = kind
        self.subject = subject
        self.options = options
        self.rec = Recorder()
        self.anchor: Anchor | None = find(options.pins, options.target, list(roots), options.home)
        self.basis: Basis | None = base.judge_anchor(
            self.anchor, self.rec, commit_proof=options.commit_proof
        )
        self.contract: Contract | None = None
        self.base: str | None = None
        if self.anchor is not None and self.basis is not None:
            patch.judge_series(self.anchor, self.rec)
            self.contract = contract.judge_contract(self.anchor, self.basis, self.rec)

    @property
    def state(self) -> str | None:
        """The contract's name of the state that was asked for."""
        if self.anchor is None:
            return None
        return self.anchor.pins.state if self.options.patched else UPSTREAM

    def report(self) -> Report:
        """Return what was found so far."""
        anchor = self.anchor
        return Report(
            kind=self.kind,
            subject=self.subject,
            target=anchor.pins.target if anchor is not None else None,
            base=self.base,
            state=self.state,
            anchor=f"{anchor.origin}: {anchor.place}" if anchor is not None else "none",
            anchor_sha256=anchor.pins_sha256 if anchor is not None else None,
            findings=self.rec.findings(),
        )


def judge_release(
    case: Case,
    basis: Basis,
    holder: Holder,
    composition: Composition,
    allowed: Callable[[str], bool],
    *,
    whole: bool,
) -> None:
    """Judge a source: its files, git's names of its trees, and the contract."""
    patched = case.options.patched
    digests = holder.digests(composition.files.keys(), case.options.progress)
    tree.judge_files(holder, digests, composition, case.rec, allowed=allowed, patched=patched)
    if not case.rec.tripped(*tree.FILE_CHECKS, "PKG-1"):
        modes = {path: each.mode for path, each in composition.files.items()}
        base.judge_tree_ids(basis.pins, modes, digests, case.rec, whole=whole, patched=patched)
    judge_state(case, holder, digests, case.rec)


def judge_vllm(
    case: Case,
    basis: Basis,
    chosen: Base,
    holder: Holder,
    composition: Composition,
    rec: Recorder,
    allowed: Callable[[str], bool],
) -> Digests:
    """Judge a vLLM made from the base ``chosen``, packed or installed; return its digests."""
    pins, patched = basis.pins, case.options.patched
    source = expect.source(pins, basis.release, patched=patched, below="vllm/").files
    digests = holder.digests(source.keys() & composition.files.keys(), case.options.progress)
    tree.judge_files(holder, digests, composition, rec, allowed=allowed, patched=patched)
    if chosen.differs.keys() & source.keys():
        rec.note("BASE-5", "vllm", "this base differs from the release: it has no git tree id")
    elif not rec.tripped(*tree.FILE_CHECKS, "PKG-1"):
        # a wheel's modes are its own; git's are the release's
        modes = {path: each.mode for path, each in source.items()}
        base.judge_tree_ids(pins, modes, digests, rec, whole=False, patched=patched)
    if case.anchor is not None:
        native.judge_native(case.anchor, chosen.native, holder, digests, composition, rec)
    if patched:
        rec.passed("PKG-3", pins.local_version if case.options.stamped else pins.version)
    judge_state(case, holder, digests, rec)
    return digests


def judge_state(case: Case, holder: Holder, digests: Digests, rec: Recorder) -> None:
    """Judge the lease contract, when there is one to judge by."""
    if case.contract is not None and case.state is not None:
        contract.judge_state(case.contract, holder, digests, case.state, rec)


def judge_connector(
    case: Case,
    holder: Holder,
    digests: Digests,
    dist_info: str,
    version: str,
    receipt: Receipt | None,
    rec: Recorder,
) -> None:
    """Judge the connector of ``holder`` by the anchor's source, if there is any.

    One that lies in a bundle is for the machine that the bundle's base is for.
    """
    connector.judge_connector(
        holder,
        digests,
        dist_info,
        version,
        _connector_anchor(case),
        receipt.connector if receipt is not None else None,
        case.basis.pins.contract_sha256 if case.basis is not None else None,
        rec,
        machine=receipt.base.rpartition("-")[2] if receipt is not None else None,
    )


def _connector_anchor(case: Case) -> ConnectorAnchor | None:
    if case.options.connector is not None:
        return read_connector(case.options.connector)
    anchor = case.anchor
    return anchor.connector if anchor is not None and anchor.authenticated else None


def composition_of(case: Case, basis: Basis, chosen: Base, dist_info: str | None) -> Composition:
    """Return what a vLLM made from ``chosen`` consists of.

    ``dist_info`` is the directory that was found; a wrong name of it is reported once, not
    again for each file in it.
    """
    composition = expect.wheel(
        basis.pins,
        basis.release,
        chosen,
        basis.bases[chosen.name],
        patched=case.options.patched,
        stamped=case.options.stamped,
    )
    old = expect.dist_info(basis.pins, chosen, patched=case.options.stamped)
    if dist_info is None or dist_info == old:
        return composition
    files = {
        (f"{dist_info}/{path[len(old) + 1 :]}" if path.startswith(f"{old}/") else path): each
        for path, each in composition.files.items()
    }
    return Composition(files, composition.deleted)


def choose_base(
    case: Case, basis: Basis, holder: Holder, candidates: Iterable[Base]
) -> Base | None:
    """Return the base that ``--base`` names, or the candidate whose files are most alike.

    Raises:
        ConfigError: when the option names no base.
    """
    pins = basis.pins
    if case.options.base is not None:
        if case.options.base not in pins.bases:
            known = ", ".join(sorted(pins.bases))
            raise ConfigError(f"--base {case.options.base}: there is no such base; known: {known}")
        return pins.bases[case.options.base]

    def difference(each: Base) -> int:
        expected = composition_of(case, basis, each, None).files
        return len(expected.keys() ^ holder.items.keys())

    return min(candidates, key=difference, default=None)


def touched(composition: Composition) -> frozenset[str]:
    """Return the files that patches, modules and packaging make."""
    origins = (Origin.PATCH, Origin.MODULE, Origin.PACKAGING)
    return frozenset(path for path, each in composition.files.items() if each.origin in origins)


def hash_file(file: Path) -> tuple[str, int]:
    """Return the SHA-256 and the size of a file.

    Raises:
        ConfigError: when it cannot be read.
    """
    sha256, size = hashlib.sha256(), 0
    try:
        for chunk in file_chunks(file.resolve(), str(file)):
            sha256.update(chunk)
            size += len(chunk)
    except ReadError as error:
        raise ConfigError(str(error)) from error
    return sha256.hexdigest(), size
