"""Download what a target is built from into the cache, checked against the pins.

Prints one line per file: its SHA-256 and its path.
"""

from __future__ import annotations

import argparse

from builder.acquire import Acquirer
from builder.console import Console
from builder.inputs import add_target_arguments, base_of_this_machine, obtain, pinned_digests
from builder.target import BASES, IndexFile, Layout

NAME = "acquire"
HELP = "download what a target is built from"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_target_arguments(parser)
    parser.add_argument(
        "what",
        nargs="*",
        metavar="FILE",
        help=f"sdist, all, or a base: {', '.join(BASES)} (default: this machine's official wheel)",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Acquire the named files."""
    layout = Layout.open(args.checkout, args.target)
    target = layout.read_target()
    known: dict[str, IndexFile] = {"sdist": target.sdist} if target.sdist is not None else {}
    known |= {name: base.file for name, base in target.bases.items()}
    names = args.what or [base_of_this_machine()]
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown:
        console.say(f"builder acquire: unknown file {unknown[0]!r}; known: all, {', '.join(known)}")
        return 2
    pinned = pinned_digests(layout)
    acquirer = Acquirer(console, offline=args.offline)
    for name in known if "all" in names else names:
        found = obtain(known[name], pinned.get(known[name].filename), acquirer)
        print(f"{found.digest.sha256}  {found.path}")
    return 0
