"""builder.source_git: the shared suite, and what a repository must not do to us."""

from __future__ import annotations

import io
import zlib

import pytest
from git import Repo

from builder.console import Console
from builder.source import SourceError, read_proven, scan
from builder.source_git import fetch
from tests import small_repository
from tests.small_target import TOUCHED, SmallTarget, release
from tests.unit.builder.source_suite import SourceSuite, pinned
from verify.gitobj import object_id

TAG = "v0.28.0"


@pytest.fixture
def upstream(tmp_path):
    """A repository whose only commit is the release."""
    folder = tmp_path / "upstream"
    commit = small_repository.make(folder, release())
    return folder, commit


@pytest.fixture
def get(tmp_path):
    def get(folder, commit, **options):
        url = options.pop("url", folder.as_uri())
        tag = options.pop("tag", TAG)
        return fetch(url, commit, tag, tmp_path / "cache", Console(io.StringIO()), **options)

    return get


class TestGit(SourceSuite):
    @pytest.fixture
    def make_provider(self, tmp_path, get):
        count = iter(range(100))

        def make(target):
            folder = tmp_path / f"up{next(count)}"
            return get(folder, small_repository.make(folder, target.files))

        return make


def test_the_raw_objects_hash_to_the_ids(get, upstream):
    folder, commit = upstream
    raw = get(folder, commit).raw()
    assert object_id("commit", raw.commit) == commit
    assert raw.commit.startswith(f"tree {object_id('tree', raw.tree)}\n".encode())


def test_any_commit_is_fetched_alone_not_only_the_tip_of_a_branch(get, upstream, tmp_path):
    folder, first = upstream
    second = small_repository.make(folder, release() | {"more.py": ("100644", b"x\n")}, "Next")
    small_repository.git(folder, "update-ref", "refs/heads/old", first)
    small_repository.git(folder, "update-ref", "-d", "refs/heads/old")
    assert first != second
    assert set(scan(get(folder, first)).manifest.files) == set(release())
    assert not small_repository.git(tmp_path / "cache" / f"{first}.git", "for-each-ref")


def test_line_ends_come_as_committed_whatever_the_attributes_say(get, tmp_path):
    files = release() | {".gitattributes": ("100644", b"* text=auto eol=lf\n")}
    commit = small_repository.make(tmp_path / "up", files)
    found = {file.path: file.data for file in get(tmp_path / "up", commit).walk()}
    assert found["vllm/config/crlf.py"] == b"a = 1\r\nb = 2\r\n"


def test_a_fetched_commit_needs_the_repository_no_more(get, upstream):
    folder, commit = upstream
    get(folder, commit)
    folder.rename(folder.with_name("gone"))
    assert set(scan(get(folder, commit, offline=True)).manifest.files) == set(release())


def test_offline_without_the_commit_is_refused(get, upstream):
    with pytest.raises(SourceError, match=r"expected commit .* in the cache with --offline"):
        get(*upstream, offline=True)


def test_a_commit_that_the_repository_lacks_is_refused_and_nothing_stays(get, upstream, tmp_path):
    with pytest.raises(SourceError, match=f"expected commit {'1' * 40} there, git says: .*not our"):
        get(upstream[0], "1" * 40)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_tag_or_tree_in_the_place_of_the_commit_is_refused(get, upstream):
    folder, commit = upstream
    small_repository.git(folder, "tag", "-a", "-m", "x", "annotated", commit)
    tag = small_repository.git(folder, "rev-parse", "annotated")
    with pytest.raises(SourceError, match=f"expected {tag} to be a commit, found a tag"):
        get(folder, tag)
    tree = small_repository.git(folder, "rev-parse", f"{commit}^{{tree}}")
    with pytest.raises(SourceError):
        get(folder, tree)


@pytest.mark.parametrize("annotated", [False, True])
def test_a_moved_tag_is_refused_and_a_right_one_is_not(get, upstream, annotated):
    folder, commit = upstream
    options = ("-a", "-m", "x") if annotated else ()
    other = small_repository.make(folder, {"x": ("100644", b"")}, "Other")
    small_repository.git(folder, "tag", *options, TAG, other)
    moved = f"the tag {TAG} was moved: expected {commit}, found {other}"
    with pytest.raises(SourceError, match=moved):
        get(folder, commit)
    small_repository.git(folder, "tag", "-f", *options, TAG, commit)
    get(folder, commit)


@pytest.mark.parametrize("which", ["commit", "blob"])
def test_a_replaced_object_is_refused(get, upstream, which):
    folder, commit = upstream
    if which == "commit":
        other = small_repository.make(folder, {"x": ("100644", b"")}, "Other")
        small_repository.git(folder, "replace", commit, other)
        replaced = commit
    else:
        replaced = small_repository.git(folder, "rev-parse", f"{commit}:{TOUCHED}")
        other = small_repository.git(folder, "hash-object", "-w", "--stdin", data=b"evil\n")
        small_repository.git(folder, "replace", replaced, other)
    with pytest.raises(SourceError, match=f"replaces the object {replaced}"):
        scan(get(folder, commit))


