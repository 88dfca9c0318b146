"""Which vLLM an interpreter would import, compared with what the real interpreter says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from verify import interpreter
from verify.errors import ConfigError
from verify.interpreter import Environment

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
ASK = """
import importlib.util, json, sys
spec = importlib.util.find_spec("vllm")
found = None if spec is None else spec.origin or list(spec.submodule_search_locations)[0]
print(json.dumps([found, sys.path]))
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real virtual environment of the running interpreter, without pip."""
    folder = tmp_path_factory.mktemp("venv") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


@pytest.fixture
def env(tmp_path: Path, template: Path) -> Path:
    folder = tmp_path / "env"
    folder.mkdir()
    subprocess.run(["cp", "-a", f"{template}/.", str(folder)], check=True)
    return folder


def site(env: Path) -> Path:
    return env / "lib" / f"python{VERSION}" / "site-packages"


def put(folder: Path, name: str = "vllm") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise SystemExit('imported by the judge')\n")
    return folder / name


def ours(env: Path, environ: dict[str, str] | None = None) -> str | None:
    found = interpreter.of_python(env / "bin" / "python", environ or {})
    assert not found.unknowns
    candidates = found.candidates("vllm")
    return str(candidates[0].path) if candidates else None


def theirs(env: Path, environ: dict[str, str] | None = None) -> str | None:
    """Start the interpreter, as the judge never does, and ask it."""
    kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
    done = subprocess.run(
        [env / "bin" / "python", "-c", ASK],
        env=kept | (environ or {}),
        cwd="/",
        capture_output=True,
        check=True,
    )
    found, _path = json.loads(done.stdout)
    return None if found is None else found.removesuffix("/__init__.py")


def test_nothing_is_found_where_nothing_is(env: Path) -> None:
    assert ours(env) is None
    assert theirs(env) is None


def test_a_package_in_the_site_directory(env: Path) -> None:
    put(site(env))
    assert ours(env) == theirs(env) == str(site(env) / "vllm")


def test_a_path_line_adds_a_place_after_the_site_directory(env: Path, tmp_path: Path) -> None:
    put(tmp_path / "checkout")
    (site(env) / "a.pth").write_text(f"# a comment\n\n{tmp_path}/checkout\n/nowhere\n")
    assert ours(env) == theirs(env) == str(tmp_path / "checkout" / "vllm")
    put(site(env))
    assert ours(env) == theirs(env) == str(site(env) / "vllm")


def test_path_lines_count_in_the_order_of_their_files(env: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        put(tmp_path / name)
        (site(env) / f"{name}.pth").write_text(f"{tmp_path / name}\n")
    assert ours(env) == theirs(env) == str(tmp_path / "a" / "vllm")


def test_a_path_line_in_an_added_place_is_not_followed(env: Path, tmp_path: Path) -> None:
    put(tmp_path / "second")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "x.pth").write_text(f"{tmp_path}/second\n")
    (site(env) / "a.pth").write_text(f"{tmp_path}/first\n")
    assert ours(env) is None
    assert theirs(env) is None


def test_the_pythonpath_comes_first(env: Path, tmp_path: Path) -> None:
    put(site(env))
    put(tmp_path / "early")
    environ = {"PYTHONPATH": f"/nowhere:{tmp_path}/early"}
    assert ours(env, environ) == theirs(env, environ) == str(tmp_path / "early" / "vllm")


def test_the_users_site_is_not_seen_from_a_virtual_environment(env: Path, tmp_path: Path) -> None:
    put(tmp_path / "home" / ".local" / "lib" / f"python{VERSION}" / "site-packages")
    environ = {"HOME": str(tmp_path / "home")}
    assert ours(env, environ) is None
    assert theirs(env, environ) is None


def test_the_users_site_is_seen_with_system_packages(env: Path, tmp_path: Path) -> None:
    text = (env / "pyvenv.cfg").read_text().replace("= false", "= true")
    (env / "pyvenv.cfg").write_text(text)
    put(tmp_path / "home" / ".local" / "lib" / f"python{VERSION}" / "site-packages")
    environ = {"HOME": str(tmp_path / "home")}
    expected = tmp_path / f"home/.local/lib/python{VERSION}/site-packages/vllm"
    found = interpreter.of_python(env / "bin" / "python", environ)
    assert str(found.candidates("vllm")[0].path) == theirs(env, environ) == str(expected)
    assert ours(env, environ | {"PYTHONNOUSERSITE": "1"}) is None


def test_a_namespace_counts_only_when_nothing_else_does(env: Path, tmp_path: Path) -> None:
    (site(env) / "vllm").mkdir()
    assert ours(env) == theirs(env) == str(site(env) / "vllm")
    put(tmp_path / "checkout")
    (site(env) / "a.pth").write_text(f"{tmp_path}/checkout\n")
    assert ours(env) == theirs(env) == str(tmp_path / "checkout" / "vllm")


def test_a_package_hides_a_module_beside_it(env: Path) -> None:
    (site(env) / "vllm.py").write_text("")
    assert ours(env) == theirs(env) == str(site(env) / "vllm.py")
    put(site(env))
    assert ours(env) == theirs(env) == str(site(env) / "vllm")


def test_a_zip_file_on_the_path_is_seen(env: Path, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    (site(env) / "a.pth").write_text(f"{tmp_path}/more.zip\n")
    found = interpreter.of_python(env / "bin" / "python", {}).candidates("vllm")[0]
    assert (found.kind, str(found.path)) == ("zip", f"{tmp_path}/more.zip")
    assert theirs(env) == f"{tmp_path}/more.zip/vllm"


FINDER = """
import sys
MAPPING: dict[str, str] = {'vllm': %r}
def install():
    from importlib.machinery import PathFinder
    class Finder:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == 'vllm':
                from importlib.util import spec_from_file_location
                return spec_from_file_location(name, MAPPING[name] + '/__init__.py')
    sys.meta_path.append(Finder)
