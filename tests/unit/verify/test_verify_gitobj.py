"""verify.gitobj against git itself."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.errors import FormatError
from verify.gitobj import (
    BlobHasher,
    File,
    blob_id,
    object_id,
    parse_commit,
    parse_tree,
    tree_id,
    tree_ids,
)

GIT_ENV = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "t",
    "GIT_AUTHOR_EMAIL": "t@example.invalid",
    "GIT_COMMITTER_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@example.invalid",
    "GIT_AUTHOR_DATE": "1000000000 +0000",
    "GIT_COMMITTER_DATE": "1000000000 +0000",
}


def git(folder, *args, data=None):
    command = ["git", "-c", "core.autocrlf=false", *args]
    return subprocess.run(
        command, cwd=folder, env=GIT_ENV, input=data, capture_output=True, check=True
    ).stdout


# "a.b", "a" and "a0" sort differently as files and as folders: git's notorious corner
segments = st.sampled_from(["a", "a.b", "a0", "a-b", "B", "ä", "z z", "x"])
paths = st.lists(segments, min_size=1, max_size=4).map("/".join)
contents = st.tuples(st.binary(max_size=40), st.sampled_from(["100644", "100755"]))


@settings(max_examples=40)
@given(st.dictionaries(paths, contents, min_size=1, max_size=12))
def test_tree_ids_equal_git_mktree(tmp_path_factory, found):
    kept: dict[str, tuple[bytes, str]] = {}
    for path, value in found.items():  # drop paths under a path that is already a file
        if not any(o.startswith(path + "/") or path.startswith(o + "/") for o in kept):
            kept[path] = value
    folder = tmp_path_factory.mktemp("repo")
    git(folder, "init", "-q")
    for path, (data, mode) in kept.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if mode == "100755" else 0o644)
    git(folder, "add", "-A")
    root = git(folder, "write-tree").decode().strip()
    files = [File(path, mode, blob_id(data)) for path, (data, mode) in kept.items()]
    ids = tree_ids(files)
    assert ids[""] == root
    assert tree_id(reversed(files)) == root
    for folder_path, id_ in ids.items():
        assert git(folder, "rev-parse", f"{root}:{folder_path}").decode().strip() == id_
        body = git(folder, "cat-file", "tree", id_)
        assert object_id("tree", body) == id_
        names = [entry.name for entry in parse_tree(body, "tree")]
        assert len(names) == len(set(names)) > 0


def test_commit_object_names_its_tree(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "f").write_bytes(b"x")
    git(tmp_path, "add", "f")
    git(tmp_path, "commit", "-qm", "tree 0000000000000000000000000000000000000000\n\nbody")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "second")
    first, second = git(tmp_path, "rev-list", "--reverse", "HEAD").decode().split()
    body = git(tmp_path, "cat-file", "commit", second)
    assert object_id("commit", body) == second
    commit = parse_commit(body, "commit")
    assert commit.tree == tree_id([File("f", "100644", blob_id(b"x"))])
    assert commit.parents == (first,)


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_blob_in_chunks_equals_blob_at_once(chunks):
    whole = b"".join(chunks)
    hasher = BlobHasher(len(whole))
    for chunk in chunks:
        hasher.update(chunk)
    assert hasher.id() == blob_id(whole)
    hasher.update(b"x")
    with pytest.raises(ValueError, match="differ by -1 bytes"):
        hasher.id()


def test_a_path_twice_and_a_file_that_is_also_a_folder_are_refused():
    one = blob_id(b"")
    with pytest.raises(FormatError, match="found two"):
        tree_id([File("a/b", "100644", one), File("a/b", "100755", one)])
    for order in (1, -1):
        with pytest.raises(FormatError, match="a file or a directory, found both"):
            tree_id([File("a", "100644", one), File("a/b/c", "100644", one)][::order])


@pytest.mark.parametrize(
    ("path", "mode"),
    [("", "100644"), ("/a", "100644"), ("a/../b", "100644"), (".git/x", "100644"),
     ("a", "100664"), ("a", "40000")],
)  # fmt: skip
def test_what_no_tree_can_hold_is_refused(path, mode):
    with pytest.raises(ValueError, match="no git"):
        tree_id([File(path, mode, blob_id(b""))])


@given(st.binary(max_size=80))
def test_no_bytes_crash_the_object_parsers(data):
    for read in (parse_tree, parse_commit):
        with contextlib.suppress(FormatError):
            read(data, "object")


ENTRY = b"100644 a\0" + bytes(20)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (ENTRY[:-1], "found an end"),
        (b"100664 a\0" + bytes(20), "expected a mode that git writes, found 100664"),
        (b"100644 ..\0" + bytes(20), "the name b'..' is not allowed"),
        (b"100644 a/b\0" + bytes(20), "is not allowed"),
        (ENTRY + ENTRY, "each name once"),
        (b"100644 b\0" + bytes(20) + ENTRY, "git's order"),
        (b"40000 a\0" + bytes(20) + b"100644 a.b\0" + bytes(20), "git's order"),
    ],
)
def test_malformed_trees_are_refused(body, match):
    with pytest.raises(FormatError, match=match):
        parse_tree(body, "tree")


ZERO = b"0" * 40


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"parent " + ZERO,
        b"tree " + ZERO[:-1],
        b"tree " + ZERO + b"\ntree " + ZERO,
        b"author x\ntree " + ZERO,
        b"\n\ntree " + ZERO,
    ],
)
def test_malformed_commits_are_refused(body):
    with pytest.raises(FormatError, match="line"):
        parse_commit(body, "commit")
