"""builder.source_wheel: the shared suite, and what a wheel must not hold."""

from __future__ import annotations

import io
import zipfile

import pytest

from builder.source import SourceError, read_proven, scan
from builder.source_wheel import WheelSource
from tests.small_target import WHEELS, SmallTarget
from tests.unit.builder.source_suite import SourceSuite, pinned


def wheel(folder, data):
    path = folder / WHEELS["cuda-x86_64"]
    path.write_bytes(data)
    return WheelSource(path)


class TestWheel(SourceSuite):
    @pytest.fixture
    def make_provider(self, tmp_path):
        return lambda target: wheel(tmp_path, target.wheel("cuda-x86_64"))


def test_a_wheel_is_not_a_whole_release(tmp_path):
    with pytest.raises(SourceError, match="expected a whole release with modes, found a part"):
        scan(wheel(tmp_path, SmallTarget().wheel("cuda-x86_64")))


def zipped(*names):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "expected a readable wheel"),
        (b"PK\x05\x06", "expected a readable wheel"),
        (zipped("vllm/../x.py"), "without empty"),
    ],
)
def test_a_malformed_wheel_is_refused(tmp_path, data, match):
    with pytest.raises(SourceError, match=match):
        list(wheel(tmp_path, data).walk())


def test_a_member_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = zipped("vllm/a.py", "vllm/a.py")
    with pytest.raises(SourceError, match="expected each member once"):
        list(wheel(tmp_path, data).walk())


def test_a_damaged_member_is_refused(tmp_path):
    data = SmallTarget().wheel("cuda-x86_64")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = archive.getinfo("vllm/version.py")
    at = info.header_offset + 30 + len(info.filename) + 3
    damaged = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
    manifest = pinned(tmp_path).manifest
    with pytest.raises(SourceError, match="expected a readable wheel"):
        read_proven(wheel(tmp_path, damaged), manifest, [])
