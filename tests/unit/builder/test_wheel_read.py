from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import BuildError
from builder.wheel_read import WheelFormatError, read_member, read_members
from tests.small_wheel import SmallWheel, package

ELF = "vllm/_C.abi3.so"


def edited(edit: Callable[[bytearray], None], wheel: SmallWheel | None = None) -> bytes:
    data = bytearray((wheel or SmallWheel()).bytes())
    edit(data)
    return bytes(data)


def central(data: bytes, path: str) -> int:
    """Where the central directory's entry of ``path`` begins."""
    return data.rindex(path.encode()) - 46


def local(data: bytes, path: str) -> int:
    """Where the local header of ``path`` begins."""
    return data.index(path.encode()) - 30


def patch(data: bytearray, at: int, layout: str, value: int) -> None:
    struct.pack_into(layout, data, at, value)


def test_members_equal_what_the_standard_reader_sees() -> None:
    data = SmallWheel().bytes()
    members = read_members(io.BytesIO(data), "w.whl")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert [member.path for member in members] == archive.namelist()
        for member in members:
            assert read_member(io.BytesIO(data), member, "w.whl") == archive.read(member.path)
    assert {m.path for m in members if m.executable} == {ELF, "vllm/third_party/tool.sh"}


def test_data_descriptors_that_repeat_the_directory_are_read() -> None:
    wheel = SmallWheel(streamed=True)
    data = wheel.bytes()
    assert data.count(b"PK\x07\x08") == len(wheel.members) + 1
    members = read_members(io.BytesIO(data), "w.whl")
    assert {m.path: read_member(io.BytesIO(data), m, "w.whl") for m in members}.items() >= (
        wheel.members.items()
    )


def test_empty_directory_entries_are_left_out() -> None:
    wheel = SmallWheel()
    wheel.members = {"vllm/": b"", **wheel.members}
    wheel.modes = {"vllm/": 0o040755}
    paths = [m.path for m in read_members(io.BytesIO(wheel.bytes()), "w.whl")]
    assert "vllm/" not in paths
    assert len(paths) == len(wheel.members)


def with_member(path: str, mode: int = 0o100644) -> bytes:
    wheel = SmallWheel(modes={path: mode})
    wheel.members = {**package(), path: b"x"}
    return wheel.bytes()


def renamed(old: str, new: str) -> bytes:
    return SmallWheel().bytes().replace(old.encode(), new.encode())


ODD: dict[str, tuple[Callable[[], bytes], str]] = {
    "bytes after the end": (lambda: SmallWheel().bytes() + b"\n", "trailing data"),
    "archive comment": (
        lambda: edited(lambda d: patch(d, len(d) - 2, "<H", 1)) + b"c",
        "trailing data",
    ),
    "bytes before the first member": (lambda: b"#!x\n" + SmallWheel().bytes(), "trailing data"),
    "nothing": (lambda: b"", "truncated"),
    "cut in half": (lambda: SmallWheel().bytes()[:900], "trailing data"),
    "encrypted": (
        lambda: edited(lambda d: patch(d, central(d, ELF) + 8, "<H", 1)),
        "encrypted",
    ),
    "strong encryption flag": (
        lambda: edited(lambda d: patch(d, central(d, ELF) + 8, "<H", 1 << 6)),
        "flags",
    ),
    "another compression": (
        lambda: edited(lambda d: patch(d, central(d, ELF) + 10, "<H", 12)),
        "compression",
    ),
    "second disk": (
        lambda: edited(lambda d: patch(d, central(d, ELF) + 34, "<H", 1)),
        "several disks",
    ),
    "end record on another disk": (
        lambda: edited(lambda d: patch(d, len(d) - 18, "<H", 1)),
        "several disks",
    ),
    "made by DOS": (
        lambda: edited(lambda d: patch(d, central(d, ELF) + 4, "<H", 20)),
        "system",
    ),
    "symbolic link": (lambda: with_member("vllm/link.py", 0o120777), "file type"),
    "device": (lambda: with_member("vllm/null", 0o020666), "file type"),
    "setuid": (lambda: with_member("vllm/tool", 0o104755), "mode"),
    "setgid": (lambda: with_member("vllm/tool", 0o102755), "mode"),
    "sticky": (lambda: with_member("vllm/tool", 0o101755), "mode"),
    "directory with content": (lambda: with_member("vllm/dir/", 0o040755), "file type"),
    "file below a file": (lambda: with_member("vllm/version.py/x.py"), "file type"),
    "parent directory": (lambda: with_member("vllm/../../etc/passwd"), "unsafe name"),
    "absolute": (lambda: with_member("/etc/passwd"), "unsafe name"),
    "empty part": (lambda: with_member("vllm//a.py"), "unsafe name"),
    "backslash": (lambda: renamed("vllm/version.py", "vllm\\version.py"), "unsafe name"),
    "control character": (lambda: with_member("vllm/a\nb.py"), "unsafe name"),
    "local header of another size": (
        lambda: edited(lambda d: patch(d, local(d, ELF) + 22, "<L", 1)),
        "local header",
    ),
    "local header of another checksum": (
        lambda: edited(lambda d: patch(d, local(d, ELF) + 14, "<L", 1)),
        "local header",
    ),
    "local header of another method": (
        lambda: edited(lambda d: patch(d, local(d, ELF) + 8, "<H", 0)),
        "local header",
    ),
    "local header of another name": (
        lambda: edited(lambda d: patch(d, local(d, ELF) + 30, "<B", ord("V"))),
        "local header",
    ),
    "directory points between members": (
        lambda: edited(lambda d: patch(d, central(d, "vllm/version.py") + 42, "<L", 7)),
        "gap or overlap",
    ),
    "member that reaches into the directory": (
        lambda: edited(
            lambda d: [
                patch(d, at, "<L", 1 << 30) for at in (central(d, ELF) + 20, local(d, ELF) + 18)
            ]
        ),
        "gap or overlap",
    ),
    "stored member with two sizes": (
        lambda: edited(
            lambda d: [patch(d, at, "<H", 0) for at in (central(d, ELF) + 10, local(d, ELF) + 8)]
        ),
        "sizes",
    ),
    "fewer entries than counted": (
        lambda: edited(
            lambda d: [patch(d, len(d) - 14, "<H", 99), patch(d, len(d) - 12, "<H", 99)]
        ),
        "entry count",
    ),
    "hidden bytes between two members": (lambda: gap(SmallWheel().bytes()), "gap or overlap"),
    "hidden bytes before the directory": (
        lambda: hidden_bytes(SmallWheel().bytes()),
        "gap or overlap",
    ),
    "descriptor that contradicts": (
        lambda: edited(
            lambda d: patch(d, d.index(b"PK\x07\x08") + 4, "<L", 1), SmallWheel(streamed=True)
        ),
        "data descriptor",
    ),
    "broken central entry": (
        lambda: edited(lambda d: patch(d, central(d, ELF), "<L", 0)),
        "central directory",
    ),
    "ZIP64 size without its field": (
        lambda: edited(lambda d: patch(d, central(d, ELF) + 20, "<L", 0xFFFFFFFF)),
        "ZIP64",
    ),
    "ZIP64 end record missing": (
        lambda: edited(lambda d: patch(d, len(d) - 6, "<L", 0xFFFFFFFF)),
        "ZIP64",
    ),
}


