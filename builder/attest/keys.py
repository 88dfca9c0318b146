"""Key pairs for signing: Ed25519, or ECDSA P-256 where Ed25519 is not to be had.

Private keys are PKCS#8 PEM files that only their owner can read; anything looser is refused,
because a signature says no more than how well its key was kept.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from builder.errors import BuildError

ED25519 = "ed25519"
ECDSA_P256 = "ecdsa-p256-sha256"
SCHEMES = (ED25519, ECDSA_P256)

_NOT_A_KEY = "expected a private key in PKCS#8 PEM; make one with `python -m builder key new`"
_MAX_KEY_BYTES = 1 << 16


class KeyUseError(BuildError):
    """A key cannot be read, made or used.

    Attributes:
        path: the key's file, or the external signer's command.
    """

    def __init__(self, path: Path | str, problem: str) -> None:
        self.path = str(path)
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key of one of the accepted schemes."""

    scheme: str
    pem: bytes
    key_id: str
    _key: ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey

    @classmethod
    def parse(cls, pem: bytes, what: Path | str) -> PublicKey:
        """Read a SubjectPublicKeyInfo in PEM; ``what`` names it in errors.

        Raises:
            KeyUseError: when it is none, or of a scheme that is not accepted.
        """
        try:
            return cls._of(load_pem_public_key(pem), what)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeyUseError(what, f"expected a public key in PEM: {error}") from error

    @classmethod
    def _of(cls, key: object, what: Path | str) -> PublicKey:
        if isinstance(key, ed25519.Ed25519PublicKey):
            scheme = ED25519
        elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
            scheme = ECDSA_P256
        else:
            raise KeyUseError(what, f"expected a key for {' or '.join(SCHEMES)}, found another")
        der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return cls(scheme, pem, hashlib.sha256(der).hexdigest(), key)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` is this key's, over ``message``."""
        try:
            if isinstance(self._key, ed25519.Ed25519PublicKey):
                self._key.verify(signature, message)
            else:
                self._key.verify(signature, message, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A private key; a :class:`~builder.attest.dsse.Signer`."""

    public: PublicKey
    _key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey

    @classmethod
    def generate(cls, scheme: str = ED25519) -> PrivateKey:
        """Make a new key."""
        key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
        if scheme == ECDSA_P256:
            key = ec.generate_private_key(ec.SECP256R1())
        else:
            key = ed25519.Ed25519PrivateKey.generate()
        return cls(PublicKey._of(key.public_key(), scheme), key)

    @classmethod
    def load(cls, path: Path, passphrase: Callable[[], bytes]) -> PrivateKey:
        """Read a private key; ``passphrase`` is called only for an encrypted one.

        Raises:
            KeyUseError: when the file is not a key, readable by others, or locked.
        """
        pem = _read_private(path)
        encrypted = pem.startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
        if not encrypted and not pem.startswith(b"-----BEGIN PRIVATE KEY-----"):
            raise KeyUseError(path, _NOT_A_KEY)
        try:
            key = load_pem_private_key(pem, passphrase() if encrypted else None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if encrypted:
                raise KeyUseError(path, "the passphrase is wrong, or the key damaged") from error
            raise KeyUseError(path, _NOT_A_KEY) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
            raise KeyUseError(path, f"expected a key for {' or '.join(SCHEMES)}, found another")
        return cls(PublicKey._of(key.public_key(), path), key)

    @property
    def key_id(self) -> str:
        """The id of the public half."""
        return self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """Return the signature of ``message``, the same each time."""
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            return self._key.sign(message)
        # deterministic nonces (RFC 6979): two builds with one key must be the same bytes
        return self._key.sign(message, ec.ECDSA(SHA256(), deterministic_signing=True))

    def save(self, path: Path, passphrase: bytes | None) -> None:
        """Write the key into a new file that only its owner can read.

        Raises:
            KeyUseError: when the file exists or cannot be written.
        """
        encryption: KeySerializationEncryption = NoEncryption()
        if passphrase is not None:
            encryption = BestAvailableEncryption(passphrase)
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(pem)
                    file.flush()
                    os.fsync(descriptor)
                path.hardlink_to(partial)  # unlike a rename, it never replaces a key
            finally:
                partial.unlink()
        except FileExistsError as error:
            raise KeyUseError(path, "the file exists; a key is never overwritten") from error
        except OSError as error:
            raise KeyUseError(path, f"cannot be written: {error.strerror}") from error


def _read_private(path: Path) -> bytes:
    """Read a key file through one descriptor, after looking at who else could."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyUseError(path, "expected a regular file")
            if status.st_uid not in (os.geteuid(), 0):
                raise KeyUseError(path, f"it belongs to user {status.st_uid}, not to you")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise KeyUseError(path, f"others can use it (mode {mode:04o}): chmod 600 it")
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise KeyUseError(path, f"cannot be read: {error.strerror}") from error
