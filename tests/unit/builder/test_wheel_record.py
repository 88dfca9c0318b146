from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import BuildError
from builder.wheel_record import RecordError, Row, check_record, dump_record, parse_record

RECORD = "p-1.dist-info/RECORD"
ROW = Row.of(b"content")
LINE = f"a.py,{ROW.digest},{ROW.size}\n"
ITSELF = f"{RECORD},,\n"

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=12)


@given(st.dictionaries(TEXT, st.binary(max_size=20)))
def test_rows_survive_being_written_and_read(files: dict[str, bytes]) -> None:
    rows = {path: Row.of(data) for path, data in files.items()}
    assert parse_record(dump_record(rows.items(), RECORD), RECORD, "w.whl") == rows


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (LINE, "expected one row without hash, found 0"),
        (ITSELF + ITSELF, "found 2"),
        (LINE + LINE + ITSELF, "a.py: the path has two rows"),
        ("a.py,,\n" + ITSELF, "a.py: expected sha256="),
        (LINE.replace("sha256", "md5") + ITSELF, "a.py: expected sha256="),
        (LINE.replace(f",{ROW.size}", ",-1") + ITSELF, "a.py: expected sha256="),
        (LINE.replace(f",{ROW.size}", ",07") + ITSELF, "a.py: expected sha256="),
        ("a.py\n" + ITSELF, "expected path, hash and size"),
        ('"a.py,x,1\n' + ITSELF, "not CSV"),
    ],
)
def test_record_of_another_shape_is_refused(record: str, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        parse_record(record.encode(), RECORD, "w.whl")


def test_record_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(RecordError, match="not CSV in UTF-8"):
        parse_record(b"\xff,,\n", RECORD, "w.whl")


@given(st.binary(max_size=80))
def test_no_bytes_crash_the_parser(data: bytes) -> None:
    with suppress(BuildError):  # the only error that may leave
        parse_record(data, RECORD, "w.whl")


@pytest.mark.parametrize(
    ("rows", "sizes", "problem"),
    [
        ({}, {"a.py": 1}, "a.py: the wheel holds it, RECORD does not list it"),
        ({"a.py": ROW}, {}, "a.py: RECORD lists it, the wheel does not hold it"),
        ({"a.py": ROW}, {"a.py": 1}, "a.py: RECORD says 7 bytes, the wheel holds 1"),
    ],
)
def test_record_and_members_must_be_the_same_files(
    rows: dict[str, Row], sizes: dict[str, int], problem: str
) -> None:
    with pytest.raises(RecordError, match=problem):
        check_record(rows, sizes, "w.whl")
