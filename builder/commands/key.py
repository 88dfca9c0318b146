"""Make a signing key, or print the public half of one.

docs/attestation.md, "Keys", says which key signs a build and how a passphrase is given.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from builder.attest.keys import ECDSA_P256, ED25519, PrivateKey
from builder.attest.signers import read_passphrase
from builder.console import Console

NAME = "key"
HELP = "make a signing key, or print its public half"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key: a new file that only you can read")
    new.add_argument("file", type=Path, metavar="FILE")
    new.add_argument("--ecdsa", action="store_true", help="ECDSA P-256 instead of Ed25519")
    new.add_argument("--plain", action="store_true", help="do not encrypt it")
    public = actions.add_parser("public", help="print the public key in PEM")
    public.add_argument("file", type=Path, metavar="FILE")


def run(args: argparse.Namespace, console: Console) -> int:
    """Make the key, or print it."""
    if args.action == "new":
        passphrase = None
        if not args.plain:
            passphrase = read_passphrase(os.environ, f"passphrase for {args.file}", twice=True)
        key = PrivateKey.generate(ECDSA_P256 if args.ecdsa else ED25519)
        key.save(args.file, passphrase)
    else:
        key = PrivateKey.load(
            args.file, lambda: read_passphrase(os.environ, f"passphrase of {args.file}")
        )
    sys.stdout.write(key.public.pem.decode("ascii"))
    console.say(f"{key.public.scheme} key {key.key_id}")
    return 0
