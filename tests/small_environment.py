"""Makes virtual environments with a small vLLM installed, as pip leaves them; no Python in it."""

from __future__ import annotations

import os
import py_compile
import stat
from pathlib import Path
from typing import Any

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile

from tests import small_wheel
from tests.small_target import TOUCHED

SITE = "lib/python3.11/site-packages"
TAG = "cpython-311"


def make(root: Path, wheel: Path) -> Path:
    """Install ``wheel`` into the new environment ``root``, bytecode and its rows included."""
    site = root / SITE
    site.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.0\n")
    scheme = {"purelib": str(site), "platlib": str(site), "scripts": str(root / "bin"),
              "data": str(root), "headers": str(root / "include")}  # fmt: skip
    destination = SchemeDictionaryDestination(
        scheme, interpreter="/usr/bin/python3", script_kind="posix"
    )
    with WheelFile.open(wheel) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"pip\n"})
    record = site / small_wheel.DIST_INFO / "RECORD"
    rows = record.read_text()
    for path in sorted((site / "vllm").rglob("*.py")):
        os.utime(path, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
        cached = path.parent / "__pycache__" / f"{path.stem}.{TAG}.pyc"
        py_compile.compile(str(path), str(cached), doraise=True)
        rows += f"{cached.relative_to(site).as_posix()},,\r\n"
    record.write_bytes(rows.replace("\r\n", "\n").replace("\n", "\r\n").encode())
    (site / TOUCHED).chmod(0o664)
    return root


def snapshot(root: Path, *, times: bool = True) -> dict[str, Any]:
    """Everything that an environment is: bytes, modes and times by path."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        name = path.relative_to(root).as_posix()
        mode = stat.S_IMODE(status.st_mode)
        if path.is_file():
            found[name] = (mode, path.read_bytes(), status.st_mtime_ns if times else None)
        else:
            found[name] = mode
    return found
