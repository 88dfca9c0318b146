from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from installer.sources import WheelFile

from builder.wheel_read import read_members
from builder.wheel_record import RecordError
from builder.wheel_repack import Add, Change, ChangeError, Remove, Repacked, Replace, repack
from builder.wheel_version import VersionRuleError
from tests.small_wheel import DIST_INFO, FILENAME, METADATA, WHEEL, SmallWheel

VERSION = "0.28.0+spark.1"
NEW_INFO = f"vllm-{VERSION}.dist-info"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
CHANGES: dict[str, Change] = {
    SCHEDULER: Replace(b"class Scheduler:\n    spark = 1\n"),
    "vllm/v1/core/boundaries.py": Add(b"added = True\n"),
    "vllm/config/crlf.py": Remove(),
    "vllm/third_party/tool.sh": Replace(b"#!/bin/sh\nexit 1\n"),
}


def run(
    base: bytes, changes: Mapping[str, Change], filename: str = FILENAME
) -> tuple[Repacked, bytes]:
    sink = io.BytesIO()
    result = repack(io.BytesIO(base), filename, sink, version=VERSION, changes=changes)
    return result, sink.getvalue()


def contents(wheel: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_result_holds_the_base_with_the_changes_and_the_stamped_version() -> None:
    result, wheel = run(SmallWheel().bytes(), CHANGES)
    expected = {
        path.replace(DIST_INFO, NEW_INFO): data for path, data in SmallWheel().members.items()
    }
    del expected["vllm/config/crlf.py"]
    expected[SCHEDULER] = b"class Scheduler:\n    spark = 1\n"
    expected["vllm/v1/core/boundaries.py"] = b"added = True\n"
    expected["vllm/third_party/tool.sh"] = b"#!/bin/sh\nexit 1\n"
    expected[f"{NEW_INFO}/METADATA"] = METADATA.replace(
        b"Version: 0.28.0\nR", b"Version: 0.28.0+spark.1\nR"
    )
    expected["vllm/_version.py"] = expected["vllm/_version.py"].replace(
        b"'0.28.0'", b"'0.28.0+spark.1'"
    )
    found = contents(wheel)
    del found[f"{NEW_INFO}/RECORD"]
    assert found == expected
    assert found[f"{NEW_INFO}/WHEEL"] == WHEEL
    assert result.filename == "vllm-0.28.0+spark.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert [path for path, _, _ in result.stamped] == ["vllm/_version.py", f"{DIST_INFO}/METADATA"]


def test_record_is_right_for_an_independent_reader(tmp_path: Path) -> None:
    result, wheel = run(SmallWheel().bytes(), CHANGES)
    path = tmp_path / result.filename
    path.write_bytes(wheel)
    with WheelFile.open(path) as source:
        source.validate_record()
        assert source.version == VERSION


def test_untouched_members_are_the_same_compressed_bytes_and_changed_ones_are_stored() -> None:
    base = SmallWheel().bytes()
    _, wheel = run(base, CHANGES)
    before = {m.path: m for m in read_members(io.BytesIO(base), "base")}
    after = {m.path: m for m in read_members(io.BytesIO(wheel), "wheel")}
    untouched = 0
    for path, member in after.items():
        old = before.get(path.replace(NEW_INFO, DIST_INFO))
        if old is not None and old.crc == member.crc:
            raw = wheel[member.offset : member.offset + member.compressed_size]
            assert raw == base[old.offset : old.offset + old.compressed_size]
            assert member.executable == old.executable
            untouched += 1
        else:
            assert member.method == 0
    assert untouched == len(before) - 6  # two replaced, one removed, two stamped, RECORD


def test_members_are_sorted_with_dist_info_last_and_record_the_very_last() -> None:
    _, wheel = run(SmallWheel().bytes(), CHANGES)
    paths = [m.path for m in read_members(io.BytesIO(wheel), "wheel")]
    package = [path for path in paths if path.startswith("vllm/")]
    assert paths[: len(package)] == sorted(package)
    assert paths[len(package) :] == [*sorted(set(paths) - set(package) - {paths[-1]}), paths[-1]]
    assert paths[-1] == f"{NEW_INFO}/RECORD"


@given(st.permutations(list(SmallWheel().members)), st.booleans())
def test_member_order_and_descriptors_of_the_base_do_not_matter(
    order: list[str], streamed: bool
) -> None:
    shuffled = SmallWheel(streamed=streamed)
    shuffled.members = {path: shuffled.members[path] for path in order}
    assert run(shuffled.bytes(), CHANGES) == run(SmallWheel().bytes(), CHANGES)


def test_without_changes_only_the_version_differs() -> None:
    _, wheel = run(SmallWheel().bytes(), {})
    found = contents(wheel)
    for path, data in SmallWheel().members.items():
        if not path.endswith(("_version.py", "METADATA")):
            assert found[path.replace(DIST_INFO, NEW_INFO)] == data


def test_mode_of_a_replaced_member_stays_and_an_added_one_has_its_own() -> None:
    changes = {**CHANGES, "vllm/run.sh": Add(b"#!/bin/sh\n", executable=True)}
    _, wheel = run(SmallWheel().bytes(), changes)
    executable = {m.path for m in read_members(io.BytesIO(wheel), "wheel") if m.executable}
    assert executable == {"vllm/_C.abi3.so", "vllm/third_party/tool.sh", "vllm/run.sh"}


@pytest.mark.parametrize(
    ("path", "change", "problem"),
    [
        ("vllm/missing.py", Replace(b""), "the base does not have it"),
        ("vllm/missing.py", Remove(), "the base does not have it"),
        (SCHEDULER, Add(b""), "the base has it already"),
        ("vllm/_version.py", Replace(b""), "only the packaging rule"),
        (f"{DIST_INFO}/WHEEL", Replace(b""), "only the packaging rule"),
        (f"{DIST_INFO}/entry_points.txt", Add(b""), "only the packaging rule"),
    ],
)
def test_change_that_does_not_fit_the_base_is_refused(
    path: str, change: Change, problem: str
) -> None:
    with pytest.raises(ChangeError, match=problem) as caught:
        run(SmallWheel().bytes(), {path: change})
    assert caught.value.path == path


def test_base_whose_record_is_not_about_its_members_is_refused() -> None:
    wheel = SmallWheel()
    wheel.record = wheel.rows().replace("vllm/version.py", "vllm/other.py").encode()
    with pytest.raises(RecordError, match=r"vllm/other\.py: RECORD lists it"):
        run(wheel.bytes(), {})


@pytest.mark.parametrize("signature", ["RECORD.jws", "RECORD.p7s"])
def test_base_with_a_signed_record_is_refused(signature: str) -> None:
    wheel = SmallWheel()
    wheel.members[f"{DIST_INFO}/{signature}"] = b"signature"
    with pytest.raises(RecordError, match="signed"):
        run(wheel.bytes(), {})


def test_base_without_record_is_refused() -> None:
    with pytest.raises(RecordError, match="the wheel has none"):
        run(SmallWheel().bytes(), {}, filename=FILENAME.replace("0.28.0", "0.28.1"))


def test_base_that_tells_another_version_is_refused() -> None:
    wheel = SmallWheel()
    wheel.members["vllm/_version.py"] = wheel.members["vllm/_version.py"].replace(b".28", b".29")
    with pytest.raises(VersionRuleError, match=r"vllm/_version\.py"):
        run(wheel.bytes(), {})


def test_base_without_a_version_module_is_refused() -> None:
    wheel = SmallWheel()
    del wheel.members["vllm/_version.py"]
    with pytest.raises(ChangeError, match="the base has none"):
        run(wheel.bytes(), {})
