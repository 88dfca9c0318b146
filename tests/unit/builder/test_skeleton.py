"""builder.skeleton and `python -m builder target new`: a target for any commit."""

from __future__ import annotations

import json

import pytest

from builder.bundle import OutputError
from builder.cli import main
from builder.skeleton import begin
from builder.target import Layout
from tests import small_repository
from tests.small_target import NAME, PLATFORMS, TOUCHED, WHEELS, SmallTarget, release

FORK = "fork-1"
CPU = f"cpu-x86_64=vllm:{WHEELS['cpu-x86_64']}"
CUDA = f"cuda-x86_64=vllm:{WHEELS['cuda-x86_64']}"


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def checkout(tmp_path):
    return SmallTarget().write(tmp_path / "checkout")


@pytest.fixture
def fork(tmp_path):
    """A commit that no release holds: one file of vllm/ is another."""
    files = release()
    files["vllm/version.py"] = ("100644", b"fork = 1\n")
    return tmp_path / "fork", small_repository.make(tmp_path / "fork", files)


def new(checkout, repository, commit, *options, name=FORK):
    arguments = ["target", "new", name, "--git", repository.as_uri(), "--commit", commit]
    files = ["--version", "0.28.0", "--files", str(checkout / "index")]
    return main(["--checkout", str(checkout), *arguments, *files, *options])


def folder(checkout, name=FORK):
    return checkout / "overlay" / "targets" / name


def test_a_target_for_a_fork_is_begun_pinned_and_proven_without_an_sdist(checkout, fork, capsys):
    assert new(checkout, *fork, "--base", CUDA, "--like", NAME) == 0
    said = capsys.readouterr()
    assert [line.split(FORK)[-1] for line in said.out.splitlines()] == [
        "/target.yaml", "/objects/commit", "/objects/tree", "/series",
    ]  # fmt: skip
    assert f"{WHEELS['cuda-x86_64']} has 5 as they are, 1 otherwise and lacks 0" in said.err
    target = Layout.open(checkout, FORK).read_target()
    assert target.sdist is None
    assert target.commit == fork[1]
    assert target.bases["cuda-x86_64"].differs == ("vllm/version.py",)
    assert set(target.contract) == {TOUCHED, "vllm/version.py"}
    yaml = folder(checkout) / "target.yaml"
    assert "\n# cuda-x86_64: of this commit" in yaml.read_text()
    pin = ["--checkout", str(checkout), "pin", "--target", FORK, "--files", f"{checkout}/index"]
    assert main(pin) == 0
    pins = json.loads((folder(checkout) / "pins.json").read_bytes())
    assert pins["sdist"] is None
    assert pins["commit"] == {"id": fork[1], "status": "proven"}
    fork[0].rename(fork[0].with_name("gone"))
    assert main([*pin, "--check", "--offline"]) == 0
    out = checkout / "tree"
    compose = ["--checkout", str(checkout), "compose", str(out), "--target", FORK, "--offline"]
    assert main(compose) == 0
    assert (out / "vllm/version.py").read_bytes() == b"fork = 1\n"


def test_natives_of_the_same_python_are_said_to_be(checkout, tmp_path, capsys):
    commit = small_repository.make(tmp_path / "up", release())
    assert new(checkout, tmp_path / "up", commit, "--base", CUDA, "--base", CPU) == 0
    err = capsys.readouterr().err
    assert f"the Python of {WHEELS['cuda-x86_64']} is this commit's, all of it" in err
    assert f"{WHEELS['cpu-x86_64']} has 5 as they are, 1 otherwise and lacks 0" in err
    target = Layout.open(checkout, FORK).read_target()
    assert target.bases["cuda-x86_64"].differs == ()
    assert target.bases["cpu-x86_64"].differs == (PLATFORMS,)


def test_without_natives_that_is_said_too(checkout, fork, capsys):
    assert new(checkout, *fork) == 0
    assert "no native libraries go with it yet" in capsys.readouterr().err
    assert Layout.open(checkout, FORK).read_target().bases == {}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--base", "rocm=vllm:x.whl"], "--base: expected BASE=PROJECT:FILENAME"),
        (["--base", "cpu-x86_64=x.whl"], "--base: expected BASE=PROJECT:FILENAME"),
        (["--base", CUDA, "--base", CUDA], "--base: expected each base once"),
        (["--like", "v9"], "unknown target 'v9'"),
        (["--commit", "main"], "expected a commit by its 40 lower-case hex digits, found 'main'"),
    ],
)
def test_refuses(checkout, fork, capsys, options, match):
    assert new(checkout, *fork, *options) == 1
    assert match in capsys.readouterr().err
    assert not folder(checkout).exists()


def test_an_existing_target_is_never_overwritten(checkout, fork, capsys):
    before = (folder(checkout, NAME) / "target.yaml").read_bytes()
    assert new(checkout, *fork, name=NAME) == 1
    assert "the target was begun already" in capsys.readouterr().err
    assert (folder(checkout, NAME) / "target.yaml").read_bytes() == before


def test_a_commit_without_vllm_is_refused(checkout, tmp_path, capsys):
    commit = small_repository.make(tmp_path / "up", {"README": ("100644", b"x\n")})
    assert new(checkout, tmp_path / "up", commit) == 1
    assert "holds no vllm/" in capsys.readouterr().err


def test_a_moved_tag_is_refused(checkout, fork, capsys):
    repository, commit = fork
    other = small_repository.make(repository, {"x": ("100644", b"")}, "Other")
    small_repository.git(repository, "tag", FORK, other)
    assert new(checkout, repository, commit) == 1
    assert f"the tag {FORK} was moved" in capsys.readouterr().err


def test_a_target_that_cannot_be_written_leaves_nothing_behind(checkout):
    layout = Layout(checkout, FORK)
    blocked = checkout / "blocked"
    blocked.write_bytes(b"a file")
    with pytest.raises(OutputError, match="overlay/targets/fork-1"):
        begin(layout, "# head\n", version="0.28.0", commit="a" * 40, git="https://example.invalid/x",
              contract={}, files={layout.patches / "series": b"", blocked / "x": b""})  # fmt: skip
    assert not layout.folder.exists()
    assert not layout.patches.exists()
