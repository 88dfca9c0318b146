"""verify.symbols: signatures from the syntax tree."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.errors import FormatError
from verify.symbols import fingerprints

SOURCE = b'''
from __future__ import annotations
LIMIT = 3
name: str = "x"
if TYPE_CHECKING:
    def early(): ...
else:
    async def early(a, /, b: int = 1, *args, c="d", **kw) -> None: ...
try:
    from x import y
except ImportError:
    y = None

@dataclass(frozen=True)
class Outer(Base, Generic[T], metaclass=Meta):
    """Text."""
    field: list[int] = []
    KIND = 1

    def __init__(self, pool):
        self.pool = pool
        self.many, self.more = pool
        self.typed: dict[str, int] = {}
        other.thing = 1
        def inner(): ...

    @property
    def prop(self) -> bool:
        return True

    @overload
    def two(self, a: int) -> int: ...
    @overload
    def two(self, a: str) -> str: ...

    class Inner:
        def deep(self): ...

    @staticmethod
    def nothing(): ...
'''

EXPECTED = {
    "LIMIT": "LIMIT = 3",
    "name": "name: str",
    "early": "def early(); async def early(a, /, b: int=1, *args, c='d', **kw) -> None",
    "y": "y = None",
    "Outer": "@dataclass(frozen=True) class Outer(Base, Generic[T], metaclass=Meta)",
    "Outer.field": "field: list[int]",
    "Outer.KIND": "KIND = 1",
    "Outer.__init__": "def __init__(self, pool)",
    "Outer.pool": "self.pool",
    "Outer.many": "self.many",
    "Outer.more": "self.more",
    "Outer.typed": "self.typed: dict[str, int]",
    "Outer.prop": "@property def prop(self) -> bool",
    "Outer.two": "@overload def two(self, a: int) -> int; @overload def two(self, a: str) -> str",
    "Outer.Inner": "class Inner",
    "Outer.Inner.deep": "def deep(self)",
    "Outer.nothing": "@staticmethod def nothing()",
}


def test_every_kind_of_definition():
    assert fingerprints(SOURCE, "m.py") == EXPECTED


def test_bodies_comments_and_line_endings_do_not_matter():
    edited = SOURCE.replace(b"return True", b"return (1,)  # why").replace(b"\n", b"\r\n")
    assert fingerprints(edited, "m.py") == EXPECTED


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        (b"b: int = 1", b"b: int = 2", "early"),
        (b"-> bool", b"-> object", "Outer.prop"),
        (b"    @property\n", b"", "Outer.prop"),
        (b"list[int]", b"list[str]", "Outer.field"),
        (b"Base, ", b"", "Outer"),
        (b"self.pool = pool", b"self._pool = pool", "Outer.pool"),
    ],
)
def test_a_changed_signature_changes_its_fingerprint_alone(old, new, name):
    assert old in SOURCE
    found = fingerprints(SOURCE.replace(old, new), "m.py")
    assert {key for key in EXPECTED if found.get(key) != EXPECTED[key]} == {name}


@pytest.mark.parametrize(
    "source",
    [b"def f(:\n", b"\0", b"x = " + b"(" * 300 + b")" * 300, b"\xff = 1", b"# coding: no\n"],
)
def test_what_is_not_python_is_named(source):
    with pytest.raises(FormatError, match=r"vllm/x\.py.*not Python source"):
        fingerprints(source, "vllm/x.py")


@given(st.binary(max_size=60))
def test_no_input_crashes_it(data):
    with contextlib.suppress(FormatError):
        fingerprints(data, "m.py")


def test_doubtful_escapes_are_the_sources_business():
    assert fingerprints(b"x = '\\d'\n", "m.py") == {"x": "x = '\\\\d'"}
