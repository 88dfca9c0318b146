"""Makes the connector's wheel from the checkout, the same bytes wherever it is made.

hatchling turns ``pyproject.toml`` into metadata, so that this wheel says what
``pip install .`` would say; the files are the source as :func:`read_source` sees it, plus the
generated ones that a build adds (the contract, the native library), and the container is
ours. The source is bound to the wheel by its git tree id and by the deployable-source SHA-256
(docs/build.md).
"""

from __future__ import annotations

import hashlib
import re
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from builder.errors import BuildError
from builder.wheel_record import Row, dump_record
from builder.wheel_version import WheelName
from builder.wheel_write import ArchiveWriter, Sink
from verify.gitobj import EXECUTABLE, File, blob_id, tree_id
from verify.manifest import is_deployable, mode_of, path_problem, source_sha256

PACKAGE = "sparkcache_connector"
_INIT = f"{PACKAGE}/__init__.py"
_VERSION = re.compile(rb'^__version__ = "([0-9A-Za-z.+]+)"$', re.MULTILINE)
_METADATA_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
_WHEEL = """\
Wheel-Version: 1.0
Generator: sparkcache
Root-Is-Purelib: {pure}
Tag: {tag}
"""


class ConnectorError(BuildError):
    """The connector's source is not what can be shipped.

    Attributes:
        path: the file, relative to the checkout.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}; `git status` shows what differs from the commit")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the connector's source: git's mode, and the bytes."""

    mode: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ConnectorSource:
    """The source of ``sparkcache_connector/``, by path relative to the checkout."""

    files: Mapping[str, SourceFile]

    @property
    def version(self) -> str:
        """The version that the package tells.

        Raises:
            ConnectorError: when it does not tell one.
        """
        match = _VERSION.search(self.files[_INIT].data)
        if match is None:
            raise ConnectorError(_INIT, 'expected a line `__version__ = "…"`')
        return match[1].decode("ascii")

    @property
    def git_tree(self) -> str:
        """The git id of the package's directory."""
        prefix = f"{PACKAGE}/"
        return tree_id(
            File(path.removeprefix(prefix), file.mode, blob_id(file.data))
            for path, file in self.files.items()
        )

    @property
    def sha256(self) -> str:
        """The deployable-source SHA-256."""
        return source_sha256(
            {path: hashlib.sha256(file.data).hexdigest() for path, file in self.files.items()}
        )


@dataclass(frozen=True, slots=True)
class ConnectorWheel:
    """A connector wheel that is ready to be written."""

    filename: str
    version: str
    members: Mapping[str, SourceFile]

    def write(self, sink: Sink) -> None:
        """Write the archive to ``sink``."""
        writer = ArchiveWriter(sink)
        record = f"{WheelName.parse(self.filename).dist_info}/RECORD"
        rows: list[tuple[str, Row]] = []
        for path in sorted(self.members, key=_order):
            file = self.members[path]
            writer.store(path, file.data, executable=file.mode == EXECUTABLE)
            rows.append((path, Row.of(file.data)))
        writer.store(record, dump_record(rows, record))
        writer.finish()


def read_source(checkout: Path) -> ConnectorSource:
    """Read the connector's source: every regular file but bytecode.

    Raises:
        ConnectorError: for a symbolic link, a device, or a name that no wheel can carry.
    """
    files: dict[str, SourceFile] = {}
    for file in (checkout / PACKAGE).rglob("*"):
        path = file.relative_to(checkout).as_posix()
        mode = file.lstat().st_mode
        if stat.S_ISDIR(mode) or not is_deployable(path):
            continue
        if not stat.S_ISREG(mode):
            raise ConnectorError(path, "expected a regular file, found a link or a device")
        problem = path_problem(path)
        if problem is not None:
            raise ConnectorError(path, problem)
        files[path] = SourceFile(mode_of(mode), file.read_bytes())
    if _INIT not in files:
        raise ConnectorError(_INIT, "the file is missing")
    return ConnectorSource(files)


def connector_wheel(
    checkout: Path,
    source: ConnectorSource,
    generated: Mapping[str, bytes],
    *,
    architecture: str | None = None,
) -> ConnectorWheel:
    """Return the wheel of ``source`` with the ``generated`` files.

    Args:
        checkout: where ``pyproject.toml`` and what it names lie.
        source: as of :func:`read_source`.
        generated: files that the build adds, by path in the wheel.
        architecture: of the native library among them (``x86_64``, ``aarch64``); None when
            there is none, and the wheel runs anywhere.

    Raises:
        ConnectorError: when a generated file would replace a source file, or hatchling does
            not ship exactly the source.
    """
    for path in sorted(generated.keys() & source.files.keys()):
        raise ConnectorError(path, "the build generates this file, the source has it too")
    name, metadata = _metadata(checkout, source)
    tag = f"py3-none-manylinux_2_28_{architecture}" if architecture else "py3-none-any"
    wheel = WheelName(name.name, name.version, None, tag)
    pure = "false" if architecture else "true"
    extra = {path: SourceFile("100644", data) for path, data in generated.items()}
    members = {
        **source.files,
        **extra,
        **{f"{wheel.dist_info}/{path}": file for path, file in metadata.items()},
        f"{wheel.dist_info}/WHEEL": SourceFile(
            "100644", _WHEEL.format(pure=pure, tag=tag).encode()
        ),
    }
    return ConnectorWheel(wheel.filename, name.version, members)


def _metadata(checkout: Path, source: ConnectorSource) -> tuple[WheelName, dict[str, SourceFile]]:
    """Let hatchling build the wheel of a copy of the source, and return its dist-info.

    A copy, because hatchling asks version control what to leave out, and a build must not
    depend on what lies around in a checkout.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "source"
        for path, file in source.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(file.data)
        for path in _METADATA_INPUTS:
            if not (checkout / path).is_file():
                raise ConnectorError(path, "the file is missing, the connector's metadata need it")
            (root / path).write_bytes((checkout / path).read_bytes())
        built = Path(next(WheelBuilder(str(root)).build(directory=scratch, versions=["standard"])))
        name = WheelName.parse(built.name)
        with zipfile.ZipFile(built) as archive:
            contents = {path: archive.read(path) for path in archive.namelist()}
    info = f"{name.dist_info}/"
    package = {path: data for path, data in contents.items() if not path.startswith(info)}
    for path in sorted(package.keys() ^ source.files.keys()):
        raise ConnectorError(path, "the source and hatchling disagree whether to ship it")
    metadata = {
        path.removeprefix(info): SourceFile("100644", data)
        for path, data in contents.items()
        if path.startswith(info)
    }
    for rewritten in ("RECORD", "WHEEL"):
        del metadata[rewritten]
    return name, metadata


def _order(path: str) -> tuple[bool, bytes]:
    return ".dist-info/" in path, path.encode("utf-8")
