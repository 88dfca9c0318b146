"""Write the composed source tree of a target: the release, our patches, our modules.

The tree is proven against the pins before it is written; `python -m verify tree DIR` judges
it afterwards. Generated files of the sdist are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.acquire import Acquirer
from builder.composed import check_target, compose_pinned, read_pins
from builder.console import Console
from builder.inputs import add_target_arguments, obtain_release
from builder.target import Layout
from builder.tree import write_tree

NAME = "compose"
HELP = "write the composed source tree of a target"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("out", type=Path, metavar="DIR", help="the folder to make")
    add_target_arguments(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Compose and write."""
    layout = Layout.open(args.checkout, args.target)
    checked = check_target(layout, read_pins(layout))
    acquirer = Acquirer(console, offline=args.offline)
    provider = obtain_release(layout, checked.target, acquirer).provider
    composition = compose_pinned(checked, provider)
    count = write_tree(args.out, provider.walk(), composition.changes())
    print(args.out)
    console.say(
        f"builder compose: {count} files, {len(composition.changes())} of them ours, as pinned"
    )
    return 0
