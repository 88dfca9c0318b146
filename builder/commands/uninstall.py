"""Take an installation in place back: every byte, mode and time as it was before."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.console import Console
from builder.install import uninstall

NAME = "uninstall"
HELP = "take an installation in place back"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--venv", type=Path, required=True, metavar="DIR", help="the environment")


def run(args: argparse.Namespace, console: Console) -> int:
    """Take it back, or finish taking it back."""
    uninstall(args.venv, console)
    print(args.venv)
    console.say(f"builder uninstall: {args.venv} is as it was")
    return 0
