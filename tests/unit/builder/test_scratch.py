"""builder.scratch, builder.git and `python -m builder patch`: commits and back, byte for byte."""

from __future__ import annotations

import functools
import os
import subprocess

import pytest

from builder.cli import main
from builder.git import Git, GitError
from builder.patchfile import PatchFormatError
from builder.scratch import BASE_REF, ScratchError, export_series, import_series, series_text
from builder.series import Series
from builder.source import GENERATED
from builder.source_sdist import SdistSource
from builder.target import Layout
from tests.small_target import (
    COMMIT,
    NAME,
    PATCHED,
    SCHEDULER,
    SDIST,
    SERIES,
    TOUCHED,
    SmallTarget,
    default_patch,
    patch,
    release,
)
from verify.gitobj import File, blob_id, tree_id

CRLF = "vllm/config/crlf.py"
CRLF_BEFORE = b"a = 1\r\nb = 2\r\n"
CRLF_AFTER = b"a = 1\r\nb = 3\r\nlast = 1"


def command(checkout, *arguments):
    files = ["--files", str(checkout / "index")] if arguments[0] != "export" else []
    return main(["--checkout", str(checkout), "patch", "--offline", *arguments, *files])


@functools.cache
def three_patches():
    """Text, CRLF without a final newline, and files that come and go."""
    second = {CRLF: (CRLF_BEFORE, CRLF_AFTER)}
    third = {
        "vllm/new dir/ä.py": (None, b"x = 1  \n"),  # git may be configured to strip this
        "vllm/empty.py": (None, b""),
        "setup.py": (b"import setuptools\n", None),
        TOUCHED: (PATCHED, PATCHED + b"\n\nEND = 1\n"),
    }
    return {
        SERIES[0]: patch({TOUCHED: (SCHEDULER, PATCHED)}, "Count steps"),
        "0002-Keep-line-ends.patch": patch(second, "Keep line ends"),
        "0003-Come-and-go.patch": patch(third, "Come and go"),
    }


@pytest.fixture
def small():
    return SmallTarget(patches=dict(three_patches()))


@pytest.fixture
def checkout(tmp_path, small):
    return small.write(tmp_path / "checkout")


@pytest.fixture
def files(checkout):
    provider = SdistSource(checkout / "index" / SDIST, "vllm", "0.28.0")
    return [file for file in provider.walk() if file.path not in GENERATED]


@pytest.fixture
def series(checkout):
    layout = Layout.open(checkout, NAME)
    return Series.read(layout.patches, f"{NAME} {COMMIT}").patches


@pytest.fixture
def repository(tmp_path, files, series):
    import_series(tmp_path / "r", files, series, NAME)
    return tmp_path / "r"


def git(repository, *arguments, **environment):
    """The user's own git, as an editor of patches would run it."""
    return subprocess.run(
        ["git", "-c", "user.name=Ed", "-c", "user.email=ed@example.invalid", *arguments],
        cwd=repository, env=os.environ | environment, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def test_an_unedited_series_comes_back_byte_for_byte(repository, small):
    assert export_series(repository) == small.patches


def test_the_first_commit_is_the_release_and_the_ids_are_the_same_everywhere(
    repository, tmp_path, files, series
):
    expected = tree_id(File(p, mode, blob_id(data)) for p, (mode, data) in release().items())
    assert git(repository, "rev-parse", f"{BASE_REF}^{{tree}}") == expected
    again = import_series(tmp_path / "again", files, series, NAME)
    assert again == [*git(repository, "rev-list", "--reverse", "HEAD").split()]
    assert (repository / CRLF).read_bytes() == CRLF_AFTER
    assert os.access(repository / "vllm/tool.py", os.X_OK)


def test_neither_the_users_configuration_nor_the_environment_is_seen(
    tmp_path, files, series, small, monkeypatch
):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("applypatch-msg", "pre-applypatch", "post-checkout", "reference-transaction"):
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    hostile = tmp_path / "gitconfig"
    hostile.write_text(
        f"[core]\n autocrlf = true\n eol = crlf\n hooksPath = {hooks}\n abbrev = 5\n"
        "[diff]\n noprefix = true\n renames = copies\n algorithm = patience\n context = 9\n"
        "[format]\n signature = x\n attach = x\n subjectPrefix = X\n numbered = true\n"
        "[apply]\n whitespace = fix\n"
        "[commit]\n gpgSign = true\n[am]\n keepcr = false\n threeWay = true\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(hostile.read_text())
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(hostile))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(hostile))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.autocrlf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "elsewhere-index"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=9")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    import_series(tmp_path / "r", files, series, NAME)
    assert export_series(tmp_path / "r") == small.patches
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "elsewhere-index").exists()


def test_attributes_of_the_release_do_not_convert_anything(tmp_path, small):
    small.files[".gitattributes"] = ("100644", b"* text=auto eol=lf\n*.py text ident\n")
    checkout = small.write(tmp_path / "c")
    layout = Layout.open(checkout, NAME)
    patches = Series.read(layout.patches, f"{NAME} {COMMIT}").patches
    provider = SdistSource(checkout / "index" / SDIST, "vllm", "0.28.0")
    files = [file for file in provider.walk() if file.path not in GENERATED]
    import_series(tmp_path / "r", files, patches, NAME)
    assert (tmp_path / "r" / CRLF).read_bytes() == CRLF_AFTER
    assert export_series(tmp_path / "r") == small.patches


