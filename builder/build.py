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
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from builder.acquire import Acquirer
from builder.attest.dsse import Signer
from builder.bundle import staging, write_file
from builder.cache import Digest
from builder.composed import TargetStateError, check_target, compose_pinned
from builder.connector_wheel import read_source
from builder.console import Console
from builder.errors import BuildError
from builder.native_pins import Natives
from builder.package import CONTRACT, Packaged, Recipe, package
from builder.pinned import Pinned, PinnedFile
from builder.prove import fetch_release
from builder.pyz import judge_source, target_files, write_pyz
from builder.receipt import Input
from builder.source import SourceProvider
from builder.source_sdist import SdistSource
from builder.source_wheel import WheelSource
from builder.target import IndexFile, Layout
from verify import strictjson
from verify.natives import NativePins

SOURCES = ("wheel", "sdist", "git")
CONNECTOR_SCHEMA = "sparkcache.connector/v1"
PYZ = "verify.pyz"


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
    """``python -m verify bundle``, run from the checkout, whose pins are its anchor.

    ``connector`` is the ``connector.json`` to judge the connector by, when the checkout does
    not know all of it: kernels of a compiler that is not pinned.
    """

    checkout: Path
    target: str
    connector: bytes | None = None

    def __call__(self, folder: Path, name: str) -> None:
        """Run the judge on ``folder``; ``name`` is what messages call it."""
        command = [sys.executable, "-m", "verify", "bundle", str(folder), "--target", self.target]
        with tempfile.TemporaryDirectory() as scratch:
            if self.connector is not None:
                given = Path(scratch) / "connector.json"
                given.write_bytes(self.connector)
                command += ["--connector", str(given)]
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


def prepare(
    layout: Layout,
    pinned: Pinned,
    base: str,
    source: str,
    acquirer: Acquirer,
    native: Natives | None = None,
) -> Recipe:
    """Return the recipe of one bundle.

    Args:
        layout: the target in the checkout.
        pinned: its pins.
        base: one of ``pinned.bases``.
        source: where the release's files are read from, one of :data:`SOURCES`.
        acquirer: gets files from cache and index.
        native: the native library for the base's architecture; without it the connector runs
            anywhere.

    Raises:
        BuildError: naming what differs from the pins, and what to do.
    """
    checked = check_target(layout, pinned)  # (1)
    base_pin = pinned.bases[base]
    wheel = _acquire(acquirer, base_pin, pinned.version)  # (2)
    inputs = [Input(base_pin.filename, base_pin.sha256, base_pin.size)]
    provider: SourceProvider
    differs: Mapping[str, str] | None = None
    if source == "sdist":
        if pinned.sdist is None:
            raise TargetStateError(layout.name, ["no sdist is pinned: build with --source git"])
        sdist = _acquire(acquirer, pinned.sdist, pinned.version)
        inputs.append(Input(pinned.sdist.filename, pinned.sdist.sha256, pinned.sdist.size))
        provider = SdistSource(sdist, pinned.sdist.project, pinned.version)
    elif source == "git":
        provider = fetch_release(checked.target, acquirer)
    else:
        provider = WheelSource(wheel)
        differs = base_pin.differs
    composition = compose_pinned(checked, provider, differs)  # (3), (4)
    return Recipe(
        checkout=layout.checkout,
        pinned=pinned,
        base=base,
        wheel=wheel,
        source=source,
        inputs=inputs,
        composition=composition,
        patches={each.name: each.data for each in checked.series.patches},
        contract=checked.contract,
        git=checked.target.git,
        native=native.members() if native is not None else {},
    )


def build(
    recipe: Recipe, out: Path, signers: Sequence[Signer], judge: Judge, console: Console
) -> Packaged:
    """Package and sign ``recipe``, let ``judge`` decide, publish ``out/<target>/<base>/``.

    Raises:
        BuildError: when anything fails; nothing is published then.
    """
    name = f"{recipe.pinned.target}/{recipe.base}"
    final = out / recipe.pinned.target / recipe.base

    def waiting(folder: Path) -> None:
        console.say(f"{name}: waiting for another build that writes {folder}")

    with staging(final, waiting=waiting) as stage:
        console.say(f"{name}: packaging {recipe.pinned.bases[recipe.base].filename}")
        packaged = package(recipe, stage, signers)
        console.say(f"{name}: judging the bundle")
        judge(stage.path, name)
    return packaged


def connector_json(layout: Layout, pinned: Pinned, native: NativePins | None) -> bytes:
    """Return what the judge needs to know of the connector; ``native`` is None without csrc.

    Raises:
        ConnectorError: when the connector's source is not what can be shipped.
    """
    connector = read_source(layout.checkout)
    return strictjson.dump(
        {
            "schema": CONNECTOR_SCHEMA,
            "version": connector.version,
            "files": {
                path: hashlib.sha256(file.data).hexdigest()
                for path, file in connector.files.items()
            },
            "generated": {CONTRACT: pinned.contract_sha256},
            "native": native.json() if native is not None else None,
        }
    )


def write_judge(
    layout: Layout, pinned: Pinned, out: Path, native: NativePins | None = None
) -> Path:
    """Write ``out/<target>/verify.pyz`` with the pins of this checkout inside.

    ``native`` are the native library's pins, with kernels that only this build knows.

    Raises:
        BuildError: when the judge's source is unusable or the file cannot be written.
    """
    pins = target_files(layout.checkout, layout.name)
    pins["connector.json"] = connector_json(layout, pinned, native)
    source = judge_source(layout.checkout)
    final = out / layout.name / PYZ
    write_file(final, lambda sink: write_pyz(sink, source, pins), mode=0o755)
    return final


def _acquire(acquirer: Acquirer, file: PinnedFile, version: str) -> Path:
    """(2) Return a pinned file, its bytes checked."""
    wanted = IndexFile(file.project, version, file.filename)
    return acquirer.get(wanted, Digest(file.sha256, file.size))
