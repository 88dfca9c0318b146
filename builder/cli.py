"""The command line: ``python -m builder COMMAND``.

Each command is a module of :mod:`builder.commands` with ``NAME``, ``HELP``, ``configure``
and ``run``; this module only finds them, runs one and turns errors into exit codes
(docs/exit-codes.md): 0 done, 1 refused, 2 usage, 4 internal error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from builder import commands
from builder.console import Console
from builder.errors import BuildError
from verify.errors import VerifyError

DONE, REFUSED, USAGE, INTERNAL, INTERRUPTED = 0, 1, 2, 4, 130


class Command(Protocol):
    """What a module of :mod:`builder.commands` holds."""

    NAME: str
    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Do it; return the exit code. Results go to standard output."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m builder",
        description="Makes the patched vLLM of a target: acquire, patch, compose, package.",
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        metavar="DIR",
        help="the checkout to work in (default: the one this package is in)",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known: dict[str, Command] = {}
    for info in sorted(pkgutil.iter_modules(commands.__path__), key=lambda item: item.name):
        command = cast("Command", importlib.import_module(f"{commands.__name__}.{info.name}"))
        known[command.NAME] = command
        subparser = subparsers.add_parser(
            command.NAME, help=command.HELP, description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.configure(subparser)
    args = parser.parse_args(argv)
    console = Console()
    try:
        return known[args.command].run(args, console)
    except (BuildError, VerifyError) as error:
        console.say(f"builder {args.command}: {error}")
        return REFUSED
    except KeyboardInterrupt:
        console.say(f"builder {args.command}: interrupted; run it again to continue")
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        console.say(f"builder {args.command}: internal error; please report the lines above")
        return INTERNAL
