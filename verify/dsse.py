"""DSSE envelopes, read without mercy (docs/attestation.md, "The file").

Pure. The payload stays the bytes that were read; what was signed is computed from them, never
from a value that was parsed and written again.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from verify import strictjson
from verify.errors import FormatError
from verify.strictjson import Record

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_SIGNATURES = 16
MAX_PAYLOAD = 16 << 20


@dataclass(frozen=True, slots=True)
class Signature:
    """A raw signature, and the id of the key that claims to have made it: a hint."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload's bytes and the signatures over them."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]

    @classmethod
    def parse(cls, line: bytes, what: str) -> Envelope:
        """Read one line of the attestation file, its newline included.

        Raises:
            FormatError: for other bytes than canonical JSON of an envelope, base64 that is
                not canonical, or more than the limits allow.
        """
        if len(line) > MAX_PAYLOAD * 2:
            raise FormatError(what, "", f"expected at most {MAX_PAYLOAD} bytes of payload")
        top = Record(strictjson.parse(line, what), what)
        payload = _base64(top, "payload")
        records = top.records("signatures")
        if len(payload) > MAX_PAYLOAD:
            raise FormatError(what, "payload", f"expected at most {MAX_PAYLOAD} bytes")
        if not 1 <= len(records) <= MAX_SIGNATURES:
            problem = f"expected 1 to {MAX_SIGNATURES}, found {len(records)}"
            raise FormatError(what, "signatures", problem)
        signatures: list[Signature] = []
        for each in records:
            signatures.append(Signature(each.sha256("keyid"), _base64(each, "sig")))
            each.done()
        envelope = cls(top.text("payloadType"), payload, tuple(signatures))
        top.done()
        return envelope

    @property
    def signed(self) -> bytes:
        """What the signatures are over: DSSE's pre-authentication encoding."""
        kind = self.payload_type.encode("utf-8")
        return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(self.payload), self.payload)


def _base64(record: Record, key: str) -> bytes:
    text = record.text(key)
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError) as error:
        record.fail(key, f"expected base64: {error}")
    if base64.b64encode(data).decode("ascii") != text:
        record.fail(key, "expected base64 in its one canonical spelling")
    return data
