"""verify.inplace: an installation in place is known by name, and still judged by its bytes."""

from __future__ import annotations

import json
import shutil

import pytest

from builder.cli import main as builder
from tests import small_environment, small_wheel
from tests.small_checkout import make_checkout
from tests.small_environment import SITE
from tests.small_target import MODULE, NAME, TOUCHED, WHEELS
from verify.cli import main as verify


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return make_checkout(tmp_path_factory.mktemp("template") / "checkout")


@pytest.fixture(scope="module")
def installed(tmp_path_factory, checkout):
    root = tmp_path_factory.mktemp("installed")
    wheel = root / small_wheel.FILENAME
    shutil.copy(checkout / "index" / WHEELS["cuda-x86_64"], wheel)
    env = small_environment.make(root / "env", wheel)
    assert builder(["--checkout", str(checkout), "install", "--venv", str(env)]) == 0
    return env


@pytest.fixture
def env(installed, tmp_path):
    return shutil.copytree(installed, tmp_path / "env")


@pytest.fixture
def judge(checkout, env, capsys):
    pins = checkout / "overlay" / "targets" / NAME / "pins.json"

    def judge(*options):
        capsys.readouterr()
        base = ["--base", "cuda-x86_64", "--format", "json"]
        arguments = ["venv", str(env), "--pins", str(pins), *base, *options]
        code = verify(arguments)
        checks = json.loads(capsys.readouterr().out)["findings"]
        failed = sorted({check["check"] for check in checks if check["status"] == "fail"})
        return code, failed, checks

    return judge


def test_an_installation_in_place_passes_and_is_named(judge):
    _, failed, checks = judge()
    assert failed == []
    messages = [check["message"] for check in checks if check["check"] == "PKG-16"]
    assert messages == [f"{NAME} is installed in place; the version stays the release's"]


def test_without_its_journal_the_same_files_are_a_layer_over_the_release(judge, env):
    shutil.rmtree(env / ".sparkcache")
    code, failed, checks = judge()
    assert (code, failed) == (0, [])
    messages = [check["message"] for check in checks if check["check"] == "PKG-16"]
    assert messages == [
        "judged as a layer over an installed release: version and RECORD stay the release's"
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"state":"installed"', b'"state":"installing"'),
        (b'"state":"installed"', b'"state":"uninstalling"'),
        (b'"target":"v0.28.0"', b'"target":"v0.27.0"'),
        (b'"schema":"sparkcache.install/v1"', b'"schema":"sparkcache.install/v2"'),
        (b'"state"', b'"status"'),
    ],
)
def test_a_journal_that_is_not_of_a_finished_installation_fails_alone(judge, env, old, new):
    path = env / ".sparkcache" / "journal.json"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    code, failed, _ = judge()
    assert code == 1
    assert failed == ["PKG-16"]


def test_an_installation_from_other_pins_fails(judge, env):
    path = env / ".sparkcache" / "journal.json"
    journal = json.loads(path.read_bytes())
    digest = journal["pins"]["sha256"]
    path.write_bytes(path.read_bytes().replace(digest.encode(), b"0" * 64))
    assert judge()[1] == ["PKG-16"]


@pytest.mark.parametrize(
    ("path", "check"),
    [(TOUCHED, "PATCH-4"), (MODULE, "TREE-6"), ("vllm/version.py", "TREE-1")],
)
def test_the_journal_excuses_no_byte(judge, env, path, check):
    (env / SITE / path).write_bytes(b"mine = 1\n")
    code, failed, _ = judge()
    assert code == 1
    assert check in failed
    assert "PKG-16" not in failed


def test_what_was_killed_before_it_changed_anything_is_only_noted(judge, env, checkout):
    assert builder(["uninstall", "--venv", str(env)]) == 0
    (env / ".sparkcache" / "before").mkdir(parents=True)
    _, failed, checks = judge("--state", "upstream")
    assert any(check["check"] == "PKG-16" and check["status"] == "note" for check in checks)
    assert "PKG-16" not in failed
