"""builder.patchfile and builder.patcher against `git diff` and `git apply`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder.errors import BuildError
from builder.patcher import Content, PatchApplyError, apply_change, apply_hunks, apply_series
from builder.patchfile import Patch, PatchFormatError
from verify.gitobj import blob_id

GIT_ENV = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
}

# Few different lines, so that the same context stands in several places; line ends of all kinds.
lines = st.sampled_from(
    [b"a\n", b"b\n", b"c\r\n", b"\n", b"d\re\n", b" -x\n", b"\tf \n", b"\xff\n"]
)
last = st.sampled_from([b"", b"", b"", b"z", b"a", b"end\r"])
# Long enough for a change with context on both sides to stand away from the file's ends.
bodies = st.lists(lines, min_size=14, max_size=24)
texts = st.builds(lambda body, end: b"".join(body) + end, st.lists(lines, max_size=25), last)


def git(folder, *args, ok=(0,), data=None):
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", *args],
        cwd=folder,
        env=GIT_ENV,
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.returncode in ok, done.stderr
    return done


@st.composite
def edits(draw, before):
    """Another text, made of ``before`` by a few edits, as people make them."""
    parts = before.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(parts)))
        parts[at : at + draw(st.integers(0, 2))] = draw(st.lists(lines, max_size=2))
    body = b"".join(part if part.endswith(b"\n") else part + b"\n" for part in parts[:-1])
    return body + (parts[-1] if parts else b"")


@st.composite
def inner_edit(draw, body):
    """One change well inside: the kind that git is ready to move."""
    at = draw(st.integers(5, len(body) - 6))
    return b"".join(body[:at] + draw(st.lists(lines, max_size=2)) + body[at + 1 :])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch")
    git(folder, "init", "-q", ".")
    return folder


def diff(folder, before, after):
    """The patch that git writes for two versions of f.py."""
    for side, data in (("a", before), ("b", after)):
        (folder / side).mkdir(exist_ok=True)
        (folder / side / "f.py").write_bytes(data)
    options = ("--no-index", "--no-prefix", "--text", "--full-index")
    return git(folder, "diff", *options, "a/f.py", "b/f.py", ok=(0, 1)).stdout


def diff_trees(folder, before, after, path):
    """The patch that git writes for one file; None stands for a file that does not exist."""
    for side, data in (("old", before), ("new", after)):
        target = folder / side / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if data is not None:
            target.write_bytes(data)
    ids = [
        git(folder, "hash-object", "-w", "--stdin", data=data or b"") for data in (before, after)
    ]
    old, new = (done.stdout.decode().strip() for done in ids)
    git(folder, "read-tree", "--empty")
    if before is not None:
        git(folder, "update-index", "--add", "--cacheinfo", f"100644,{old},{path}")
    first = git(folder, "write-tree").stdout.decode().strip()
    git(folder, "read-tree", "--empty")
    if after is not None:
        git(folder, "update-index", "--add", "--cacheinfo", f"100644,{new},{path}")
    second = git(folder, "write-tree").stdout.decode().strip()
    return git(
        folder, "diff-tree", "-p", "--text", "--full-index", "--no-renames", first, second
    ).stdout


def git_apply(folder, patch, before):
    """What `git apply` makes of ``before``, or None; and whether it moved a hunk."""
    target = folder / "f.py"
    target.write_bytes(before)
    done = git(folder, "apply", "-v", "-", data=patch, ok=(0, 1, 128))
    if done.returncode:
        return None, False
    return target.read_bytes(), b"offset" in done.stderr


MOVED, REFUSED, ACCEPTED = "git moves it, we refuse", "both refuse", "both accept, same bytes"


def test_same_bytes_as_git_apply_where_we_accept_and_git_moves_what_we_refuse(scratch):
    """Of the changed files, at least 20 % must be cases that git moves: the test's power."""
    seen = Counter()

    @settings(max_examples=150)
    @given(st.data())
    def compare(data):
        body = data.draw(bodies)
        before = b"".join(body) + data.draw(last)
        after = data.draw(st.one_of(edits(before), inner_edit(body)))
        text = diff(scratch, before, after)
        if not text:
            return
        (change,) = Patch.parse(text, "p").changes
        assert apply_change(change, Content("100644", before), "p") == Content("100644", after)
        assert git_apply(scratch, text, before) == (after, False)

        # The same patch on a file that moved or changed a little: never more lenient than git.
        other = data.draw(
            st.one_of(
                st.builds(lambda head: head + before, lines),
                st.builds(lambda head, tail: head + head + before + tail, lines, lines),
                st.builds(lambda tail: before + b"\n" + tail, lines),
                edits(before),
            )
        )
        if other == before:
            return
        theirs, moved = git_apply(scratch, text, other)
        try:
            ours = apply_hunks(change, other, "p")
        except PatchApplyError:
            assert theirs is None or moved, (text, other)
            seen[MOVED if moved else REFUSED] += 1
        else:
            seen[ACCEPTED] += 1
            assert (theirs, moved) == (ours, False)
        with pytest.raises(PatchApplyError, match=r"p: f\.py: expected git blob"):
            apply_change(change, Content("100644", other), "p")

    compare()
    assert seen.total() >= 100, seen
    assert seen[MOVED] >= 0.20 * seen.total(), seen
    assert seen[ACCEPTED] >= 0.05 * seen.total(), seen


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, st.sampled_from(["f.py", "a b/c d.py", "x b/x", "dir/ä.txt"]))
def test_files_that_come_and_go(scratch, content, path):
    quoted = git(scratch, "config", "core.quotePath", "false")
    assert quoted.returncode == 0
    for before, after in ((None, content), (content, None)):
        (change,) = Patch.parse(diff_trees(scratch, before, after, path), "p").changes
        old = None if before is None else Content("100644", before)
        new = None if after is None else Content("100644", after)
        assert change.path == path
        assert apply_change(change, old, "p") == new
        with pytest.raises(PatchApplyError, match="already applied"):
            apply_change(change, new, "p")
        with pytest.raises(PatchApplyError, match=r"expected .*, found git blob"):
            apply_change(change, Content("100644", content + b"x"), "p")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_patch_never_crashes_and_never_beats_git(scratch, data):
    before = data.draw(texts)
    text = diff(scratch, before, data.draw(edits(before)))
    if not text:
        return
    at = data.draw(st.integers(0, len(text) - 1))
    piece = data.draw(st.sampled_from([b"", b"0", b"1", b"\n", b"-", b"+", b" ", b"\\", b"\r\n"]))
    damaged = text[:at] + piece + text[at + data.draw(st.integers(0, 2)) :]
    with contextlib.suppress(BuildError):
        (change, *_) = Patch.parse(damaged, "p").changes
        if change.path == "f.py" and change.old_mode and change.new_mode:
            ours = apply_hunks(change, before, "p")
            assert git_apply(scratch, damaged, before)[0] == ours


