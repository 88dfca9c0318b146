"""A virtual environment on disk: where its packages are, without ever starting its Python."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.errors import BuildError
from builder.source import SourceError, SourceFile
from builder.wheel_record import Row
from verify.manifest import path_problem

PACKAGE = "vllm"


class EnvironmentProblemError(BuildError):
    """An environment is not one that can be changed in place.

    Attributes:
        path: the environment, or what is wrong in it.
        problem: what was expected and what was found.
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that holds vLLM.

    ``site`` is its site-packages folder and ``dist_info`` the name of vLLM's metadata
    folder in it.
    """

    root: Path
    site: Path
    dist_info: str

    @classmethod
    def open(cls, root: Path) -> Environment:
        """Find vLLM in a virtual environment.

        Raises:
            EnvironmentProblemError: when it is no virtual environment, or has no vLLM or
                several.
        """
        if not (root / "pyvenv.cfg").is_file():
            raise EnvironmentProblemError(
                root, "expected a virtual environment (pyvenv.cfg); an environment that a system "
                "manages is not changed in place"
            )  # fmt: skip
        found = [
            record.parent
            for record in sorted(root.glob("lib/python3.*/site-packages/*.dist-info/RECORD"))
            if f"{PACKAGE}/__init__.py" in read_rows(record)
        ]
        if len(found) != 1:
            names = ", ".join(str(path.relative_to(root)) for path in found) or "none"
            raise EnvironmentProblemError(root, f"expected one installed vLLM, found {names}")
        return cls(root, found[0].parent, found[0].name)

    def relative(self, path: Path) -> str:
        """The path below the environment, as the journal writes it."""
        return path.relative_to(self.root).as_posix()

    def bytecode_of(self, path: Path) -> list[Path]:
        """The cached bytecode of a source file that exists now."""
        if path.suffix != ".py":
            return []
        return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))


class EnvironmentSource:
    """The files of an installed vLLM as a source provider: contents, without git's modes."""

    whole = False

    def __init__(self, environment: Environment) -> None:
        self.name = str(environment.site / PACKAGE)
        self._site = environment.site

    def walk(self) -> Iterator[SourceFile]:
        """Yield every regular file below ``vllm/`` but bytecode and shared libraries."""
        for path in sorted((self._site / PACKAGE).rglob("*")):
            name = path.relative_to(self._site).as_posix()
            if path.suffix in (".so", ".pyc") or (path.is_dir() and not path.is_symlink()):
                continue
            if path.is_symlink() or not path.is_file() or path_problem(name) is not None:
                raise SourceError(self.name, f"{name}: expected a regular file")
            try:
                yield SourceFile(name, None, path.read_bytes())
            except OSError as error:
                raise SourceError(self.name, f"{name}: {error.strerror}") from error


def read_rows(record: Path) -> set[str]:
    """The paths that a RECORD lists."""
    return {path for path, _ in _lines(record.read_bytes())}


def edit_record(data: bytes, drop: Collection[str], rows: Mapping[str, Row]) -> bytes:
    """Return RECORD with some rows dropped and others set; every other line as it was.

    ``rows`` are set in place where they exist and appended, sorted, where they do not.
    """
    end = b"\r\n" if data.partition(b"\n")[0].endswith(b"\r") else b"\n"
    left = dict(rows)
    out: list[bytes] = []
    for path, line in _lines(data):
        if path in left:
            out.append(_line(path, left.pop(path), end))
        elif path not in drop:
            out.append(line)
    if out and not out[-1].endswith(b"\n"):
        out[-1] += end
    out += [_line(path, left[path], end) for path in sorted(left)]
    return b"".join(out)


def _lines(data: bytes) -> Iterator[tuple[str, bytes]]:
    for line in data.splitlines(keepends=True):
        fields = next(csv.reader([line.decode("utf-8", "surrogateescape")]), [])
        yield (fields[0] if fields else ""), line


def _line(path: str, row: Row, end: bytes) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow((path, row.digest, row.size))
    return text.getvalue().encode("utf-8") + end
