"""The packaging rule ``spark-local-version/v1``: how a repacked wheel tells its own version.

Pure functions over bytes and names; docs/build.md describes the rule. Two members say the
version and are stamped here; the dist-info directory and the wheel's file name carry it and
are renamed. Tags are never touched: they describe native files, which stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from builder.errors import BuildError

RULE = "spark-local-version/v1"
VERSION_MODULE = "vllm/_version.py"

_WHEEL_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.!+]+)"
    r"(?:-(?P<build>[0-9][A-Za-z0-9_.]*))?"
    r"-(?P<tags>[A-Za-z0-9_.]+-[A-Za-z0-9_.]+-[A-Za-z0-9_.]+)\.whl"
)


class VersionRuleError(BuildError):
    """A member or a name does not have the shape that the packaging rule rewrites.

    Attributes:
        path: the member or file name.
        expected: what the rule looks for.
        found: what is there.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        self.path = path
        self.expected = expected
        self.found = found
        super().__init__(
            f"{path}: the packaging rule {RULE} expects {expected}, found {found}; "
            "this base needs a packaging rule of its own before it can be repacked"
        )


@dataclass(frozen=True, slots=True)
class WheelName:
    """The parts of a wheel's file name (Binary distribution format, "File name convention")."""

    name: str
    version: str
    build: str | None
    tags: str

    @classmethod
    def parse(cls, filename: str) -> WheelName:
        """Split ``filename``.

        Raises:
            VersionRuleError: when it is not ``name-version[-build]-python-abi-platform.whl``.
        """
        match = _WHEEL_NAME.fullmatch(filename)
        if match is None:
            raise VersionRuleError(
                filename, "the name of a wheel, name-version[-build]-python-abi-platform.whl", "it"
            )
        return cls(match["name"], match["version"], match["build"], match["tags"])

    def with_version(self, version: str) -> WheelName:
        """Return the same name with another version."""
        return WheelName(self.name, version, self.build, self.tags)

    @property
    def filename(self) -> str:
        """The whole file name."""
        build = f"-{self.build}" if self.build is not None else ""
        return f"{self.name}-{self.version}{build}-{self.tags}.whl"

    @property
    def dist_info(self) -> str:
        """The name of the wheel's metadata directory."""
        return f"{self.name}-{self.version}.dist-info"


def local_version(version: str, revision: int) -> str:
    """Return ``version`` with our local part: ``+spark.N``, or ``.spark.N`` after a local part."""
    return f"{version}{'.' if '+' in version else '+'}spark.{revision}"


def stamp_version_module(data: bytes, old: str, new: str) -> bytes:
    """Return ``vllm/_version.py`` with its version string changed from ``old`` to ``new``.

    Only the assignment ``__version__ = version = '…'`` changes. The version tuple keeps the
    release's numbers, which are still true and which vLLM compares; the commit id stays.

    Raises:
        VersionRuleError: when that line is not there exactly once.
    """
    return _replace_line(
        data,
        f"__version__ = version = '{old}'".encode(),
        f"__version__ = version = '{new}'".encode(),
        VERSION_MODULE,
    )


def stamp_metadata(data: bytes, old: str, new: str, path: str = "METADATA") -> bytes:
    """Return ``METADATA`` with the ``Version`` header changed from ``old`` to ``new``.

    Raises:
        VersionRuleError: when the headers do not hold that line exactly once.
    """
    header, blank, body = data.partition(b"\n\n")
    stamped = _replace_line(header, f"Version: {old}".encode(), f"Version: {new}".encode(), path)
    return stamped + blank + body


def _replace_line(data: bytes, old: bytes, new: bytes, path: str) -> bytes:
    lines = data.split(b"\n")
    places = [number for number, line in enumerate(lines) if line == old]
    if len(places) != 1:
        raise VersionRuleError(path, f"the line {old.decode()!r} once", f"it {len(places)} times")
    lines[places[0]] = new
    return b"\n".join(lines)
