"""What a build takes from ``pins.json`` (docs/build.md), as typed values.

Only the parts that steer a build are read here; the receipt repeats others as they are, and
the judgement of the whole is :mod:`verify`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from verify import strictjson
from verify.strictjson import Json, Record

SCHEMA = "sparkcache.pins/v1"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of the package index."""

    project: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class PinnedBase(PinnedFile):
    """A base wheel.

    ``differs`` maps the Python files that it has otherwise than the release to their SHA-256;
    ``packaging`` those that the packaging rule changes to their SHA-256 before and after.
    """

    differs: Mapping[str, str]
    native_sha256: str
    packaging: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Pinned:
    """The pins of one target; ``json`` is all of them, ``sha256`` that of the file's bytes.

    ``files`` maps what patches touch, and ``modules`` what is added, to the SHA-256 after the
    build, None where the patches delete; ``patches`` maps patch names to SHA-256 in order.
    """

    json: Mapping[str, Json]
    sha256: str
    target: str
    version: str
    local_version: str
    commit: str | None
    source_manifest_sha256: str
    sdist: PinnedFile | None
    bases: Mapping[str, PinnedBase]
    patches: Mapping[str, str]
    files: Mapping[str, str | None]
    modules: Mapping[str, str]
    composed_sha256: str
    contract_sha256: str

    @classmethod
    def parse(cls, data: bytes, what: str) -> Pinned:
        """Read ``pins.json``; ``what`` names it in errors.

        Raises:
            FormatError: for a missing key or a value of another type.
        """
        top = Record(parsed := strictjson.parse(data, what), what)
        if not isinstance(parsed, Mapping):
            raise TypeError("Record accepted what is no object")
        top.expect("schema", SCHEMA)
        bases = top.record("bases")
        sdist = top.record_or_null("sdist")
        posts = ((file.text("path"), file.record_or_null("post")) for file in top.records("files"))
        return cls(
            json=parsed,
            sha256=hashlib.sha256(data).hexdigest(),
            target=top.text("target"),
            version=top.text("version"),
            local_version=top.text("local_version"),
            commit=top.record("commit").text_or_null("id"),
            source_manifest_sha256=top.record("source").record("manifest").sha256("sha256"),
            sdist=None if sdist is None else _file(sdist),
            bases={name: _base(bases.record(name)) for name in bases},
            patches={each.text("name"): each.sha256("sha256") for each in top.records("patches")},
            files={path: None if post is None else post.sha256("sha256") for path, post in posts},
            modules={each.text("path"): each.sha256("sha256") for each in top.records("modules")},
            composed_sha256=top.record("composed").sha256("manifest_sha256"),
            contract_sha256=top.record("contract").sha256("sha256"),
        )


def _file(record: Record) -> PinnedFile:
    return PinnedFile(
        record.text("project"),
        record.text("filename"),
        record.sha256("sha256"),
        record.integer("size"),
    )


def _base(record: Record) -> PinnedBase:
    file = _file(record)
    differs = record.record("differs")
    return PinnedBase(
        project=file.project,
        filename=file.filename,
        sha256=file.sha256,
        size=file.size,
        differs={path: differs.sha256(path) for path in differs},
        native_sha256=record.record("native").sha256("sha256"),
        packaging={
            each.text("path"): (each.sha256("pre"), each.sha256("post"))
            for each in record.record("packaging").records("files")
        },
    )
