"""Makes a checkout with one small target: an sdist, two base wheels, a patch and a module.

Everything has the structure of the real thing and is a few hundred bytes. The bytes depend
on the arguments alone. Tests change what they need before calling :func:`make`.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import small_wheel

NAME = "v0.28.0"
COMMIT = "2cf0a6915ce544dc493a0990f2ea38d81601128a"
SDIST = "vllm-0.28.0.tar.gz"
WHEELS = {
    "cuda-x86_64": small_wheel.FILENAME,
    "cpu-x86_64": "vllm-0.28.0-cp312-cp312-manylinux_2_28_x86_64.whl",
}
TOUCHED = "vllm/v1/core/sched/scheduler.py"
PLATFORMS = "vllm/platforms/__init__.py"
MODULE = "vllm/v1/core/boundary.py"
SERIES = ("0001-Count-steps.patch",)

SCHEDULER = b'''# SPDX-License-Identifier: Apache-2.0
"""Schedules."""


class Scheduler:
    limit: int = 8

    def __init__(self, config: dict) -> None:
        self.config = config

    def schedule(self) -> list[int]:
        return [1]
'''
PATCHED = SCHEDULER.replace(
    b"Apache-2.0\n", b"Apache-2.0\n# Modified by SparkCache for vLLM: see patches/v0.28.0\n"
).replace(b"(self) -> list[int]", b"(self, step: int = 0) -> list[int]")
MODULES = {MODULE: b"def floor(tokens: int, unit: int) -> int:\n    return tokens // unit * unit\n"}

TARGET_YAML = f"""\
schema: sparkcache.target/v1
name: {NAME}
version: 0.28.0
commit: {COMMIT}
git: https://example.invalid/vllm
revision: 1
sdist: {{project: vllm, filename: {SDIST}}}
bases:
  cuda-x86_64: {{project: vllm, filename: {WHEELS["cuda-x86_64"]}, differs: []}}
  cpu-x86_64: {{project: vllm, filename: {WHEELS["cpu-x86_64"]}, differs: [{PLATFORMS}]}}
contract:
  {TOUCHED}: [Scheduler.schedule, Scheduler.config]
  vllm/version.py: []
"""


def release() -> dict[str, tuple[str, bytes]]:
    """The release by path: mode and bytes, without generated files."""
    members = small_wheel.package()
    sources = ("vllm/__init__.py", "vllm/version.py", "vllm/config/crlf.py")
    files = {path: ("100644", members[path]) for path in sources}
    return files | {
        TOUCHED: ("100644", SCHEDULER),
        PLATFORMS: ("100644", b"kind = 'cuda'\n"),
        "vllm/tool.py": ("100755", b"#!/usr/bin/env python3\n"),
        "setup.py": ("100644", b"import setuptools\n"),
        "tests/test_a.py": ("100644", b"def test(): pass\n"),
        "tools/run.sh": ("100755", b"#!/bin/sh\n"),
    }


def generated() -> dict[str, bytes]:
    """What setuptools adds to an sdist."""
    return {
        "PKG-INFO": small_wheel.METADATA,
        "setup.cfg": b"[egg_info]\n",
        "vllm.egg-info/SOURCES.txt": b"setup.py\n",
        "vllm/_version.py": small_wheel.VERSION_MODULE,
    }


@dataclass
class SmallTarget:
    """What a small target consists of; :meth:`write` makes the files."""

    files: dict[str, tuple[str, bytes]] = field(default_factory=release)
    generated: dict[str, bytes] = field(default_factory=generated)
    patches: dict[str, bytes] = field(default_factory=lambda: {SERIES[0]: default_patch()})
    modules: dict[str, bytes] = field(default_factory=lambda: dict(MODULES))
    target_yaml: str = TARGET_YAML
    top: str = "vllm-0.28.0"
    odd_members: tuple[tarfile.TarInfo, ...] = ()

    def sdist(self) -> bytes:
        """The source distribution, with group-writable modes as upstream's has."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
            everything = self.files | {path: ("100644", d) for path, d in self.generated.items()}
            folder = tarfile.TarInfo(self.top)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o775
            archive.addfile(folder)
            for path, (mode, data) in everything.items():
                info = tarfile.TarInfo(f"{self.top}/{path}")
                info.size, info.mode = len(data), 0o775 if mode == "100755" else 0o664
                archive.addfile(info, io.BytesIO(data))
            for info in self.odd_members:
                archive.addfile(info)
        return gzip.compress(raw.getvalue(), mtime=0)

    def wheel(self, base: str) -> bytes:
        """A base wheel; the CPU one has a platform of its own."""
        members = {p: data for p, data in small_wheel.package().items() if p not in release()}
        members |= {p: data for p, (_, data) in self.files.items() if p.startswith("vllm/")}
        if base == "cpu-x86_64":
            members[PLATFORMS] = b"kind = 'cpu'\n"
        return small_wheel.SmallWheel(members).bytes()

    def write(self, root: Path) -> Path:
        """Write the checkout below ``root``, and the files of the index to ``root/index``."""
        written: dict[str, bytes] = {
            f"overlay/targets/{NAME}/target.yaml": self.target_yaml.encode(),
            f"patches/{NAME}/series": "".join(f"{name}\n" for name in self.patches).encode(),
            "overlay/modules/README.md": b"# Modules\n",
            f"index/{SDIST}": self.sdist(),
        }
        written |= {f"patches/{NAME}/{name}": data for name, data in self.patches.items()}
        written |= {f"overlay/modules/{path}": data for path, data in self.modules.items()}
        written |= {f"index/{name}": self.wheel(base) for base, name in WHEELS.items()}
        for path, data in written.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return root


@functools.cache
def default_patch() -> bytes:
    """The one patch of the series, unless a test says otherwise."""
    return patch({TOUCHED: (SCHEDULER, PATCHED)})


def patch(
    changes: Mapping[str, tuple[bytes | None, bytes | None]], subject: str = "Count steps"
) -> bytes:
    """A patch file for ``path -> (before, after)``; git writes the diff."""
    with TemporaryDirectory() as scratch:
        diffs = b"".join(
            _diff(Path(scratch), path, before, after)
            for path, (before, after) in sorted(changes.items())
        )
    head = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: SparkCache <patches@sparkcache.invalid>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: {subject}

A step is counted.

Why: because tests need one.
Upstream-Status: not submitted
Base: {NAME} {COMMIT}

"""
    return head.encode() + diffs


def _diff(scratch: Path, path: str, before: bytes | None, after: bytes | None) -> bytes:
    environment = {"PATH": os.environ["PATH"], "HOME": str(scratch), "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*args: str, data: bytes | None = None) -> bytes:
        options = ["-c", "core.autocrlf=false", "-c", "core.quotePath=false", "-C", str(scratch)]
        command = ["git", *options, *args]
        return subprocess.run(
            command, input=data, env=environment, capture_output=True, check=True
        ).stdout

    if not (scratch / ".git").exists():
        git("init", "--quiet")
    trees = []
    for data in (before, after):
        git("read-tree", "--empty")
        if data is not None:
            blob = git("hash-object", "-w", "--stdin", data=data).decode().strip()
            git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
        trees.append(git("write-tree").decode().strip())
    return git("diff-tree", "-p", "--text", "--full-index", "--no-renames", *trees)
