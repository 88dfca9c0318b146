"""Judges installed packages: an environment's, or those that an interpreter would import."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from verify import expect, inplace, interpreter
from verify.anchor import PACKAGE
from verify.checks import bytecode, environment, package, tree
from verify.digest import ReadError
from verify.filesystem import FileSystem, read_file
from verify.interpreter import Environment
from verify.judges.case import (
    Case,
    Options,
    choose_base,
    composition_of,
    judge_connector,
    judge_vllm,
    touched,
)
from verify.judges.source import tree_below
from verify.receipt import Receipt
from verify.report import Report


def judge_venv(folder: Path, options: Options) -> Report:
    """Judge the vLLM and the connector installed below ``folder``.

    Raises:
        ConfigError: when the directory, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    env = interpreter.of_folder(folder)
    case = Case("venv", str(folder), options, [folder])
    judge_environment(case, env, env.sites)
    return case.report()


def judge_env(python: Path, environ: Mapping[str, str], options: Options) -> Report:
    """Judge the vLLM that the interpreter at ``python`` would import.

    ``environ`` are the variables that it would be started with.

    Raises:
        ConfigError: when the interpreter, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    env = interpreter.of_python(python, environ)
    case = Case("env", str(python), options, [env.prefix, *env.sites])
    judge_environment(case, env, None)
    return case.report()


def judge_environment(
    case: Case, env: Environment, within: list[Path] | None, receipt: Receipt | None = None
) -> None:
    """Judge the vLLM and the connector of an environment.

    ``within`` are the directories of which one must provide vLLM; None accepts any.
    ``receipt`` is what came with the connector, when something did.
    """
    chosen = environment.judge_candidates(env, within, case.rec)
    if chosen is not None and env.files.is_dir(chosen.path):
        site = chosen.path.parent
        installed = chosen.kind in ("package", "namespace")
        owners = owners_of(env.files, site, "vllm", vllm_names(case)) if installed else []
        if owners:
            _judge_journal(case, env)
            _judge_site(case, env.files, site, owners, laid_over=_lies_over_release(case, owners))
        else:
            if chosen.kind == "package":
                environment.judge_distributions([], ["one installed wheel"], case.rec)
            tree_below(case, env.files.hold(site, ("vllm",)))
        judge_installed_connector(case, env, receipt)
    environment.judge_startup(env, case.options.known_startup, case.rec)


def _judge_journal(case: Case, env: Environment) -> None:
    """Find out whether the packages were changed in place, which keeps the release's version."""
    anchor = case.anchor
    target = anchor.pins.target if anchor is not None else None
    pins = anchor.pins_sha256 if anchor is not None else None
    if inplace.judge_journal(env.files, env.prefix, target, pins, case.rec):
        case.options = replace(case.options, in_place=True)


def _lies_over_release(case: Case, owners: list[str]) -> bool:
    """Whether files of a layer were laid over an installed release, which keeps its version."""
    if case.basis is None or not case.options.stamped:
        return False
    pins = case.basis.pins
    names = {
        stamped: {expect.dist_info(pins, each, patched=stamped) for each in pins.bases.values()}
        for stamped in (False, True)
    }
    if not names[False] & set(owners) or names[True] & set(owners):
        return False
    case.options = replace(case.options, in_place=True)
    case.rec.note(
        "PKG-16",
        None,
        "judged as a layer over an installed release: version and RECORD stay the release's",
    )
    return True


