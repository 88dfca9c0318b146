"""Makes root directories for base images: this machine's Python, or Debian's by debootstrap.

The small one holds what a container build and the judge need and nothing else: an interpreter
with its standard library below /usr/local, a shell, ``rm``, and the libraries that these load.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.unit.verify.small_image import Entry, folder

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"usr/local/lib/{PYTHON}/site-packages"
TOOLS = ("sh", "rm")
MIRROR = "http://deb.debian.org/debian"
_UNUSED = re.compile(
    r"(tests?|idlelib|ensurepip|tkinter|turtledemo|lib2to3|pydoc_data|config-.*|(site|dist)-packages"
    r"|__pycache__|.*\.a|_(tkinter|sqlite3|decimal|test|xx|ssl|hashlib|ctypes|curses|dbm|gdbm|codecs_)"
    r".*\.so|readline\..*)\Z"
)


def small() -> list[Entry]:
    """The entries of the small root's layer, without a vLLM."""
    interpreter = Path(sys.base_prefix, "bin", PYTHON).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    found = {f"usr/local/bin/{PYTHON}": interpreter}
    for name in TOOLS:
        found[f"bin/{name}"] = Path(shutil.which(name) or f"/bin/{name}").resolve()
    for file in _modules(library):
        found[f"usr/local/lib/{PYTHON}/{file.relative_to(library)}"] = file
    programs = [file for path, file in found.items() if "/bin/" in f"/{path}"]
    loaded = [file for file in found.values() if file.suffix == ".so"]
    for file in _libraries([*programs, *loaded]):
        found[str(file)[1:]] = file
    entries = [
        Entry(path, file.read_bytes(), 0o755 if os.access(file, os.X_OK) else 0o644)
        for path, file in sorted(found.items())
    ]
    python3 = Entry("usr/local/bin/python3", kind=tarfile.SYMTYPE, target=PYTHON, mode=0o777)
    return [folder("tmp"), folder("run"), folder("etc"), *entries, python3]


def debian(place: Path) -> None:
    """Make Debian's minimal root with Python in ``place``: minutes, and some 60 MB to load."""
    command = ["debootstrap", "--variant=minbase", "--include=python3", "bookworm"]
    subprocess.run([*command, str(place), MIRROR], check=True, capture_output=True)


def _modules(library: Path) -> Iterator[Path]:
    for base, folders, names in os.walk(library):
        folders[:] = sorted(name for name in folders if not _UNUSED.match(name))
        yield from (Path(base, name) for name in sorted(names) if not _UNUSED.match(name))


def _libraries(files: Iterable[Path]) -> set[Path]:
    """Every shared library that the files load, as the loader finds them, and the loader."""
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False)
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", done.stdout)}
