"""PKG 14, the native library: there when the wheel promises it, pinned, and for one machine.

1. The wheel's tag says for which architecture it is, or that it runs anywhere; in a bundle it
   is that of the base.
2. A wheel for an architecture carries exactly the pinned library of it; one that runs anywhere
   carries none.
3. Kernels may lie beside it: those of a pinned compiler, all of them. Others are undecided when
   the receipt names them, since only a build knows its compiler.
4. A receipt names what is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from verify.digest import Digest, ReadError
from verify.holders import Holder
from verify.natives import FOLDER, NativePins
from verify.report import Recorder

ANYWHERE = "py3-none-any"

_TAG = re.compile(r"py3-none-manylinux_2_28_(\w+)")


def judge_library(
    holder: Holder,
    found: Mapping[str, Digest],
    dist_info: str,
    pins: NativePins,
    claims: Mapping[str, str],
    machine: str | None,
    rec: Recorder,
) -> frozenset[str]:
    """Run steps 1 to 4; return the paths that were judged here, present or not.

    ``found`` are the connector's files, ``claims`` the digests that a receipt gives for files
    that a build adds, ``machine`` the architecture that the connector must be for.
    """
    arch = _architecture(holder, dist_info, pins, machine, rec)  # (1)
    expected = {f"{FOLDER}/{arch}/{name}": each for name, each in _library(pins, arch).items()}
    kernels = {f"{FOLDER}/{arch}/{name}" for name in pins.kernel_names()} if arch else set()
    present = {path: each.sha256 for path, each in found.items() if path.startswith(f"{FOLDER}/")}
    for path in sorted((expected.keys() | present.keys()) - kernels):  # (2)
        wanted, actual = expected.get(path, "no file"), present.get(path, "no file")
        if actual != wanted:
            message = "not the pinned native library"
            if path not in expected:
                message = "a file beyond the pinned native library"
            elif path not in present:
                message = "the native library that the wheel's tag promises is not there"
            rec.fail("PKG-14", path, message, expected=wanted, actual=actual)
    mine = {path: sha256 for path, sha256 in present.items() if path in kernels}
    if mine:
        _judge_kernels(mine, f"{FOLDER}/{arch}/", pins, claims, rec)  # (3)
    for path, actual in sorted(present.items()):  # (4)
        if claims.get(path, actual) != actual:
            message = "the receipt claims another file"
            rec.fail("PKG-14", path, message, expected=claims[path], actual=actual)
    return frozenset(expected.keys() | present.keys())


def _library(pins: NativePins, arch: str | None) -> Mapping[str, str]:
    return pins.libraries.get(arch, {}) if arch is not None else {}


def _architecture(
    holder: Holder, dist_info: str, pins: NativePins, machine: str | None, rec: Recorder
) -> str | None:
    # (1)
    place = f"{dist_info}/WHEEL"
    try:
        text = holder.read(place).decode("utf-8", "replace") if place in holder.items else ""
    except ReadError:
        text = ""  # reported where members are read
    tags = [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")]
    match = _TAG.fullmatch(tags[0]) if len(tags) == 1 else None
    arch = match[1] if match is not None and match[1] in pins.libraries else None
    wanted = f"py3-none-manylinux_2_28_{machine}" if machine is not None else None
    known = [ANYWHERE, *(f"py3-none-manylinux_2_28_{each}" for each in sorted(pins.libraries))]
    if (wanted is not None and tags != [wanted]) or (arch is None and tags != [ANYWHERE]):
        rec.fail(
            "PKG-14",
            place,
            "the connector is for another machine than this"
            if wanted is not None
            else "the connector is for a machine that no library is pinned for",
            expected=wanted or " or ".join(known),
            actual=", ".join(tags) or "no tag",
        )
    return arch


def _judge_kernels(
    present: Mapping[str, str],
    below: str,
    pins: NativePins,
    claims: Mapping[str, str],
    rec: Recorder,
) -> None:
    # (3)
    files = {path.removeprefix(below): sha256 for path, sha256 in present.items()}
    if pins.accepts_kernels(files):
        return
    known = ", ".join(sorted(pins.kernels))
    if files.keys() != pins.kernel_names():
        rec.fail(
            "PKG-14",
            below.rstrip("/"),
            "kernels and their manifest are not both there",
            expected=", ".join(sorted(pins.kernel_names())),
            actual=", ".join(sorted(files)),
        )
    elif all(claims.get(path) == sha256 for path, sha256 in present.items()):
        for path, sha256 in sorted(present.items()):
            rec.undecided(
                "PKG-14",
                path,
                "kernels of a compiler that is not pinned: only the receipt, which lies beside "
                "them, vouches for them",
                expected=f"those of {known}",
                actual=sha256,
                hint="use the verify.pyz of the build that made them, or pin that compiler's",
            )
    else:
        for path, sha256 in sorted(present.items()):
            rec.fail(
                "PKG-14",
                path,
                "not the pinned kernels",
                expected=f"those of {known}",
                actual=sha256,
            )
