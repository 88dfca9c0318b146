"""No input crashes the judge: bombs, nesting, odd entries, random damage. Findings or exit 2."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import marshal
import os
import struct
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.verify import small_target as small
from tests.unit.verify.small_target import F, World
from verify import cli
from verify.digest import quiet
from verify.errors import ConfigError, FormatError
from verify.holders.directory import DirectoryHolder
from verify.holders.tarred import SdistHolder
from verify.holders.zipped import ZipHolder
from verify.judges.bundle import judge_bundle
from verify.judges.case import Options
from verify.judges.source import judge_sdist, judge_tree
from verify.judges.wheel import judge_wheel
from verify.marshalled import read_code
from verify.pins import Contract, Pins
from verify.receipt import Receipt
from verify.record import RecordFile
from verify.report import Status


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small.build(tmp_path_factory.mktemp("world"))


def bad(report: object) -> set[str]:
    return {f.check for f in report.findings if f.status is Status.FAIL}  # type: ignore[attr-defined]


# Archives that expand, or say that they do.


def bomb(size: int) -> bytes:
    """A wheel whose one member really expands to ``size`` zeros."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo("vllm/crlf.py", (2020, 1, 1, 0, 0, 0))
        info.external_attr, info.compress_type = F << 16, zipfile.ZIP_DEFLATED
        with archive.open(info, "w", force_zip64=True) as member:
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
    return sink.getvalue()


def test_a_member_that_expands_further_than_declared_is_not_read_on(
    world: World, tmp_path: Path
) -> None:
    data = bomb(64 << 20)
    central = data.rindex(b"PK\x01\x02")
    # the directory and the local header agree on 10 bytes; the stream holds 64 MiB
    data = data[: central + 24] + struct.pack("<I", 10) + data[central + 28 :]
    local_extra = data.index(struct.pack("<Q", 64 << 20))
    data = data[:local_extra] + struct.pack("<Q", 10) + data[local_extra + 8 :]
    file = tmp_path / world.wheel.name
    file.write_bytes(data)
    report = judge_wheel(file, Options(home=world.home))
    finding = next(f for f in report.findings if f.check == "PKG-1" and f.actual == "more")
    assert finding.expected == "10 bytes"


def test_a_member_that_declares_more_than_its_bytes_can_expand_to_is_not_read(
    world: World, tmp_path: Path
) -> None:
    members = small.zipped({"vllm/crlf.py": (F, b"A" * 50)})
    central = members.rindex(b"PK\x01\x02")
    data = members[: central + 24] + struct.pack("<I", 0xF0000000) + members[central + 28 :]
    file = tmp_path / world.wheel.name
    file.write_bytes(data)
    with ZipHolder(file) as holder:
        assert not holder.items
        assert any("can expand to" in str(d.expected) for d in holder.defects)


def test_an_sdist_that_expands_without_end_stops_at_the_limit(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.holders.tarred.TOTAL_LIMIT", 1 << 20)
    data = small.tarred({"vllm/big": (F, bytes(8 << 20))})
    file = tmp_path / world.sdist.name
    file.write_bytes(data)
    assert "PKG-1" in bad(judge_sdist(file, Options(home=world.home)))


def test_an_sdist_with_a_name_of_gigabytes_is_not_read_into_memory(
    world: World, tmp_path: Path
) -> None:
    """GNU long names are read whole, as long as their header says."""
    header = bytearray(512)
    header[:13] = b"././@LongLink"
    header[124:136] = b"%011o\0" % (7 << 30)
    header[156:157] = b"L"
    header[257:265] = b"ustar  \0"
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    file = tmp_path / world.sdist.name
    file.write_bytes(gzip.compress(bytes(header) + bytes(4096)))
    holder = SdistHolder(file, lambda _done: None)
    assert [d.actual for d in holder.defects] == [f"a header of {7 << 30} bytes"]


def test_an_sdist_with_too_many_members_is_not_listed_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.holders.tarred.MEMBER_COUNT_LIMIT", 5)
    holder = SdistHolder(world.sdist, lambda _done: None)
    assert [d.actual for d in holder.defects] == ["more than 5 members"]


# Places.


def test_a_tree_as_deep_as_paths_go_is_reported(world: World, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "vllm").mkdir(parents=True)
    descriptor = os.open(root / "vllm", os.O_RDONLY)
    for _ in range(600):  # 600 * 10 bytes: longer than any path may be
        os.mkdir("deepdeepde", dir_fd=descriptor)
        below = os.open("deepdeepde", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    report = judge_tree(root, Options(home=world.home))
    assert "TREE-5" in bad(report)


def test_a_link_to_itself_is_one_finding(world: World, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "loop").symlink_to("loop")
    report = judge_tree(tmp_path, Options(home=world.home))
    assert [f.path for f in report.findings if f.check == "TREE-5"] == ["vllm/loop"]


def test_a_folder_linked_to_its_parent_is_not_entered(world: World, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "up").symlink_to("..")
    report = judge_tree(tmp_path, Options(home=world.home))
    assert [f.path for f in report.findings if f.check == "TREE-5"] == ["vllm/up"]


def test_a_pipe_as_a_wheel_is_a_usage_error_and_never_waits(world: World, tmp_path: Path) -> None:
    pipe = tmp_path / world.wheel.name
    os.mkfifo(pipe)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="expected a file, found a named pipe"):
        judge_wheel(pipe, Options(home=world.home))
    assert time.monotonic() - begun < 5


def test_a_pipe_as_an_sdist_is_a_usage_error_and_never_waits(world: World, tmp_path: Path) -> None:
    pipe = tmp_path / world.sdist.name
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="found a named pipe"):
        judge_sdist(pipe, Options(home=world.home))


