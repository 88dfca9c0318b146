"""The command line: ``python -m verify KIND SUBJECT``, and ``verify.pyz`` alike.

The result goes to standard output, progress and errors to standard error. Exit codes are in
docs/exit-codes.md; only this module exits.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from verify import render, render_ci
from verify.checks.attestation import Demands
from verify.digest import Progress, quiet
from verify.errors import FormatError, VerifyError
from verify.judges.bundle import judge_bundle
from verify.judges.case import Options
from verify.judges.image import judge_image
from verify.judges.site import judge_env, judge_venv
from verify.judges.source import judge_sdist, judge_tree
from verify.judges.wheel import judge_wheel
from verify.report import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, Report, printable
from verify.trust import parse_time

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")

_KINDS: Mapping[str, tuple[str, str]] = {
    "tree": ("DIR", "a source tree: the whole release, or a directory that holds vllm/ alone"),
    "sdist": ("FILE", "the release as a source distribution"),
    "wheel": ("FILE", "a wheel of vLLM, of any base, or of the connector"),
    "venv": ("DIR", "what is installed in a virtual environment or below a prefix"),
    "env": ("PYTHON", "the vLLM that this interpreter would import; it is not started"),
    "bundle": ("DIR", "a directory that a build made: wheels, receipt, bill of materials"),
    "image": ("LAYOUT:TAG", "an image of an OCI layout: what its layers make together"),
}

_SIGNED = ("bundle", "image")

_FORMATS: Mapping[str, Callable[[Report], str]] = {
    "text": render.text,
    "json": render.as_json,
    "sarif": render_ci.sarif,
    "junit": render_ci.junit,
}

_EPILOG = """\
exit codes: 0 passed, 1 failed, 2 usage or unreadable configuration, 3 undecided (required
evidence is missing), 4 internal error, 130 interrupted; treat anything else as a failure.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge what ``arguments`` name, print the report and return the exit code."""
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        report = _judge(options)
        sys.stdout.write(_FORMATS[options.format](report))
        sys.stdout.flush()
    except VerifyError as error:
        sys.stderr.write(f"verify: {printable(str(error))}\n")
        return EXIT_USAGE
    except BrokenPipeError:
        # the reader went away; leave nothing for the interpreter to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERNAL
    except KeyboardInterrupt:
        sys.stderr.write("verify: interrupted; nothing was decided\n")
        return EXIT_INTERRUPTED
    except Exception:  # a bug of ours must not look like a verdict
        traceback.print_exc()
        sys.stderr.write("verify: internal error; nothing was decided. Please report this\n")
        return EXIT_INTERNAL
    return report.exit_code


def _judge(options: argparse.Namespace) -> Report:
    progress, stop = _progress()
    asked = Options(
        target=options.target,
        base=options.base,
        pins=options.pins,
        patched=options.state == "patched",
        known_startup=frozenset(options.known_startup),
        progress=progress,
        commit_proof=options.require_commit_proof,
        connector=options.connector,
        attestations=Demands(options.trust, options.at, options.require_attestation)
        if options.kind in _SIGNED
        else Demands(),
        site=getattr(options, "site", None),
        platform=getattr(options, "platform", None),
        layer=getattr(options, "layer", False),
    )
    judges: Mapping[str, Callable[[Path, Options], Report]] = {
        "tree": judge_tree,
        "sdist": judge_sdist,
        "wheel": judge_wheel,
        "venv": judge_venv,
        "env": lambda python, asked: judge_env(python, os.environ, asked),
        "bundle": judge_bundle,
        "image": judge_image,
    }
    try:
        return judges[options.kind](options.subject, asked)
    finally:
        stop()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"verify: {message}\n       see `python -m verify --help`\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; it exits with 2 on wrong usage."""
    common = _Parser(add_help=False)
    common.add_argument("--target", metavar="NAME", help="which target, when there are several")
    common.add_argument("--base", metavar="NAME", help="which base wheel; otherwise recognised")
    common.add_argument(
        "--pins",
        metavar="FILE|sha256:HEX",
        help="use these pins, or demand that the pins found have this digest",
    )
    common.add_argument(
        "--connector",
        metavar="FILE",
        type=Path,
        help="a connector.json from outside: what the connector and its native library are",
    )
    common.add_argument(
        "--state",
        choices=("patched", "upstream"),
        default="patched",
        help="which state the subject must be in as a whole (default: patched)",
    )
    common.add_argument(
        "--known-startup",
        metavar="sha256:HEX",
        type=_digest,
        action="append",
        default=[],
        help="accept this file although it runs when the interpreter starts; repeatable",
    )
    common.add_argument("--format", choices=sorted(_FORMATS), default="text", help="default: text")
    common.add_argument(
        "--require-commit-proof",
        action="store_true",
        help="undecided unless raw objects prove that the pinned tree is the commit's",
    )
    signed = _Parser(add_help=False)
    signed.add_argument(
        "--trust",
        metavar="FILE",
        type=Path,
        help="a trust root from outside: judge the signatures by it",
    )
    signed.add_argument(
        "--require-attestation",
        action="store_true",
        help="undecided without attestations and a trust root",
    )
    signed.add_argument(
        "--at",
        metavar="TIME",
        type=_moment,
        help="judge the trust root's expiry at this moment, such as 2027-01-31T00:00:00Z",
    )
    top = _Parser(
        prog="verify",
        description="Judge a vLLM against pins from outside of it, read-only and offline.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (metavar, about) in _KINDS.items():
        parents = [common, signed] if name in _SIGNED else [common]
        kind = kinds.add_parser(
            name, parents=parents, help=about, description=f"Judge {about}.", allow_abbrev=False
        )
        kind.add_argument("subject", metavar=metavar, type=Path)
        if name == "image":
            _add_image_options(kind)
    return top


def _add_image_options(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "--site",
        metavar="DIR",
        help="the directory in the image that holds vllm/; needed when several do",
    )
    kind.add_argument(
        "--platform", metavar="OS/ARCH", help="which image of an index, such as linux/arm64"
    )
    kind.add_argument(
        "--layer",
        action="store_true",
        help="the subject is the layer without its base: judge what it holds",
    )


def _digest(text: str) -> str:
    match = _DIGEST.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected sha256:<64 hex digits>, found {text!r}")
    return match[1]


def _moment(text: str) -> datetime.datetime:
    try:
        return parse_time(text, "--at")
    except FormatError as error:
        raise argparse.ArgumentTypeError(error.problem) from error


def _progress() -> tuple[Progress, Callable[[], None]]:
    """Return a progress callback for terminals, and what clears its line."""
    if not sys.stderr.isatty():
        return quiet, lambda: None
    begun = shown = time.monotonic()
    done = 0
    lock = threading.Lock()

    def progress(count: int) -> None:
        nonlocal done, shown
        with lock:
            done += count
            now = time.monotonic()
            if now - begun > 1 and now - shown > 0.2:
                shown = now
                sys.stderr.write(f"\rverify: {done / 1e6:,.0f} MB hashed")
                sys.stderr.flush()

    def stop() -> None:
        if shown != begun:
            sys.stderr.write("\r\033[K")

    return progress, stop
