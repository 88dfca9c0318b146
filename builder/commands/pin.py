"""Generate pins.json, contract.json and the manifests of a target.

Run it after any change of patches, modules or target.yaml, and commit what it writes.
--check generates them in memory and compares: exit code 1 names every file that is stale.

`pin native` compiles the native library for both architectures, and its kernels where nvcc is,
and writes csrc/pins.json. Run it after any change of csrc or of the compiler.

`pin prove` fetches the target's exact commit from its git repository, stores the raw commit
and root tree beside the pins, and marks the commit as proven: from then on anyone can check
without git and without the network that the release is that commit's.
"""

from __future__ import annotations

import argparse
from operator import methodcaller
from pathlib import Path

from builder.acquire import Acquirer
from builder.bundle import write_file
from builder.console import Console
from builder.inputs import add_target_arguments, obtain, obtain_release, pinned_digests
from builder.native_pins import pin_natives, read_native_pins
from builder.pin import Inputs, make_pins
from builder.prove import prove
from builder.target import Layout
from verify.anchor import NATIVE_PINS

NAME = "pin"
HELP = "generate pins, contract and manifests, or check them"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("native", "prove"),
        help="native: pin the native library; prove: add the commit's raw objects",
    )
    add_target_arguments(parser)
    parser.add_argument(
        "--git", metavar="URL", help="with prove: the repository (default: target.yaml's)"
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="take the sdist and wheels from this folder where it has them",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Generate and write, or compare."""
    if args.action == "native":
        return _pin_native(args.checkout, args.check, console)
    layout = Layout.open(args.checkout, args.target)
    target = layout.read_target()
    if args.action == "prove":
        acquirer = Acquirer(console, offline=args.offline)
        for path in prove(layout, target, acquirer, args.git):
            print(f"wrote {path.relative_to(layout.checkout)}")
        console.say(f"builder pin: {target.name}: commit {target.commit} is proven")
        return 0
    if args.git is not None:
        console.say("builder pin: --git belongs to `pin prove`")
        return 2
    pinned = pinned_digests(layout)
    acquirer = Acquirer(console, offline=args.offline)

    def given(filename: str) -> Path | None:
        path = args.files / filename if args.files is not None else None
        return path if path is not None and path.is_file() else None

    release = obtain_release(layout, target, acquirer, args.files)
    bases = {
        name: obtain(base.file, pinned.get(base.file.filename), acquirer, given(base.file.filename))
        for name, base in target.bases.items()
    }
    inputs = Inputs(release.provider, release.sdist, bases)
    generated = make_pins(layout, inputs, console.say)
    stale = [
        name
        for name, data in sorted(generated.items())
        if not (layout.folder / name).is_file() or (layout.folder / name).read_bytes() != data
    ]
    known = {layout.folder / name for name in generated}
    orphans = sorted(set((layout.folder / "bases").glob("*.manifest")) - known)
    if args.check:
        for path in [*(layout.folder / name for name in stale), *orphans]:
            print(f"stale: {path.relative_to(layout.checkout)}")
        if stale or orphans:
            console.say("builder pin: run `python -m builder pin` and commit what it changes")
            return 1
        console.say(f"builder pin: {len(generated)} files of {target.name} are as generated")
        return 0
    for name in stale:
        write_file(layout.folder / name, methodcaller("write", generated[name]))
        print(f"wrote {(layout.folder / name).relative_to(layout.checkout)}")
    for path in orphans:
        path.unlink()
        print(f"removed {path.relative_to(layout.checkout)}")
    console.say(f"builder pin: {target.name}: {len(stale)} of {len(generated)} files changed")
    return 0


def _pin_native(checkout: Path, check: bool, console: Console) -> int:
    """Build the native library, and write its pins or compare them."""
    path = checkout / NATIVE_PINS
    console.say("builder pin: compiling the placement library for every architecture")
    generated = pin_natives(read_native_pins(checkout) if path.is_file() else None)
    if path.is_file() and path.read_bytes() == generated:
        console.say(f"builder pin: {NATIVE_PINS} is as generated")
        return 0
    if check:
        print(f"stale: {NATIVE_PINS}")
        console.say("builder pin: run `python -m builder pin native` and commit what it changes")
        return 1
    write_file(path, methodcaller("write", generated))
    print(f"wrote {NATIVE_PINS}")
    return 0
