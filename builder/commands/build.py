"""Build the patched vLLM's bundle, let the judge decide, and publish it below dist/.

The bundle is published only when the judge accepts it; a failed or interrupted build leaves
an earlier bundle as it was. Its attestations are signed with the key that docs/attestation.md
says. Prints one summary line.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from builder.acquire import Acquirer
from builder.attest.signers import choose_signer
from builder.build import (
    SOURCES,
    CheckoutJudge,
    build,
    connector_json,
    prepare,
    write_judge,
)
from builder.composed import read_pins
from builder.console import Console
from builder.inputs import add_target_arguments, base_of_this_machine
from builder.native_pins import Natives, build_pinned, declare, read_native_pins
from builder.package import architecture
from builder.pinned import Pinned
from builder.target import Layout
from verify.natives import NativePins

NAME = "build"
HELP = "build, judge and publish a bundle"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_target_arguments(parser)
    parser.add_argument(
        "--base",
        default="auto",
        metavar="NAME",
        help="a base of the target, all, or auto: the official wheel for this machine (default)",
    )
    parser.add_argument(
        "--source",
        choices=SOURCES,
        default="wheel",
        help="where the release's files are read from; each is proven to be the same "
        "(default: wheel)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to publish (default: dist/ in the checkout)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Build the chosen bases one after the other."""
    start = time.monotonic()
    signal.signal(signal.SIGTERM, _terminate)
    layout = Layout.open(args.checkout, args.target)
    pinned = read_pins(layout)
    base = base_of_this_machine() if args.base == "auto" else args.base
    if base not in (*pinned.bases, "all"):
        console.say(f"builder build: unknown base {base!r}; known: all, {', '.join(pinned.bases)}")
        return 2
    out: Path = args.out if args.out is not None else layout.checkout / "dist"
    acquirer = Acquirer(console, offline=args.offline)
    signer = choose_signer(os.environ, console.say, layout.checkout)
    size = 0
    bases = list(pinned.bases) if base == "all" else [base]
    known = read_native_pins(layout.checkout)
    natives = _build_natives(known, bases, console)
    for each in natives.values():
        known = declare(known, each) if known is not None else None
    judge = CheckoutJudge(layout.checkout, layout.name, _declared(layout, pinned, known))
    for name in bases:
        native = natives.get(architecture(name))
        recipe = prepare(layout, pinned, name, args.source, acquirer, native)
        packaged = build(recipe, out, [signer], judge, console)
        size += packaged.size
        console.say(f"{layout.name}/{name}: {packaged.wheel}")
        console.say(f"{layout.name}/{name}: {packaged.connector}")
    pyz = write_judge(layout, pinned, out, known)
    console.say(f"{layout.name}: {pyz.name} judges without a checkout")
    print(
        f"build: vLLM {pinned.local_version} for {', '.join(bases)}: judged and published below "
        f"{out / layout.name}, {size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s"
    )
    return 0


def _build_natives(
    pins: NativePins | None, bases: Sequence[str], console: Console
) -> dict[str, Natives]:
    """Build the native library for each architecture among ``bases``; it is the pinned one."""
    if pins is None:
        console.say("builder build: this checkout has no csrc/: the connector is Python alone")
        return {}
    natives: dict[str, Natives] = {}
    for arch in sorted({architecture(base) for base in bases}):
        console.say(f"native: compiling the placement library for {arch}")
        natives[arch] = build_pinned(pins, arch)
        compiler = natives[arch].compiler
        if compiler is None:
            console.say("native: no nvcc in PATH: without kernels, CUDA engines place with torch")
        elif compiler not in pins.kernels:
            console.say(
                f"native: the kernels of {compiler} are not pinned; this build's verify.pyz knows "
                "them, a judge from a checkout will be undecided"
            )
    return natives


def _declared(layout: Layout, pinned: Pinned, known: NativePins | None) -> bytes | None:
    """Return what the checkout's judge must be told; None when it knows everything."""
    if known == read_native_pins(layout.checkout):
        return None
    return connector_json(layout, pinned, known)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave like Ctrl-C, so that what was begun is removed."""
    raise KeyboardInterrupt
