"""Begins a target for any commit, forks included: everything that a person then completes.

The commit is fetched and its raw objects are kept, so a new target is proven from its first
day. Python and native libraries are two identities: each base wheel is compared with the
commit, and what of its Python is not the commit's is stated and listed, never assumed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from builder.bundle import OutputError
from builder.errors import BuildError
from builder.source_git import RawCommit
from builder.source_wheel import WheelSource
from builder.target import SCHEMA, IndexFile, Layout, Target
from verify.manifest import Manifest

_HEADER = """\
# What we mean by the target {name}, by hand. Everything that can be computed is in pins.json,
# contract.json and the manifests beside it: `python -m builder pin`.
#
{natives}"""


class SkeletonError(BuildError):
    """A target cannot be begun: it exists, or what was asked for contradicts itself."""


@dataclass(frozen=True, slots=True)
class Natives:
    """A base wheel beside the commit.

    Of the commit's files below ``vllm/``, ``differs`` are those that the wheel has otherwise,
    ``lacking`` counts those that it does not have, ``same`` the others.
    """

    base: str
    file: IndexFile
    same: int
    lacking: int
    differs: tuple[str, ...]

    def statement(self) -> str:
        """One sentence for people."""
        if not self.differs and not self.lacking:
            return f"{self.base}: the Python of {self.file.filename} is this commit's, all of it"
        return (
            f"{self.base}: of this commit's files {self.file.filename} has {self.same} as they "
            f"are, {len(self.differs)} otherwise and lacks {self.lacking}; those stay the wheel's"
        )


def compare(base: str, file: IndexFile, wheel: Path, release: Manifest) -> Natives:
    """Say what of ``wheel`` is the release's.

    Raises:
        SourceError: when the wheel cannot be read.
    """
    missing = set(release.below("vllm").files)
    differs: set[str] = set()
    for member in WheelSource(wheel).walk():
        if member.path not in missing:
            continue
        missing.discard(member.path)
        if hashlib.sha256(member.data).hexdigest() != release.files[member.path].sha256:
            differs.add(member.path)
    total = len(release.below("vllm").files)
    same = total - len(differs) - len(missing)
    return Natives(base, file, same, len(missing), tuple(sorted(differs)))


def write_skeleton(
    layout: Layout,
    *,
    url: str,
    commit: str,
    version: str,
    raw: RawCommit,
    natives: Sequence[Natives],
    like: Target | None,
) -> list[Path]:
    """Write ``target.yaml``, the raw objects and an empty series; return the paths.

    ``like`` is an existing target whose contract is a good beginning.

    Raises:
        SkeletonError: when the target or its patches exist.
        OutputError: when it cannot be written; nothing stays behind.
    """
    lines = [f"# {each.statement()}\n" for each in natives] or [
        "# No native libraries go with it yet: name a wheel under `bases` and the files of its\n"
        "# Python that are not this commit's under `differs`.\n"
    ]
    header = _HEADER.format(name=layout.name, natives="".join(lines))
    return begin(
        layout,
        header,
        version=version,
        commit=commit,
        git=url,
        bases=natives,
        contract=like.contract if like is not None else {},
        files={
            layout.folder / "objects" / "commit": raw.commit,
            layout.folder / "objects" / "tree": raw.tree,
            layout.patches / "series": b"# patch files of this folder, in order\n",
        },
    )


def begin(
    layout: Layout,
    header: str,
    *,
    version: str,
    commit: str | None,
    git: str,
    contract: Mapping[str, Sequence[str]],
    files: Mapping[Path, bytes],
    sdist: IndexFile | None = None,
    bases: Sequence[Natives] = (),
) -> list[Path]:
    """Write a target that does not exist yet, whole or not at all; return the paths.

    Args:
        layout: where it goes.
        header: the comment at the head of ``target.yaml``.
        version: the release's version.
        commit: the exact commit; None where it is not known.
        git: the repository's URL.
        contract: the files and symbols that the connector relies on, as far as known.
        files: what lies beside ``target.yaml``, by path.
        sdist: the release's source distribution, if it has one.
        bases: the base wheels, as far as known.

    Raises:
        SkeletonError: when the target or its patches exist.
        OutputError: when it cannot be written; nothing stays behind.
    """
    for folder in (layout.folder, layout.patches):
        if folder.exists():
            raise SkeletonError(f"{folder}: expected no such folder: the target was begun already")
    value = {
        "schema": SCHEMA,
        "name": layout.name,
        "version": version,
        "commit": commit,
        "git": git,
        "revision": 1,
        "sdist": None if sdist is None else {"project": sdist.project, "filename": sdist.filename},
        "bases": {
            each.base: {
                "project": each.file.project,
                "filename": each.file.filename,
                "differs": list(each.differs),
            }
            for each in bases
        },
        "contract": {path: list(names) for path, names in contract.items()},
    }
    text = header.encode() + yaml.safe_dump(value, sort_keys=False).encode()
    Target.parse(text, str(layout.target_yaml))
    written = {layout.target_yaml: text, **files}
    try:
        for path, data in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        for folder in (layout.folder, layout.patches):
            shutil.rmtree(folder, ignore_errors=True)
        raise OutputError(layout.folder, error) from error
    return list(written)
