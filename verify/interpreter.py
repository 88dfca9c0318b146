"""Which vLLM an interpreter would import, found without starting it.

What CPython's ``getpath`` and ``site`` modules do is followed here by reading the files that
they read:

1. the executable and the ``pyvenv.cfg`` beside it or one directory up;
2. the version: from ``pyvenv.cfg``, the executable's name, or the one standard library;
3. the prefixes: the virtual environment's, and its base's when it includes system packages;
4. path entries in import order: the script's directory, ``PYTHONPATH``, the standard library,
   the environment's site directory, the user's, the base's, each followed by the entries
   that its ``.pth`` files add;
5. code that runs at start: lines of ``.pth`` files that begin with ``import``,
   ``sitecustomize`` and ``usercustomize``. Editable finders of setuptools are read, not run.

Nothing is imported and nothing runs. Where the answer depends on something that cannot be
read, it is an :attr:`Environment.unknowns`, never a guess.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verify.digest import ReadError
from verify.errors import ConfigError
from verify.filesystem import HOST, FileSystem, exists, read_file
from verify.startup import Startup, StartupFile, read_pth

_LIBRARY = re.compile(r"python(3\.[0-9]{1,3})\Z")
_VERSION = re.compile(r"(3\.[0-9]{1,3})(?:\.|\Z)")
_INIT = re.compile(r"__init__\.(?:py|pyc|.*\.so|so)\Z")
_SITE_NAMES = ("site-packages", "dist-packages")
_CUSTOMIZE = ("sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class PathEntry:
    """One entry of ``sys.path``, and why it is there."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that provides a module: ``kind`` is package, namespace, module, zip or editable."""

    entry: PathEntry
    kind: str
    path: Path


@dataclass(slots=True)
class Environment:
    """An interpreter's import path, as far as files tell it."""

    prefix: Path
    version: str
    files: FileSystem = HOST
    entries: list[PathEntry] = field(default_factory=list)
    sites: list[Path] = field(default_factory=list)
    startup: list[Startup] = field(default_factory=list)
    unknowns: list[str] = field(default_factory=list)
    editable: dict[str, Path] = field(default_factory=dict)

    def candidates(self, name: str) -> list[Candidate]:
        """Return every place that provides the top-level module ``name``, in import order.

        A directory without ``__init__`` counts only when nothing else provides the name.
        """
        found: list[Candidate] = []
        portions: list[Candidate] = []
        for entry in self.entries:
            candidate = _provides(self.files, entry, name)
            if candidate is not None:
                (portions if candidate.kind == "namespace" else found).append(candidate)
        if name in self.editable:
            where = self.editable[name]
            entry = PathEntry(where.parent, "an editable finder")
            found.append(Candidate(entry, "editable", where))
        return found + portions


def of_python(python: Path, environ: Mapping[str, str], files: FileSystem = HOST) -> Environment:
    """Return the environment of the interpreter at ``python``, started with ``environ``.

    Raises:
        ConfigError: when there is no such file, or its version cannot be told.
    """
    # (1)
    if not files.is_file(python):
        raise ConfigError(f"{python}: expected an interpreter, found no file")
    folder = Path(os.path.abspath(python)).parent  # noqa: PTH100 - links must stay
    for place in (folder, folder.parent):
        if files.is_file(place / "pyvenv.cfg"):
            return _virtual(files, folder.parent, place / "pyvenv.cfg", environ)
    real = files.real(python)
    # (2)
    prefix = real.parent.parent
    match = _LIBRARY.match(real.name)
    version = match[1] if match is not None else _only_version(files, prefix)
    env = Environment(prefix, version, files)
    # (4)
    _start(env, folder, environ)
    _standard_library(env, prefix)
    _user_site(env, environ)
    for site in _site_folders(files, prefix, version):
        _add_site(env, site, "a site directory")
    _customize(env, user=True)
    return env


