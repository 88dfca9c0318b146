"""Change an environment's vLLM in place: patched files, modules and the connector.

For environments that cannot take another wheel. Every file of its vLLM must be the pinned
release's; the version stays. The change is journaled: a killed run is continued by the same
command, and `uninstall` takes everything back, modes and times included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.console import Console
from builder.install import install
from builder.target import Layout

NAME = "install"
HELP = "change an environment's vLLM in place"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--venv", type=Path, required=True, metavar="DIR", help="the environment")
    parser.add_argument("--target", default="v0.28.0", metavar="NAME", help="default: v0.28.0")
    parser.add_argument(
        "--connector",
        type=Path,
        metavar="WHEEL",
        help="the connector wheel of a bundle of this checkout, for its native library "
        "(default: the connector's source alone)",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Install, or continue an interrupted installation."""
    layout = Layout.open(args.checkout, args.target)
    journal = install(layout, args.venv, args.connector, console)
    print(args.venv)
    console.say(
        f"builder install: {journal.target} in {args.venv}: {len(journal.operations)} files"
    )
    return 0
