"""Move the patch series to commits in a scratch repository, and back.

import   make the repository: the release as one commit, then one commit per patch
export   write the commits back to patches/<target>/ and its series file
check    both, in a temporary folder: every patch must come back byte for byte
"""

from __future__ import annotations

import argparse
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.acquire import Acquirer
from builder.bundle import write_file
from builder.console import Console
from builder.errors import BuildError
from builder.inputs import add_target_arguments, obtain_release
from builder.scratch import export_series, import_series, series_text
from builder.series import Series
from builder.source import GENERATED, SourceFile
from builder.target import Layout, Target

NAME = "patch"
HELP = "move the patch series to commits in a scratch repository, and back"


class PatchDriftError(BuildError):
    """The patch files are not what their own commits export as."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=("import", "export", "check"))
    add_target_arguments(parser)
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="the scratch repository (default: build/patch/<target>)",
    )
    parser.add_argument(
        "--files", type=Path, metavar="DIR", help="take the sdist from this folder if it has it"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Import, export or check."""
    layout = Layout.open(args.checkout, args.target)
    target = layout.read_target()
    repository = args.repository or layout.checkout / "build" / "patch" / target.name
    if args.action == "export":
        return _export(layout, repository, console)
    series = Series.read(layout.patches, target.base_trailer)
    release = _release(layout, target, args, console)
    if args.action == "import":
        commits = import_series(repository, release, series.patches, target.base_trailer)
        print(repository)
        console.say(f"builder patch: {len(commits) - 1} commits on the release in {repository}")
        return 0
    with TemporaryDirectory() as scratch:
        import_series(Path(scratch) / "r", release, series.patches, target.base_trailer)
        exported = export_series(Path(scratch) / "r")
    committed = {patch.name: patch.data for patch in series.patches}
    drifted = sorted(
        name for name in committed.keys() | exported.keys()
        if committed.get(name) != exported.get(name)
    )  # fmt: skip
    if drifted or list(committed) != list(exported):
        raise PatchDriftError(
            f"patches/{target.name}: expected every patch as git writes it, these are not: "
            f"{', '.join(drifted) or 'their order'}; run `patch import`, then `patch export`"
        )
    console.say(f"builder patch: {len(committed)} patches of {target.name} round-trip unchanged")
    return 0


def _release(
    layout: Layout, target: Target, args: argparse.Namespace, console: Console
) -> list[SourceFile]:
    acquirer = Acquirer(console, offline=args.offline)
    provider = obtain_release(layout, target, acquirer, args.files).provider
    return [file for file in provider.walk() if file.path not in GENERATED]


def _export(layout: Layout, repository: Path, console: Console) -> int:
    exported = export_series(repository)
    series = layout.patches / "series"
    listed = series_text(exported, series.read_bytes() if series.is_file() else b"")
    wanted = exported | {"series": listed}
    changed = 0
    for name, data in wanted.items():
        path = layout.patches / name
        if not path.is_file() or path.read_bytes() != data:
            write_file(path, methodcaller("write", data))
            print(f"wrote {path.relative_to(layout.checkout)}")
            changed += 1
    for path in sorted(layout.patches.glob("*.patch")):
        if path.name not in wanted:
            path.unlink()
            print(f"removed {path.relative_to(layout.checkout)}")
            changed += 1
    after = "; now run `python -m builder pin`" if changed else ""
    console.say(f"builder patch: {len(exported)} patches, {changed} files changed{after}")
    return 0
