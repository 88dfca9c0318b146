"""PKG 7: compiled modules that Python would run instead of the judged source.

Python runs ``__pycache__/<name>.<tag>.pyc`` and does not look into the source when time and
size, or the hash, in the header agree with it. For each compiled module:

a. its source belongs to the composition;
b. its header makes Python compare it with the source, always;
c. where Python would run it instead of a file that patches, modules or packaging touch, it
   is what that source compiles to. Only the Python version that wrote it can tell; modules
   of other versions, and those of untouched files, are counted in a note.
"""

from __future__ import annotations

import importlib.util
import marshal
import re
import struct
import sys
import warnings
from collections.abc import Collection

from verify.checks.package import is_bytecode
from verify.digest import ReadError
from verify.errors import FormatError
from verify.filesystem import Tree
from verify.marshalled import read_code
from verify.report import Recorder

_NAME = re.compile(r"(.+)/__pycache__/([^/]+)\.([a-z]+-[0-9]+)(?:\.opt-([12]))?\.pyc\Z")
_HEADER = struct.Struct("<4sI8s")
_HASHED, _CHECKED = 1, 2


def judge_bytecode(
    holder: Tree, sources: Collection[str], touched: Collection[str], rec: Recorder
) -> None:
    """Run the steps; ``sources`` are the composition's paths, ``touched`` those of step c."""
    compared, left = 0, 0
    for path in sorted(path for path in holder.items if is_bytecode(path)):
        match = _NAME.match(path)
        source = f"{match[1]}/{match[2]}.py" if match is not None else ""
        # (a)
        if match is None or source not in sources:
            message = "a compiled module whose source is not part of the composition"
            rec.fail("PKG-7", path, message, expected="no file", actual="a compiled module")
            continue
        if source not in holder.items:
            continue  # the missing source is reported
        try:
            runs = _would_run(holder, path, source, rec)
            if not runs:
                continue
            if source not in touched or match[3] != sys.implementation.cache_tag:
                left += 1
                continue
            # (c)
            compared += 1
            _compare(holder, path, source, int(match[4] or 0), rec)
        except ReadError as error:
            rec.fail("PKG-7", path, str(error), expected=error.expected, actual=error.actual)
    if left:
        rec.note(
            "PKG-7",
            None,
            f"{left} compiled modules were not compared with their sources (untouched files, or "
            f"not compiled by {sys.implementation.cache_tag}); delete __pycache__ to be sure",
        )
    rec.passed("PKG-7", f"{compared} compiled modules of touched files are their sources")


def _would_run(holder: Tree, path: str, source: str, rec: Recorder) -> bool:
    """Whether Python would take the compiled module for this source."""
    data = holder.head(path, _HEADER.size)
    if len(data) < _HEADER.size:
        return False
    magic: bytes
    flags: int
    stamp: bytes
    magic, flags, stamp = _HEADER.unpack_from(data)
    if flags & _HASHED:
        # (b)
        if not flags & _CHECKED:
            message = "a compiled module that Python runs without looking at its source"
            rec.fail("PKG-7", path, message, expected="a checked header", actual="unchecked")
            return False
        if magic != importlib.util.MAGIC_NUMBER:
            return True  # the hash is keyed by the version that wrote it
        return importlib.util.source_hash(holder.read(source)) == stamp
    item = holder.items[source]
    expected = struct.pack("<II", item.mtime & 0xFFFFFFFF, item.size & 0xFFFFFFFF)
    return expected == stamp


def _compare(holder: Tree, path: str, source: str, optimize: int, rec: Recorder) -> None:
    data = holder.read(path)
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return  # Python compiles again
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the judged source's style is not our concern
            code = compile(
                holder.read(source),
                str(holder.root / source),
                "exec",
                dont_inherit=True,
                optimize=optimize,
            )
        expected = marshal.dumps(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the source is judged by its bytes
    actual = data[_HEADER.size :]
    # equal bytes are the usual case; paths, shared objects and the order of sets may differ
    same = actual == expected
    if not same:
        try:
            same = read_code(actual, path) == read_code(expected, source)
        except (FormatError, RecursionError):
            same = False
    if not same:
        rec.fail(
            "PKG-7",
            path,
            "Python would run this instead of the source, and it is other code",
            expected=f"what {source} compiles to",
            actual="other code",
        )