@given(st.binary(max_size=80), st.binary(max_size=20))
def test_no_input_crashes_the_parser(noise, tail):
    head = b"diff --git a/f b/f\nindex " + b"1" * 40 + b".." + b"2" * 40 + b" 100644\n"
    for data in (noise, head + noise, head + b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n" + noise + tail):
        with contextlib.suppress(PatchFormatError):
            Patch.parse(data, "p")


def make(*body, head=b"diff --git a/f b/f\n", index=None, names=b"--- a/f\n+++ b/f\n"):
    index = index or b"index " + b"1" * 40 + b".." + b"2" * 40 + b" 100644\n"
    return head + index + names + b"".join(body)


HUNK = b"@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (make(HUNK, index=b"similarity index 90%\nrename from f\nrename to g\n"), "a rename"),
        (make(HUNK, index=b"copy from f\n"), "a copy is not supported"),
        (make(HUNK, index=b"old mode 100644\nnew mode 100755\n"), "a mode change is not supp"),
        (make(b"GIT binary patch\n", names=b""), "a binary patch is not supported"),
        (make(b"Binary files a/f and b/f differ\n", names=b""), "a binary patch is not supp"),
        (make(HUNK, head=b'diff --git "a/\\303" "b/\\303"\n'), "a quoted path or a merge"),
        (make(HUNK, head=b"diff --cc f\n"), "a quoted path or a merge"),
        (make(HUNK, head=b"diff --git a/f b/g\n"), "expected `diff --git a/PATH b/PATH`"),
        (make(HUNK, head=b"diff --git a/../f b/../f\n"), "is not allowed"),
        (make(HUNK, index=b"index 1234567..89abcde 100644\n"), "whole object ids"),
        (make(HUNK, index=b"index " + b"1" * 40 + b".." + b"2" * 40 + b" 120000\n"), "symbolic"),
        (make(HUNK, index=b"index " + b"1" * 40 + b".." + b"2" * 40 + b" 160000\n"), "submodule"),
        (make(HUNK, index=b"index " + b"1" * 40 + b".." + b"2" * 40 + b"\n"), "file's mode after"),
        (make(HUNK, index=b"index " + b"1" * 40 + b".." + b"1" * 40 + b" 100644\n"), "equal obj"),
        (make(HUNK, index=b"index " + b"0" * 40 + b".." + b"1" * 40 + b" 100644\n"), "contradict"),
        (make(HUNK, names=b"--- a/f\r\n+++ b/f\r\n"), "expected '--- a/f"),
        (make(), "expected a hunk, found the end of the file"),
        (make(names=b""), "expected hunks, found none"),
        (make(b"@@ -1 +1 @\n-a\n+b\n"), "expected a hunk|expected `@@"),
        (make(b"@@ -1,2 +1 @@\n-a\n+b\n"), "expected 2 old and 1 new lines"),
        (make(b"@@ -1 +1 @@\n-a\n+b\n+c\n"), "expected a hunk, found '.c"),
        (make(b"@@ -1 +1 @@\n a\n"), "context alone"),
        (make(b"@@ -0 +1 @@\n-a\n+b\n"), "counted from 1"),
        (make(b"@@ -1,2 +1,2 @@\n-a\n\\ No newline at end of file\n-b\n+c\n+d\n"), "not the file"),
        (make(b"@@ -1 +1 @@\n-a\n+\n\\ No newline at end of file\n"), "needs its newline or some"),
        (make(HUNK, b"-- \n2.40.0\n"), "expected a hunk, found '-- "),
        (make(HUNK) + make(HUNK), "expected each file once, found f again"),
        (make(HUNK)[:-1], "expected a final newline"),
        (b"From x\n\nmessage\n", "found no change at all"),
        (b"\xff\n" + make(HUNK), "UTF-8 message"),
    ],
)
def test_refuses_by_name(data, match):
    with pytest.raises(PatchFormatError, match=match) as caught:
        Patch.parse(data, "0001-x.patch")
    assert str(caught.value).startswith("0001-x.patch, line ")


