"""The behaviour that every source provider must show; each provider's test module runs it.

A test module defines the fixture ``make_provider``: a function from a small target to a
provider of its release.
"""

from __future__ import annotations

import hashlib

import pytest

from builder.source import SourceError, read_proven, scan
from builder.source_sdist import SdistSource
from tests.small_target import PLATFORMS, SCHEDULER, SDIST, TOUCHED, SmallTarget, release
from verify.gitobj import File, blob_id, tree_ids
from verify.manifest import Manifest


def pinned(tmp_path, target=None):
    """The manifest that a release is pinned by: the sdist's, unless the test is about that."""
    path = tmp_path / "pinned" / SDIST
    path.parent.mkdir()
    path.write_bytes((target or SmallTarget()).sdist())
    return scan(SdistSource(path, "vllm", "0.28.0"))


class SourceSuite:
    """What is asked of a provider of the release."""

    @pytest.fixture
    def manifest(self, tmp_path):
        return pinned(tmp_path).manifest

    def test_one_identity_whatever_the_provider(self, make_provider, manifest):
        provider = make_provider(SmallTarget())
        everything = [path for path in release() if provider.whole or path.startswith("vllm/")]
        found = read_proven(provider, manifest, everything)
        files = [File(f.path, f.mode or "", blob_id(f.data)) for f in found.values()]
        expected = tree_ids(File(p, mode, blob_id(data)) for p, (mode, data) in release().items())
        assert tree_ids(files)["vllm"] == expected["vllm"]
        if provider.whole:
            assert tree_ids(files)[""] == expected[""]

    def test_the_wanted_bytes_are_the_releases(self, make_provider, manifest):
        found = read_proven(make_provider(SmallTarget()), manifest, [TOUCHED, "vllm/tool.py"])
        assert {path: (f.mode, f.data) for path, f in found.items()} == {
            TOUCHED: ("100644", SCHEDULER),
            "vllm/tool.py": ("100755", b"#!/usr/bin/env python3\n"),
        }

    def test_a_changed_file_is_refused_even_when_nobody_wants_it(self, make_provider, manifest):
        target = SmallTarget()
        target.files["vllm/version.py"] = ("100644", b"changed\n")
        with pytest.raises(SourceError, match=r"vllm/version\.py: expected SHA-256 \w{64}, found"):
            read_proven(make_provider(target), manifest, [TOUCHED])

    def test_converted_line_ends_are_refused_and_named(self, make_provider, manifest):
        target = SmallTarget()
        target.files["vllm/config/crlf.py"] = ("100644", b"a = 1\nb = 2\n")
        with pytest.raises(SourceError, match=r"crlf\.py: .* \(only the line ends differ\)"):
            read_proven(make_provider(target), manifest, [])

    def test_every_difference_is_listed_not_the_first(self, make_provider, manifest):
        target = SmallTarget()
        del target.files["vllm/version.py"]
        target.files[TOUCHED] = ("100644", b"changed\n")
        with pytest.raises(SourceError, match=r"2 difference\(s\)") as caught:
            read_proven(make_provider(target), manifest, [])
        assert [line.split(":")[0] for line in caught.value.differences] == [
            TOUCHED,
            "vllm/version.py",
        ]

    def test_an_extra_file_or_another_mode_is_refused_where_it_can_be_seen(
        self, make_provider, manifest
    ):
        extra, mode = SmallTarget(), SmallTarget()
        extra.files["vllm/sitecustomize.py"] = ("100644", b"")
        mode.files["vllm/tool.py"] = ("100644", mode.files["vllm/tool.py"][1])
        provider = make_provider(extra)
        if not provider.whole:  # a wheel holds more than sources, and no modes
            assert read_proven(provider, manifest, [TOUCHED]).keys() == {TOUCHED}
            return
        with pytest.raises(SourceError, match=r"vllm/sitecustomize\.py: not in the release"):
            read_proven(provider, manifest, [])
        with pytest.raises(SourceError, match=r"tool\.py: expected mode 100755, found 100644"):
            read_proven(make_provider(mode), manifest, [])

    def test_files_that_may_differ_are_pinned_too_and_cannot_be_read(self, make_provider, manifest):
        target = SmallTarget()
        target.files[PLATFORMS] = ("100644", b"kind = 'tpu'\n")
        digest = pinned_sha256(manifest, target)
        provider = make_provider(target)
        assert TOUCHED in read_proven(provider, manifest, [TOUCHED], {PLATFORMS: digest})
        with pytest.raises(SourceError, match="cannot give these files as released"):
            read_proven(provider, manifest, [PLATFORMS], {PLATFORMS: digest})
        with pytest.raises(SourceError, match=r"expected SHA-256 0{64}"):
            read_proven(provider, manifest, [TOUCHED], {PLATFORMS: "0" * 64})

    def test_a_file_that_the_release_lacks_cannot_be_wanted(self, make_provider, manifest):
        with pytest.raises(SourceError, match=r"vllm/none\.py"):
            read_proven(make_provider(SmallTarget()), manifest, ["vllm/none.py"])


def pinned_sha256(manifest: Manifest, target: SmallTarget) -> str:
    """The SHA-256 of the target's platform file, which must not be the release's."""
    digest = hashlib.sha256(target.files[PLATFORMS][1]).hexdigest()
    assert manifest.files[PLATFORMS].sha256 != digest
    return digest
