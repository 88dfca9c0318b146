"""Writes ``verify.pyz``: the judge with pins inside, for gates that have no checkout.

A zip application of the standard library only. Members are stored, sorted and dated alike,
so that it is the same file wherever it is made, and its SHA-256 can be given by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from builder.errors import BuildError
from builder.wheel_write import ArchiveWriter, Sink

SHEBANG = b"#!/usr/bin/env python3\n"
EMBEDDED = "verify/_pins"

# The first lines run on any Python 3, so that an old one is told what is missing.
_MAIN = b"""import sys

if sys.version_info < (3, 11):
    sys.stderr.write("verify: Python 3.11 or newer is needed, this is %s\\n" % sys.version)
    sys.exit(2)

import runpy

runpy.run_module("verify", run_name="__main__", alter_sys=True)
"""


class JudgeSourceError(BuildError):
    """The judge's own source is not what can be shipped."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}; restore the checkout with git and build again")


def judge_source(checkout: Path) -> dict[str, bytes]:
    """Return the judge's source files by their path in the archive.

    Raises:
        JudgeSourceError: for a symbolic link, or when there is no judge to run.
    """
    found: dict[str, bytes] = {}
    package = checkout / "verify"
    for file in package.rglob("*"):
        path = file.relative_to(checkout).as_posix()
        if file.is_symlink():
            raise JudgeSourceError(path, "expected a regular file, found a symbolic link")
        if file.suffix == ".py" and "__pycache__" not in file.parts:
            found[path] = file.read_bytes()
    if "verify/__main__.py" not in found:
        raise JudgeSourceError("verify/__main__.py", "the file is missing")
    return found


def target_files(checkout: Path, target: str) -> dict[str, bytes]:
    """Return what the judge needs of a target, by its path below ``verify/_pins/``.

    Pins, contract, manifests and raw objects as they lie in ``overlay/targets/<target>/``,
    the patches in a folder ``patches`` beside them.
    """
    found: dict[str, bytes] = {}
    folder = checkout / "overlay" / "targets" / target
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "target.yaml":
            found[f"{target}/{file.relative_to(folder).as_posix()}"] = file.read_bytes()
    for file in (checkout / "patches" / target).iterdir():
        if file.is_file():
            found[f"{target}/patches/{file.name}"] = file.read_bytes()
    return found


def write_pyz(sink: Sink, source: Mapping[str, bytes], pins: Mapping[str, bytes]) -> None:
    """Write the zip application to ``sink``.

    Args:
        sink: receives the archive, and must be made executable by the caller.
        source: the judge's files, as of :func:`judge_source`.
        pins: the files to embed, by their path below ``verify/_pins/``.
    """
    members = {
        "__main__.py": _MAIN,
        **source,
        **{f"{EMBEDDED}/{path}": data for path, data in pins.items()},
    }
    writer = ArchiveWriter(sink, prefix=SHEBANG)
    for path in sorted(members, key=lambda path: path.encode("utf-8")):
        writer.store(path, members[path])
    writer.finish()
