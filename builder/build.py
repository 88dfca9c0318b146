"""Builds bundles: from a target's pins to ``dist/<target>/<base>/``.

Steps of :func:`prepare`, each against the pins, so that a build from a checkout that was
edited fails before it writes anything:

1. patches, modules, contract and the release's manifest are the pinned ones;
2. the base wheel, and the sdist when it is the source, are the pinned files;
3. all of the source is the pinned release;
4. the patches apply, and what comes out is what was pinned.

:func:`build` then packages into a staging directory, lets the judge decide, and publishes
only what the judge accepts.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from builder.acquire import Acquirer
from builder.bundle import staging, write_file
from builder.cache import Digest
from builder.compose import Composition, compose, read_modules
from builder.connector_wheel import read_source
from builder.console import Console
from builder.errors import BuildError
from builder.package import CONTRACT, Packaged, PinMismatchError, Recipe, package
from builder.patcher import Content
from builder.pinned import Pinned, PinnedFile
from builder.pyz import judge_source, target_files, write_pyz
from builder.receipt import Input
from builder.series import Series
from builder.source import SourceProvider, read_proven
from builder.source_sdist import SdistSource
from builder.source_wheel import WheelSource
from builder.target import IndexFile, Layout
from verify import strictjson
from verify.manifest import Manifest

SOURCES = ("wheel", "sdist")
CONNECTOR_SCHEMA = "sparkcache.connector/v1"
PYZ = "verify.pyz"


class TargetStateError(BuildError):
    """The checkout's files of a target are not the ones that its pins describe.

    Attributes:
        differences: one line for each.
    """

    def __init__(self, target: str, differences: list[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            "\n  ".join(
                [
                    f"{target}: the checkout differs from overlay/targets/{target}/pins.json; "
                    "if that is meant, run `python -m builder pin`, else restore it with git",
                    *differences,
                ]
            )
        )


class JudgementError(BuildError):
    """The judge did not accept what was built; it was not published.

    Attributes:
        code: the judge's exit code.
    """

    def __init__(self, bundle: str, code: int, output: str) -> None:
        self.code = code
        super().__init__(
            f"{output.rstrip()}\n{bundle}: the judge did not accept it (exit code {code}); "
            "nothing was published and an earlier bundle stays as it was"
        )


class Judge(Protocol):
    """Decides about the bundle in a directory."""

    def __call__(self, folder: Path, name: str) -> None:
        """Return when it is accepted.

        Raises:
            JudgementError: when it is not.
        """


@dataclass(frozen=True, slots=True)
class CheckoutJudge:
    """``python -m verify bundle``, run from the checkout, whose pins are its anchor."""

    checkout: Path
    target: str

    def __call__(self, folder: Path, name: str) -> None:
        """Run the judge on ``folder``; ``name`` is what messages call it."""
        command = [sys.executable, "-m", "verify", "bundle", str(folder), "--target", self.target]
        done = subprocess.run(
            command,
            cwd=self.checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise JudgementError(name, done.returncode, done.stdout)


def read_pins(layout: Layout) -> Pinned:
    """Return the pins of a target.

    Raises:
        TargetStateError: when there are none.
        FormatError: when they cannot be read as pins.
    """
    what = str(layout.pins.relative_to(layout.checkout))
    data = _read(layout, layout.pins)
    return Pinned.parse(data, what)


def prepare(layout: Layout, pinned: Pinned, base: str, source: str, acquirer: Acquirer) -> Recipe:
    """Return the recipe of one bundle.

    Args:
        layout: the target in the checkout.
        pinned: its pins.
        base: one of ``pinned.bases``.
        source: where the release's files are read from, one of :data:`SOURCES`.
        acquirer: gets files from cache and index.

    Raises:
        BuildError: naming what differs from the pins, and what to do.
    """
    target = layout.read_target()
    series = Series.read(layout.patches, target.base_trailer)
    modules = read_modules(layout.modules)
    contract = _read(layout, layout.contract)
    release_data = _read(layout, layout.source_manifest)
    found = {
        **{f"patches/{each.name}": _sha256(each.data) for each in series.patches},
        **{f"modules/{path}": _sha256(content.data) for path, content in modules.items()},
        "contract.json": _sha256(contract),
        "source.manifest": _sha256(release_data),
    }
    expected = {
        **{f"patches/{name}": sha256 for name, sha256 in pinned.patches.items()},
        **{f"modules/{path}": sha256 for path, sha256 in pinned.modules.items()},
        "contract.json": pinned.contract_sha256,
        "source.manifest": pinned.source_manifest_sha256,
    }
    _compare(layout, expected, found)  # (1)
    if (order := [each.name for each in series.patches]) != list(pinned.patches):
        raise TargetStateError(layout.name, [f"patches/series: the order is {', '.join(order)}"])

    base_pin = pinned.bases[base]
    wheel = _acquire(acquirer, base_pin, pinned.version)  # (2)
    inputs = [Input(base_pin.filename, base_pin.sha256, base_pin.size)]
    provider: SourceProvider
    differs: Mapping[str, str] | None = None
    if source == "sdist":
        sdist = _acquire(acquirer, pinned.sdist, pinned.version)
        inputs.append(Input(pinned.sdist.filename, pinned.sdist.sha256, pinned.sdist.size))
        provider = SdistSource(sdist, pinned.sdist.project, pinned.version)
    else:
        provider = WheelSource(wheel)
        differs = base_pin.differs
    release = Manifest.parse(release_data, "source.manifest")
    wanted = [path for path in series.paths() if path in release.files]
    proven = read_proven(provider, release, wanted, differs)  # (3)
    before = {
        path: Content(proven[path].mode or "", proven[path].data) if path in proven else None
        for path in series.paths()
    }
    composition = compose(series, modules, before, release)  # (4)
    _check_composition(layout, pinned, composition, release)
    return Recipe(
        checkout=layout.checkout,
        pinned=pinned,
        base=base,
        wheel=wheel,
        inputs=inputs,
        composition=composition,
        patches={each.name: each.data for each in series.patches},
        contract=contract,
        git=target.git,
    )


def build(recipe: Recipe, out: Path, judge: Judge, console: Console) -> Packaged:
    """Package ``recipe``, let ``judge`` decide, publish ``out/<target>/<base>/``.

    Raises:
        BuildError: when anything fails; nothing is published then.
    """
    name = f"{recipe.pinned.target}/{recipe.base}"
    final = out / recipe.pinned.target / recipe.base

    def waiting(folder: Path) -> None:
        console.say(f"{name}: waiting for another build that writes {folder}")

    with staging(final, waiting=waiting) as stage:
        console.say(f"{name}: packaging {recipe.pinned.bases[recipe.base].filename}")
        packaged = package(recipe, stage)
        console.say(f"{name}: judging the bundle")
        judge(stage.path, name)
    return packaged


def write_judge(layout: Layout, pinned: Pinned, out: Path) -> Path:
    """Write ``out/<target>/verify.pyz`` with the pins of this checkout inside.

    Raises:
        BuildError: when the judge's source is unusable or the file cannot be written.
    """
    connector = read_source(layout.checkout)
    pins = target_files(layout.checkout, layout.name)
    pins["connector.json"] = strictjson.dump(
        {
            "schema": CONNECTOR_SCHEMA,
            "version": connector.version,
            "source_sha256": connector.sha256,
            "generated": {CONTRACT: pinned.contract_sha256},
        }
    )
    source = judge_source(layout.checkout)
    final = out / layout.name / PYZ
    write_file(final, lambda sink: write_pyz(sink, source, pins), mode=0o755)
    return final


def _acquire(acquirer: Acquirer, file: PinnedFile, version: str) -> Path:
    """(2) Return a pinned file, its bytes checked."""
    wanted = IndexFile(file.project, version, file.filename)
    return acquirer.get(wanted, Digest(file.sha256, file.size))


def _compare(layout: Layout, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """(1) Refuse unless both map the same names to the same SHA-256."""
    differences = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            differences.append(f"{name}: pinned, but not there")
        elif name not in expected:
            differences.append(f"{name}: there, but not pinned")
        elif found[name] != expected[name]:
            differences.append(f"{name}: expected SHA-256 {expected[name]}, found {found[name]}")
    if differences:
        raise TargetStateError(layout.name, differences)


def _check_composition(
    layout: Layout, pinned: Pinned, composition: Composition, release: Manifest
) -> None:
    """(4) Refuse a composition that is not the pinned one."""
    found = {
        path: _sha256(content.data) if content is not None else "absent"
        for path, content in composition.patched.items()
    }
    expected = {path: sha256 or "absent" for path, sha256 in pinned.files.items()}
    _compare(layout, expected, found)
    composed = composition.manifest(release).below("vllm").sha256()
    if composed != pinned.composed_sha256:
        raise PinMismatchError("the composed vllm/", pinned.composed_sha256, composed)


def _read(layout: Layout, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        name = path.relative_to(layout.checkout)
        raise TargetStateError(layout.name, [f"{name}: {error.strerror}"]) from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
