"""Make an image layout and its Containerfile from a bundle in dist/.

The layout holds one uncompressed layer: the patched files below SITE, the connector, and the
evidence below /usr/share/sparkcache. It goes over an image that has the release installed.
Prints the manifest's digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from builder.bundle import write_file
from builder.composed import read_pins
from builder.console import Console
from builder.image import SITE, BaseImage, containerfile, image_layout, write_layout
from builder.inputs import base_of_this_machine
from builder.oci import ARCHITECTURES
from builder.target import Layout

NAME = "image"
HELP = "make an image layer from a bundle"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--target", default="v0.28.0", metavar="NAME", help="default: v0.28.0")
    parser.add_argument(
        "--arch", choices=sorted(ARCHITECTURES), help="default: this machine's architecture"
    )
    parser.add_argument(
        "--site",
        default=f"/{SITE}",
        metavar="DIR",
        help=f"where the base image has vLLM installed (default: /{SITE})",
    )
    parser.add_argument(
        "--base-image", default="", metavar="NAME@sha256:HEX", help="the image to name as the base"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: dist/<target> in the checkout"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Make the layout."""
    layout = Layout.open(args.checkout, args.target)
    pinned = read_pins(layout)
    base = f"cuda-{args.arch}" if args.arch else base_of_this_machine()
    out = args.out if args.out is not None else layout.checkout / "dist" / layout.name
    image = BaseImage.parse(args.base_image) if args.base_image else None
    files = image_layout(out / base, pinned, base, args.site, image)
    write_layout(files, out / "image")
    recipe = containerfile(pinned, base, args.site)
    write_file(out / "Containerfile", lambda sink: sink.write(recipe))
    digest = json.loads(files["index.json"])["manifests"][0]["digest"]
    size = sum(map(len, files.values()))
    fingerprint = hashlib.sha256(files["index.json"]).hexdigest()
    console.say(f"{layout.name}: index {fingerprint[:16]}, {len(files)} files")
    print(f"image: {out / 'image'}:{layout.name} for {base}: {digest}, {size / 1e6:.1f} MB")
    return 0
