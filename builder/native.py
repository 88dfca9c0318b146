"""Builds the native placement library: the same bytes wherever and whenever it is built.

One function, :func:`build_native`. The compiler is the ``ziglang`` package (clang with the
headers and stubs of old glibc releases), so one machine builds both architectures and the
result loads from glibc 2.28 on; :mod:`builder.native_runtime` says what of the C++ runtime goes
in. Kernels are added where ``nvcc`` is found, with a manifest of their own: the library and its
manifest are the same files with and without.

    python -m builder.native x86_64 OUT
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builder.errors import BuildError
from builder.native_runtime import Unit, compiler_folder, runtime_units

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY = "libsparkcache_placement.so"
FATBIN = "kernels.fatbin"
MANIFEST = "placement.json"
KERNELS_MANIFEST = "kernels.json"
ABI = 1
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")

CUDA_ARCHITECTURES = ("90", "100", "103", "120", "121")
CUDA_PTX = "80"
"""PTX of this level is compiled by the driver on every other device from here on."""

_CODE = (
    "-O2",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffunction-sections",
    "-fdata-sections",
)
_OURS = (
    "-std=c++20",
    "-Iinclude",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wsign-conversion",
    "-Werror",
)
# The runtime's objects are given by name, so the compiler adds none of its own.
_LINK = ("-nostdlib++", "-s", "-Wl,--gc-sections", "-Wl,--build-id=none")
_SHARED = (
    "-shared",
    f"-Wl,-soname,{LIBRARY}",
    "-Wl,--version-script=src/exports.map",
    "-Wl,-z,relro,-z,now",
    "-Wl,-z,defs",
)
_COMPILER_HINT = "pip install ziglang (requirements/tools.lock has the version)"


class NativeBuildError(BuildError):
    """The library could not be built; the message ends with what to do."""


def build_native(arch: str, out_dir: Path, *, cache_dir: Path | None = None) -> list[Path]:
    """Build library, kernels (where ``nvcc`` is found) and their manifest into ``out_dir``.

    Args:
        arch: one of :data:`ARCHITECTURES`.
        out_dir: is made if missing; files of these names are replaced, each atomically.
        cache_dir: where the compiler keeps what it may reuse; a folder of the user's cache by
            default. It has no influence on the output.

    Returns:
        The files, sorted: nothing else in ``out_dir`` was touched.

    Raises:
        NativeBuildError: unknown architecture, no compiler, or the compiler's own words.
    """
    if arch not in ARCHITECTURES:
        raise NativeBuildError(f"architecture {arch!r}; choose one of {', '.join(ARCHITECTURES)}")
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".native-") as scratch_name:
        scratch = Path(scratch_name)
        compiler = Compiler(arch, cache_dir)
        compiler.link(_sources(), scratch / LIBRARY, scratch, _SHARED)
        _describe(scratch, LIBRARY, MANIFEST, {"abi": ABI, "target": _target(arch)})
        nvcc = shutil.which("nvcc")
        if nvcc is not None:
            _fatbin(nvcc, scratch / FATBIN, scratch)
            _describe(scratch, FATBIN, KERNELS_MANIFEST, {"compiler": _version_of(nvcc)})
        files = []
        for name in (FATBIN, KERNELS_MANIFEST, LIBRARY, MANIFEST):
            if (scratch / name).exists():
                (scratch / name).chmod(0o644)
                (scratch / name).replace(out_dir / name)
                files.append(out_dir / name)
            else:
                (out_dir / name).unlink(missing_ok=True)
    return files


class Compiler:
    """Compiles and links for one architecture, with the part of the C++ runtime that we use.

    Paths in the commands are relative to csrc or the compiler's own, and the environment is
    fixed: neither the place of the checkout nor the user's settings reach the output.
    """

    def __init__(self, arch: str, cache_dir: Path | None = None) -> None:
        folder = compiler_folder()
        if folder is None:
            raise NativeBuildError(f"no compiler is installed; {_COMPILER_HINT}")
        cache = (cache_dir or _user_cache()).resolve()
        self._zig = str(folder / "zig")
        self._lib = folder / "lib"
        self._arch = arch
        self._environment = {
            "PATH": os.defpath,
            "HOME": str(cache),
            "LC_ALL": "C",
            "ZIG_GLOBAL_CACHE_DIR": str(cache / "global"),
            "ZIG_LOCAL_CACHE_DIR": str(cache / "local"),
        }

    def link(self, sources: Sequence[str], out: Path, scratch: Path, flags: Sequence[str]) -> None:
        """Compile ``sources`` of csrc and the runtime, and link them into ``out``.

        ``scratch`` receives the objects; ``flags`` are the linker's, beside those of every link.

        Raises:
            NativeBuildError: with the compiler's own words.
        """
        units = [Unit("c++", source, _OURS) for source in sources]
        units += runtime_units(self._lib)
        objects = [str(scratch.resolve() / f"{number}.o") for number in range(len(units))]
        # Each starts a process of its own, so threads are enough to keep the processors busy.
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for _ in pool.map(self._compile, units, objects):
                pass
        self._run("c++", *objects, *_LINK, *flags, "-o", str(out.resolve()))

    def _compile(self, unit: Unit, out: str) -> None:
        self._run(unit.mode, *_CODE, *unit.flags, "-c", unit.source, "-o", out)

    def _run(self, mode: str, *arguments: str) -> None:
        command = [self._zig, mode, "-target", _target(self._arch), *arguments]
        _run(command, self._environment, _COMPILER_HINT)


def _target(arch: str) -> str:
    return f"{arch}-linux-gnu.{GLIBC}"


def _sources() -> list[str]:
    return sorted(path.relative_to(CSRC).as_posix() for path in (CSRC / "src").glob("*.cpp"))


def _describe(folder: Path, name: str, manifest: str, facts: dict[str, object]) -> None:
    """Write the manifest that a loader compares ``name`` with."""
    data = (folder / name).read_bytes()
    described = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    text = json.dumps({**facts, "files": {name: described}}, indent=1, sort_keys=True)
    (folder / manifest).write_text(text + "\n", encoding="utf-8")


def nvcc_in_use() -> str | None:
    """Return ``nvcc`` and its full version, which kernels' bytes depend on; None without it.

    Raises:
        NativeBuildError: when it does not tell one.
    """
    nvcc = shutil.which("nvcc")
    return _version_of(nvcc) if nvcc is not None else None


def _version_of(nvcc: str) -> str:
    hint = "repair the CUDA toolkit, or take nvcc out of PATH"
    told = _run([nvcc, "--version"], {"PATH": os.environ.get("PATH", os.defpath)}, hint)
    match = re.search(r"\bV(\d+(?:\.\d+)+)", told)
    if match is None:
        raise NativeBuildError(f"{nvcc} --version tells no version: {told!r}; {hint}")
    return f"nvcc {match[1]}"


def _fatbin(nvcc: str, out: Path, scratch: Path) -> None:
    command = [nvcc, "-std=c++20", "-O3", "-fatbin"]
    for sm in CUDA_ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{sm},code=sm_{sm}"]
    command += ["-gencode", f"arch=compute_{CUDA_PTX},code=compute_{CUDA_PTX}"]
    command += ["kernels/move.cu", "-o", str(out.resolve())]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    environment["TMPDIR"] = str(scratch.resolve())
    _run(command, environment, "repair the CUDA toolkit, or take nvcc out of PATH")


def _run(command: list[str], environment: dict[str, str], hint: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=CSRC, env=environment, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NativeBuildError(f"{command[0]}: {error.strerror}; {hint}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise NativeBuildError(f"{' '.join(command)}\n{said}\nexit {done.returncode}; {hint}")
    return done.stdout


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparkcache" / "zig"


def main(argv: list[str] | None = None) -> int:
    """Build for one architecture; one line per file on stdout."""
    parser = argparse.ArgumentParser(prog="python -m builder.native", description=__doc__)
    parser.add_argument("arch", choices=ARCHITECTURES)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    try:
        files = build_native(arguments.arch, arguments.out)
    except NativeBuildError as error:
        print(f"native: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