def test_import_refuses_a_folder_that_may_hold_work(repository, files, series):
    with pytest.raises(ScratchError, match="may hold work that is not exported"):
        import_series(repository, files, series, NAME)


def test_import_names_the_patch_that_git_refuses(tmp_path, files, series):
    with pytest.raises(ScratchError, match=r"0003-Come-and-go\.patch: git am"):
        import_series(tmp_path / "other", files, [series[2]], NAME)


@pytest.mark.parametrize("what", ["edit", "staged", "untracked"])
def test_export_refuses_uncommitted_changes(repository, what):
    name = "new.py" if what == "untracked" else TOUCHED
    (repository / name).write_bytes(b"x = 1\n")
    if what == "staged":
        git(repository, "add", name)
    with pytest.raises(ScratchError, match=r"expected no uncommitted changes, found '.*\.py'"):
        export_series(repository)


def test_export_refuses_merges_strangers_and_what_is_not_a_repository(repository, tmp_path):
    git(repository, "checkout", "-qb", "side", "HEAD~1")
    git(repository, "commit", "-q", "--allow-empty", "-m", "side")
    git(repository, "merge", "-q", "--no-ff", "-m", "merge", "series")
    with pytest.raises(ScratchError, match="expected a line of commits, found the merge"):
        export_series(repository)
    git(repository, "checkout", "-q", "--orphan", "stranger")
    git(repository, "commit", "-qm", "stranger")
    with pytest.raises(ScratchError, match="expected HEAD on top of the release"):
        export_series(repository)
    with pytest.raises(ScratchError, match="expected a scratch repository"):
        export_series(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    with pytest.raises(ScratchError, match="`patch import` did not make this"):
        export_series(other)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: (r / "vllm/bin.py").write_bytes(b"\0\1"), "a binary patch is not supported"),
        (lambda r: (r / TOUCHED).chmod(0o755), "a mode change is not supported"),
        (lambda r: (r / "vllm/l.py").symlink_to("x"), "a symbolic link is not supported"),
    ],
)
def test_export_refuses_a_commit_that_we_could_not_apply(repository, change, match):
    change(repository)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "Not ours")
    with pytest.raises(PatchFormatError, match=match):
        export_series(repository)


def test_an_edit_travels_from_the_repository_to_the_series(checkout, capsys):
    assert command(checkout, "import") == 0
    repository = checkout / "build" / "patch" / NAME
    target = repository / TOUCHED
    target.write_bytes(target.read_bytes().replace(b"END = 1", b"END = 2"))
    git(repository, "commit", "-q", "--all", "--amend", "--no-edit")
    git(repository, "-c", "sequence.editor=sed -i 2d", "rebase", "-qi", BASE_REF)
    series = checkout / "patches" / NAME / "series"
    series.write_bytes(b"# ours\n# two lines\n" + series.read_bytes())
    capsys.readouterr()
    assert command(checkout, "export") == 0
    out = capsys.readouterr()
    assert sorted(out.out.splitlines()) == [
        f"removed patches/{NAME}/0002-Keep-line-ends.patch",
        f"removed patches/{NAME}/0003-Come-and-go.patch",
        f"wrote patches/{NAME}/0002-Come-and-go.patch",
        f"wrote patches/{NAME}/series",
    ]
    assert "2 patches, 4 files changed; now run `python -m builder pin`" in out.err
    assert series.read_bytes() == (
        b"# ours\n# two lines\n0001-Count-steps.patch\n0002-Come-and-go.patch\n"
    )
    assert b"+END = 2" in (series.parent / "0002-Come-and-go.patch").read_bytes()
    assert command(checkout, "check") == 0
    assert command(checkout, "export") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"A step is counted.\n", b"A step is counted.  \n"),  # git strips this
        (b"@@ class Scheduler:", b"@@ class Other:"),  # and writes its own section names
        (b"Date: Thu, 1 Jan 2026", b"Date: Fri, 1 Jan 2026"),
    ],
)
def test_check_names_a_patch_that_git_would_write_otherwise(checkout, capsys, old, new):
    path = checkout / "patches" / NAME / SERIES[0]
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    assert command(checkout, "check") == 1
    assert f"these are not: {SERIES[0]};" in capsys.readouterr().err


def test_check_names_a_patch_whose_file_name_is_not_its_subject(checkout, capsys):
    folder = checkout / "patches" / NAME
    (folder / SERIES[0]).rename(folder / "0001-Other.patch")
    text = (folder / "series").read_text()
    (folder / "series").write_text(text.replace(SERIES[0], "0001-Other.patch"))
    assert command(checkout, "check") == 1
    assert "0001-Count-steps.patch, 0001-Other.patch" in capsys.readouterr().err


def test_series_text_keeps_only_the_opening_comment():
    assert series_text(["a.patch"], b"# x\nold.patch\n# y\n") == b"# x\na.patch\n"
    assert series_text([], b"") == b""


def test_a_git_that_fails_says_what_it_was_asked_and_what_it_said(tmp_path):
    with pytest.raises(GitError, match=r"git rev-parse HEAD: fatal: not a git repository"):
        Git(tmp_path).run("rev-parse", "HEAD")
    with pytest.raises(GitError, match=r"git status: git is not installed, or its folder is gone"):
        Git(tmp_path / "none").run("status")


def test_the_default_patch_is_what_git_writes(tmp_path):
    checkout = SmallTarget(modules={}).write(tmp_path)
    assert command(checkout, "check") == 0
    assert default_patch() in (checkout / "patches" / NAME / SERIES[0]).read_bytes()
