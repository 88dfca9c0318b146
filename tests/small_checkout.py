"""Makes a whole checkout around a small target, and the download cache that it builds from.

The code is this checkout's, the target is :mod:`tests.small_target`'s: everything that
``python -m builder build`` does to the real target happens here to a few hundred bytes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.small_target import NAME, SmallTarget

ROOT = Path(__file__).resolve().parent.parent
CODE = ("builder", "verify", "sparkcache_connector", "tests")
FILES = ("pyproject.toml", "LICENSE", "NOTICE")


def make_checkout(folder: Path, target: SmallTarget | None = None) -> Path:
    """Write a checkout with pins into ``folder``, and its downloads into ``folder/cache``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CODE:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    (folder / "README.md").write_text("# SparkCache for vLLM\n")
    (target or SmallTarget()).write(folder)
    downloads = folder / "cache" / "sparkcache" / "downloads" / "sha256"
    downloads.mkdir(parents=True)
    for file in (folder / "index").iterdir():
        shutil.copy(file, downloads / hashlib.sha256(file.read_bytes()).hexdigest())
    command = [sys.executable, "-m", "builder", "pin", "--target", NAME, "--offline"]
    subprocess.run(
        [*command, "--files", str(folder / "index")], cwd=folder, check=True, capture_output=True
    )
    return folder
