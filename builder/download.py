"""Downloads one file into a partial file, from where an earlier attempt stopped.

What comes is not trusted here: the caller hashes the whole file. A server that ignores or
cannot satisfy the resume makes the download start over, never end early.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from unearth.fetchers import PyPIClient
from unearth.link import Link

from builder.console import Console
from builder.errors import BuildError

ATTEMPTS = 5
BACKOFF_SECONDS = 0.5

_CHUNK = 1 << 16  # what a broken connection loses at most
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DownloadError(BuildError):
    """A file could not be downloaded whole.

    Attributes:
        shown: the file's address without credentials.
        problem: what was expected and what was found.
    """

    def __init__(self, shown: str, problem: str) -> None:
        self.shown = shown
        self.problem = problem
        super().__init__(f"{shown}: {problem}")


class _BrokenError(Exception):
    """The connection ended early, or the server is busy: worth another attempt."""


def fetch(
    url: str,
    shown: str,
    partial: Path,
    session: PyPIClient,
    console: Console,
    *,
    size: int | None = None,
) -> None:
    """Complete ``partial`` with the bytes at ``url``; ``size`` is their number, if known.

    Broken connections are taken up again where they broke, up to :data:`ATTEMPTS` times
    without a new byte in between.

    Raises:
        DownloadError: when the server refuses, the connection keeps breaking, the file ends
            at another size, or the disk is full. What came stays in ``partial``.
    """
    label = Link(url).filename
    failures = 0
    while True:
        before = _length(partial)
        if size is not None and before > size:
            _truncate(partial, shown)
            before = 0
        if size is not None and before == size:
            return
        try:
            if Link(url).is_file:
                _copy(Link(url).file_path, shown, partial, console, label)
            else:
                _stream(url, shown, partial, session, console, label, before)
            found = _length(partial)
            if size is None or found == size:
                return
            if found > size:
                _truncate(partial, shown)
                raise DownloadError(shown, f"expected {size} bytes, found {found}: another file")
            raise _BrokenError(f"ended at {found} of {size} bytes")
        except _BrokenError as error:
            failures = 1 if _length(partial) > before else failures + 1
            if failures >= ATTEMPTS:
                raise DownloadError(
                    shown, f"gave up after {failures} attempts: {error}; run the command again "
                    "to resume"
                ) from error  # fmt: skip
            console.say(f"{label}: {error}; trying again")
            time.sleep(BACKOFF_SECONDS * 2**failures)


def _stream(
    url: str, shown: str, partial: Path, session: PyPIClient, console: Console, label: str, at: int
) -> None:
    # identity: a compressing proxy would make offsets meaningless
    headers = {"Accept-Encoding": "identity"}
    if at:
        headers["Range"] = f"bytes={at}-"
    with _http_errors(), session.get_stream(url, headers=headers) as response:
        if response.status_code == 416 and at:
            _truncate(partial, shown)
            raise _BrokenError("the server cannot resume there, starting over")
        if response.status_code in (408, 425, 429, 500, 502, 503, 504):
            raise _BrokenError(f"the server answers {response.status_code}")
        if response.status_code not in (200, 206):
            reason = response.reason_phrase
            raise DownloadError(shown, f"the server answers {response.status_code} {reason}")
        resumed = response.status_code == 206 and _range_start(response.headers) == at
        if at and not resumed:
            if response.status_code == 206:
                raise DownloadError(shown, f"asked to resume at {at}, the server resumed elsewhere")
            at = 0
        total = at + int(response.headers.get("Content-Length") or 0)
        with console.progress(label, total, at) as advance, _disk_errors(shown, partial):
            with partial.open("ab" if at else "wb") as out:
                for chunk in response.iter_bytes(_CHUNK):
                    out.write(chunk)
                    advance(len(chunk))
            if response.headers.get("Content-Length") and _length(partial) != total:
                raise _BrokenError(f"ended at {_length(partial)} of {total} bytes")


def _copy(path: Path, shown: str, partial: Path, console: Console, label: str) -> None:
    try:
        source = path.open("rb")
    except OSError as error:
        raise DownloadError(shown, f"expected a readable file: {error.strerror}") from error
    with (
        source,
        console.progress(label, path.stat().st_size) as advance,
        _disk_errors(shown, partial),
        partial.open("wb") as out,
    ):
        while chunk := source.read(_CHUNK):
            out.write(chunk)
            advance(len(chunk))


@contextmanager
def _http_errors() -> Iterator[None]:
    """Turn the HTTP client's errors into ours; its package is unearth's choice, not ours."""
    try:
        yield
    except (BuildError, _BrokenError, OSError):
        raise
    except Exception as error:
        raise _BrokenError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _disk_errors(shown: str, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DownloadError(
                shown,
                f"{partial}: no space left ({error.strerror}) after {_length(partial)} bytes; "
                "make room or set XDG_CACHE_HOME, then run the command again to resume",
            ) from error
        raise DownloadError(shown, f"{partial}: {error.strerror}") from error


def _range_start(headers: Mapping[str, str]) -> int | None:
    unit, _, rest = headers.get("Content-Range", "").partition(" ")
    first = rest.partition("-")[0]
    return int(first) if unit == "bytes" and first.isdecimal() else None


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _truncate(partial: Path, shown: str) -> None:
    with _disk_errors(shown, partial):
        partial.unlink(missing_ok=True)
