"""Write a trust root: the public keys whose word a verifier takes, and until when.

Keep it where the verifier gets it from elsewhere than the bundle (docs/attestation.md).
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from builder.attest.keys import KeyUseError, PublicKey
from builder.attest.trust import Role, trust_root
from builder.bundle import write_file
from builder.console import Console

NAME = "trust"
HELP = "write a trust root"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for role in ("builder", "verifier"):
        parser.add_argument(
            f"--{role}",
            type=Path,
            action="append",
            default=[],
            metavar="PUBLIC.pem",
            help=f"a public key that may speak as {role}; may be repeated",
        )
        parser.add_argument(
            f"--{role}-threshold",
            type=int,
            default=1,
            metavar="N",
            help="how many distinct keys must have signed (default: 1)",
        )
    parser.add_argument(
        "--expires", type=_time, required=True, metavar="TIME", help="such as 2027-12-31T00:00:00Z"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def run(args: argparse.Namespace, console: Console) -> int:
    """Write the file."""
    roles = {
        name: Role([_public(path) for path in paths], threshold)
        for name, paths, threshold in (
            ("builder", args.builder, args.builder_threshold),
            ("verifier", args.verifier, args.verifier_threshold),
        )
        if paths
    }
    if not roles:
        console.say("builder trust: no key: name one with --builder PUBLIC.pem")
        return 2
    data = trust_root(roles, args.expires)
    write_file(args.out, lambda sink: sink.write(data))
    for name, role in roles.items():
        console.say(f"{name}: {role.threshold} of {len(role.keys)}")
        for key in role.keys:
            console.say(f"  {key.scheme} {key.key_id}")
    return 0


def _public(path: Path) -> PublicKey:
    try:
        return PublicKey.parse(path.read_bytes(), path)
    except OSError as error:
        raise KeyUseError(path, f"cannot be read: {error.strerror}") from error


def _time(text: str) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment
