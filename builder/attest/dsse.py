"""DSSE envelopes: a payload's bytes, and signatures over exactly these bytes.

Pure. The protocol is https://github.com/secure-systems-lab/dsse/blob/master/protocol.md.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Protocol

from verify import strictjson

PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Signer(Protocol):
    """Signs bytes with one key."""

    @property
    def key_id(self) -> str:
        """The id of the key's public half."""

    def sign(self, message: bytes) -> bytes:
        """Return the raw signature of ``message``."""


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the bytes that are signed: DSSE's pre-authentication encoding."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def envelope(payload: bytes, signers: Iterable[Signer]) -> bytes:
    """Sign ``payload`` and return the envelope: one line of canonical JSON.

    Raises:
        KeyUseError: when a signer cannot sign.
    """
    message = pae(payload)
    signatures = {signer.key_id: signer.sign(message) for signer in signers}
    return strictjson.dump(
        {
            "payload": _base64(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [
                {"keyid": key_id, "sig": _base64(signatures[key_id])}
                for key_id in sorted(signatures)
            ],
        }
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
