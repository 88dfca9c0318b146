"""Reads marshalled code as plain values, without making code objects of it.

``marshal.loads`` is not safe for bytes of unknown origin. This reader knows the format of
the running Python only (``Python/marshal.c``, version 4, code objects as of CPython 3.11), and
returns nested tuples that are equal when two modules are the same code, wherever the source
lay and in whatever order sets were written.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from verify.errors import FormatError

Value: TypeAlias = "tuple[Value, ...] | frozenset[Value] | bytes | str | int | None"

_FLAG_REF = 0x80
_MAX_DEPTH = 200
_CODE_INTS = 5  # argcount, posonlyargcount, kwonlyargcount, stacksize, flags
_CODE_OBJECTS = 5  # code, consts, names, localsplusnames, localspluskinds
_SINGLETONS = {ord(code): (code,) for code in "NFTS.0"}
_TEXTS = frozenset(b"tuaA")
_SHORT_TEXTS = frozenset(b"zZ")


def read_code(data: bytes, what: str) -> Value:
    """Return the code object that ``data`` holds, as a value.

    Raises:
        FormatError: for bytes that this Python would not have written.
    """
    reader = _Reader(data, what)
    try:
        value = reader.value(0)
    except (struct.error, IndexError, TypeError, UnicodeDecodeError) as error:
        raise FormatError(what, "", f"not marshalled code: {error}") from error
    if reader.at != len(data):
        raise FormatError(what, f"byte {reader.at}", "expected the end of the code")
    return value


class _Reader:
    def __init__(self, data: bytes, what: str) -> None:
        self.at = 0
        self._data = data
        self._what = what
        self._refs: list[Value] = []

    def value(self, depth: int) -> Value:
        if depth > _MAX_DEPTH:
            raise FormatError(self._what, f"byte {self.at}", "nested too deeply")
        code = self._take(1)[0]
        kind = code & ~_FLAG_REF
        if kind == ord("r"):
            return self._refs[self._int()]
        if not code & _FLAG_REF:
            return self._body(kind, depth)
        place = len(self._refs)
        self._refs.append(None)
        self._refs[place] = value = self._body(kind, depth)
        return value

    def _body(self, kind: int, depth: int) -> Value:
        if kind in _SINGLETONS:
            return _SINGLETONS[kind]
        if kind == ord("i"):
            return ("int", self._int())
        if kind == ord("l"):
            return ("int", self._long())
        if kind in (ord("g"), ord("y")):  # floats by their bytes: zeros have signs
            return (chr(kind), self._take(8 if kind == ord("g") else 16))
        if kind == ord("s"):
            return self._take(self._size())
        if kind in _TEXTS:
            return self._take(self._size()).decode("utf-8", "surrogatepass")
        if kind in _SHORT_TEXTS:
            return self._take(self._take(1)[0]).decode("latin-1")
        if kind in (ord("("), ord(")"), ord(":")):
            short = {ord("("): None, ord(")"): 1, ord(":"): 3}[kind]
            count = self._size() if short is None else (self._take(1)[0] if short == 1 else short)
            return ("tuple" if kind != ord(":") else "slice", *self._values(count, depth))
        if kind == ord(">"):
            return ("frozenset", frozenset(self._values(self._size(), depth)))
        if kind == ord("c"):
            return self._code(depth)
        raise FormatError(self._what, f"byte {self.at - 1}", f"unexpected type {chr(kind)!r}")

    def _code(self, depth: int) -> Value:
        numbers = tuple(self._int() for _ in range(_CODE_INTS))
        parts = self._values(_CODE_OBJECTS, depth)
        _filename, name, qualname = self._values(3, depth)
        first_line = self._int()
        lines, exceptions = self._values(2, depth)
        return ("code", *numbers, *parts, name, qualname, first_line, lines, exceptions)

    def _values(self, count: int, depth: int) -> tuple[Value, ...]:
        return tuple(self.value(depth + 1) for _ in range(count))

    def _long(self) -> int:
        count = self._int()
        digits: tuple[int, ...] = struct.unpack(f"<{abs(count)}H", self._take(2 * abs(count)))
        number = sum(digit << (15 * place) for place, digit in enumerate(digits))
        return -number if count < 0 else number

    def _int(self) -> int:
        return int.from_bytes(self._take(4), "little", signed=True)

    def _size(self) -> int:
        size = self._int()
        if not 0 <= size <= len(self._data):
            raise FormatError(self._what, f"byte {self.at}", f"a size of {size}")
        return size

    def _take(self, count: int) -> bytes:
        part = self._data[self.at : self.at + count]
        if len(part) != count:
            raise FormatError(self._what, f"byte {self.at}", "the code is cut short")
        self.at += count
        return part
