from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from builder.bundle import write_file
from builder.pyz import JudgeSourceError, judge_source, target_files, write_pyz

ROOT = Path(__file__).resolve().parents[3]
JUDGE = {
    "verify/__init__.py": b"",
    "verify/__main__.py": b"""import sys
from importlib import resources
root = resources.files("verify") / "_pins"
print(sorted(p.name for p in root.iterdir()), (root / "v1" / "pins.json").read_text(), sys.argv[1:])
sys.exit(3)
""",
}
PINS = {"v1/pins.json": b"{}", "v1/patches/series": b"", "connector.json": b"{}"}


def test_archive_runs_the_judge_with_the_pins_inside(tmp_path: Path) -> None:
    archive = tmp_path / "verify.pyz"
    write_file(archive, lambda sink: write_pyz(sink, JUDGE, PINS), mode=0o755)
    for command in ([sys.executable, "-I", str(archive)], [str(archive)]):
        done = subprocess.run(
            [*command, "wheel", "x"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        assert done.stdout == "['connector.json', 'v1'] {} ['wheel', 'x']\n"
        assert done.returncode == 3


def test_bytes_do_not_depend_on_the_order_of_files() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    write_pyz(first, JUDGE, PINS)
    write_pyz(second, dict(reversed(JUDGE.items())), dict(reversed(PINS.items())))
    assert first.getvalue() == second.getvalue()
    assert zipfile.ZipFile(first).testzip() is None


def test_first_lines_are_understood_by_any_python_3() -> None:
    archive = io.BytesIO()
    write_pyz(archive, JUDGE, PINS)
    main = zipfile.ZipFile(archive).read("__main__.py").decode()
    head = main[: main.index("import runpy")].replace("(3, 11)", "(99, 0)")
    done = subprocess.run([sys.executable, "-c", head], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("verify: Python 3.11 or newer is needed, this is 3.")


def checkout(folder: Path) -> Path:
    (folder / "verify" / "checks" / "__pycache__").mkdir(parents=True)
    (folder / "verify" / "__main__.py").write_text("")
    (folder / "verify" / "checks" / "tree.py").write_text("tree")
    (folder / "verify" / "checks" / "__pycache__" / "tree.cpython-311.pyc").write_text("")
    (folder / "verify" / "checks" / "__pycache__" / "left.py").write_text("")
    (folder / "verify" / "notes.txt").write_text("")
    return folder


def test_only_source_files_are_shipped(tmp_path: Path) -> None:
    assert judge_source(checkout(tmp_path)) == {
        "verify/__main__.py": b"",
        "verify/checks/tree.py": b"tree",
    }


def test_symbolic_link_in_the_judge_is_refused(tmp_path: Path) -> None:
    (checkout(tmp_path) / "verify" / "link.py").symlink_to("/etc/passwd")
    with pytest.raises(JudgeSourceError, match=r"verify/link\.py: expected a regular file"):
        judge_source(tmp_path)


def test_missing_judge_is_named(tmp_path: Path) -> None:
    shutil.rmtree(checkout(tmp_path) / "verify")
    with pytest.raises(JudgeSourceError, match=r"verify/__main__\.py: the file is missing"):
        judge_source(tmp_path)


def test_everything_of_a_target_but_the_intent_is_embedded(tmp_path: Path) -> None:
    folder = tmp_path / "overlay" / "targets" / "v1"
    (folder / "bases").mkdir(parents=True)
    (folder / "target.yaml").write_text("by hand")
    (folder / "pins.json").write_text("{}")
    (folder / "bases" / "cpu.manifest").write_text("m")
    (tmp_path / "patches" / "v1").mkdir(parents=True)
    (tmp_path / "patches" / "v1" / "series").write_text("s")
    assert target_files(tmp_path, "v1") == {
        "v1/pins.json": b"{}",
        "v1/bases/cpu.manifest": b"m",
        "v1/patches/series": b"s",
    }


def test_judge_of_this_checkout_uses_the_standard_library_only() -> None:
    imports = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            "import sys; sys.path.insert(0, sys.argv[1]); import pkgutil, importlib, verify\n"
            "for m in pkgutil.walk_packages(verify.__path__, 'verify.'):\n"
            "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
            "tops = {n.partition('.')[0] for n in sys.modules} - {'verify', '__main__'}\n"
            "print(sorted(n for n in tops if n not in sys.stdlib_module_names and "
            "not n.startswith('_')))",
            str(ROOT),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert imports.stdout == "[]\n"
