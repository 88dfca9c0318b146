"""Writes a trust root: who may speak in which role, how many must, and until when.

Pure. Reading and applying one is :mod:`verify`'s; docs/attestation.md holds the schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from builder.attest.keys import PublicKey
from builder.errors import BuildError
from verify import strictjson

SCHEMA = "sparkcache.trust/v1"
ROLES = ("builder", "verifier")


class TrustError(BuildError):
    """A trust root that nobody could meet, or that says less than it seems to."""


@dataclass(frozen=True, slots=True)
class Role:
    """The keys of a role, and how many of them must have signed."""

    keys: Sequence[PublicKey]
    threshold: int = 1


def trust_root(roles: Mapping[str, Role], expires: datetime.datetime, version: int = 1) -> bytes:
    """Return a trust root as canonical JSON.

    Raises:
        TrustError: for a threshold that the role's distinct keys cannot meet, a key that is
            named twice, or a time without a zone.
    """
    if expires.tzinfo is None:
        raise TrustError("expires: expected a time with its zone, such as 2027-12-31T00:00:00Z")
    keys: dict[str, PublicKey] = {}
    for name, role in roles.items():
        if name not in ROLES:
            raise TrustError(f"role {name!r}: expected one of {', '.join(ROLES)}")
        ids = [key.key_id for key in role.keys]
        if len(set(ids)) != len(ids):
            raise TrustError(f"role {name}: a key is named twice; it would count once")
        if not 1 <= role.threshold <= len(ids):
            raise TrustError(
                f"role {name}: expected a threshold from 1 to {len(ids)}, found {role.threshold}"
            )
        keys |= {key.key_id: key for key in role.keys}
    moment = expires.astimezone(datetime.UTC).replace(microsecond=0, tzinfo=None)
    return strictjson.dump(
        {
            "schema": SCHEMA,
            "version": version,
            "expires": f"{moment.isoformat()}Z",
            "keys": {
                key_id: {"scheme": key.scheme, "pem": key.pem.decode("ascii")}
                for key_id, key in keys.items()
            },
            "roles": {
                name: {
                    "keys": sorted(key.key_id for key in role.keys),
                    "threshold": role.threshold,
                }
                for name, role in roles.items()
            },
        }
    )
