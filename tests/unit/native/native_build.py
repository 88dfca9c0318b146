"""Builds what the native tests run, with the system's compiler, once per content.

The shipped library is built by ``builder.native``; here any C++20 compiler will do, and
sanitizers need the system's. Outputs lie under ``build/`` by the digest of everything that went
in, so that a second run compiles nothing.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Werror"]
COMMON = ["-std=c++20", "-fPIC", "-pthread", "-Iinclude", *WARNINGS]
SANITIZERS = {
    "plain": ["-O2"],
    "asan": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-g", "-fsanitize=thread"],
}


def _compiler():
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler (g++ or clang++) on this machine")
    return found


def _build(name, sources, flags, link):
    compiler = _compiler()
    state = hashlib.sha256("\0".join([compiler, *COMMON, *flags, *sources, *link]).encode())
    for path in sorted(CSRC.rglob("*.[ch]*")):
        state.update(path.name.encode() + path.read_bytes())
    out = ROOT / "build" / "native-tests" / state.hexdigest()[:16] / name
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        objects = [str(Path(scratch) / f"{i}.o") for i in range(len(sources))]
        commands = [
            [compiler, *COMMON, *flags, "-c", source, "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_run, commands))
        made = str(Path(scratch) / name)
        _run([compiler, *COMMON, *flags, *objects, *link, "-o", made])
        Path(made).replace(out)
    return out


def _run(command):
    done = subprocess.run(command, cwd=CSRC, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def compiles(source, flags):
    """Check that ``source`` compiles; it is not run."""
    _run([_compiler(), *COMMON, *flags, "-fsyntax-only", source])


def _sources():
    return sorted(path.relative_to(CSRC).as_posix() for path in (CSRC / "src").glob("*.cpp"))


def sha256(path):
    """The digest that a binding must be given for ``path``."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def library():
    """``libsparkcache_placement.so`` for this machine."""
    link = ["-shared", "-Wl,--version-script=src/exports.map", "-ldl"]
    return _build("libsparkcache_placement.so", _sources(), ["-O2", "-fvisibility=hidden"], link)


def fake_cuda(sanitizer="plain"):
    """``libcuda.so.1`` without a device."""
    return _build(
        "libcuda.so.1",
        ["tests/fake_cuda.cpp"],
        SANITIZERS[sanitizer],
        ["-shared", "-Wl,-soname,libcuda.so.1"],
    )


def native_tests(sanitizer):
    """The C++ tests; they find the fake driver beside it by its name."""
    fake = fake_cuda(sanitizer)
    sources = _sources() + sorted(
        path.relative_to(CSRC).as_posix() for path in (CSRC / "tests").glob("test_*.cpp")
    )
    link = [str(fake), f"-Wl,-rpath,{fake.parent}", "-ldl"]
    return _build("native_tests", sources, SANITIZERS[sanitizer], link)