def test_a_file_that_changes_into_a_pipe_while_it_is_judged_is_one_error(tmp_path: Path) -> None:
    small.write(tmp_path, {"a.py": b"A = 1\n", "b.py": b"B = 1\n", "c.py": b"C = 1\n"})
    holder = DirectoryHolder(tmp_path)
    (tmp_path / "a.py").unlink()
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").write_text("B = 12\n")
    (tmp_path / "c.py").unlink()
    found = holder.digests((), quiet)
    assert [str(found[path]) for path in ("a.py", "b.py", "c.py")] == [
        "a.py: expected a regular file, found a named pipe",
        "b.py: expected 6 bytes, found 7: the file changed while it was read",
        "c.py: expected a readable file, found No such file or directory",
    ]


@pytest.mark.parametrize(
    "data",
    [
        b'{"schema":' + b"[" * 200_000,
        b'{"schema":"sparkcache.receipt/v1",' + b'"a":1,' * 100_000 + b'"b":1}\n',
        b'"' + b"x" * (8 << 20) + b'"\n',
        b'{"schema":"sparkcache.receipt/v1"}\n',
        b"\x00" * 1000,
        b'{"a":1e999999}\n',
        b'{"a":"\\ud800"}\n',
    ],
    ids=["deep", "wide", "long", "bare", "zeros", "float", "surrogate"],
)
def test_a_receipt_that_is_none_is_one_finding(world: World, tmp_path: Path, data: bytes) -> None:
    bundle = tmp_path / "bundle"
    small.write(bundle, small.bundle("cuda-x86_64") | {"receipt.json": data})
    assert bad(judge_bundle(bundle, Options(home=world.home))) == {"PKG-12"}


# Random damage.


