"""The composed tree: the release, with our patches, plus our modules, and nothing else.

Pure but for reading the modules' folder. A composition holds only what differs from the
release; everything else is the release's, by construction.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.errors import BuildError
from builder.patcher import Content, apply_series
from builder.series import NOTICE, Series, has_notice
from verify.gitobj import File, blob_id, tree_ids
from verify.manifest import Entry, Manifest, is_deployable, mode_of, path_problem

PACKAGE = "vllm"


class CompositionError(BuildError):
    """Release, patches and modules do not make one tree.

    Attributes:
        path: the file at fault.
        problem: what was expected and what was found.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Composition:
    """What a composed tree has otherwise than the release.

    ``before`` and ``patched`` have the same paths: every file that patches touch, None where
    it does not exist. ``modules`` are the files that we add whole.
    """

    before: Mapping[str, Content | None]
    patched: Mapping[str, Content | None]
    modules: Mapping[str, Content]

    def changes(self) -> dict[str, Content | None]:
        """Every path that differs from the release, and its new content; None is deletion."""
        return {**self.patched, **self.modules}

    def manifest(self, release: Manifest) -> Manifest:
        """The manifest of the composed tree, given the release's (or a part of it)."""
        files = dict(release.files)
        for path, content in self.changes().items():
            files.pop(path, None)
            if content is not None:
                files[path] = Entry(content.mode, hashlib.sha256(content.data).hexdigest())
        return Manifest(files)

    def git_trees(self, release: Mapping[str, File]) -> dict[str, str]:
        """The git tree ids of the composed tree, given the release's files by path."""
        files = dict(release)
        for path, content in self.changes().items():
            files.pop(path, None)
            if content is not None:
                files[path] = File(path, content.mode, blob_id(content.data))
        return tree_ids(files.values())


def read_modules(folder: Path) -> dict[str, Content]:
    """Return the files below ``overlay/modules`` by their path in the wheel.

    Bytecode is left out. A file of the folder itself (its README) is not a module.

    Raises:
        CompositionError: for a link, a device, or a path that is not ``vllm/…``.
    """
    modules: dict[str, Content] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) or not is_deployable(name) or "/" not in name:
            continue
        problem = path_problem(name)
        if problem is None and not stat.S_ISREG(status.st_mode):
            problem = "expected a regular file, found a link or a device"
        if problem is None and not name.startswith(f"{PACKAGE}/"):
            problem = f"expected a path below {PACKAGE}/"
        if problem is not None:
            raise CompositionError(name, problem)
        modules[name] = Content(mode_of(status.st_mode), path.read_bytes())
    return modules


def compose(
    series: Series, modules: Mapping[str, Content], before: Mapping[str, Content | None],
    release: Manifest,
) -> Composition:  # fmt: skip
    """Apply ``series`` to the files in ``before`` and lay ``modules`` beside them.

    ``before`` holds the release's content of every path that the series touches.

    Raises:
        PatchApplyError: when a patch does not fit.
        CompositionError: when a module would replace a file of the release, a patch leaves
            ``vllm/``, or a changed file does not say that it was changed.
    """
    patched = apply_series(series.patches, lambda path: before.get(path))
    for path, content in patched.items():
        if not path.startswith(f"{PACKAGE}/"):
            raise CompositionError(path, f"expected patches to files below {PACKAGE}/ only")
        old = before.get(path)
        if content == old:
            raise CompositionError(path, "the patches change it and change it back: drop both")
        if old is not None and content is not None and not has_notice(content.data):
            raise CompositionError(
                path, f"expected the notice `{NOTICE.decode()}` near the top of a changed file"
            )
    for path in modules:
        if path in release.files or path in patched:
            raise CompositionError(
                path, "expected modules to add files, this one exists: change it with a patch"
            )
        parts = path.split("/")
        clash = next((p for i in range(1, len(parts))
                      if (p := "/".join(parts[:i])) in release.files), None)  # fmt: skip
        if clash is not None:
            raise CompositionError(path, f"its folder {clash} is a file of the release")
    return Composition({path: before.get(path) for path in patched}, patched, dict(modules))
