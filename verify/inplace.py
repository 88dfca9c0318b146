"""An installation in place: what its journal says of an environment (docs/build.md).

The journal is a claim of the thing judged. It decides only which *name* the state has (the
version stays the release's, nothing is stamped); every byte is still judged by the pins.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verify import strictjson
from verify.digest import ReadError
from verify.errors import FormatError
from verify.filesystem import FileSystem, exists, read_file
from verify.report import Recorder
from verify.strictjson import Record

JOURNAL = ".sparkcache/journal.json"
SCHEMA = "sparkcache.install/v1"
INSTALLED = "installed"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a journal says of itself."""

    state: str
    target: str
    pins: str

    @classmethod
    def parse(cls, data: bytes, what: str) -> Claim:
        """Read the journal's head; its operations are the builder's business.

        Raises:
            FormatError: when it is no journal.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", SCHEMA)
        return cls(top.text("state"), top.text("target"), top.record("pins").sha256("sha256"))


def judge_journal(
    files: FileSystem, prefix: Path, target: str | None, pins: str | None, rec: Recorder
) -> bool:
    """Judge the journal of the environment ``prefix``, if there is one (PKG-16).

    ``target`` and ``pins`` are the anchor's. Returns whether the environment claims to be
    installed in place, finished or not.
    """
    path = prefix / JOURNAL
    if not exists(files, path.parent):
        return False
    if path not in files.children(path.parent):
        rec.note("PKG-16", JOURNAL, "an installation was interrupted before it changed anything")
        return False
    try:
        claim = Claim.parse(read_file(files, files.real(path), str(path)), str(path))
    except (ReadError, FormatError) as error:
        rec.fail("PKG-16", JOURNAL, f"not a journal that can be read: {error}")
        return True
    for what, expected, actual in (
        ("the state is not one to run in", INSTALLED, claim.state),
        ("installed from another target", target, claim.target),
        ("installed from other pins", pins, claim.pins),
    ):
        if expected is not None and expected != actual:
            rec.fail("PKG-16", JOURNAL, what, expected=expected, actual=actual)
    rec.passed("PKG-16", f"{claim.target} is installed in place; the version stays the release's")
    return True
