"""What the placement library needs of the C++ runtime, compiled from the compiler's own sources.

The ``ziglang`` package brings the sources of libc++, libc++abi and libunwind. Asked for C++, it
compiles all of them before the first link, which takes minutes per architecture; the library
needs exceptions, ``new`` and a few classes of the headers, so only those files are compiled,
with the library's own flags and with every symbol hidden. A symbol that is missing here fails
the link (``-z defs``), not the process that loads the library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LIBCXX = (
    "exception",
    "memory",
    "new",
    "new_handler",
    "new_helpers",
    "stdexcept",
    "verbose_abort",
)
_LIBCXXABI = (
    "abort_message",
    "cxa_aux_runtime",
    "cxa_default_handlers",
    "cxa_exception",
    "cxa_exception_storage",
    "cxa_guard",
    "cxa_handlers",
    "cxa_personality",
    "cxa_virtual",
    "fallback_malloc",
    "private_typeinfo",
    "stdlib_exception",
    "stdlib_new_delete",
    "stdlib_stdexcept",
    "stdlib_typeinfo",
)
_LIBUNWIND = (
    "UnwindLevel1.c",
    "UnwindRegistersRestore.S",
    "UnwindRegistersSave.S",
    "libunwind.cpp",
)

# The sources are other people's: their warnings say nothing to whoever builds this.
_CXX_FLAGS = (
    "-std=c++23",
    "-w",
    "-DNDEBUG",
    "-D_LIBCPP_BUILDING_LIBRARY",
    "-D_LIBCXXABI_BUILDING_LIBRARY",
    "-DLIBCXX_BUILDING_LIBCXXABI",
    # Without its demangler, which is larger than the library.
    "-DLIBCXXABI_NON_DEMANGLING_TERMINATE",
)
_UNWIND_FLAGS = (
    "-w",
    "-DNDEBUG",
    "-D_LIBUNWIND_HIDE_SYMBOLS",
    "-D_LIBUNWIND_IS_NATIVE_ONLY",
    "-funwind-tables",
)
_UNWIND_CXX_FLAGS = ("-std=c++17", "-fno-exceptions", "-fno-rtti")


@dataclass(frozen=True, slots=True)
class Unit:
    """One file to compile: the compiler's mode (``c++`` or ``cc``), the source, its flags."""

    mode: str
    source: str
    flags: tuple[str, ...]


def compiler_folder() -> Path | None:
    """Return where the ``ziglang`` package lies, None where it is not installed."""
    spec = importlib.util.find_spec("ziglang")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def runtime_units(lib: Path) -> Iterator[Unit]:
    """Return the runtime's files below ``lib``, the compiler's library folder."""
    libcxx, libcxxabi, libunwind = (lib / name for name in ("libcxx", "libcxxabi", "libunwind"))
    cxx = (*_CXX_FLAGS, f"-I{libcxx / 'src'}", f"-I{libcxx / 'libc'}")
    for folder, names in ((libcxx, _LIBCXX), (libcxxabi, _LIBCXXABI)):
        for name in names:
            yield Unit("c++", str(folder / "src" / f"{name}.cpp"), cxx)
    unwind = (*_UNWIND_FLAGS, f"-I{libunwind / 'include'}")
    for name in _LIBUNWIND:
        source = str(libunwind / "src" / name)
        if name.endswith(".cpp"):
            yield Unit("c++", source, (*unwind, *_UNWIND_CXX_FLAGS))
        else:
            yield Unit("cc", source, unwind)
