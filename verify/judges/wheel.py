"""Judges wheels: vLLM's, of any base, patched or not, and the connector's."""

from __future__ import annotations

from pathlib import Path

from verify import expect
from verify.anchor import PACKAGE
from verify.checks import base, package, tree
from verify.checks.base import Basis
from verify.digest import ReadError
from verify.holders.zipped import ZipHolder
from verify.judges.case import (
    Case,
    Options,
    choose_base,
    composition_of,
    hash_file,
    judge_connector,
    judge_vllm,
)
from verify.pins import Base
from verify.receipt import Receipt
from verify.report import Recorder, Report


def judge_wheel(file: Path, options: Options) -> Report:
    """Judge one wheel.

    Raises:
        ConfigError: when the file, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    case = Case("wheel", str(file), options, [file])
    with ZipHolder(file) as holder:
        if is_connector(file.name):
            connector_wheel(case, holder, file.name, None, case.rec)
        else:
            chosen = vllm_wheel(case, holder, file.name, case.rec)
            if chosen is not None and not options.patched:
                base.judge_download(chosen.wheel, *hash_file(file), None, case.rec)
    return case.report()


def is_connector(filename: str) -> bool:
    """Whether a wheel of this name is the connector's."""
    return filename.startswith(f"{PACKAGE}-")


def vllm_wheel(case: Case, holder: ZipHolder, filename: str, rec: Recorder) -> Base | None:
    """Judge a wheel of vLLM; return its base, None when nothing says what it must be."""
    if not holder.items:
        _unlistable(holder, rec)
        return None
    chosen = None if case.basis is None else _base(case, case.basis, holder, filename)
    if case.basis is None or chosen is None:
        _self_consistent(case, holder, rec)
        return None
    pins, patched = case.basis.pins, case.options.patched
    case.base = chosen.name
    package.judge_filename(filename, expect.wheel_filename(pins, chosen, patched=patched), rec)
    wanted = expect.dist_info(pins, chosen, patched=patched)
    dist_info = package.find_dist_info(holder, wanted, rec)
    digests = judge_vllm(
        case,
        case.basis,
        chosen,
        holder,
        composition_of(case, case.basis, chosen, dist_info),
        rec,
        lambda path: path == f"{dist_info}/RECORD",
    )
    package.judge_archive(holder, rec)
    package.judge_wheel_record(holder, digests, dist_info, rec)
    package.judge_modes(holder, rec)
    return chosen


def connector_wheel(
    case: Case, holder: ZipHolder, filename: str, receipt: Receipt | None, rec: Recorder
) -> None:
    """Judge the connector's wheel; ``receipt`` is that of the bundle it lies in."""
    if not holder.items:
        _unlistable(holder, rec)
        return
    sources = [path for path in holder.items if path.startswith(f"{PACKAGE}/")]
    digests = holder.digests(sources, case.options.progress)
    tree.judge_defects(holder, rec)
    tree.judge_unreadable(holder, digests, rec)
    parts = filename.removesuffix(".whl").split("-")
    version = parts[1] if len(parts) == 5 else "unknown"
    dist_info = package.find_dist_info(holder, f"{PACKAGE}-{version}.dist-info", rec)
    package.judge_archive(holder, rec)
    judge_connector(case, holder, digests, dist_info, version, receipt, rec)
    for path, found in sorted(digests.items()):
        ours = path.startswith((f"{PACKAGE}/", f"{dist_info}/"))
        if not ours and not isinstance(found, ReadError):
            message = "a file beyond the connector"
            rec.fail("TREE-3", path, message, expected="no file", actual=found.sha256)
    rec.passed("TREE-3", f"{len(digests)} members")
    package.judge_wheel_record(holder, digests, dist_info, rec)
    package.judge_modes(holder, rec)


def _base(case: Case, basis: Basis, holder: ZipHolder, filename: str) -> Base | None:
    bases = basis.pins.bases.values()
    patched = case.options.patched
    named = [
        each
        for each in bases
        if filename == expect.wheel_filename(basis.pins, each, patched=patched)
    ]
    return choose_base(case, basis, holder, named or bases)


def _unlistable(holder: ZipHolder, rec: Recorder) -> None:
    """Nothing can be said of members; that is one finding, not one for each that is missing."""
    tree.judge_defects(holder, rec)
    package.judge_archive(holder, rec)


def _self_consistent(case: Case, holder: ZipHolder, rec: Recorder) -> None:
    """Without pins: is the wheel at least what its own RECORD says?"""
    digests = holder.digests((), case.options.progress)
    tree.judge_defects(holder, rec)
    tree.judge_unreadable(holder, digests, rec)
    package.judge_archive(holder, rec)
    records = sorted(path for path in holder.items if path.endswith(".dist-info/RECORD"))
    for record in records[:1]:
        package.judge_wheel_record(holder, digests, record.rpartition("/")[0], rec)
    package.judge_modes(holder, rec)
