"""verify.strictjson: one value, one text; everything else is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.errors import FormatError
from verify.strictjson import Record, dump, parse

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_dump_and_parse_are_inverse(value):
    assert parse(dump(value), "f") == value


@given(st.binary(max_size=64))
def test_no_input_crashes_it_and_what_passes_is_canonical(data):
    try:
        value = parse(data, "f")
    except FormatError:
        return
    assert dump(value) == data


@given(values)
def test_whitespace_and_order_are_free_only_when_not_canonical(value):
    loose = json.dumps(value, indent=1).encode()
    assert parse(loose, "f", canonical=False) == value


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b'{"a":1,"a":1}\n', "'a': the key occurs twice"),
        (b'{"a":{"b":1,"b":2}}\n', "'b': the key occurs twice"),
        (b"1.0\n", "no floating point number, found 1.0"),
        (b"1e3\n", "no floating point number"),
        (b"NaN\n", "no floating point number, found NaN"),
        (b"\xef\xbb\xbf{}\n", "not JSON"),
        (b'"\xff"\n', "expected UTF-8, found byte 0xff at 1"),
        (b'"\\ud800"\n', "not JSON that we accept"),
        (b"1" * 5000 + b"\n", "not JSON that we accept"),
        (b"[" * 100_000, "not JSON"),
        (b"{} \n", "byte 2: expected canonical JSON"),
        (b"{}", "byte 2: expected canonical JSON"),
        (b'{"b":1,"a":1}\n', "byte 2: expected canonical JSON"),
        (b'"\\u0041"\n', "expected canonical JSON"),
        (b"{}\n{}\n", "not JSON: Extra data"),
        (b"", "not JSON"),
    ],
)
def test_refuses(data, match):
    with pytest.raises(FormatError, match=match) as caught:
        parse(data, "pins.json")
    assert str(caught.value).startswith("pins.json: ")


@pytest.mark.parametrize("value", [1.0, {1: 2}, b"x", [float("nan")], {"a": {2}}])
def test_dump_refuses_what_has_no_canonical_form(value):
    with pytest.raises(TypeError):
        dump(value)


def test_record_names_the_path_of_keys_and_refuses_unknown_ones():
    def record(value):
        return Record(value, "pins.json")

    top = record({"a": {"b": ["x", 1]}, "n": None, "list": [{"id": "0" * 40}], "more": 1})
    assert top.text_or_null("n") is None
    assert top.record_or_null("n") is None
    assert [entry.git_id("id") for entry in top.records("list")] == ["0" * 40]
    with pytest.raises(FormatError, match=r"pins\.json: a\.b\[1\]: expected text, found the numb"):
        top.record("a").texts("b")
    with pytest.raises(FormatError, match="unknown key 'more'; known: a, list, n"):
        top.done()
    with pytest.raises(FormatError, match="the key 'gone' is missing"):
        top.text("gone")


@pytest.mark.parametrize(
    ("read", "match"),
    [
        (lambda r: r.text("t"), "t: expected text, found true"),
        (lambda r: r.integer("t"), "expected a non-negative whole number, found true"),
        (lambda r: r.integer("minus"), "whole number, found the number -1"),
        (lambda r: r.record("l"), "l: expected an object, found a list"),
        (lambda r: r.records("s"), "s: expected a list, found text 'AB'"),
        (lambda r: r.hex("s", 2), "expected 2 lower-case hex digits, found 'AB'"),
        (lambda r: r.sha256("s"), "expected 64 lower-case hex digits"),
        (lambda r: r.expect("s", "x"), "expected 'x', found 'AB'"),
    ],
)
def test_record_refuses_wrong_types(read, match):
    with pytest.raises(FormatError, match=match):
        read(Record({"t": True, "minus": -1, "l": [], "s": "AB"}, "f"))
