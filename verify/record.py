"""RECORD, the list of an installed or packed distribution's files (PyPA's specification).

Pure: rows and what is wrong with them. Whether the rows describe the files that are there is
judged by :mod:`verify.checks.package`.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One row: SHA-256 in hex and size, both None where RECORD gives none."""

    sha256: str | None
    size: int | None


@dataclass(frozen=True, slots=True)
class RecordProblem:
    """A row that the specification does not allow; ``path`` is None when it names no file."""

    path: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The rows by path, and everything that is not a row."""

    rows: Mapping[str, Row]
    problems: tuple[RecordProblem, ...]

    @classmethod
    def parse(cls, data: bytes) -> RecordFile:
        """Read RECORD's bytes; anything that is not a row becomes a problem."""
        rows: dict[str, Row] = {}
        problems: list[RecordProblem] = []
        try:
            # csv itself must see the line ends: names may hold characters that splitlines splits at
            fields = list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            return cls({}, (RecordProblem(None, f"expected rows in UTF-8: {error}"),))
        for number, row in enumerate(fields, start=1):
            if len(row) != 3 or not row[0]:
                problem = f"line {number}: expected path, hash and size"
                problems.append(RecordProblem(None, problem))
                continue
            path, digest, size = row
            if path in rows:
                problems.append(RecordProblem(path, "the path has two rows"))
                continue
            sha256 = _sha256(digest)
            number_of_bytes = _size(size)
            if digest and sha256 is None:
                problem = f"expected sha256=<base64url>, found {digest[:60]!r}"
                problems.append(RecordProblem(path, problem))
            elif size and number_of_bytes is None:
                problems.append(RecordProblem(path, f"expected a size, found {size[:40]!r}"))
            rows[path] = Row(sha256, number_of_bytes)
        return cls(rows, tuple(problems))


def _size(text: str) -> int | None:
    """Return a size in decimal digits, or None; no file has more than 19 of them."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _sha256(text: str) -> str | None:
    """Return the hex digest of ``sha256=<unpadded base64url>``, or None."""
    algorithm, _, encoded = text.partition("=")
    if algorithm != "sha256" or len(encoded) != 43:
        return None
    try:
        raw = base64.b64decode(encoded + "=", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    # the last character carries two bits that nobody reads: only one spelling is right
    again = base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")
    return raw.hex() if again == encoded else None
