"""Finds out who signs: ``SIGN_KEY``, ``SIGN_COMMAND``, or a key that is made once.

docs/attestation.md, "Keys", is the specification of what the variables mean.
"""

from __future__ import annotations

import getpass
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.attest.dsse import Signer
from builder.attest.keys import KeyUseError, PrivateKey, PublicKey

LOCAL_KEY = "local-unverified.pem"
_MAX_SIGNATURE_BYTES = 1 << 12
_MAX_PASSPHRASE_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class CommandSigner:
    """A program that signs: it reads the message and writes the raw signature.

    What it returns is verified before it is used: a wrong key, a text encoding or a digest
    instead of the message would otherwise be found by the first reader.
    """

    command: str
    public: PublicKey

    @property
    def key_id(self) -> str:
        """The id of the public key that the program's signatures must verify with."""
        return self.public.key_id

    def sign(self, message: bytes) -> bytes:
        """Run the program once.

        Raises:
            KeyUseError: when it fails, or what it writes is not this key's signature.
        """
        try:
            done = subprocess.run(
                shlex.split(self.command), input=message, stdout=subprocess.PIPE, check=False
            )
        except (OSError, ValueError) as error:
            raise KeyUseError(self.command, f"the signer cannot be run: {error}") from error
        if done.returncode:
            raise KeyUseError(self.command, f"the signer failed with exit code {done.returncode}")
        signature = done.stdout[: _MAX_SIGNATURE_BYTES + 1]
        if not self.public.verifies(signature, message):
            raise KeyUseError(
                self.command,
                f"what the signer wrote ({len(done.stdout)} bytes) is not a raw "
                f"{self.public.scheme} signature of its input by the key of SIGN_KEY",
            )
        return signature


def choose_signer(
    environment: Mapping[str, str], say: Callable[[str], None], checkout: Path
) -> Signer:
    """Return the signer that the environment asks for, or the key that is made once.

    Args:
        environment: ``os.environ``.
        say: told when a key is made, or used unasked.
        checkout: no private key may lie below it.

    Raises:
        KeyUseError: when the key or the command cannot be used.
    """
    key, command = environment.get("SIGN_KEY"), environment.get("SIGN_COMMAND")
    if command:
        if not key:
            raise KeyUseError(command, "SIGN_COMMAND needs its public key: set SIGN_KEY to it")
        return CommandSigner(command, PublicKey.parse(_read_public(Path(key)), key))
    if key:
        path = Path(key)
        if path.resolve().is_relative_to(checkout.resolve()):
            raise KeyUseError(path, "a private key does not belong into a checkout: move it out")
        return PrivateKey.load(path, lambda: read_passphrase(environment, f"passphrase of {path}"))
    return _local_key(environment, say)


def read_passphrase(environment: Mapping[str, str], prompt: str, *, twice: bool = False) -> bytes:
    """Return a passphrase from the descriptor ``SIGN_KEY_PASSPHRASE_FD`` or the terminal.

    Raises:
        KeyUseError: when there is neither, it is empty, or the two inputs differ.
    """
    number = environment.get("SIGN_KEY_PASSPHRASE_FD")
    if number is not None:
        try:
            with open(int(number), "rb", closefd=False) as file:
                passphrase = file.read(_MAX_PASSPHRASE_BYTES).rstrip(b"\r\n")
        except (OSError, ValueError) as error:
            raise KeyUseError(
                f"SIGN_KEY_PASSPHRASE_FD={number}", f"expected an open file descriptor: {error}"
            ) from error
    elif sys.stdin.isatty():
        passphrase = getpass.getpass(f"{prompt}: ").encode()
        if twice and getpass.getpass(f"{prompt} again: ").encode() != passphrase:
            raise KeyUseError(prompt, "the two inputs differ")
    else:
        raise KeyUseError(
            prompt, "no terminal to ask on: give it through SIGN_KEY_PASSPHRASE_FD (a descriptor)"
        )
    if not passphrase:
        raise KeyUseError(prompt, "it is empty")
    return passphrase


def _local_key(environment: Mapping[str, str], say: Callable[[str], None]) -> PrivateKey:
    """Return the key of this user account, made on first use."""
    configured = environment.get("XDG_CONFIG_HOME", "")
    # relative values are to be ignored, says the XDG base directory specification
    home = Path(configured) if configured.startswith("/") else Path.home() / ".config"
    path = home / "sparkcache" / LOCAL_KEY
    if not path.exists():
        made = PrivateKey.generate()
        try:
            made.save(path, None)
        except KeyUseError:
            if not path.exists():  # else another build was faster
                raise
        else:
            say(f"made the key {path}: it marks this account's builds, nobody vouches for it")
    key = PrivateKey.load(path, _no_passphrase)
    say(f"signing with {LOCAL_KEY} (key {key.key_id[:12]}…); SIGN_KEY names a key that others know")
    return key


def _no_passphrase() -> bytes:
    raise KeyUseError(LOCAL_KEY, "it is encrypted; set SIGN_KEY to use it")


def _read_public(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyUseError(path, f"cannot be read: {error.strerror}") from error
