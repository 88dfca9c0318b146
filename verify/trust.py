"""Trust roots: which public keys may speak in which role, how many must, until when.

Pure, but for :func:`verifies`, which needs the ``cryptography`` package and is the only place
that does. docs/attestation.md holds the schema.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from verify import strictjson
from verify.errors import FormatError, VerifyError
from verify.strictjson import Record

TRUST_SCHEMA = "sparkcache.trust/v1"
BUILDER = "builder"
ROLES = (BUILDER, "verifier")
SCHEMES = ("ed25519", "ecdsa-p256-sha256")

_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----\n([A-Za-z0-9+/=\n]+)-----END PUBLIC KEY-----\n?\Z")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z\Z")


class NoCryptographyError(VerifyError):
    """Signatures cannot be judged: the ``cryptography`` package is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "signatures need the Python package `cryptography`, which is not installed"
        )


@dataclass(frozen=True, slots=True)
class Key:
    """A public key: how it signs, and its DER SubjectPublicKeyInfo."""

    scheme: str
    der: bytes


@dataclass(frozen=True, slots=True)
class Role:
    """The ids of a role's keys, and how many distinct ones must have signed."""

    keys: frozenset[str]
    threshold: int


@dataclass(frozen=True, slots=True)
class TrustRoot:
    """A whole trust root."""

    version: int
    expires: datetime.datetime
    keys: Mapping[str, Key]
    roles: Mapping[str, Role]

    @classmethod
    def parse(cls, data: bytes, what: str) -> TrustRoot:
        """Read a trust root.

        Raises:
            FormatError: for anything that the schema does not allow, a key whose id is not
                computed from its bytes, or a threshold that the keys cannot meet.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", TRUST_SCHEMA)
        keys, roles = top.record("keys"), top.record("roles")
        root = cls(
            version=top.integer("version"),
            expires=_time(top, "expires"),
            keys={key_id: _key(keys, key_id) for key_id in keys},
            roles={name: _role(roles, name) for name in roles},
        )
        for part in (keys, roles, top):
            part.done()
        if root.version < 1:
            top.fail("version", "expected 1 or more")
        for name, role in root.roles.items():
            if name not in ROLES:
                raise FormatError(what, f"roles.{name}", f"expected one of {', '.join(ROLES)}")
            unknown = sorted(role.keys - root.keys.keys())
            if unknown:
                raise FormatError(what, f"roles.{name}.keys", f"there is no key {unknown[0]}")
        return root


def parse_time(text: str, what: str) -> datetime.datetime:
    """Return a moment written as ``2027-12-31T00:00:00Z``.

    Raises:
        FormatError: for any other spelling.
    """
    try:
        if _TIME.match(text):
            return datetime.datetime.fromisoformat(text)
    except ValueError:
        pass
    raise FormatError(what, "", f"expected a time such as 2027-12-31T00:00:00Z, found {text!r}")


def verifies(key: Key, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is ``key``'s over ``message``.

    Raises:
        NoCryptographyError: when signatures cannot be judged here.
        FormatError: when the key is none, or not of its scheme.
    """
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import load_der_public_key
    except ImportError as error:
        raise NoCryptographyError from error
    try:
        public = load_der_public_key(key.der)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FormatError("trust root", "keys", f"not a public key: {error}") from error
    try:
        if key.scheme == "ed25519" and isinstance(public, ed25519.Ed25519PublicKey):
            public.verify(signature, message)
        elif (
            key.scheme == "ecdsa-p256-sha256"
            and isinstance(public, ec.EllipticCurvePublicKey)
            and isinstance(public.curve, ec.SECP256R1)
        ):
            public.verify(signature, message, ec.ECDSA(SHA256()))
        else:
            raise FormatError("trust root", "keys", f"a key is not of its scheme {key.scheme}")
    except InvalidSignature:
        return False
    return True


def _key(keys: Record, key_id: str) -> Key:
    record = keys.record(key_id)
    scheme = record.text("scheme")
    if scheme not in SCHEMES:
        record.fail("scheme", f"expected one of {', '.join(SCHEMES)}, found {scheme!r}")
    match = _PEM.match(record.text("pem"))
    record.done()
    try:
        der = base64.b64decode(match[1].replace("\n", ""), validate=True) if match else b""
    except (binascii.Error, ValueError):
        der = b""
    if not der:
        record.fail("pem", "expected one public key in PEM")
    computed = hashlib.sha256(der).hexdigest()
    if computed != key_id:
        record.fail("pem", f"the key's id is {computed}; a key has one id")
    return Key(scheme, der)


def _role(roles: Record, name: str) -> Role:
    record = roles.record(name)
    keys = record.texts("keys")
    threshold = record.integer("threshold")
    record.done()
    if len(set(keys)) != len(keys):
        record.fail("keys", "a key is listed twice; it counts once")
    if not 1 <= threshold <= len(keys):
        record.fail("threshold", f"expected 1 to {len(keys)}, found {threshold}")
    return Role(frozenset(keys), threshold)


def _time(record: Record, key: str) -> datetime.datetime:
    text = record.text(key)
    try:
        return parse_time(text, key)
    except FormatError as error:
        record.fail(key, error.problem)
