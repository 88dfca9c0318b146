"""One JSON line per publication and per restore, for operators and scripts.

Fields are the dataclass fields below; units are in the names. A consumer checks ``schema``
and ignores nothing: within one schema version fields are neither added nor removed.
:func:`json_schema` gives the same as a JSON Schema document.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

_JSON_TYPES: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRecord:
    """What became of one restore on one rank.

    Attributes:
        request: the engine's request id.
        rank: tensor-parallel rank.
        root: first 16 hexadecimal digits of the context digest.
        boundary_tokens: where the root ends.
        local_tokens: of these, tokens that the engine had itself.
        outcome: ``received``, ``failed`` or ``cancelled``.
        reason: why not received; empty otherwise.
        quarantined: the root was taken out of service, because its bytes were wrong.
        pages: pages placed.
        bytes: authenticated bytes placed.
        queued_ms: from the request to the first read.
        read_ms: reading and authenticating.
        place_ms: writing into the engine's pages, to completion.
    """

    request: str
    rank: int
    root: str
    boundary_tokens: int
    local_tokens: int
    outcome: str
    reason: str
    quarantined: bool
    pages: int
    bytes: int
    queued_ms: float
    read_ms: float
    place_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRecord:
    """What became of one publication on one rank.

    Attributes:
        request: the engine's request id.
        rank: tensor-parallel rank.
        publication: its number in this engine's life.
        root: first 16 hexadecimal digits of the context digest.
        boundary_tokens: where the root ends.
        outcome: ``stored``, ``already_held``, ``skipped`` or ``failed``.
        reason: why not stored; empty otherwise.
        pages: pages of the root.
        referenced_pages: of these, pages that a base root already held.
        written_bytes: bytes that the publication allocated on disk.
        queued_ms: from the step that named it to the first gathered byte.
        gather_ms: copying out of the engine's pages.
        store_ms: hashing, writing and syncing.
    """

    request: str
    rank: int
    publication: int
    root: str
    boundary_tokens: int
    outcome: str
    reason: str
    pages: int
    referenced_pages: int
    written_bytes: int
    queued_ms: float
    gather_ms: float
    store_ms: float


SCHEMAS: Final[dict[type[Any], str]] = {
    RestoreRecord: "sparkcache-restore/v1",
    PublicationRecord: "sparkcache-publication/v1",
}


def to_json(record: RestoreRecord | PublicationRecord) -> str:
    """One line without line break, keys sorted, ``schema`` among them."""
    document = {"schema": SCHEMAS[type(record)], **asdict(record)}
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in document.items()}
    return json.dumps(rounded, sort_keys=True, separators=(",", ":"))


def json_schema(record: type[Any]) -> dict[str, Any]:
    """The JSON Schema of one record type."""
    properties: dict[str, Any] = {"schema": {"const": SCHEMAS[record]}}
    for item in fields(record):
        properties[item.name] = {"type": _JSON_TYPES[str(item.type)]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMAS[record],
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }
