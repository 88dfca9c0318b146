"""A target's composition, proven against its pins at every step.

Steps, each of which fails with everything that differs from the pins:

1. :func:`check_target`: patches, modules, contract and the release's manifest are the pinned
   ones;
2. :func:`compose_pinned`: all of the source is the pinned release;
3. the patches apply, and what comes out is what was pinned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.compose import Composition, compose, read_modules
from builder.errors import BuildError
from builder.patcher import Content
from builder.pinned import Pinned
from builder.series import Series
from builder.source import SourceProvider, read_proven
from builder.target import Layout, Target
from verify.manifest import Manifest


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


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A target whose files in the checkout are the pinned ones."""

    layout: Layout
    pinned: Pinned
    target: Target
    series: Series
    modules: Mapping[str, Content]
    contract: bytes
    release: Manifest


def read_pins(layout: Layout) -> Pinned:
    """Return the pins of a target.

    Raises:
        TargetStateError: when there are none.
        FormatError: when they cannot be read as pins.
    """
    what = str(layout.pins.relative_to(layout.checkout))
    data = _read(layout, layout.pins)
    return Pinned.parse(data, what)


def check_target(layout: Layout, pinned: Pinned) -> CheckedTarget:
    """(1) Return the target's files, which are the ones that its pins describe.

    Raises:
        TargetStateError: listing every file that is another.
        BuildError: when the target or its series is malformed.
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
    release = Manifest.parse(release_data, "source.manifest")
    return CheckedTarget(layout, pinned, target, series, modules, contract, release)


def compose_pinned(
    checked: CheckedTarget, provider: SourceProvider, differs: Mapping[str, str] | None = None
) -> Composition:
    """Return the pinned composition, made from ``provider``.

    ``differs`` are the files that the provider may have otherwise than the release.

    Raises:
        SourceError: listing every file of the provider that is not the release's.
        PatchApplyError: when a patch does not fit.
        TargetStateError: when what comes out is not what was pinned.
    """
    paths = checked.series.paths()
    wanted = [path for path in paths if path in checked.release.files]
    proven = read_proven(provider, checked.release, wanted, differs)  # (2)
    before = {
        path: Content(proven[path].mode or "", proven[path].data) if path in proven else None
        for path in paths
    }
    composition = compose(checked.series, checked.modules, before, checked.release)  # (3)
    found = {
        path: _sha256(content.data) if content is not None else "absent"
        for path, content in composition.patched.items()
    }
    expected = {path: sha256 or "absent" for path, sha256 in checked.pinned.files.items()}
    found["vllm/ as a whole"] = composition.manifest(checked.release).below("vllm").sha256()
    expected["vllm/ as a whole"] = checked.pinned.composed_sha256
    _compare(checked.layout, expected, found)
    return composition


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


def _read(layout: Layout, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        name = path.relative_to(layout.checkout)
        raise TargetStateError(layout.name, [f"{name}: {error.strerror}"]) from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
