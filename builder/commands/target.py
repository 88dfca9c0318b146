"""Begin a target for any commit of any repository, forks included.

`target new` fetches the commit, keeps its raw objects as proof, writes target.yaml and an
empty patch series, and states which native libraries go with it: every --base wheel is
compared with the commit, file by file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from builder import source_git
from builder.acquire import Acquirer
from builder.console import Console
from builder.inputs import obtain
from builder.prove import git_cache
from builder.skeleton import SkeletonError, compare, write_skeleton
from builder.source import scan
from builder.target import BASES, IndexFile, Layout

NAME = "target"
HELP = "begin a target for another commit"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=("new",))
    parser.add_argument("name", metavar="NAME", help="the target's name; its tag, if it has one")
    parser.add_argument("--git", required=True, metavar="URL", help="the repository")
    parser.add_argument("--commit", required=True, metavar="SHA", help="the exact commit, 40 hex")
    parser.add_argument(
        "--version", required=True, metavar="V", help="the version that its wheels have"
    )
    parser.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="BASE=PROJECT:FILENAME",
        help=f"a wheel whose native libraries go with it ({', '.join(BASES)}); may be repeated",
    )
    parser.add_argument("--like", metavar="TARGET", help="begin with this target's contract")
    parser.add_argument("--files", type=Path, metavar="DIR", help="where wheels may lie already")
    parser.add_argument("--offline", action="store_true", help="use the caches only")


def run(args: argparse.Namespace, console: Console) -> int:
    """Fetch, compare, write."""
    bases = [_base(text, args.version) for text in args.base]
    if len({name for name, _ in bases}) != len(bases):
        raise SkeletonError("--base: expected each base once")
    layout = Layout(args.checkout, args.name)
    like = Layout.open(args.checkout, args.like).read_target() if args.like else None
    source = source_git.fetch(
        args.git, args.commit, args.name, git_cache(), console, offline=args.offline
    )
    release = scan(source).manifest
    if not release.below("vllm").files:
        raise SkeletonError(f"{args.git}: commit {args.commit} holds no vllm/")
    acquirer = Acquirer(console, offline=args.offline)
    natives = []
    for name, file in bases:
        given = args.files / file.filename if args.files is not None else None
        wheel = obtain(file, None, acquirer, given if given and given.is_file() else None)
        natives.append(compare(name, file, wheel.path, release))
    written = write_skeleton(
        layout,
        url=args.git,
        commit=args.commit,
        version=args.version,
        raw=source.raw(),
        natives=natives,
        like=like,
    )
    for path in written:
        print(f"wrote {path.relative_to(layout.checkout)}")
    for each in natives:
        console.say(each.statement())
    if not natives:
        console.say("no native libraries go with it yet: name a wheel under `bases`")
    console.say(f"builder target: complete target.yaml, then `python -m builder pin --target "
                f"{args.name}`")  # fmt: skip
    return 0


def _base(text: str, version: str) -> tuple[str, IndexFile]:
    name, equals, rest = text.partition("=")
    project, colon, filename = rest.partition(":")
    if not equals or not colon or name not in BASES or not filename.endswith(".whl"):
        raise SkeletonError(
            f"--base: expected BASE=PROJECT:FILENAME with a base of {', '.join(BASES)}, "
            f"found {text!r}"
        )
    return name, IndexFile(project, version, filename)
