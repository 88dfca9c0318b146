"""builder.prove and `python -m builder pin prove`: the commit proof on real history."""

from __future__ import annotations

import json

import pytest

from builder.cli import main
from tests import small_repository
from tests.small_target import COMMIT, NAME, SmallTarget, release
from verify.gitobj import object_id


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def checkout_for(root, commit):
    """A checkout whose target names ``commit``, with pins of the sdist."""
    small = SmallTarget()
    small.target_yaml = small.target_yaml.replace(COMMIT, commit)
    small.patches = {
        name: data.replace(COMMIT.encode(), commit.encode()) for name, data in small.patches.items()
    }
    small.write(root)
    assert main(["--checkout", str(root), "pin", "--offline", "--files", f"{root}/index"]) == 0
    return root


def prove(root, upstream, *options):
    return main(
        ["--checkout", str(root), "pin", "prove", "--git", upstream.as_uri(), *options]
    )  # fmt: skip


def folder(root):
    return root / "overlay" / "targets" / NAME


def status(root):
    return json.loads((folder(root) / "pins.json").read_bytes())["commit"]


@pytest.fixture
def upstream(tmp_path):
    first = small_repository.make(tmp_path / "up", {"README": ("100644", b"x\n")}, "Before")
    commit = small_repository.make(tmp_path / "up", release())
    assert first != commit
    small_repository.git(tmp_path / "up", "tag", NAME, commit)
    return tmp_path / "up", commit


def test_the_proof_is_two_raw_objects_and_pin_accepts_it_from_then_on(tmp_path, upstream, capsys):
    repository, commit = upstream
    root = checkout_for(tmp_path / "c", commit)
    assert status(root) == {"id": commit, "status": "unproven"}
    capsys.readouterr()
    assert prove(root, repository) == 0
    assert [line.split("/")[-1] for line in capsys.readouterr().out.split()[1::2]] == [
        "commit", "tree", "pins.json",
    ]  # fmt: skip
    assert status(root) == {"id": commit, "status": "proven"}
    raw = (folder(root) / "objects" / "commit").read_bytes()
    assert object_id("commit", raw) == commit
    check = ["--checkout", str(root), "pin", "--check", "--offline", "--files", f"{root}/index"]
    assert main(check) == 0
    repository.rename(repository.with_name("gone"))
    assert prove(root, repository, "--offline") == 0


@pytest.mark.parametrize("path", ["setup.py", "vllm/version.py", "tools/run.sh"])
def test_one_byte_anywhere_breaks_the_proof(tmp_path, capsys, path):
    files = release()
    files[path] = (files[path][0], files[path][1] + b"#")
    commit = small_repository.make(tmp_path / "up", files)
    root = checkout_for(tmp_path / "c", commit)
    before = (folder(root) / "pins.json").read_bytes()
    assert prove(root, tmp_path / "up") == 1
    assert "root tree: expected" in capsys.readouterr().err
    assert (folder(root) / "pins.json").read_bytes() == before
    assert not (folder(root) / "objects").exists()


def test_a_mode_breaks_the_proof_too(tmp_path, capsys):
    files = release()
    files["setup.py"] = ("100755", files["setup.py"][1])
    commit = small_repository.make(tmp_path / "up", files)
    assert prove(checkout_for(tmp_path / "c", commit), tmp_path / "up") == 1
    assert "root tree: expected" in capsys.readouterr().err


def test_a_moved_tag_is_refused(tmp_path, upstream, capsys):
    repository, commit = upstream
    root = checkout_for(tmp_path / "c", commit)
    other = small_repository.make(repository, {"x": ("100644", b"")}, "Other")
    small_repository.git(repository, "tag", "-f", NAME, other)
    assert prove(root, repository) == 1
    assert f"the tag {NAME} was moved: expected {commit}, found {other}" in capsys.readouterr().err


def test_a_repository_without_the_commit_proves_nothing(tmp_path, upstream, capsys):
    repository, _ = upstream
    small_repository.git(repository, "tag", "-d", NAME)
    root = checkout_for(tmp_path / "c", "a" * 40)
    assert prove(root, repository) == 1
    assert f"expected commit {'a' * 40} there" in capsys.readouterr().err


def test_without_a_commit_or_pins_there_is_nothing_to_prove(tmp_path, upstream, capsys):
    repository, commit = upstream
    root = checkout_for(tmp_path / "c", commit)
    yaml = folder(root) / "target.yaml"
    text = yaml.read_text()
    yaml.write_text(text.replace(commit, "null"))
    assert prove(root, repository) == 1
    assert "names no commit" in capsys.readouterr().err
    yaml.write_text(text)
    (folder(root) / "pins.json").unlink()
    assert prove(root, repository) == 1
    assert "run `python -m builder pin`" in capsys.readouterr().err
