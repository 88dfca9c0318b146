"""PKG 1 to 6 and 10: a package as its format has it, packed or installed.

1. The archive is well formed and reads the same for every reader.
2. File name, dist-info directory and tags are those of the base with the local version.
3. The version that the package tells follows the packaging rule (seen by
   :mod:`verify.checks.tree`).
4. RECORD lists exactly the files that are there, each once. An installed RECORD may also
   name what installers write: their marks, bytecode, and the scripts of entry points.
5. Every RECORD row has the file's digest and size.
6. No file is set-user-id, set-group-id, sticky or writable by everyone.
10. What installers add has the form that the specifications give it.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path

from verify import strictjson
from verify.digest import Digest, ReadError, digest
from verify.errors import FormatError
from verify.expect import Composition, Origin
from verify.filesystem import FileSystem
from verify.holders import Holder, hidden
from verify.record import RecordFile, Row
from verify.report import Recorder

INSTALLER_FILES = frozenset(
    {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
)
"""What pip and uv write into a dist-info directory (PyPA's "Recording installed projects")."""

_LAID = (Origin.PATCH, Origin.MODULE)
_SCRIPT = re.compile(r"(?:\.\./){1,4}bin/([^/]+)\Z")
_FORBIDDEN = 0o7002


def judge_archive(holder: Holder, rec: Recorder) -> None:
    """Let step 1 pass when the holder and the hashing of its members reported nothing."""
    # (1)
    if not holder.items and not holder.defects:
        rec.fail("PKG-1", None, "the archive is empty", expected="members", actual="none")
    rec.passed("PKG-1", f"{len(holder.items)} members")


def judge_filename(actual: str, expected: str, rec: Recorder) -> None:
    """Run step 2 for a wheel's file name."""
    # (2)
    if actual != expected:
        message = "not the name that a wheel of this base has"
        rec.fail("PKG-2", None, message, expected=expected, actual=actual)


def find_dist_info(holder: Holder, expected: str, rec: Recorder) -> str:
    """Run step 2 for the dist-info directory; return the one to judge by."""
    # (2)
    found = sorted(
        {
            path.partition("/")[0]
            for path in holder.items
            if "/" in path and path.partition("/")[0].endswith(".dist-info")
        }
    )
    if found == [expected]:
        rec.passed("PKG-2", expected)
        return expected
    names = ", ".join(found) or "none"
    message = "not the one dist-info directory that the packaging rule names"
    rec.fail("PKG-2", None, message, expected=expected, actual=names)
    return found[0] if len(found) == 1 else expected


def judge_modes(holder: Holder, rec: Recorder) -> None:
    """Run step 6."""
    # (6)
    for path, item in sorted(holder.items.items()):
        if item.mode & _FORBIDDEN:
            message = "a permission that no build gives"
            rec.fail("PKG-6", path, message, expected="0644 or 0755", actual=f"{item.mode:04o}")
    rec.passed("PKG-6", f"{len(holder.items)} files")


def judge_wheel_record(
    holder: Holder, digests: Mapping[str, Digest | ReadError], dist_info: str, rec: Recorder
) -> None:
    """Run steps 4 and 5 on a packed wheel: no row without a file, no file without a row."""
    # (4)
    place = f"{dist_info}/RECORD"
    record = _read_record(holder, digests, place, rec)
    if record is None:
        return
    if b"\r" in holder.read(place):
        message = "the line ends were converted"
        rec.fail("PKG-4", place, message, expected="line feeds", actual="carriage returns")
    for path in sorted(digests.keys() - record.rows.keys() - _bad_paths(record)):
        message = "a member without a row in RECORD"
        rec.fail("PKG-4", path, message, expected="a row", actual="none")
    for path in sorted(record.rows.keys() - digests.keys()):
        if not hidden(holder, path):
            message = "a row of RECORD without a member"
            rec.fail("PKG-4", path, message, expected="a member", actual="none")
    # (5)
    for path in sorted((record.rows.keys() & digests.keys()) - _bad_paths(record)):
        _judge_row(path, record.rows[path], digests[path], rec, own=path == place)
    _pass_record(record, rec)


def judge_installed_record(
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    dist_info: str,
    files: FileSystem,
    site: Path,
    rec: Recorder,
    *,
    laid_over: Composition | None = None,
) -> None:
    """Run steps 4, 5 and 10 on an installed distribution in ``site``.

    ``laid_over`` is the composition where files of a layer lie over an installed release: its
    RECORD may still tell the release's files where the composition has others.
    """
    told = {} if laid_over is None else laid_over.files
    gone = {} if laid_over is None else laid_over.deleted
    # (4)
    place = f"{dist_info}/RECORD"
    record = _read_record(holder, digests, place, rec)
    if record is None:
        return
    scripts = _script_names(holder, f"{dist_info}/entry_points.txt")
    bad = _bad_paths(record)
    for path in sorted(digests.keys() - record.rows.keys() - bad):
        if path in told and told[path].pre is None and told[path].origin in _LAID:
            continue
        if not is_bytecode(path) and not is_installers(path, dist_info):
            message = "an installed file without a row in RECORD"
            rec.fail("PKG-4", path, message, expected="a row", actual="none")
    outside = 0
    for path in sorted(record.rows.keys() - digests.keys() - bad):
        script = _SCRIPT.match(path)
        if script is not None and script[1] in scripts:
            outside += 1
            _judge_script(files, site, path, record.rows[path], rec)
        elif not (is_bytecode(path) or hidden(holder, path) or path in gone):
            message = "a row of RECORD without an installed file"
            rec.fail("PKG-4", path, message, expected="a file", actual="none")
    # (5)
    for path in sorted((record.rows.keys() & digests.keys()) - bad):
        stale = path in told and record.rows[path].sha256 == told[path].pre is not None
        if not is_bytecode(path) and not stale:
            _judge_row(path, record.rows[path], digests[path], rec, own=path == place)
    _pass_record(record, rec)
    # (10)
    for name in sorted(INSTALLER_FILES):
        path = f"{dist_info}/{name}"
        if isinstance(digests.get(path), Digest):
            _judge_installers_file(holder, path, name, rec)
    rec.passed("PKG-10", f"{outside} scripts of entry points")


def is_bytecode(path: str) -> bool:
    """Whether a path is where Python keeps compiled modules."""
    return path.endswith(".pyc") and "/__pycache__/" in path


def is_installers(path: str, dist_info: str) -> bool:
    """Whether an installer, not the wheel, puts this file into the dist-info directory."""
    folder, _, name = path.rpartition("/")
    return folder == dist_info and name in INSTALLER_FILES


def _read_record(
    holder: Holder, digests: Mapping[str, Digest | ReadError], place: str, rec: Recorder
) -> RecordFile | None:
    if not isinstance(digests.get(place), Digest):
        if place not in digests and not hidden(holder, place):
            rec.fail("PKG-4", place, "RECORD is missing", expected="a file", actual="none")
        return None
    try:
        record = RecordFile.parse(holder.read(place))
    except ReadError as error:
        rec.fail("PKG-4", place, str(error), expected=error.expected, actual=error.actual)
        return None
    for problem in record.problems:
        rec.fail("PKG-4", problem.path or place, f"RECORD: {problem.problem}")
    return record


def _bad_paths(record: RecordFile) -> set[str]:
    return {problem.path for problem in record.problems if problem.path is not None}


def _judge_row(path: str, row: Row, found: Digest | ReadError, rec: Recorder, *, own: bool) -> None:
    # (5)
    if isinstance(found, ReadError):
        return
    expected = _describe(row.sha256, row.size)
    if own:
        if (row.sha256, row.size) != (None, None):
            message = "RECORD gives a digest of itself"
            rec.fail("PKG-5", path, message, expected="no digest, no size", actual=expected)
    elif row.sha256 != found.sha256 or row.size not in (None, found.size):
        message = "RECORD does not describe this file"
        actual = _describe(found.sha256, found.size)
        rec.fail("PKG-5", path, message, expected=expected, actual=actual)


def _describe(sha256: str | None, size: int | None) -> str:
    return f"{sha256 or 'no digest'}, {'no size' if size is None else f'{size} bytes'}"


def _judge_script(files: FileSystem, site: Path, path: str, row: Row, rec: Recorder) -> None:
    # (5) the installer wrote the script and its row; only their agreement can be judged
    try:
        found = digest(files.chunks(site / path, path), 0, git=False)
    except ReadError as error:
        rec.fail("PKG-4", path, "a script of RECORD", expected=error.expected, actual=error.actual)
        return
    _judge_row(path, row, found, rec, own=False)


def _pass_record(record: RecordFile, rec: Recorder) -> None:
    for check in ("PKG-4", "PKG-5"):
        rec.passed(check, f"{len(record.rows)} rows")


def _script_names(holder: Holder, path: str) -> set[str]:
    """Return the names of the scripts that an installer makes from ``entry_points.txt``."""
    if path not in holder.items:
        return set()
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # documented way
    try:
        parser.read_string(holder.read(path).decode("utf-8"))
    except (ReadError, UnicodeDecodeError, configparser.Error):
        return set()
    sections = ("console_scripts", "gui_scripts")
    return {name for each in sections if parser.has_section(each) for name in parser[each]}


def _judge_installers_file(holder: Holder, path: str, name: str, rec: Recorder) -> None:
    # (10)
    try:
        data = holder.read(path)
    except ReadError as error:
        rec.fail("PKG-10", path, "cannot be read", expected=error.expected, actual=error.actual)
        return
    if name == "INSTALLER":
        installer = data.decode("ascii", "replace").strip()
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,40}", installer):
            expected = "one name, such as pip"
            rec.fail("PKG-10", path, "not a name", expected=expected, actual=installer[:80])
        else:
            rec.note("PKG-10", path, f"installed by {installer}")
    elif name == "REQUESTED":
        if data:
            message = "REQUESTED is a mark"
            rec.fail("PKG-10", path, message, expected="no bytes", actual=f"{len(data)} bytes")
    elif name == "direct_url.json":
        _judge_direct_url(data, path, rec)
    else:
        rec.note("PKG-10", path, "kept by uv")


def _judge_direct_url(data: bytes, path: str, rec: Recorder) -> None:
    # (10) where the installer says it found the package: of interest, proof of nothing
    try:
        value = strictjson.parse(data, path, canonical=False)
    except FormatError as error:
        rec.fail("PKG-10", path, str(error), expected="a JSON object")
        return
    if not isinstance(value, Mapping):
        rec.fail("PKG-10", path, "not an object", expected="a JSON object", actual="another value")
        return
    url = value.get("url")
    if not isinstance(url, str):
        rec.fail("PKG-10", path, "names no source", expected="a url", actual="none")
    else:
        rec.note("PKG-10", path, f"installed from {url}")
