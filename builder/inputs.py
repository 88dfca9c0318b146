"""The files of a target by their pins: what ``acquire``, ``pin`` and ``build`` start from."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from pathlib import Path

from builder.acquire import Acquirer
from builder.cache import Digest, digest_of
from builder.errors import BuildError
from builder.pin import Input
from builder.prove import fetch_release
from builder.source import SourceProvider
from builder.source_sdist import SdistSource
from builder.target import BASES, IndexFile, Layout, Target
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
    records = [top.record_or_null("sdist"), *(bases.record(name) for name in bases)]
    return {
        record.text("filename"): Digest(record.sha256("sha256"), record.integer("size"))
        for record in records
        if record is not None
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


@dataclass(frozen=True, slots=True)
class ReleaseInput:
    """The release of a target: its files, and the sdist that they are from, if any."""

    provider: SourceProvider
    sdist: Input | None


def obtain_release(
    layout: Layout, target: Target, acquirer: Acquirer, files: Path | None = None
) -> ReleaseInput:
    """Return the release from the target's sdist, or from git where it has none.

    ``files`` is a folder that may hold the sdist already.

    Raises:
        BuildError: when it cannot be acquired as pinned.
    """
    if target.sdist is None:
        return ReleaseInput(fetch_release(target, acquirer), None)
    given = files / target.sdist.filename if files is not None else None
    pinned = pinned_digests(layout).get(target.sdist.filename)
    sdist = obtain(
        target.sdist, pinned, acquirer, given if given is not None and given.is_file() else None
    )
    return ReleaseInput(SdistSource(sdist.path, target.sdist.project, target.version), sdist)