BEFORE = b"".join(b"%d\n" % n for n in range(1, 21))


@pytest.mark.parametrize(
    ("body", "reason", "match"),
    [
        (b"@@ -4,3 +4,3 @@\n 3\n-4\n+x\n 5\n", "context", "expected b'3.n' at line 4, found b'4"),
        (b"@@ -3,3 +4,3 @@\n 3\n-4\n+x\n 5\n", "position", "expected new line 3, found new line 4"),
        (b"@@ -30,3 +30,3 @@\n 3\n-4\n+x\n 5\n", "position", "between lines 1 and 21"),
        (b"@@ -20,2 +20,2 @@\n 20\n-4\n+x\n", "context", "found the end of the file"),
        (b"@@ -4 +4 @@\n-4\n+x\n", "context", "unchanged lines around the change, found none"),
        (b"@@ -3,2 +3,2 @@\n 3\n-4\n+x\n", "context", "unchanged lines around"),
        (b"@@ -4,2 +4,2 @@\n-4\n+x\n 5\n", "context", "unchanged lines around"),
        (
            b"@@ -3,3 +3,3 @@\n 3\n-4\n+x\n 5\n@@ -5,3 +5,3 @@\n 5\n-6\n+x\n 7\n",
            "position",
            "between lines 6 and 21",
        ),
        (
            b"@@ -3,3 +3,3 @@\n 3\n-4\n+x\n 5\n@@ -1,3 +1,3 @@\n 1\n-2\n+x\n 3\n",
            "position",
            "between lines 6",
        ),
        (b"@@ -3,3 +3,3 @@\n 3\r\n-4\n+x\n 5\n", "context", r"b'3.r.n' at line 3, found b'3.n'"),
        (
            b"@@ -3,3 +3,3 @@\n 3\n-4\n 5\n+5\n\\ No newline at end of file\n",
            "context",
            "without its newline|unchanged lines",
        ),
    ],
)
def test_a_hunk_stands_at_its_line_or_is_refused(body, reason, match):
    (change,) = Patch.parse(make(body), "p").changes
    with pytest.raises(PatchApplyError, match=match) as caught:
        apply_hunks(change, BEFORE, "p")
    assert caught.value.reason == reason


