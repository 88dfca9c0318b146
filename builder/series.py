"""The patch series of a target: ``patches/<target>/series`` and the files that it names.

The folder is checked as a whole: every patch is listed once, every listed patch exists,
every message says why the patch is there, where upstream stands, and what it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.errors import BuildError
from builder.patchfile import Patch
from verify.manifest import path_problem

TRAILERS = ("Why", "Upstream-Status", "Base")
NOTICE = b"Modified by SparkCache for vLLM"
"""Every vLLM file that we change says so, near its top (Apache-2.0, section 4(b))."""

_NOTICE_WITHIN = 2048


class SeriesError(BuildError):
    """The patch folder is not one coherent series.

    Attributes:
        path: the file at fault.
        problem: what was expected and what was found.
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path.name} in {path.parent.name}: {problem}")


@dataclass(frozen=True, slots=True)
class Series:
    """A target's patches in the order in which they apply."""

    patches: tuple[Patch, ...]

    @classmethod
    def read(cls, folder: Path, base: str) -> Series:
        """Read and check a series; ``base`` is what every ``Base:`` trailer must say.

        Raises:
            SeriesError: when the folder is not one coherent series.
            PatchFormatError: when a patch file is not one that we apply.
        """
        names = parse_series(_read(folder / "series"), folder / "series")
        on_disk = {path.name for path in folder.iterdir() if path.suffix == ".patch"}
        for name in sorted(on_disk - set(names)):
            raise SeriesError(folder / name, "expected every patch in `series`, this one is not")
        patches = []
        for name in names:
            patch = Patch.parse(_read(folder / name), name)
            for trailer in TRAILERS:
                if trailer not in patch.trailers:
                    problem = f"expected the trailer `{trailer}:` at the end of the message"
                    raise SeriesError(folder / name, problem)
            if patch.trailers["Base"] != base:
                problem = f"expected `Base: {base}`, found `Base: {patch.trailers['Base']}`"
                raise SeriesError(folder / name, problem)
            patches.append(patch)
        return cls(tuple(patches))

    def touching(self, path: str) -> tuple[str, ...]:
        """The names of the patches that change ``path``."""
        return tuple(
            patch.name
            for patch in self.patches
            if any(change.path == path for change in patch.changes)
        )

    def paths(self) -> tuple[str, ...]:
        """Every file that the series touches, sorted."""
        return tuple(sorted({change.path for patch in self.patches for change in patch.changes}))


def parse_series(data: bytes, path: Path) -> tuple[str, ...]:
    """Return the names in a ``series`` file: one a line, ``#`` starts a comment.

    Raises:
        SeriesError: for a name that is not a patch file of this folder, or one named twice.
    """
    names: list[str] = []
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), start=1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if path_problem(name) is not None or "/" in name or not name.endswith(".patch"):
            raise SeriesError(path, f"line {number}: expected a `.patch` file, found {name!r}")
        if name in names:
            raise SeriesError(path, f"line {number}: expected each patch once, found {name} again")
        names.append(name)
    return tuple(names)


def has_notice(data: bytes) -> bool:
    """Whether a changed file says near its top that we changed it."""
    return NOTICE in data[:_NOTICE_WITHIN]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SeriesError(path, f"expected a readable file: {error.strerror}") from error