def test_a_repository_that_borrows_objects_is_refused(get, upstream, tmp_path):
    folder, commit = upstream
    small_repository.git(tmp_path, "clone", "--quiet", "--shared", str(folder), "borrower")
    with pytest.raises(SourceError, match="this one borrows from others"):
        get(tmp_path / "borrower", commit)
    get(folder, commit)
    info = tmp_path / "cache" / f"{commit}.git" / "objects" / "info"
    (info / "alternates").write_text(f"{folder}/.git/objects\n")
    with pytest.raises(SourceError, match="expected no borrowed objects"):
        get(folder, commit)


@pytest.mark.parametrize(
    ("mode", "data", "match"),
    [
        ("160000", b"1" * 40, "'sub': expected files and folders only, found a submodule"),
        ("120000", b"setup.py", "'sub': expected files and folders only, found a symbolic link"),
    ],
)
def test_submodules_and_links_are_refused(get, tmp_path, mode, data, match):
    commit = small_repository.make(tmp_path / "up", release() | {"sub": (mode, data)})
    with pytest.raises(SourceError, match=match):
        scan(get(tmp_path / "up", commit))


@pytest.mark.parametrize(
    "url",
    ["ext::sh -c 'touch pwned'", "git://example.invalid/x", "http://example.invalid/x", "/tmp/x",
     "-ufile:///x", "--upload-pack=touch", "host:path", "file:///a b", "fd::3"],
)  # fmt: skip
def test_other_protocols_are_refused_before_git_runs(get, upstream, url):
    with pytest.raises(SourceError, match="expected a URL that begins with https://, ssh://, file"):
        get(*upstream, url=url)


def test_a_redirecting_configuration_is_not_seen(get, upstream, tmp_path, monkeypatch):
    """The user's `insteadOf` could send us anywhere; hooks and templates could run anything."""
    folder, commit = upstream
    hostile = tmp_path / "gitconfig"
    hostile.write_text(
        f'[url "file:///nonexistent"]\n insteadOf = {folder.as_uri()}\n'
        f"[init]\n templateDir = {tmp_path}\n[protocol]\n allow = never\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(hostile.read_text())
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(hostile))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(hostile))
    monkeypatch.setenv("GIT_ALTERNATE_OBJECT_DIRECTORIES", str(tmp_path))
    assert set(scan(get(folder, commit)).manifest.files) == set(release())


def test_credentials_in_the_address_are_never_shown(get, upstream):
    with pytest.raises(SourceError) as caught:
        get(*upstream, url="https://someone:secret@127.0.0.1:9/x")
    assert "secret" not in str(caught.value)
    assert "https://127.0.0.1:9/x" in str(caught.value)


@pytest.mark.parametrize("kind", ["commit", "tree", "blob"])
def test_a_damaged_object_in_the_cache_is_refused(get, upstream, tmp_path, kind):
    folder, commit = upstream
    get(folder, commit)
    repository = tmp_path / "cache" / f"{commit}.git"
    # unpack, so that one object is one file that can be forged
    (pack,) = (repository / "objects" / "pack").glob("*.pack")
    data = pack.read_bytes()
    for file in (repository / "objects" / "pack").iterdir():
        file.unlink()
    small_repository.git(repository, "unpack-objects", "-q", data=data)
    spec = {"commit": commit, "tree": f"{commit}:vllm", "blob": f"{commit}:{TOUCHED}"}[kind]
    id_ = small_repository.git(repository, "rev-parse", spec)
    other = {
        "commit": b"tree " + b"1" * 40 + b"\n\n",
        "tree": b"100644 x\0" + bytes(20),
        "blob": b"forged\n",
    }[kind]
    loose = repository / "objects" / id_[:2] / id_[2:]
    loose.chmod(0o644)
    loose.write_bytes(zlib.compress(f"{kind} {len(other)}\0".encode() + other))
    with pytest.raises(SourceError, match=f"the {kind} {id_}|hash mismatch|git cat-file"):
        scan(get(folder, commit))


def test_one_byte_anywhere_breaks_the_proof(get, tmp_path):
    """The commit proof on generated history: the release equals the sdist's, or is refused."""
    manifest = pinned(tmp_path).manifest
    for number, path in enumerate(release()):
        files = release()
        mode, data = files[path]
        files[path] = (mode, data[:-1] + bytes([data[-1] ^ 1]))
        folder = tmp_path / f"up{number}"
        commit = small_repository.make(folder, files)
        with pytest.raises(SourceError, match=rf"{path}: expected SHA-256"):
            read_proven(get(folder, commit), manifest, [])


def test_a_read_only_cache_is_named(get, upstream, tmp_path):
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    with pytest.raises(SourceError, match="cannot be written"):
        get(*upstream)


def test_the_suite_sees_every_file_of_the_target(get, upstream):
    found = {file.path: (file.mode, file.data) for file in get(*upstream).walk()}
    assert found == SmallTarget().files


def test_another_reader_of_git_sees_the_same_commit_tree_and_files(get, upstream, tmp_path):
    """GitPython: none of our parsers, and nothing of how we run git."""
    folder, commit = upstream
    ours = {file.path: (file.mode, file.data) for file in get(folder, commit).walk()}
    with Repo(tmp_path / "cache" / f"{commit}.git") as repository:
        tree = repository.commit(commit).tree
        theirs = {
            entry.path: (f"{entry.mode:o}", entry.data_stream.read())
            for entry in tree.traverse()
            if entry.type == "blob"
        }
    assert tree.hexsha == object_id("tree", get(folder, commit).raw().tree)
    assert theirs == ours
