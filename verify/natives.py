"""``csrc/pins.json``: the files of the native library that a connector's wheel carries.

Schema ``sparkcache.native/v1`` (docs/build.md). Per architecture the library and its manifest;
apart from them, per version of the kernels' compiler, the kernels and theirs, since these come
only from machines that have that compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verify import strictjson
from verify.manifest import path_problem
from verify.strictjson import Json, Record

NATIVE_SCHEMA = "sparkcache.native/v1"
FOLDER = "sparkcache_connector/native"
"""In the wheel; below it a folder per architecture."""

Files = Mapping[str, str]
"""SHA-256 by file name."""


@dataclass(frozen=True, slots=True)
class NativePins:
    """The pinned files: ``libraries`` by architecture, ``kernels`` by compiler."""

    libraries: Mapping[str, Files]
    kernels: Mapping[str, Files]

    @classmethod
    def parse(cls, data: bytes, what: str) -> NativePins:
        """Read the file; ``what`` names it in errors.

        Raises:
            FormatError: for anything that the schema does not allow.
        """
        return cls.take(Record(strictjson.parse(data, what), what))

    @classmethod
    def take(cls, top: Record) -> NativePins:
        """Read the object, all of it.

        Raises:
            FormatError: for anything that the schema does not allow.
        """
        top.expect("schema", NATIVE_SCHEMA)
        value = cls(_files(top.record("libraries")), _files(top.record("kernels")))
        top.done()
        return value

    def json(self) -> Json:
        """Return what :meth:`take` reads."""
        return {
            "schema": NATIVE_SCHEMA,
            "libraries": {arch: dict(files) for arch, files in self.libraries.items()},
            "kernels": {compiler: dict(files) for compiler, files in self.kernels.items()},
        }

    def accepts_kernels(self, files: Files) -> bool:
        """Whether ``files`` are, as a whole, those of one pinned compiler."""
        return any(files == pinned for pinned in self.kernels.values())

    def kernel_names(self) -> frozenset[str]:
        """Return the names that kernels' files have."""
        return frozenset(name for files in self.kernels.values() for name in files)


def _files(groups: Record) -> Mapping[str, Files]:
    def each() -> Iterator[tuple[str, Files]]:
        for group in groups:
            files = groups.record(group)
            for name in files:
                if "/" in name or path_problem(name) is not None:
                    files.fail(name, "expected the name of a file")
            yield group, {name: files.sha256(name) for name in files}
            files.done()

    found = dict(each())
    groups.done()
    return found
