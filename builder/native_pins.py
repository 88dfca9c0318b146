"""The native library's files as a connector's wheel carries them, compared with their pins.

``csrc/pins.json`` (docs/build.md) says what the library is for each architecture, so that the
judge knows it without a compiler. A change of csrc, of the compiler or of its flags is a change
of the pins, made by ``python -m builder pin native``. Kernels depend on the version of ``nvcc``:
one that is not pinned builds all the same, and the build says so.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from builder.errors import BuildError
from builder.native import (
    ARCHITECTURES,
    FATBIN,
    KERNELS_MANIFEST,
    LIBRARY,
    MANIFEST,
    build_native,
    nvcc_in_use,
)
from verify import strictjson
from verify.anchor import NATIVE_PINS
from verify.errors import FormatError
from verify.natives import FOLDER, NativePins

_KERNELS = (FATBIN, KERNELS_MANIFEST)
_REPIN = "if the change is meant, pin it with `python -m builder pin native` and commit the pins"


class NativePinError(BuildError):
    """The library that was built is not the pinned one, or nothing is pinned."""


@dataclass(frozen=True, slots=True)
class Natives:
    """The files of one architecture by name; ``compiler`` made the kernels, if there are any."""

    arch: str
    files: Mapping[str, bytes]
    compiler: str | None

    def members(self) -> dict[str, bytes]:
        """Return the files by their path in the connector's wheel."""
        return {f"{FOLDER}/{self.arch}/{name}": data for name, data in self.files.items()}

    def library(self) -> dict[str, str]:
        """Return the SHA-256 of the library and its manifest by name."""
        return {name: _sha256(self.files[name]) for name in (LIBRARY, MANIFEST)}

    def kernels(self) -> dict[str, dict[str, str]]:
        """Return the SHA-256 of kernels and their manifest by name, by compiler."""
        if self.compiler is None:
            return {}
        return {self.compiler: {name: _sha256(self.files[name]) for name in _KERNELS}}


def read_native_pins(checkout: Path) -> NativePins | None:
    """Return the pins; None when this checkout has no native sources at all.

    Raises:
        NativePinError: when the sources are there and the pins are not, or cannot be read.
    """
    path = checkout / NATIVE_PINS
    if not path.parent.is_dir():
        return None
    try:
        return NativePins.parse(path.read_bytes(), NATIVE_PINS)
    except FileNotFoundError:
        raise NativePinError(
            f"{NATIVE_PINS}: the file is missing; restore it with git, or make it with "
            "`python -m builder pin native`"
        ) from None
    except (OSError, FormatError) as error:
        raise NativePinError(
            f"{NATIVE_PINS}: expected the native library's pins: {error}; restore them with git"
        ) from error


def build_pinned(pins: NativePins, arch: str) -> Natives:
    """Build the library for ``arch``; it is the pinned one.

    Raises:
        NativePinError: naming the file, both digests, and how to pin.
        NativeBuildError: when it cannot be built.
    """
    natives = make_natives(arch)
    expect_pinned(pins, natives)
    return natives


def expect_pinned(pins: NativePins, natives: Natives) -> None:
    """Compare what was built with the pins; kernels only where their compiler is pinned.

    Raises:
        NativePinError: naming the file, both digests, and how to pin.
    """
    wanted = [(pins.libraries.get(natives.arch, {}), natives.library())]
    wanted += [
        (pins.kernels[compiler], files)
        for compiler, files in natives.kernels().items()
        if compiler in pins.kernels
    ]
    for pinned, built in wanted:
        for name, found in built.items():
            if found != pinned.get(name):
                raise NativePinError(
                    f"csrc: {name} for {natives.arch}: expected SHA-256 "
                    f"{pinned.get(name, 'of a pinned file')} as in {NATIVE_PINS}, built {found}: "
                    "csrc, the compiler (requirements/tools.lock) or its flags are not those of "
                    f"the pins; {_REPIN}"
                )


def make_natives(arch: str) -> Natives:
    """Build the library for ``arch``, and kernels where their compiler is.

    Raises:
        NativeBuildError: when it cannot be built.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = {path.name: path.read_bytes() for path in build_native(arch, Path(scratch))}
    return Natives(arch, files, nvcc_in_use() if FATBIN in files else None)


def pin_natives(earlier: NativePins | None) -> bytes:
    """Build everything and return the pins of it.

    Kernels of compilers that are not here are kept as they were pinned: they cannot be built,
    and whoever changes the kernels' sources on such a machine must have that compiler.

    Raises:
        NativeBuildError: when something cannot be built.
    """
    built = [make_natives(arch) for arch in ARCHITECTURES]
    pins = NativePins(
        {each.arch: each.library() for each in built},
        {**(earlier.kernels if earlier is not None else {}), **built[0].kernels()},
    )
    return strictjson.dump(pins.json())


def declare(pins: NativePins, natives: Natives) -> NativePins:
    """Return ``pins`` with the kernels of this build, if their compiler is not pinned."""
    return replace(pins, kernels={**natives.kernels(), **pins.kernels})


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