@settings(max_examples=150)
@given(data=st.data())
def test_no_damage_to_a_wheel_crashes_the_judge(
    world: World, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    wheel = bytearray(world.wheel.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(wheel) - 1))
        change = data.draw(st.sampled_from(("flip", "cut", "insert", "number")))
        if change == "flip":
            wheel[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del wheel[at : at + data.draw(st.integers(1, 64))]
        elif change == "insert":
            wheel[at:at] = data.draw(st.binary(min_size=1, max_size=64))
        else:
            wheel[at : at + 4] = b"\xff\xff\xff\xff"
        if not wheel:
            break
    if bytes(wheel) == world.wheel.read_bytes():
        return
    file = tmp_path_factory.mktemp("damaged") / world.wheel.name
    file.write_bytes(wheel)
    report = judge_wheel(file, Options(home=world.home))
    # a time stamp in a header is the one thing that nothing depends on
    assert bad(report) or _same_members(bytes(wheel), world)


def _same_members(data: bytes, world: World) -> bool:
    return small.unzipped(data) == small.unzipped(world.wheel.read_bytes())


@settings(max_examples=100)
@given(data=st.data())
def test_no_damage_to_an_sdist_crashes_the_judge(
    world: World, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tar = bytearray(gzip.decompress(world.sdist.read_bytes()))
    for _ in range(data.draw(st.integers(1, 4))):
        tar[data.draw(st.integers(0, len(tar) - 1))] = data.draw(st.integers(0, 255))
    packed = gzip.compress(bytes(tar), 1)[: data.draw(st.integers(1, 1 << 20))]
    file = tmp_path_factory.mktemp("damaged") / world.sdist.name
    file.write_bytes(packed)
    assert "BASE-6" in bad(judge_sdist(file, Options(home=world.home)))


DOCUMENTS = (
    (Pins, small.canonical(small.pins())),
    (Contract, small.canonical(small.contract())),
    (Receipt, small.canonical(small.receipt("cuda-x86_64", {}, {}, small.CONNECTOR_NAME))),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(value=_JSON, key=st.integers(0, 10_000))
def test_no_json_crashes_a_parser(value: object, key: int) -> None:
    """A random value in a random place of a valid document is a format error or a document."""
    for parser, text in DOCUMENTS:
        document = json.loads(text)
        places = list(_places(document))
        holder, at = places[key % len(places)]
        holder[at] = value
        data = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        try:
            parser.parse(data.encode("utf-8", "surrogatepass") + b"\n", "document")
        except FormatError as error:
            assert str(error).startswith("document")  # noqa: PT017 - either outcome is right


def _places(value: object) -> list[tuple[object, object]]:
    found: list[tuple[object, object]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[call-overload]
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found.extend(_places(inner))
    return found


@given(st.binary(max_size=400) | st.text().map(str.encode))
def test_no_bytes_crash_the_reader_of_record(data: bytes) -> None:
    record = RecordFile.parse(data)
    assert all(row.size is None or row.size >= 0 for row in record.rows.values())


_CODE = marshal.dumps(compile(Path(__file__).read_bytes(), "x", "exec", dont_inherit=True))


@settings(max_examples=300)
@given(at=st.integers(0, len(_CODE) - 1), new=st.binary(min_size=1, max_size=6))
def test_no_bytes_crash_the_reader_of_bytecode(at: int, new: bytes) -> None:
    damaged = _CODE[:at] + new + _CODE[at + len(new) :]
    try:
        read_code(damaged, "module")
    except FormatError as error:
        assert str(error).startswith("module")  # noqa: PT017 - either outcome is right


def test_bytecode_is_equal_to_itself_written_again_and_to_nothing_else() -> None:
    expected = read_code(_CODE, "module")
    assert read_code(marshal.dumps(marshal.loads(_CODE)), "again") == expected
    other = compile(Path(__file__).read_bytes() + b"\nX = -0.0\n", "x", "exec", dont_inherit=True)
    assert read_code(marshal.dumps(other), "other") != expected
    for left, right in ((b"x = 0.0", b"x = -0.0"), (b"x = 1", b"x = True"), (b"x='a'", b"x=b'a'")):
        codes = [read_code(marshal.dumps(compile(s, "x", "exec")), "x") for s in (left, right)]
        assert codes[0] != codes[1], (left, right)


def test_every_module_that_pip_compiled_here_reads(tmp_path: Path) -> None:
    """The real thing: what this interpreter's compiler writes for its own library."""
    library = Path(json.__file__).parent.parent
    for source in sorted(library.glob("*.py"))[:25]:
        code = compile(source.read_bytes(), "first", "exec", dont_inherit=True)
        again = compile(source.read_bytes(), "second", "exec", dont_inherit=True)
        assert read_code(marshal.dumps(code), "a") == read_code(marshal.dumps(again), "b")


def test_json_output_of_a_hostile_tree_is_json(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    for name in (b"a\xff.py", b"b\n.py", b"c\x1b[31m.py", "d\u202e.py".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path / "vllm") + b"/" + name)).write_text("")
    pins = ["--pins", str(world.pins / "pins.json"), "--format", "json"]
    assert cli.main(["tree", str(tmp_path), *pins]) == 1
    paths = {f["path"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert {"vllm/a\\xff.py", "vllm/b\\n.py", "vllm/c\\x1b[31m.py", "vllm/d\\u202e.py"} <= paths


def test_the_magic_number_names_the_running_version() -> None:
    # the reader of bytecode is written for these; a new version must be looked at first
    assert sys.version_info[:2] in {(3, 11), (3, 12), (3, 13), (3, 14)}
    assert len(importlib.util.MAGIC_NUMBER) == 4
    assert zlib.ZLIB_VERSION
