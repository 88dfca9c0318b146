"""Builds the native placement library: the same bytes wherever and whenever it is built.

One function, :func:`build_native`. The compiler is the ``ziglang`` package (clang with the
headers and stubs of old glibc releases), so one machine builds both architectures and the
result loads from glibc 2.28 on. Kernels are added where ``nvcc`` is found; the library itself
is the same file with and without.

    python -m builder.native x86_64 OUT
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY = "libsparkcache_placement.so"
FATBIN = "kernels.fatbin"
MANIFEST = "placement.json"
ABI = 1
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")

CUDA_ARCHITECTURES = ("90", "100", "103", "120", "121")
CUDA_PTX = "80"
"""PTX of this level is compiled by the driver on every other device from here on."""

_COMPILE = (
    "-std=c++20",
    "-O2",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wsign-conversion",
    "-Werror",
)
_LINK = (
    "-shared",
    "-s",
    f"-Wl,-soname,{LIBRARY}",
    "-Wl,--version-script=src/exports.map",
    "-Wl,--gc-sections",
    "-Wl,--build-id=none",
    "-Wl,-z,relro,-z,now",
)


class NativeBuildError(Exception):
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
        _library(arch, scratch / LIBRARY, cache_dir or _user_cache())
        nvcc = shutil.which("nvcc")
        if nvcc is not None:
            _fatbin(nvcc, scratch / FATBIN, scratch)
        names = [name for name in (FATBIN, LIBRARY) if (scratch / name).exists()]
        manifest = {
            "abi": ABI,
            "files": {name: _describe(scratch / name) for name in names},
            "target": _target(arch),
        }
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        (scratch / MANIFEST).write_text(text, encoding="utf-8")
        if FATBIN not in names:
            (out_dir / FATBIN).unlink(missing_ok=True)
        files = []
        for name in (*names, MANIFEST):
            (scratch / name).chmod(0o644)
            (scratch / name).replace(out_dir / name)
            files.append(out_dir / name)
    return sorted(files)


def _target(arch: str) -> str:
    return f"{arch}-linux-gnu.{GLIBC}"


def _describe(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _library(arch: str, out: Path, cache: Path) -> None:
    sources = sorted(path.relative_to(CSRC).as_posix() for path in (CSRC / "src").glob("*.cpp"))
    command = [sys.executable, "-m", "ziglang", "c++", "-target", _target(arch)]
    command += [*_COMPILE, "-Iinclude", *sources, *_LINK, "-o", str(out.resolve())]
    # Paths in the command are relative to csrc and the environment is fixed: neither the place
    # of the checkout nor the user's settings reach the output.
    environment = {
        "PATH": os.defpath,
        "HOME": str(cache),
        "LC_ALL": "C",
        "ZIG_GLOBAL_CACHE_DIR": str(cache / "global"),
        "ZIG_LOCAL_CACHE_DIR": str(cache / "local"),
    }
    _run(command, environment, "pip install ziglang (requirements/tools.lock has the version)")


def _fatbin(nvcc: str, out: Path, scratch: Path) -> None:
    command = [nvcc, "-std=c++20", "-O3", "-fatbin"]
    for sm in CUDA_ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{sm},code=sm_{sm}"]
    command += ["-gencode", f"arch=compute_{CUDA_PTX},code=compute_{CUDA_PTX}"]
    command += ["kernels/move.cu", "-o", str(out.resolve())]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    environment["TMPDIR"] = str(scratch.resolve())
    _run(command, environment, "repair the CUDA toolkit, or take nvcc out of PATH")


def _run(command: list[str], environment: dict[str, str], hint: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=CSRC, env=environment, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NativeBuildError(f"{command[0]}: {error.strerror}; {hint}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise NativeBuildError(f"{' '.join(command)}\n{said}\nexit {done.returncode}; {hint}")


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
        print(f"{_describe(path)['sha256']}  {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