def of_folder(folder: Path, files: FileSystem = HOST) -> Environment:
    """Return the environment below ``folder``: a virtual environment, or a prefix like /usr.

    A folder that is itself a site directory stands for what is installed in it.

    Variables of the process that will run are not known and not taken into account.

    Raises:
        ConfigError: when there is neither, or the version cannot be told.
    """
    if not files.is_dir(folder):
        raise ConfigError(f"{folder}: expected a directory, found none")
    root = Path(os.path.abspath(folder))  # noqa: PTH100 - links must stay
    config = root / "pyvenv.cfg"
    if files.is_file(config):
        return _virtual(files, root, config, {"PYTHONNOUSERSITE": "1"})
    if root.name in _SITE_NAMES:
        return _site_alone(files, root)
    env = Environment(root, _only_version(files, root), files)
    _start(env, root / "bin", {})
    _standard_library(env, root)
    for site in _site_folders(files, root, env.version):
        _add_site(env, site, "a site directory")
    _customize(env, user=False)
    return env


def _site_alone(files: FileSystem, site: Path) -> Environment:
    """Return what one site directory provides; others of its interpreter are not looked at."""
    match = _LIBRARY.match(site.parent.name)
    prefix = site.parent.parent.parent
    env = Environment(prefix, match[1] if match is not None else "3", files)
    _start(env, prefix / "bin", {})
    _add_site(env, site, "a site directory")
    _customize(env, user=False)
    return env


def _virtual(
    files: FileSystem, prefix: Path, config: Path, environ: Mapping[str, str]
) -> Environment:
    values = _pyvenv(files, config)
    # (2)
    match = _VERSION.match(values.get("version", values.get("version_info", "")))
    version = match[1] if match is not None else _only_version(files, prefix)
    # (3)
    system = values.get("include-system-site-packages", "").lower() == "true"
    home = values.get("home")
    base = Path(home).parent if home else None
    env = Environment(prefix, version, files)
    # (4)
    _start(env, prefix / "bin", environ)
    if base is None:
        env.unknowns.append(f"{config} names no home: the standard library is unknown")
    else:
        _standard_library(env, base)
    for site in _site_folders(files, prefix, version, debian=False):
        _add_site(env, site, "the environment's site directory")
    if system:
        _user_site(env, environ)
        if base is not None:
            for site in _site_folders(files, base, version):
                _add_site(env, site, "a site directory of the base interpreter")
    _customize(env, user=system)
    return env


def _pyvenv(files: FileSystem, config: Path) -> dict[str, str]:
    try:
        lines = read_file(files, config, str(config)).decode("utf-8").splitlines()
    except (ReadError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config}: cannot be read: {error}") from error
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _only_version(files: FileSystem, prefix: Path) -> str:
    """Return the version of the one standard library or site directory below ``prefix``."""
    found = {
        match[1]
        for lib in ("lib", "lib64", "local/lib")
        for child in files.children(prefix / lib)
        if (match := _LIBRARY.match(child.name)) is not None and files.is_dir(child)
    }
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"{prefix}: expected one lib/python3.X, found {names}; "
            "name the interpreter with `verify env PYTHON`"
        )
    return found.pop()


def _start(env: Environment, scripts: Path, environ: Mapping[str, str]) -> None:
    # (4) console scripts put their own directory first
    env.entries.append(PathEntry(scripts, "the directory of scripts"))
    for name in ("PYTHONHOME", "PYTHONPLATLIBDIR"):
        if environ.get(name):
            env.unknowns.append(f"{name} is set: the interpreter looks elsewhere for its library")
    for part in environ.get("PYTHONPATH", "").split(os.pathsep):
        if part:
            env.entries.append(PathEntry(Path(part), "PYTHONPATH"))


def _standard_library(env: Environment, base: Path) -> None:
    digits = env.version.replace(".", "")
    for lib in ("lib", "lib64"):
        for part in (f"python{digits}.zip", f"python{env.version}"):
            env.entries.append(PathEntry(base / lib / part, "the standard library"))
        dynamic = base / lib / f"python{env.version}" / "lib-dynload"
        env.entries.append(PathEntry(dynamic, "the standard library"))


