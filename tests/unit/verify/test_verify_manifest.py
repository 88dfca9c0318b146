"""verify.manifest: the codec, its order and what it refuses."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.errors import FormatError
from verify.manifest import Entry, Manifest, is_deployable, mode_of, path_problem, source_sha256

entries = st.builds(
    Entry,
    st.sampled_from(["100644", "100755"]),
    st.binary(min_size=1, max_size=4).map(lambda b: hashlib.sha256(b).hexdigest()),
)
paths = st.text("ab/. é\U0001f600￿", min_size=1, max_size=8).filter(
    lambda path: path_problem(path) is None
)
manifests = st.builds(
    lambda files, absent: Manifest(files, frozenset(absent - set(files))),
    st.dictionaries(paths, entries, max_size=8),
    st.sets(paths, max_size=3),
)


@given(manifests)
def test_dump_and_parse_are_inverse(manifest):
    data = manifest.dump()
    assert Manifest.parse(data, "m") == manifest
    assert manifest.sha256() == hashlib.sha256(data).hexdigest()


@given(manifests, st.data())
def test_a_damaged_manifest_is_refused_or_is_another_one(manifest, data):
    whole = manifest.dump()
    if not whole:
        return
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for attempt in (damaged, whole[:at]):
        try:
            other = Manifest.parse(attempt, "m")
        except FormatError:
            continue
        assert other.dump() == attempt
        assert other != manifest


H = "0" * 64


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (f"100644 {H} a", "expected a final newline"),
        (f"100644 {H} b\n100644 {H} a\n", "line 2: expected paths sorted"),
        (f"100644 {H} a\n100755 {H} a\n", "line 2: expected paths sorted, each once; found 'a'"),
        (f"100664 {H} a\n", "line 1: expected `<mode> <sha256> <path>`"),
        (f"100644 {H.upper()[:-1]}A a\n", "line 1"),
        (f"100644 {H} ../a\n", "without empty"),
        (f"100644 {H} /a\n", "without empty"),
        (f"100644 {H} a\\b\n", "backslash"),
        (f"100644 {H} a\rb\n", "control character"),
        (f"100644 {H} a\n\n", "line 2"),
        (f"100644 {H} a\r\n", "control character"),
        ("- - \n", "line 1"),
    ],
)
def test_refuses(text, match):
    with pytest.raises(FormatError, match=match):
        Manifest.parse(text.encode(), "bases/x.manifest")


def test_paths_sort_by_their_bytes_not_by_code_units():
    high, low = "\U0001f600", "￿"
    entry = Entry("100644", H)
    lines = Manifest({high: entry, low: entry}).dump().decode().splitlines()
    assert [line[-1] for line in lines] == [low, high]


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest({"a": Entry("100664", H)}),
        Manifest({"a\nb": Entry("100644", H)}),
        Manifest({"\udc80": Entry("100644", H)}),
        Manifest({"a": Entry("100644", H)}, frozenset({"a"})),
    ],
)
def test_dump_refuses_what_parse_would(manifest):
    with pytest.raises(ValueError, match="a"):
        manifest.dump()


def test_below_takes_whole_path_parts():
    entry = Entry("100644", H)
    manifest = Manifest({"vllm/a": entry, "vllm2/a": entry, "vllm": entry}, frozenset({"vllm/b"}))
    assert manifest.below("vllm") == Manifest({"vllm/a": entry}, frozenset({"vllm/b"}))


@pytest.mark.parametrize(
    ("mode", "kept"), [(0o644, "100644"), (0o664, "100644"), (0o755, "100755"), (0o611, "100644")]
)
def test_only_the_owners_execute_bit_is_kept(mode, kept):
    assert mode_of(mode) == kept


def test_source_digest_is_the_shells(tmp_path):
    for name in ("pkg/b.py", "pkg/a.py", "pkg/a/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    script = "find pkg -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    shell = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, capture_output=True, check=True, text=True
    ).stdout.split()[0]
    digests = {
        str(path.relative_to(tmp_path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tmp_path.rglob("*.py")
    }
    assert source_sha256(digests) == shell


@pytest.mark.parametrize(
    ("path", "covered"),
    [("p/a.py", True), ("p/py.typed", True), ("p/a.pyc", False), ("p/__pycache__/x.txt", False)],
)
def test_bytecode_is_not_source(path, covered):
    assert is_deployable(path) is covered
