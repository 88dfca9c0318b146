"""The files of a target by their pins: what ``acquire``, ``pin`` and ``build`` start from."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from builder.acquire import Acquirer
from builder.cache import Digest, digest_of
from builder.errors import BuildError
from builder.pin import Input
from builder.target import BASES, IndexFile, Layout
from verify import strictjson
from verify.strictjson import Record

_MACHINES = {"x86_64": "cuda-x86_64", "amd64": "cuda-x86_64",
             "aarch64": "cuda-aarch64", "arm64": "cuda-aarch64"}  # fmt: skip


class InputError(BuildError):
    """A given or pinned input file is not what it should be."""


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--target`` and ``--offline``."""
    parser.add_argument("--target", default="v0.28.0", metavar="NAME", help="default: v0.28.0")
    parser.add_argument(
        "--offline", action="store_true", help="use the download cache only, never the network"
    )


def base_of_this_machine() -> str:
    """The official wheel for this machine's architecture.

    Raises:
        InputError: when there is none.
    """
    machine = platform.machine().lower()
    try:
        return _MACHINES[machine]
    except KeyError:
        raise InputError(
            f"no base wheel for {machine or 'this machine'}; choose one of {', '.join(BASES)}"
        ) from None


def pinned_digests(layout: Layout) -> dict[str, Digest]:
    """The pinned SHA-256 and size of every input file by file name; empty without pins.

    Raises:
        FormatError: when ``pins.json`` is malformed.
    """
    if not layout.pins.is_file():
        return {}
    what = str(layout.pins.relative_to(layout.checkout))
    top = Record(strictjson.parse(layout.pins.read_bytes(), what), what)
    bases = top.record("bases")
    records = [top.record("sdist"), *(bases.record(name) for name in bases)]
    return {
        record.text("filename"): Digest(record.sha256("sha256"), record.integer("size"))
        for record in records
    }


def obtain(
    file: IndexFile, pinned: Digest | None, acquirer: Acquirer, given: Path | None = None
) -> Input:
    """Return an input file, from ``given`` when the caller has it already.

    Raises:
        InputError: when the given file is not the pinned one.
        BuildError: when it cannot be acquired.
    """
    if given is None:
        path = acquirer.get(file, pinned)
        return Input(file, path, pinned or digest_of(path))
    found = digest_of(given)
    if given.name != file.filename:
        raise InputError(f"{given}: expected the file {file.filename}, found {given.name}")
    if pinned is not None and found != pinned:
        raise InputError(
            f"{given}: expected SHA-256 {pinned.sha256} ({pinned.size} bytes), found "
            f"{found.sha256} ({found.size} bytes)"
        )
    return Input(file, given, found)