def _user_site(env: Environment, environ: Mapping[str, str]) -> None:
    if environ.get("PYTHONNOUSERSITE"):
        return
    base = environ.get("PYTHONUSERBASE")
    home = environ.get("HOME")
    if base or home:
        root = Path(base) if base else Path(str(home)) / ".local"
        _add_site(env, root / "lib" / f"python{env.version}" / "site-packages", "the user's site")


def _site_folders(
    files: FileSystem, prefix: Path, version: str, *, debian: bool = True
) -> Iterator[Path]:
    python = f"python{version}"
    if debian:
        yield prefix / "local" / "lib" / python / "dist-packages"
        if prefix == Path("/usr"):
            yield Path("/usr/local/lib") / python / "dist-packages"
    yield prefix / "lib" / python / "site-packages"
    lib64 = prefix / "lib64"
    if not files.is_link(lib64):
        yield lib64 / python / "site-packages"
    if debian:
        yield prefix / "lib" / "python3" / "dist-packages"
        yield prefix / "lib" / python / "dist-packages"


def _add_site(env: Environment, site: Path, why: str) -> None:
    """Add a site directory and what its ``.pth`` files add, as ``site.addsitedir`` does."""
    if not env.files.is_dir(site) or site in env.sites:
        return
    env.sites.append(site)
    env.entries.append(PathEntry(site, why))
    # (5)
    for child in sorted(env.files.children(site), key=lambda child: child.name):
        if child.name.endswith(".pth"):
            _take(env, site, read_pth(env.files, child))
        elif child.name.endswith(".start"):
            what = "an entry point file of Python 3.15"
            env.startup.append(Startup.whole_file(env.files, child, what))


def _take(env: Environment, site: Path, found: StartupFile) -> None:
    env.startup.extend(found.startup)
    env.unknowns.extend(found.unknowns)
    for name, place in found.editable.items():
        env.editable.setdefault(name, Path(place))
    known = {entry.path for entry in env.entries}
    for line in found.paths:
        path = Path(os.path.abspath(site / line))  # noqa: PTH100 - links must stay
        if path not in known and exists(env.files, path):
            known.add(path)
            env.entries.append(PathEntry(path, f"a path line of {found.file.name}"))


def _customize(env: Environment, *, user: bool) -> None:
    # (5)
    for name in _CUSTOMIZE if user else _CUSTOMIZE[:1]:
        for entry in env.entries:
            candidate = _provides(env.files, entry, name)
            if candidate is None or candidate.kind == "namespace":
                continue
            file = candidate.path
            if candidate.kind == "package":
                file = file / "__init__.py"
            env.startup.append(Startup.whole_file(env.files, file, f"the {name} module"))
            break


def _provides(files: FileSystem, entry: PathEntry, name: str) -> Candidate | None:
    """Return what ``entry`` gives for ``import name``, in the order of CPython's finder."""
    path = entry.path
    if files.is_file(path):
        return Candidate(entry, "zip", path) if _zip_has(files, path, name) else None
    package = path / name
    portion = None
    if files.is_dir(package):
        if any(_INIT.match(child.name) for child in files.children(package)):
            return Candidate(entry, "package", package)
        portion = Candidate(entry, "namespace", package)
    module = re.compile(re.escape(name) + r"\.(?:py|pyc|so|abi3\.so|cpython-.*\.so)\Z")
    for child in sorted(files.children(path), key=lambda child: child.name):
        if module.match(child.name):
            return Candidate(entry, "module", child)
    return portion


def _zip_has(files: FileSystem, file: Path, name: str) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(read_file(files, files.real(file), str(file)))) as archive:
            return any(re.match(rf"{re.escape(name)}[/.]", each) for each in archive.namelist())
    except (zipfile.BadZipFile, ReadError, OSError, ValueError, NotImplementedError):
        return False
