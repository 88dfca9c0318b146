"""Try a target's patch series on another release, and report hunk by hunk.

The report also lists the contract files that changed: hunks that fit do not mean that what
the connector assumes still holds. When every hunk fits, patches/<to>/ and
overlay/targets/<to>/target.yaml are written; what is not known (the commit, the base wheels)
is left open there, never guessed. Exit code 1 means that a person must look at conflicts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from builder.acquire import Acquirer
from builder.compose import read_modules
from builder.console import Console
from builder.errors import BuildError
from builder.inputs import obtain, pinned_digests
from builder.port import Outcome, Port, Read, contract_changes, export_port, try_series
from builder.scratch import series_text
from builder.series import Series
from builder.skeleton import begin
from builder.source_sdist import SdistSource
from builder.target import IndexFile, Layout, Target

NAME = "port"
HELP = "try the patch series on another release"

_HEADER = """\
# What we mean by the target {name}, by hand. Begun by a port from {old}: name the commit, the
# base wheels and what changed in the contract, then run `python -m builder pin`.
"""


class PortError(BuildError):
    """A port cannot be tried or written."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--from", dest="old", default="v0.28.0", metavar="NAME", help="a target")
    parser.add_argument("--to", required=True, metavar="NAME", help="the new target, v0.33.0 say")
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help="the new release's sdist (default: the index)"
    )
    parser.add_argument("--commit", metavar="SHA", help="the new release's commit, when known")
    parser.add_argument("--offline", action="store_true", help="never use the network")
    parser.add_argument("--dry-run", action="store_true", help="report only, write nothing")


def run(args: argparse.Namespace, console: Console) -> int:
    """Try, report, and write what fits."""
    layout = Layout.open(args.checkout, args.old)
    target = layout.read_target()
    if target.sdist is None:
        raise PortError(
            f"{args.old}: it has no sdist, whose name says what the new release's is called; "
            "begin the new target with `python -m builder target new`"
        )
    series = Series.read(layout.patches, target.base_trailer)
    modules = read_modules(layout.modules)
    wanted = {*series.paths(), *target.contract, *modules}
    version = args.to.removeprefix("v")
    sdist = IndexFile(
        target.sdist.project, version, target.sdist.filename.replace(target.version, version)
    )
    acquirer = Acquirer(console, offline=args.offline)
    pinned = pinned_digests(layout)[target.sdist.filename]
    old = _reader(obtain(target.sdist, pinned, acquirer).path, target.sdist, wanted)
    new = _reader(obtain(sdist, None, acquirer, args.source).path, sdist, wanted)
    port = Port(
        try_series(series.patches, old, new),
        contract_changes(target.contract, series.paths(), old, new),
        tuple(path for path in sorted(modules) if new(path) is not None),
    )
    print(report(port, args.old, args.to), end="")
    if not port.fits:
        return 1
    if not args.dry_run:
        trailer = f"{args.to} {args.commit}" if args.commit else args.to
        patches = export_port(port.patches, new, args.to, trailer)
        _write(Layout(args.checkout, args.to), target, sdist, args.commit, patches, console)
    return 0


def report(port: Port, old: str, new: str) -> str:
    """Return the report as text."""
    lines = [f"Patches of {old} on {new}"]
    for patch in port.patches:
        lines += ["", patch.patch.name]
        for hunk in patch.hunks:
            moved = f" by {hunk.offset:+d}" if hunk.offset else ""
            note = f": {hunk.note}" if hunk.note else ""
            lines.append(f"  {hunk.outcome.value + moved:18} {hunk.path}:{hunk.line}{note}")
    for path in port.modules:
        lines += ["", f"  conflict           {path}: we add this file, the new release has one"]
    lines += ["", "Contract files that are not the same"]
    for change in port.contract:
        lines.append(f"  {'gone   ' if change.gone else 'changed'} {change.path}")
        lines += [f"          {line}" for line in change.symbols]
    counts = Counter(hunk.outcome for patch in port.patches for hunk in patch.hunks)
    summary = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
    verdict = "fits; review the contract files" if port.fits else "does not fit"
    lines += ["", f"port: {old} -> {new}: {summary}; {len(port.contract)} contract files changed: "
              f"{verdict}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def _reader(path: Path, file: IndexFile, wanted: Iterable[str]) -> Read:
    names = frozenset(wanted)
    walk = SdistSource(path, file.project, file.version).walk()
    files = {found.path: found.data for found in walk if found.path in names}
    return files.get


def _write(
    layout: Layout,
    old: Target,
    sdist: IndexFile,
    commit: str | None,
    patches: dict[str, bytes],
    console: Console,
) -> None:
    beside = {layout.patches / name: data for name, data in patches.items()}
    beside[layout.patches / "series"] = series_text(patches, b"")
    for path in begin(
        layout,
        _HEADER.format(name=layout.name, old=old.name),
        version=sdist.version,
        commit=commit,
        git=old.git,
        sdist=sdist,
        contract=old.contract,
        files=beside,
    ):
        console.say(f"wrote {path.relative_to(layout.checkout)}")
