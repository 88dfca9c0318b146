"""The judge as one file with pins inside, run where there is no checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.verify import small_target as small
from tests.unit.verify.small_target import World

ROOT = Path(__file__).parents[3]
MAIN = "import runpy\nrunpy.run_module('verify', run_name='__main__', alter_sys=True)\n"
LIBRARY = {"sparkcache_connector/libsparkcache_placement.so": small.ELF + b"placement"}


def connector_json(generated: dict[str, bytes]) -> bytes:
    return small.canonical(
        {
            "schema": "sparkcache.connector/v1",
            "version": small.CONNECTOR_VERSION,
            "files": {path: small.sha256(data) for path, data in small.CONNECTOR.items()},
            "generated": {path: small.sha256(data) for path, data in generated.items()},
            "native": None,
        }
    )


def write_pyz(file: Path, generated: dict[str, bytes], *, connector: bool = True) -> None:
    """A zip application as docs/build.md describes it, made without the builder."""
    place = f"overlay/targets/{small.TARGET}/"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for source in sorted((ROOT / "verify").rglob("*.py")):
            archive.write(source, source.relative_to(ROOT))
        for path, data in small.checkout().items():
            if path.startswith(place):
                archive.writestr(f"verify/_pins/{small.TARGET}/{path[len(place) :]}", data)
            elif path.startswith("patches/"):
                name = path.rpartition("/")[2]
                archive.writestr(f"verify/_pins/{small.TARGET}/patches/{name}", data)
        if connector:
            archive.writestr("verify/_pins/connector.json", connector_json(generated))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small.build(tmp_path_factory.mktemp("world"))


def run(pyz: Path, *arguments: str | Path) -> tuple[int, dict[str, str]]:
    """Return the exit code, and the status of every check."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", pyz, *arguments, "--format", "json"],
        cwd=pyz.parent,
        capture_output=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["checks"]


def test_every_subject_passes_by_the_pins_inside(world: World, tmp_path: Path) -> None:
    write_pyz(tmp_path / "verify.pyz", {})
    for kind, subject in (
        ("bundle", world.bundle),
        ("wheel", world.wheel),
        ("tree", world.tree),
        ("sdist", world.sdist),
        ("venv", world.venv),
        ("env", world.venv / "bin" / "python"),
    ):
        code, checks = run(tmp_path / "verify.pyz", kind, subject)
        assert code == 0, (kind, checks)
        assert checks["BASE-1"] == "pass"


def test_a_forged_wheel_fails_by_the_pins_inside(world: World, tmp_path: Path) -> None:
    write_pyz(tmp_path / "verify.pyz", {})
    members = small.unzipped(world.wheel.read_bytes())
    members["vllm/core/scheduler.py"] = (small.F, small.SCHEDULER)
    file = tmp_path / world.wheel.name
    file.write_bytes(small.zipped(members))
    code, checks = run(tmp_path / "verify.pyz", "wheel", file)
    assert (code, checks["PATCH-3"], checks["CONTRACT-3"]) == (1, "fail", "fail")


def test_a_judge_inside_the_subject_authenticates_nothing(world: World, tmp_path: Path) -> None:
    small.write(tmp_path / "tree", small.composed())
    write_pyz(tmp_path / "tree" / "verify.pyz", {})
    code, checks = run(tmp_path / "tree" / "verify.pyz", "tree", tmp_path / "tree")
    assert code == 1
    assert checks["BASE-1"] == "undecided"


def test_without_a_connector_inside_its_source_is_undecided(world: World, tmp_path: Path) -> None:
    write_pyz(tmp_path / "verify.pyz", {}, connector=False)
    code, checks = run(tmp_path / "verify.pyz", "bundle", world.bundle)
    assert (code, checks["PKG-13"]) == (3, "undecided")


def test_a_native_library_needs_somebody_outside_who_knows_it(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    small.write(bundle, small.bundle("cuda-x86_64", LIBRARY))
    write_pyz(tmp_path / "without.pyz", {})
    code, checks = run(tmp_path / "without.pyz", "bundle", bundle)
    assert (code, checks["PKG-14"]) == (3, "undecided")
    (tmp_path / "connector.json").write_bytes(connector_json(LIBRARY))
    given = ("--connector", tmp_path / "connector.json")
    assert run(tmp_path / "without.pyz", "bundle", bundle, *given)[0] == 0
    write_pyz(tmp_path / "with.pyz", LIBRARY)
    assert run(tmp_path / "with.pyz", "bundle", bundle)[0] == 0


def test_another_native_library_fails(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    other = {path: data + b"!" for path, data in LIBRARY.items()}
    small.write(bundle, small.bundle("cuda-x86_64", other))
    write_pyz(tmp_path / "verify.pyz", LIBRARY)
    code, checks = run(tmp_path / "verify.pyz", "bundle", bundle)
    assert (code, checks["PKG-14"], checks["PKG-13"]) == (1, "fail", "pass")
