"""A wheel's ``RECORD``: which files it holds, with their hashes and sizes.

The format is that of the packaging specification "Recording installed projects": CSV rows of
path, ``sha256=<urlsafe base64 without padding>`` and size; ``RECORD`` itself has neither.
Rows that a repacked wheel takes over are believed only as far as the pinned SHA-256 of the
base wheel carries them; :mod:`verify` recomputes them all.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from builder.errors import BuildError

_HASH = re.compile(r"sha256=[A-Za-z0-9_-]{43}")
_SIZE = re.compile(r"0|[1-9][0-9]{0,15}")
# Signatures of RECORD: they cannot stay true when it changes, nor may they go unnoticed.
SIGNATURES = ("RECORD.jws", "RECORD.p7s")


class RecordError(BuildError):
    """``RECORD`` and the wheel's members do not tell the same story."""

    def __init__(self, wheel: str, path: str, problem: str) -> None:
        self.wheel = wheel
        self.path = path
        self.problem = problem
        super().__init__(
            f"{wheel}: RECORD: {path}: {problem}; a wheel with this cannot be a base: compare "
            "its SHA-256 with the pinned one and fetch it again"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What RECORD says of one file: ``sha256=…`` in its own spelling, and the size."""

    digest: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> Row:
        """Return the row of a file with these bytes."""
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        return cls(f"sha256={digest.decode('ascii')}", len(data))


def parse_record(data: bytes, record_path: str, wheel: str) -> dict[str, Row]:
    """Return RECORD's rows by path, without the row of RECORD itself.

    Raises:
        RecordError: for another shape, another hash than SHA-256, a path twice, or no row
            of RECORD itself.
    """
    try:
        lines = list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordError(wheel, record_path, f"not CSV in UTF-8: {error}") from error
    rows: dict[str, Row] = {}
    itself = 0
    for line in lines:
        if len(line) != 3:
            raise RecordError(wheel, str(line)[:80], "expected path, hash and size")
        path, digest, size = line
        if path == record_path and not digest and not size:
            itself += 1
        elif not _HASH.fullmatch(digest) or not _SIZE.fullmatch(size):
            problem = f"expected sha256=<43 characters> and a size, found {digest!r}, {size!r}"
            raise RecordError(wheel, path, problem)
        elif path in rows:
            raise RecordError(wheel, path, "the path has two rows")
        else:
            rows[path] = Row(digest, int(size))
    if itself != 1:
        raise RecordError(wheel, record_path, f"expected one row without hash, found {itself}")
    return rows


def check_record(rows: Mapping[str, Row], sizes: Mapping[str, int], wheel: str) -> None:
    """Check that RECORD's rows and the members (path to size) are the same files.

    Raises:
        RecordError: naming the first path, in sorted order, that only one of them has or
            whose sizes differ.
    """
    for path in sorted(rows.keys() | sizes.keys()):
        if path not in rows:
            raise RecordError(wheel, path, "the wheel holds it, RECORD does not list it")
        if path not in sizes:
            raise RecordError(wheel, path, "RECORD lists it, the wheel does not hold it")
        if rows[path].size != sizes[path]:
            problem = f"RECORD says {rows[path].size} bytes, the wheel holds {sizes[path]}"
            raise RecordError(wheel, path, problem)


def dump_record(rows: Iterable[tuple[str, Row]], record_path: str) -> bytes:
    """Return RECORD's bytes: the rows in the order given, then RECORD's own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((path, row.digest, row.size) for path, row in rows)
    writer.writerow((record_path, "", ""))
    return text.getvalue().encode("utf-8")
