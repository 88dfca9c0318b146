"""Canonical JSON, read without mercy and written in one way only.

Canonical means: UTF-8 without a byte order mark, keys sorted, separators ``,`` and ``:``,
no floating point, one final newline (docs/build.md). For such data this equals RFC 8785
plus the newline. Reading refuses duplicate keys, which the standard reader resolves
silently ("last one wins"), and :class:`Record` refuses keys that nobody asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TypeAlias

from verify.errors import FormatError

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | bool | None"

_HEX = re.compile(r"[0-9a-f]+\Z")


def dump(value: Json) -> bytes:
    """Return the canonical bytes of ``value``.

    Raises:
        TypeError: for a float, a key that is not text, or any other type outside JSON.
        ValueError: for text that UTF-8 cannot carry (lone surrogates).
    """
    _refuse_foreign(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8") + b"\n"


def parse(data: bytes, what: str, *, canonical: bool = True) -> Json:
    """Return the value that ``data`` holds; ``what`` names it in errors.

    With ``canonical`` the bytes must be exactly those that :func:`dump` writes, so that one
    value has one digest.

    Raises:
        FormatError: for anything else, including duplicate keys, floats and nesting that
            exhausts the parser.
    """

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for key, value in pairs:
            if key in found:
                raise FormatError(what, repr(key), "the key occurs twice; keep one of them")
            found[key] = value
        return found

    def no_float(text: str) -> NoReturn:
        raise FormatError(what, "", f"expected no floating point number, found {text[:40]}")

    try:
        value: Json = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=no_float,
            parse_constant=no_float,
        )
        written = dump(value)
    except UnicodeDecodeError as error:
        problem = f"expected UTF-8, found byte 0x{data[error.start]:02x} at {error.start}"
        raise FormatError(what, "", problem) from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise FormatError(what, place, f"not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        # an integer of thousands of digits, a lone surrogate, nesting beyond the stack
        raise FormatError(what, "", f"not JSON that we accept: {error}") from error
    if canonical and written != data:
        raise FormatError(
            what,
            f"byte {_first_difference(written, data)}",
            "expected canonical JSON (sorted keys, no spaces, one final newline); "
            "the file was edited by hand or by another writer: regenerate it",
        )
    return value


class Record:
    """One JSON object whose keys are taken one by one; :meth:`done` refuses the rest.

    Every accessor raises :class:`~verify.errors.FormatError` naming the path of keys.
    """

    def __init__(self, value: Json, what: str, where: str = "") -> None:
        self._what = what
        self._where = where
        if not isinstance(value, Mapping):
            self._fail("", f"expected an object, found {_kind(value)}")
        self._value: Mapping[str, Json] = value
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the object has ``key``, without taking it."""
        return key in self._value

    def json(self, key: str) -> Json:
        """Take ``key``, whatever its type."""
        if key not in self._value:
            self._fail("", f"the key {key!r} is missing")
        self._taken.add(key)
        return self._value[key]

    def text(self, key: str) -> str:
        """Take a string."""
        value = self.json(key)
        if not isinstance(value, str):
            self._fail(key, f"expected text, found {_kind(value)}")
        return value

    def text_or_null(self, key: str) -> str | None:
        """Take a string or null."""
        return None if self.json(key) is None else self.text(key)

    def expect(self, key: str, expected: str) -> None:
        """Take a string that must be ``expected``, such as the schema."""
        value = self.text(key)
        if value != expected:
            self._fail(key, f"expected {expected!r}, found {value!r}")

    def integer(self, key: str) -> int:
        """Take a non-negative whole number."""
        value = self.json(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._fail(key, f"expected a non-negative whole number, found {_kind(value)}")
        return value

    def hex(self, key: str, digits: int) -> str:
        """Take a lower-case hexadecimal string of exactly ``digits`` digits."""
        value = self.text(key)
        if len(value) != digits or not _HEX.match(value):
            self._fail(key, f"expected {digits} lower-case hex digits, found {value[:80]!r}")
        return value

    def sha256(self, key: str) -> str:
        """Take a SHA-256 value."""
        return self.hex(key, 64)

    def git_id(self, key: str) -> str:
        """Take a git object id."""
        return self.hex(key, 40)

    def record(self, key: str) -> Record:
        """Take an object."""
        return Record(self.json(key), self._what, self._path(key))

    def record_or_null(self, key: str) -> Record | None:
        """Take an object or null."""
        return None if self.json(key) is None else self.record(key)

    def records(self, key: str) -> list[Record]:
        """Take a list of objects."""
        return [
            Record(value, self._what, f"{self._path(key)}[{index}]")
            for index, value in enumerate(self._list(key))
        ]

    def texts(self, key: str) -> list[str]:
        """Take a list of strings."""
        found: list[str] = []
        for index, value in enumerate(self._list(key)):
            if not isinstance(value, str):
                self._fail(f"{key}[{index}]", f"expected text, found {_kind(value)}")
            found.append(value)
        return found

    def __iter__(self) -> Iterator[str]:
        """The object's keys, for maps whose keys are data; take each to read it."""
        return iter(self._value)

    def keys(self) -> Iterator[str]:
        """The same keys, by the name that mappings give them."""
        return iter(self._value)

    def done(self) -> None:
        """Refuse keys that were not taken."""
        unknown = sorted(set(self._value) - self._taken)
        if unknown:
            self._fail("", f"unknown key {unknown[0]!r}; known: {', '.join(sorted(self._taken))}")

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the error for a value whose type is right and whose content is not."""
        self._fail(key, problem)

    def _list(self, key: str) -> Sequence[Json]:
        value = self.json(key)
        if isinstance(value, str) or not isinstance(value, Sequence):
            self._fail(key, f"expected a list, found {_kind(value)}")
        return value

    def _path(self, key: str) -> str:
        return ".".join(part for part in (self._where, key) if part)

    def _fail(self, key: str, problem: str) -> NoReturn:
        raise FormatError(self._what, self._path(key), problem)


def _refuse_foreign(value: object) -> None:
    """Raise for what :mod:`json` would write but canonical JSON has no form for."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise TypeError(f"a JSON key must be text, not {key!r}")
                stack.append(inner)
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif item is not None and not isinstance(item, str | int):
            raise TypeError(f"canonical JSON has no form for {item!r}")


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {value[:40]!r}"
    if isinstance(value, int):
        return f"the number {value}" if abs(value) < 1 << 64 else "a huge number"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def _first_difference(left: bytes, right: bytes) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
