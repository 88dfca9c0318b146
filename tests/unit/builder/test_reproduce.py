"""The comparison that `make reproduce` rests on sees what it must see."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.reproduce.compare import differences

ROOT = Path(__file__).resolve().parents[3]


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_equal_folders_have_no_differences(tmp_path: Path) -> None:
    files = {"a/b.json": b"{}", "c": b"x" * 3_000_000}
    assert differences(tree(tmp_path / "1", files), tree(tmp_path / "2", files)) == []


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_999])
def test_one_byte_is_found_where_it_is(tmp_path: Path, place: int) -> None:
    data = bytearray(3_000_000)
    left = tree(tmp_path / "1", {"c": bytes(data)})
    data[place] = 1
    right = tree(tmp_path / "2", {"c": bytes(data)})
    assert differences(left, right) == [f"c: differ at byte {place}"]


def test_shorter_file_extra_file_and_mode_are_found(tmp_path: Path) -> None:
    left = tree(tmp_path / "1", {"short": b"ab", "mode": b"", "only": b""})
    right = tree(tmp_path / "2", {"short": b"a", "mode": b""})
    (right / "mode").chmod(0o755)
    (left / "mode").chmod(0o644)
    assert differences(left, right) == [
        f"only: only in {left}",
        "mode: mode -rw-r--r-- and -rwxr-xr-x",
        "short: differ at byte 1",
    ]


def test_members_of_archives_are_named(tmp_path: Path) -> None:
    for number, year in ((1, 1999), (2, 2000)):
        folder = tree(tmp_path / str(number), {})
        folder.mkdir()
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("same.py"), b"")
            archive.writestr(zipfile.ZipInfo("dated.py", (year, 1, 1, 0, 0, 0)), b"")
    (line,) = differences(tmp_path / "1", tmp_path / "2")
    assert line.startswith("w.whl: differ at byte ")
    assert line.endswith(": members dated.py")


def test_directories_really_list_their_files_in_another_order(tmp_path: Path) -> None:
    tree(tmp_path, {f"{number}": b"" for number in range(50)})
    script = """
import os, sys
from pathlib import Path
from tests.reproduce.shuffled import shuffle_listings
shuffle_listings(int(sys.argv[1]))
folder = sys.argv[2]
orders = [os.listdir(folder), [e.name for e in os.scandir(folder)],
    [p.name for p in Path(folder).rglob("*")], next(os.walk(folder))[2]]
assert all(sorted(order) == sorted(orders[0]) for order in orders)
assert all(order != sorted(order) for order in orders), orders
print(orders)
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, seed, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "1", "2")
    }
    assert len(outputs) == 2
