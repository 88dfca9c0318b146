"""The release from a wheel: ``vllm/`` only, contents without git's modes.

Wheel builders normalise permission bits, so modes come from the pinned manifest. Members
that no release holds (native libraries, vendored packages) are yielded too; the base
manifest names them.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from builder.source import SourceError, SourceFile
from verify.manifest import path_problem

_MAX_SOURCE = 256 << 20


class WheelSource:
    """The members of one wheel below ``vllm/`` that are not native libraries."""

    whole = False

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path

    def walk(self) -> Iterator[SourceFile]:
        """Yield every member below ``vllm/`` except shared libraries, which are no source."""
        seen: set[str] = set()
        try:
            with zipfile.ZipFile(self._path) as archive:
                for info in archive.infolist():
                    path = info.filename
                    if not path.startswith("vllm/") or info.is_dir() or path.endswith(".so"):
                        continue
                    problem = path_problem(path)
                    if problem is None and path in seen:
                        problem = "expected each member once, found it again"
                    if problem is None and info.file_size > _MAX_SOURCE:
                        problem = f"expected a source file, found {info.file_size} bytes"
                    if problem is not None:
                        raise SourceError(self.name, f"{path!r}: {problem}")
                    seen.add(path)
                    yield SourceFile(path, None, archive.read(info))
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
            raise SourceError(
                self.name, f"expected a readable wheel: {error}; download it again"
            ) from error