def gap(data: bytes) -> bytes:
    """Five bytes before the third member, with every offset behind them put right."""
    headers = sorted(member.header_offset for member in zipfile.ZipFile(io.BytesIO(data)).filelist)
    place = headers[2]
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    end = bytearray(data[start:])
    struct.pack_into("<L", end, len(end) - 6, start + 5)
    at = 0
    while end[at : at + 4] == b"PK\x01\x02":
        offset = struct.unpack_from("<L", end, at + 42)[0]
        if offset >= place:
            struct.pack_into("<L", end, at + 42, offset + 5)
        at += 46 + sum(struct.unpack_from("<3H", end, at + 28))
    found = data[:place] + b"hello" + data[place:start] + bytes(end)
    assert zipfile.ZipFile(io.BytesIO(found)).testzip() is None, "the standard reader is content"
    return found


def hidden_bytes(data: bytes) -> bytes:
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    end = bytearray(data[start:])
    struct.pack_into("<L", end, len(end) - 6, start + 5)
    return data[:start] + b"hello" + bytes(end)


@pytest.mark.parametrize("name", ODD)
def test_odd_container_is_refused_by_name(name: str) -> None:
    make, problem = ODD[name]
    with pytest.raises(WheelFormatError) as caught:
        read_members(io.BytesIO(make()), "w.whl")
    assert caught.value.problem == problem
    assert str(caught.value).startswith("w.whl: ")
    assert "fetch it again" in str(caught.value)


def test_duplicate_name_is_refused() -> None:
    wheel = SmallWheel()
    wheel.members = {"vllm/aa.py": b"1", "vllm/ab.py": b"2", **wheel.members}
    data = wheel.bytes().replace(b"vllm/ab.py", b"vllm/aa.py")
    with pytest.raises(WheelFormatError, match=r"vllm/aa\.py: duplicate name"):
        read_members(io.BytesIO(data), "w.whl")


def test_name_outside_ascii_needs_its_flag() -> None:
    wheel = SmallWheel()
    wheel.members = {"vllm/é.py": b"1", **wheel.members}
    data = wheel.bytes()
    assert read_members(io.BytesIO(data), "w.whl")[0].path == "vllm/é.py"
    unflagged = bytearray(data)
    for at in (central(data, "vllm/é.py") + 8, local(data, "vllm/é.py") + 6):
        patch(unflagged, at, "<H", 0)
    with pytest.raises(WheelFormatError, match="expected ASCII"):
        read_members(io.BytesIO(bytes(unflagged)), "w.whl")


@pytest.mark.parametrize("byte", [0, 5000])
def test_damaged_member_is_refused_when_it_is_read(byte: int) -> None:
    data = bytearray(SmallWheel().bytes())
    elf = next(m for m in read_members(io.BytesIO(data), "w.whl") if m.path == ELF)
    data[elf.offset + byte % elf.compressed_size] ^= 0xFF
    with pytest.raises(WheelFormatError, match=r"_C\.abi3\.so: damaged"):
        read_member(io.BytesIO(data), elf, "w.whl")


@given(st.data())
def test_no_flipped_byte_crashes_the_reader(data: st.DataObject) -> None:
    original = SmallWheel().bytes()
    broken = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(original) - 1))
        broken[at] = data.draw(st.integers(0, 255))
    cut = bytes(broken[: data.draw(st.integers(len(original) - 300, len(original)))])
    file = io.BytesIO(cut)
    with suppress(BuildError):  # the only error that may leave
        for member in read_members(file, "w.whl"):
            read_member(file, member, "w.whl")


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    with pytest.raises(WheelFormatError):
        read_members(io.BytesIO(data), "w.whl")
