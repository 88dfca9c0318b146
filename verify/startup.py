"""Code that runs when an interpreter starts, read from ``.pth`` files and never run.

A line of a ``.pth`` file is a comment, a path, or, when it begins with ``import``, code. Two
kinds of code are understood: setuptools' distutils shim, and its finders of editable
installs, whose table of packages is read as a literal.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from verify.digest import ReadError
from verify.filesystem import FileSystem, read_file

_FINDER = re.compile(r"import (__editable___\w+_finder); ?\1\.install\(\)\Z")
_KNOWN = {
    "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') == "
    "'local'; enabled and __import__('_distutils_hack').add_shim();": "setuptools' distutils shim",
    "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'stdlib') == "
    "'local'; enabled and __import__('_distutils_hack').add_shim();": "setuptools' distutils shim",
    "import _virtualenv": "virtualenv's distutils shim",
}
_KNOWN_FILES = {
    "43d81125d92376b1a69d53a71126a041cc9a18d8080e92dea0a2ae23be138b1e": "Debian's crash reporter",
}


@dataclass(frozen=True, slots=True)
class Startup:
    """A piece of code that runs at start: what it is, and the digest that accepts it.

    ``known`` says what it does when its form is understood; None when it could do anything.
    """

    file: Path
    what: str
    sha256: str | None
    known: str | None = None

    @classmethod
    def whole_file(cls, files: FileSystem, file: Path, what: str) -> Startup:
        """Describe a file that runs as a whole; its digest is None when it cannot be read."""
        try:
            sha256 = hashlib.sha256(_read(files, file)).hexdigest()
        except ReadError:
            return cls(file, what, None)
        return cls(file, what, sha256, _KNOWN_FILES.get(sha256))


@dataclass(slots=True)
class StartupFile:
    """What one ``.pth`` file does."""

    file: Path
    paths: list[str] = field(default_factory=list)
    startup: list[Startup] = field(default_factory=list)
    editable: dict[str, str] = field(default_factory=dict)
    unknowns: list[str] = field(default_factory=list)


def read_pth(files: FileSystem, file: Path) -> StartupFile:
    """Read a ``.pth`` file as ``site.addpackage`` does."""
    found = StartupFile(file)
    if files.is_dir(file):
        return found  # Python ignores it, too
    try:
        data = _read(files, file)
        text = data.decode("utf-8-sig")
    except (ReadError, UnicodeDecodeError):
        found.unknowns.append(f"{file} cannot be read as UTF-8: what it adds is unknown")
        return found
    sha256 = hashlib.sha256(data).hexdigest()
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(("import ", "import\t")):
            _take_code(files, found, line.strip(), sha256)
        elif "\0" in line:
            found.unknowns.append(f"{file} has a line that is no path")
        else:
            found.paths.append(line.rstrip())
    return found


def _take_code(files: FileSystem, found: StartupFile, line: str, sha256: str) -> None:
    what = f"the line `{line[:80]}`"
    finder = _FINDER.match(line)
    known = _KNOWN.get(line)
    if finder is not None:
        module = found.file.parent / f"{finder[1]}.py"
        mapping = _mapping(files, module)
        if mapping is not None:
            found.editable.update(mapping)
            known = f"setuptools' editable finder for {', '.join(sorted(mapping)) or 'nothing'}"
    found.startup.append(Startup(found.file, what, sha256, known))


def _read(files: FileSystem, file: Path) -> bytes:
    # Python follows links to what it runs: distributions keep such files below /etc
    return read_file(files, files.real(file), str(file))


def _mapping(files: FileSystem, module: Path) -> dict[str, str] | None:
    """Return the ``MAPPING`` of an editable finder, or None when it is not a plain literal."""
    try:
        tree = ast.parse(_read(files, module))
    except (ReadError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for statement in tree.body:
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "MAPPING":
            value = statement.value if isinstance(statement, ast.AnnAssign) else None
            try:
                mapping = ast.literal_eval(value) if value is not None else None
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return None
            if isinstance(mapping, dict) and all(
                isinstance(text, str) for pair in mapping.items() for text in pair
            ):
                return mapping
    return None
