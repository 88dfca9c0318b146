"""The release from a source distribution: the whole tree, with git's modes.

An sdist of vLLM holds every file of its commit; docs/build.md names the generated files
that it has besides. Members are read in memory; nothing is unpacked.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from builder.source import SourceError, SourceFile
from verify.manifest import mode_of, path_problem

_MAX_MEMBER = 256 << 20
_CHUNK = 1 << 20


class SdistSource:
    """The files of one ``.tar.gz``, below its single top folder."""

    whole = True

    def __init__(self, path: Path, project: str, version: str) -> None:
        self.name = path.name
        self._path = path
        self._top = f"{project.replace('-', '_')}-{version}"

    def walk(self) -> Iterator[SourceFile]:
        """Yield every regular file; refuse everything that is neither file nor folder."""
        try:
            with tarfile.open(self._path, "r:gz") as archive:
                for member in archive:
                    file = self._file(archive, member)
                    if file is not None:
                        yield file
                self._check_end(archive)
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            raise SourceError(
                self.name, f"expected a readable .tar.gz: {error}; download it again"
            ) from error

    def _check_end(self, archive: tarfile.TarFile) -> None:
        """Read to the end: the reader stops at the end mark, before gzip's checksum."""
        stream = archive.fileobj
        while stream is not None and (rest := stream.read(_CHUNK)):
            if rest.strip(b"\0"):
                raise SourceError(self.name, "expected nothing after the archive's end")

    def _file(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> SourceFile | None:
        top, _, path = member.name.partition("/")
        if top != self._top:
            raise SourceError(
                self.name,
                f"expected everything below {self._top}/, found {member.name!r}: "
                "this is another project or version",
            )
        if member.isdir():
            return None
        problem = path_problem(path)
        if problem is not None or not member.isreg():
            kind = problem or "expected files and folders only, found a link or a device"
            raise SourceError(self.name, f"{member.name!r}: {kind}")
        if member.size > _MAX_MEMBER:
            raise SourceError(self.name, f"{path}: expected a source file, found {member.size} B")
        stream = archive.extractfile(member)
        if stream is None:
            raise SourceError(self.name, f"{path}: expected a readable file")
        with stream:
            return SourceFile(path, mode_of(member.mode), stream.read())
