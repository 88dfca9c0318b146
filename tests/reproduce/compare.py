"""Says in which bytes, names or modes two output folders differ, and where to look."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path


def differences(left: Path, right: Path) -> list[str]:
    """Return one line per difference; empty when the folders are the same in every byte."""
    found: list[str] = []
    trees = [
        {file.relative_to(root).as_posix() for file in root.rglob("*")} for root in (left, right)
    ]
    for name in sorted(trees[0] ^ trees[1]):
        found.append(f"{name}: only in {left if name in trees[0] else right}")
    for name in sorted(trees[0] & trees[1]):
        one, two = left / name, right / name
        if one.lstat().st_mode != two.lstat().st_mode:
            modes = [stat.filemode(file.lstat().st_mode) for file in (one, two)]
            found.append(f"{name}: mode {modes[0]} and {modes[1]}")
        elif one.is_file() and (where := _first_difference(one, two)) is not None:
            found.append(f"{name}: differ at byte {where}{_members(one, two)}")
    return found


def _first_difference(one: Path, two: Path) -> int | None:
    position = 0
    with one.open("rb") as left, two.open("rb") as right:
        while True:
            chunks = left.read(1 << 20), right.read(1 << 20)
            if chunks[0] != chunks[1]:
                same = next(
                    (n for n, (a, b) in enumerate(zip(*chunks, strict=False)) if a != b),
                    min(map(len, chunks)),
                )
                return position + same
            if not chunks[0]:
                return None
            position += len(chunks[0])


def _members(one: Path, two: Path) -> str:
    """Name the members of two archives that differ, in contents or in their headers."""
    if not (zipfile.is_zipfile(one) and zipfile.is_zipfile(two)):
        return ""
    with zipfile.ZipFile(one) as left, zipfile.ZipFile(two) as right:
        if left.namelist() != right.namelist():
            return ": other members, or another order"
        names = [
            info.filename
            for info, other in zip(left.infolist(), right.infolist(), strict=True)
            if (info.CRC, info.date_time, info.external_attr, info.compress_size)
            != (other.CRC, other.date_time, other.external_attr, other.compress_size)
        ]
    return f": members {', '.join(names[:5])}" if names else ": between the members"
