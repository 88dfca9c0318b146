"""builder.source_sdist: the shared suite, and what an archive must not hold."""

from __future__ import annotations

import gzip
import tarfile

import pytest

from builder.source import SourceError, scan
from builder.source_sdist import SdistSource
from tests.small_target import SDIST, SmallTarget, generated, release
from tests.unit.builder.source_suite import SourceSuite


def sdist(folder, data):
    (folder / SDIST).write_bytes(data)
    return SdistSource(folder / SDIST, "vllm", "0.28.0")


class TestSdist(SourceSuite):
    @pytest.fixture
    def make_provider(self, tmp_path):
        return lambda target: sdist(tmp_path, target.sdist())


def test_generated_files_are_set_apart(tmp_path):
    found = scan(sdist(tmp_path, SmallTarget().sdist()), keep=["setup.py", "nothing.py"])
    assert set(found.manifest.files) == set(release())
    assert set(found.generated) == set(generated())
    assert set(found.kept) == {"setup.py"}


def odd(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("member", "match"),
    [
        (odd("vllm-0.28.0/vllm/l.py", tarfile.SYMTYPE, "version.py"), "found a link or a device"),
        (odd("vllm-0.28.0/h.py", tarfile.LNKTYPE, "vllm-0.28.0/setup.py"), "found a link"),
        (odd("vllm-0.28.0/fifo", tarfile.FIFOTYPE), "found a link or a device"),
        (odd("vllm-0.28.0/../x", tarfile.REGTYPE), "without empty"),
        (odd("/etc/x", tarfile.REGTYPE), "expected everything below vllm-0.28.0/"),
        (odd("other/x", tarfile.REGTYPE), "expected everything below vllm-0.28.0/"),
        (odd("vllm-0.28.0/setup.py", tarfile.REGTYPE), r"found setup\.py twice"),
    ],
)
def test_a_member_that_no_release_holds_is_refused(tmp_path, member, match):
    with pytest.raises(SourceError, match=match):
        scan(sdist(tmp_path, SmallTarget(odd_members=(member,)).sdist()))


def test_another_version_is_refused_by_name(tmp_path):
    with pytest.raises(SourceError, match=r"below vllm-0\.28\.0/, found 'vllm-0\.27\.1"):
        scan(sdist(tmp_path, SmallTarget(top="vllm-0.27.1").sdist()))


@pytest.mark.parametrize("cut", [0, 1, 20, 200, -1, -9])
def test_a_truncated_archive_is_refused(tmp_path, cut):
    whole = SmallTarget().sdist()
    with pytest.raises(SourceError, match=r"expected a readable \.tar\.gz"):
        scan(sdist(tmp_path, whole[:cut]))


@pytest.mark.parametrize("at", [12, 200, -20])
def test_a_flipped_byte_is_refused_or_is_another_release(tmp_path, at):
    whole = bytearray(SmallTarget().sdist())
    whole[at] ^= 0x55
    with pytest.raises(SourceError):
        scan(sdist(tmp_path, bytes(whole)))


def test_bytes_after_the_archives_end_are_refused(tmp_path):
    hidden = gzip.decompress(SmallTarget().sdist()) + b"hidden"
    with pytest.raises(SourceError, match="expected nothing after the archive's end"):
        scan(sdist(tmp_path, gzip.compress(hidden)))


def test_a_missing_archive_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"expected a readable .*No such file"):
        scan(SdistSource(tmp_path / SDIST, "vllm", "0.28.0"))
