from __future__ import annotations

import io
import zipfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from builder.wheel_read import STORED, Member, read_member, read_members
from builder.wheel_write import ArchiveWriter

PATHS = st.lists(
    st.text(st.sampled_from("abcé"), min_size=1, max_size=6), unique=True, max_size=8
).map(lambda names: [f"{name}.py" for name in names])


@given(st.data())
def test_what_is_written_is_read_back_by_both_readers(data: st.DataObject) -> None:
    contents = {
        path: (data.draw(st.binary(max_size=60)), data.draw(st.booleans()))
        for path in data.draw(PATHS)
    }
    sink = io.BytesIO()
    writer = ArchiveWriter(sink)
    for path, (content, executable) in contents.items():
        writer.store(path, content, executable=executable)
    writer.finish()
    members = read_members(sink, "w.whl")
    assert {m.path: (read_member(sink, m, "w.whl"), m.executable) for m in members} == contents
    with zipfile.ZipFile(sink) as archive:
        assert archive.testzip() is None
        assert {info.filename: archive.read(info) for info in archive.infolist()} == {
            path: content for path, (content, _) in contents.items()
        }


def test_copied_member_keeps_its_compressed_bytes() -> None:
    source = io.BytesIO()
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (("a.bin", b"x" * 3_000_000), ("b.bin", b"")):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    sink = io.BytesIO()
    writer = ArchiveWriter(sink)
    for member in read_members(source, "w.whl"):
        writer.copy(member, source, path=f"new/{member.path}")
    writer.finish()
    copied = read_members(sink, "w.whl")
    assert [m.path for m in copied] == ["new/a.bin", "new/b.bin"]
    for before, after in zip(read_members(source, "w.whl"), copied, strict=True):
        raw = source.getvalue()[before.offset : before.offset + before.compressed_size]
        assert sink.getvalue()[after.offset : after.offset + after.compressed_size] == raw


def test_headers_tell_one_time_unix_modes_and_no_descriptor() -> None:
    sink = io.BytesIO()
    writer = ArchiveWriter(sink)
    writer.store("a.py", b"1")
    writer.store("tool", b"2", executable=True)
    writer.finish()
    with zipfile.ZipFile(sink) as archive:
        for info in archive.infolist():
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert info.create_system == 3
            assert info.flag_bits == 0
            assert info.extra == b""
            assert info.compress_type == zipfile.ZIP_STORED
        assert [info.external_attr >> 16 for info in archive.infolist()] == [0o100644, 0o100755]


def test_more_than_65535_members_need_the_zip64_end_record() -> None:
    sink = io.BytesIO()
    writer = ArchiveWriter(sink)
    for number in range(65_536):
        writer.store(f"{number}", b"")
    writer.finish()
    assert len(read_members(sink, "w.whl")) == 65_536
    with zipfile.ZipFile(sink) as archive:
        assert len(archive.infolist()) == 65_536


class _Hole(io.RawIOBase):
    """A source of zeros without end."""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return len(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset


def test_member_of_4_gib_and_the_members_after_it_need_zip64(tmp_path: Path) -> None:
    size = 0xFFFF_FFFF  # the first size that does not fit: this value means "see ZIP64"
    with (tmp_path / "sparse").open("w+b") as file:
        writer = ArchiveWriter(_Sparse(file))
        writer.copy(Member("huge", False, STORED, 0, size, size, 0), _Hole())
        writer.store("after", b"found")
        writer.finish()
        huge, after = read_members(file, "w.whl")
        assert (huge.size, huge.compressed_size) == (size, size)
        assert after.offset > size
        assert read_member(file, after, "w.whl") == b"found"
        with zipfile.ZipFile(file) as archive:
            assert archive.getinfo("huge").file_size == size
            assert archive.read("after") == b"found"


class _Sparse(io.RawIOBase):
    """Seeks over large zeros instead of writing them."""

    def __init__(self, file: io.BufferedRandom) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        if len(data) > 1 << 16:
            self._file.seek(len(data), 1)
            return len(data)
        return self._file.write(data)
