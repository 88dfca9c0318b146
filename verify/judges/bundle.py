"""Judges a bundle: its papers, its vLLM wheel and its connector wheel."""

from __future__ import annotations

from pathlib import Path

from verify.checks import attestation, bundle
from verify.digest import Digest
from verify.errors import ConfigError
from verify.holders.directory import DirectoryHolder
from verify.holders.zipped import ZipHolder
from verify.judges.case import Case, Options
from verify.judges.wheel import connector_wheel, is_connector, vllm_wheel
from verify.report import Report


def judge_bundle(folder: Path, options: Options) -> Report:
    """Judge a bundle.

    Raises:
        ConfigError: when the directory, the anchor or the target cannot be used.
        FormatError: when the pins cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a directory, found none")
    case = Case("bundle", str(folder), options, [folder])
    holder = DirectoryHolder(folder)
    digests = holder.digests((), options.progress)
    receipt = bundle.read_receipt(holder, digests, case.rec)
    if receipt is not None:
        bundle.judge_listing(holder, digests, receipt, case.rec)
        if case.anchor is not None and case.basis is not None:
            bundle.judge_receipt(receipt, case.anchor, case.rec)
    vllm: Digest | None = None
    for name in sorted(path for path in holder.items if path.endswith(".whl")):
        part = case.rec.below(name)
        with ZipHolder(folder / name) as archive:
            if is_connector(name):
                connector_wheel(case, archive, name, receipt, part)
            else:
                vllm_wheel(case, archive, name, part)
                found = digests[name]
                vllm = found if isinstance(found, Digest) else None
        case.rec.absorb(part)
    if receipt is not None and case.base not in (None, receipt.base):
        message = "the vLLM wheel is of another base than the receipt says"
        case.rec.fail("PKG-12", bundle.RECEIPT, message, expected=case.base, actual=receipt.base)
    if case.basis is not None:
        bundle.judge_bom(holder, vllm, case.basis.pins.local_version, case.rec)
    attestation.judge_attestations(
        holder, digests, receipt, case.anchor, options.attestations, folder, case.rec
    )
    return case.report()