def test_the_result_must_have_the_named_object_id():
    ids = b"index " + blob_id(b"a\n").encode() + b".." + b"2" * 40 + b" 100644\n"
    (change,) = Patch.parse(make(HUNK, index=ids), "p").changes
    with pytest.raises(PatchApplyError, match=r"expected git blob 2{40}, found git blob") as caught:
        apply_change(change, Content("100644", b"a\n"), "p")
    assert caught.value.reason == "postimage"
    with pytest.raises(PatchApplyError, match="expected mode 100644, found mode 100755"):
        apply_change(change, Content("100755", b"a\n"), "p")


def test_a_deletion_must_delete_everything():
    whole = b"a\nb\n"
    index = (
        b"deleted file mode 100644\nindex " + blob_id(whole).encode() + b".." + b"0" * 40 + b"\n"
    )
    text = make(b"@@ -1,2 +1 @@\n-a\n b\n", index=index, names=b"--- a/f\n+++ /dev/null\n")
    (change,) = Patch.parse(text, "p").changes
    with pytest.raises(PatchApplyError, match="expected nothing left of it, found 2 bytes"):
        apply_change(change, Content("100644", whole), "p")


def test_patches_apply_in_order_and_a_later_one_sees_the_earlier(scratch):
    texts_ = [b"a\nb\nc\nd\ne\nf\ng\n", b"a\nb\nc\nX\ne\nf\ng\n", b"a\nb\nc\nY\ne\nf\ng\n"]
    first, second = (
        Patch.parse(diff(scratch, old, new), name)
        for old, new, name in zip(texts_, texts_[1:], ["1", "2"], strict=False)
    )
    read = {"f.py": Content("100644", texts_[0])}.get
    assert apply_series([first, second], read) == {"f.py": Content("100644", texts_[2])}
    with pytest.raises(PatchApplyError, match=r"2: f\.py: expected git blob"):
        apply_series([second, first], read)


def test_trailers_are_the_last_paragraph():
    message = b"From x\nSubject: s\n\nText.\nWhy: not here\n\nWhy: one\n two\nBase: b\n\n"
    patch = Patch.parse(message + make(HUNK), "p")
    assert patch.trailers == {"Why": "one two", "Base": "b"}
    assert Patch.parse(b"Why: x\n\n" + make(HUNK), "p").trailers == {}
