"""Writes a composed source tree to a folder: whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from builder.bundle import OutputError
from builder.errors import BuildError
from builder.patcher import Content
from builder.source import GENERATED, SourceFile
from verify.manifest import EXECUTABLE


class TreeExistsError(BuildError):
    """The folder to write is there already."""


def write_tree(
    out: Path, release: Iterable[SourceFile], changes: Mapping[str, Content | None]
) -> int:
    """Write ``release`` with ``changes`` laid over it to the new folder ``out``.

    Generated files are left out: a composed tree is what a commit would hold. Returns the
    number of files.

    Raises:
        TreeExistsError: when ``out`` exists.
        OutputError: when it cannot be written; nothing stays behind.
    """
    if out.exists() or out.is_symlink():
        raise TreeExistsError(f"{out}: expected no such folder; remove it or choose another")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    count = 0
    try:
        partial.mkdir(parents=True)
        for file in release:
            if file.path not in changes and file.path not in GENERATED:
                _write(partial / file.path, file.mode or "", file.data)
                count += 1
        for path, content in changes.items():
            if content is not None:
                _write(partial / path, content.mode, content.data)
                count += 1
        partial.rename(out)
    except OSError as error:
        raise OutputError(out, error) from error
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(partial)
    return count


def _write(path: Path, mode: str, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755 if mode == EXECUTABLE else 0o644)
