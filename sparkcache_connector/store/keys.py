"""Secrets that authenticate manifests: the key ring, its file, and what a key is used for.

The ring is a text file: a first line that names the format, then one secret of 32 bytes in
lower-case hexadecimal per line. The first secret is *current*: it authenticates what is
written; the others still authenticate what is read, until rotation has rewritten it.
A secret that is in no ring can no longer vouch for anything: that is revocation.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from sparkcache_connector.store.errors import Reason, Unusable

KEYS_LIMIT: Final = 1 << 16
"""Largest key file in bytes."""
KEY_ID_BYTES: Final = 8

_FIRST_LINE: Final = "sparkcache-keys 1"
_SECRET_LINE: Final = re.compile(r"[0-9a-f]{64}")
_MANIFEST_CONTEXT: Final = "SparkCache store v1 manifest key"
_KEY_ID_CONTEXT: Final = "SparkCache store v1 key id"


@dataclass(frozen=True, repr=False)
class Key:
    """One secret. Its id may be seen by everyone; :attr:`secret` only by this user."""

    secret: bytes

    @classmethod
    def generate(cls) -> Key:
        """Return a new random key."""
        return cls(secrets.token_bytes(32))

    @property
    def key_id(self) -> bytes:
        """The 8 bytes by which manifests name this key."""
        return blake3(self.secret, derive_key_context=_KEY_ID_CONTEXT).digest(KEY_ID_BYTES)

    def tag(self, data: bytes | memoryview) -> bytes:
        """Return the 32-byte authentication tag of a manifest's bytes."""
        manifest_key = blake3(self.secret, derive_key_context=_MANIFEST_CONTEXT).digest()
        return blake3(data, key=manifest_key).digest()

    def __repr__(self) -> str:
        return f"Key({self.key_id.hex()})"


@dataclass(frozen=True)
class KeyRing:
    """The keys of one cache root, current first."""

    keys: tuple[Key, ...]

    @classmethod
    def generate(cls) -> KeyRing:
        """Return a ring of one new key."""
        return cls((Key.generate(),))

    @classmethod
    def parse(cls, data: bytes, path: str) -> KeyRing:
        """Return the ring that a key file's bytes describe.

        Raises:
            Unusable: naming the line that is wrong, never its content.
        """
        lines = data.decode("ascii", "replace").split("\n")
        advice = "restore the file from where it was kept, or remove it to start with a new key"
        if lines[0] != _FIRST_LINE:
            found = f"{path} does not begin with the line {_FIRST_LINE!r}"
            raise Unusable(Reason.MALFORMED, path, found, advice)
        body = lines[1:-1] if lines[-1] == "" else lines[1:]
        for number, line in enumerate(body, start=2):
            if not _SECRET_LINE.fullmatch(line):
                found = f"line {number} of {path} is not 64 lower-case hexadecimal digits"
                raise Unusable(Reason.MALFORMED, path, found, advice)
        if not body or len(set(body)) != len(body):
            found = f"{path} holds {'no key' if not body else 'a key twice'}"
            raise Unusable(Reason.MALFORMED, path, found, advice)
        return cls(tuple(Key(bytes.fromhex(line)) for line in body))

    def encode(self) -> bytes:
        """Return the key file's bytes."""
        lines = [_FIRST_LINE, *(key.secret.hex() for key in self.keys)]
        return ("\n".join(lines) + "\n").encode("ascii")

    @property
    def current(self) -> Key:
        """The key that authenticates what is written."""
        return self.keys[0]

    def find(self, key_id: bytes) -> Key | None:
        """Return the key with this id; None if it is not in the ring."""
        return next((key for key in self.keys if key.key_id == key_id), None)

    def with_new_current(self) -> KeyRing:
        """Return a ring with one more key in front."""
        return KeyRing((Key.generate(), *self.keys))

    def only_current(self) -> KeyRing:
        """Return a ring in which all keys but the current one are destroyed."""
        return KeyRing((self.current,))