def _judge_site(
    case: Case, files: FileSystem, site: Path, owners: list[str], *, laid_over: bool
) -> None:
    rec, patched = case.rec, case.options.stamped
    holder = files.hold(site, ("vllm", *owners))
    chosen = None
    if case.basis is not None:
        pins = case.basis.pins
        bases = pins.bases.values()
        named = [each for each in bases if expect.dist_info(pins, each, patched=patched) in owners]
        chosen = choose_base(case, case.basis, holder, named or bases)
    if case.basis is None or chosen is None:
        _self_consistent(case, files, site, owners)
        return
    case.base = chosen.name
    wanted = expect.dist_info(case.basis.pins, chosen, patched=patched)
    environment.judge_distributions(owners, [wanted], rec)
    own = wanted if wanted in owners else owners[0]
    holder = files.hold(site, ("vllm", own), unhashed=package.is_bytecode)
    dist_info = package.find_dist_info(holder, wanted, rec)
    composition = composition_of(case, case.basis, chosen, dist_info)

    def allowed(path: str) -> bool:
        if path.startswith("vllm/"):
            return package.is_bytecode(path)
        return path == f"{dist_info}/RECORD" or package.is_installers(path, dist_info)

    digests = judge_vllm(case, case.basis, chosen, holder, composition, rec, allowed)
    package.judge_installed_record(
        holder, digests, dist_info, files, site, rec, laid_over=composition if laid_over else None
    )
    package.judge_modes(holder, rec)
    bytecode.judge_bytecode(holder, composition.files.keys(), touched(composition), rec)


def _self_consistent(case: Case, files: FileSystem, site: Path, owners: list[str]) -> None:
    """Without pins: is what is installed at least what its own RECORD says?"""
    environment.judge_distributions(owners, ["one distribution"], case.rec)
    holder = files.hold(site, ("vllm", *owners))
    digests = holder.digests((), case.options.progress)
    tree.judge_defects(holder, case.rec)
    tree.judge_unreadable(holder, digests, case.rec)
    package.judge_installed_record(holder, digests, owners[0], files, site, case.rec)
    package.judge_modes(holder, case.rec)


def judge_installed_connector(case: Case, env: Environment, receipt: Receipt | None) -> None:
    """Judge the connector that would be imported."""
    rec = case.rec
    candidates = env.candidates(PACKAGE)
    if not candidates:
        rec.note("PKG-13", None, "no connector is installed")
        return
    first = candidates[0]
    site = first.path.parent
    owners = owners_of(env.files, site, PACKAGE, {PACKAGE}) if first.kind == "package" else []
    if len(owners) != 1:
        rec.fail(
            "PKG-8",
            str(first.path),
            f"the connector would not be imported as one installed wheel: {first.entry.why}",
            expected="one distribution",
            actual=", ".join(owners) or f"{first.kind} without a distribution",
        )
        return
    holder = env.files.hold(site, (PACKAGE, owners[0]), unhashed=package.is_bytecode)
    sources = [path for path in holder.items if path.startswith(f"{PACKAGE}/")]
    digests = holder.digests(sources, case.options.progress)
    tree.judge_defects(holder, rec)
    tree.judge_unreadable(holder, digests, rec)
    version = owners[0].removesuffix(".dist-info").partition("-")[2]
    judge_connector(case, holder, digests, owners[0], version, receipt, rec)
    package.judge_installed_record(holder, digests, owners[0], env.files, site, rec)
    package.judge_modes(holder, rec)
    bytecode.judge_bytecode(holder, frozenset(sources), frozenset(sources), rec)


def vllm_names(case: Case) -> set[str]:
    """Return the distribution names of the bases, as in dist-info directories."""
    if case.basis is None:
        return {"vllm"}
    return {each.dist_info.partition("-")[0] for each in case.basis.pins.bases.values()}


def owners_of(
    files: FileSystem, site: Path, name: str, distributions: Collection[str]
) -> list[str]:
    """Return the dist-info directories of ``site`` that own the package ``name``.

    By the distribution's name, or because RECORD lists the package's ``__init__.py``.
    """
    found: list[str] = []
    marker = f"{name}/__init__.py,".encode()
    for child in sorted(each.name for each in files.children(site)):
        if not child.endswith(".dist-info"):
            continue
        record = files.real(site / child / "RECORD")
        try:
            listed = marker in read_file(files, record, f"{child}/RECORD")
        except ReadError:
            listed = False
        if listed or child.partition("-")[0] in distributions:
            found.append(child)
    return found