"""


def test_an_editable_finder_is_read_and_comes_last(env: Path, tmp_path: Path) -> None:
    checkout = put(tmp_path / "checkout")
    (site(env) / "__editable___vllm_1_finder.py").write_text(FINDER % str(checkout))
    line = "import __editable___vllm_1_finder; __editable___vllm_1_finder.install()"
    (site(env) / "__editable__.vllm-1.pth").write_text(line)
    assert ours(env) == theirs(env) == str(checkout)
    put(site(env))
    assert ours(env) == theirs(env) == str(site(env) / "vllm")


def test_an_editable_finder_with_a_computed_table_is_unknown_code(env: Path) -> None:
    (site(env) / "__editable___vllm_1_finder.py").write_text("MAPPING: dict = dict(a='b')\n")
    line = "import __editable___vllm_1_finder; __editable___vllm_1_finder.install()"
    (site(env) / "__editable__.vllm-1.pth").write_text(line)
    found = interpreter.of_python(env / "bin" / "python", {})
    assert [each.known for each in _of_site(found, env)] == [None]


def test_code_at_start_is_found_and_does_not_run(env: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (site(env) / "a.pth").write_text(f"import os; open({str(trap)!r}, 'w')\n")
    (site(env) / "sitecustomize.py").write_text(f"open({str(trap)!r}, 'w')\n")
    found = interpreter.of_python(env / "bin" / "python", {})
    assert {each.file.name for each in _of_site(found, env)} == {"a.pth", "sitecustomize.py"}
    assert not trap.exists()
    theirs(env)
    assert trap.exists()


def _of_site(found: Environment, env: Path) -> list[interpreter.Startup]:
    return [each for each in found.startup if each.file.is_relative_to(env)]


def test_every_entry_of_the_real_path_is_known(env: Path) -> None:
    (site(env) / "a.pth").write_text("more\n")
    (site(env) / "more").mkdir()
    done = subprocess.run(
        [env / "bin" / "python", "-c", ASK], env={}, cwd="/", capture_output=True, check=True
    )
    _found, path = json.loads(done.stdout)
    found = interpreter.of_python(env / "bin" / "python", {})
    real = [entry for entry in path if entry]  # "" is the current directory of -c
    assert [str(e.path) for e in found.entries if str(e.path) in real] == real


@pytest.mark.parametrize("variable", ["PYTHONHOME", "PYTHONPLATLIBDIR"])
def test_variables_that_move_the_library_leave_the_answer_open(env: Path, variable: str) -> None:
    found = interpreter.of_python(env / "bin" / "python", {variable: "/elsewhere"})
    assert [variable in unknown for unknown in found.unknowns] == [True]


def test_a_prefix_without_a_configuration_is_read_by_its_library(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    put(packages)
    found = interpreter.of_folder(tmp_path)
    assert found.version == "3.12"
    assert [str(each.path) for each in found.candidates("vllm")] == [str(packages / "vllm")]


def test_debians_directories_are_known(tmp_path: Path) -> None:
    put(tmp_path / "local/lib/python3.12/dist-packages")
    put(tmp_path / "lib/python3/dist-packages")
    (tmp_path / "lib/python3.12").mkdir()
    found = interpreter.of_folder(tmp_path).candidates("vllm")
    assert [each.path.parent.parent.parent.name for each in found] == ["lib", "lib"]
    assert len(found) == 2


def test_two_libraries_in_one_prefix_need_a_named_interpreter(tmp_path: Path) -> None:
    for version in ("3.11", "3.12"):
        (tmp_path / "lib" / f"python{version}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"found 3\.11, 3\.12; name the interpreter"):
        interpreter.of_folder(tmp_path)


def test_an_interpreter_outside_of_an_environment_is_read_by_its_name(tmp_path: Path) -> None:
    packages = put(tmp_path / "lib" / "python3.12" / "site-packages").parent
    (tmp_path / "lib" / "python3.11").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.12").write_text("")
    (tmp_path / "bin" / "python3").symlink_to("python3.12")
    found = interpreter.of_python(tmp_path / "bin" / "python3", {})
    assert [str(each.path) for each in found.candidates("vllm")] == [str(packages / "vllm")]


def test_the_judge_of_an_environment_imports_nothing_of_it() -> None:
    """The interpreter that runs the judge has no vllm and no sparkcache_connector loaded."""
    code = (
        "import sys, verify.cli; print([m for m in sys.modules if m.startswith(('vllm', 'spark'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout == "[]\n"
