"""Judges sources: a source distribution, or a tree with or without the patches."""

from __future__ import annotations

from pathlib import Path

from verify import expect
from verify.checks import base, bytecode, package, tree
from verify.errors import ConfigError
from verify.filesystem import Tree
from verify.holders.directory import DirectoryHolder
from verify.holders.tarred import SdistHolder
from verify.judges.case import Case, Options, hash_file, judge_release, touched
from verify.report import Report


def judge_sdist(file: Path, options: Options) -> Report:
    """Judge a source distribution against the pinned release.

    Raises:
        ConfigError: when the file, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    case = Case("sdist", str(file), options.upstream(), [file])
    sha256, size = hash_file(file)
    holder = SdistHolder(file, options.progress)
    if case.basis is None:
        tree.judge_defects(holder, case.rec)
    else:
        pins = case.basis.pins
        if pins.sdist is None:
            raise ConfigError(f"{pins.target} has no sdist; judge its source with `verify tree`")
        base.judge_download(pins.sdist, sha256, size, None, case.rec)
        top = pins.sdist.filename.removesuffix(".tar.gz")
        if holder.top not in (None, top):
            message = "not the release's top directory"
            case.rec.fail("PKG-1", holder.top, message, expected=top, actual=holder.top)
        generated = frozenset(pins.source.generated)
        composition = expect.source(pins, case.basis.release, patched=False)
        judge_release(
            case, case.basis, holder, composition, lambda path: path in generated, whole=True
        )
    package.judge_archive(holder, case.rec)
    package.judge_modes(holder, case.rec)
    return case.report()


def judge_tree(folder: Path, options: Options) -> Report:
    """Judge a source tree: the whole release, or a directory that holds ``vllm/`` alone.

    Raises:
        ConfigError: when the directory, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a directory, found none")
    case = Case("tree", str(folder), options, [folder])
    tree_below(case, DirectoryHolder(folder, skip=(".git",)))
    return case.report()


def tree_below(case: Case, holder: Tree) -> None:
    """Judge the files of ``holder`` as a source tree."""
    if case.basis is None:
        tree.judge_defects(holder, case.rec)
        return
    pins, release = case.basis.pins, case.basis.release
    whole = any(path in release.files and not path.startswith("vllm/") for path in holder.items)
    if not whole:
        case.rec.note("TREE-2", None, "there is vllm/ alone of the release: only that is judged")
    composition = expect.source(
        pins, release, patched=case.options.patched, below="" if whole else "vllm/"
    )
    sources = composition.files.keys() | set(pins.source.generated)
    judge_release(
        case,
        case.basis,
        holder,
        composition,
        lambda path: path in sources or package.is_bytecode(path),
        whole=whole,
    )
    bytecode.judge_bytecode(holder, sources, touched(composition), case.rec)
    package.judge_modes(holder, case.rec)
