from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from builder.attest.keys import ECDSA_P256, ED25519, SCHEMES, KeyUseError, PrivateKey, PublicKey
from builder.attest.signers import LOCAL_KEY, CommandSigner, choose_signer, read_passphrase

MESSAGE = b"DSSEv1 4 type 2 {}"


def never() -> bytes:
    raise AssertionError("a plain key needs no passphrase")


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_saved_key_is_loaded_and_signs_the_same_bytes(
    tmp_path: Path, scheme: str, passphrase: bytes | None
) -> None:
    key = PrivateKey.generate(scheme)
    path = tmp_path / "new" / "key.pem"
    key.save(path, passphrase)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (b"ENCRYPTED" in path.read_bytes()) == (passphrase is not None)
    loaded = PrivateKey.load(path, never if passphrase is None else lambda: passphrase)
    assert loaded.public.scheme == scheme
    assert loaded.key_id == key.key_id
    signature = loaded.sign(MESSAGE)
    assert signature == key.sign(MESSAGE)
    assert key.public.verifies(signature, MESSAGE)
    assert not key.public.verifies(signature, MESSAGE + b" ")
    assert not PrivateKey.generate(scheme).public.verifies(signature, MESSAGE)
    assert [entry.name for entry in path.parent.iterdir()] == ["key.pem"]


def test_ecdsa_signature_is_der() -> None:
    r, s = decode_dss_signature(PrivateKey.generate(ECDSA_P256).sign(MESSAGE))
    assert r > 0
    assert s > 0


def test_key_id_is_the_digest_that_openssl_computes(tmp_path: Path) -> None:
    key = PrivateKey.generate(ED25519)
    write(tmp_path / "public.pem", key.public.pem)
    script = "openssl pkey -pubin -in public.pem -outform DER | sha256sum | cut -d ' ' -f 1"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert key.key_id == done.stdout.strip()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    PrivateKey.generate().save(tmp_path / "key.pem", None)
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(KeyUseError, match=rf"others can use it \(mode 0{mode:o}\): chmod 600"):
        PrivateKey.load(tmp_path / "key.pem", never)


def test_wrong_passphrase_is_named(tmp_path: Path) -> None:
    PrivateKey.generate().save(tmp_path / "key.pem", b"right")
    with pytest.raises(KeyUseError, match=r"key\.pem: the passphrase is wrong"):
        PrivateKey.load(tmp_path / "key.pem", lambda: b"wrong")


def pkcs8(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def other_keys() -> dict[str, bytes]:
    curve = ec.generate_private_key(ec.SECP256R1())
    traditional = curve.private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    return {
        "RSA": pkcs8(rsa.generate_private_key(65537, 2048)),
        "another curve": pkcs8(ec.generate_private_key(ec.SECP384R1())),
        "not PKCS8": traditional,
        "a public key": PrivateKey.generate().public.pem,
        "damaged": pkcs8(curve)[:100] + b"\n-----END PRIVATE KEY-----\n",
        "empty": b"",
    }


@pytest.mark.parametrize("name", other_keys())
def test_file_that_is_no_accepted_key_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "key.pem", other_keys()[name])
    with pytest.raises(KeyUseError, match=r"key\.pem: expected a (private )?key"):
        PrivateKey.load(path, never)


def test_missing_key_folder_and_pipe_are_named(tmp_path: Path) -> None:
    with pytest.raises(KeyUseError, match="No such file"):
        PrivateKey.load(tmp_path / "none.pem", never)
    with pytest.raises(KeyUseError, match="Is a directory"):
        PrivateKey.load(tmp_path, never)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyUseError, match="expected a regular file"):
        PrivateKey.load(tmp_path / "pipe", never)


def test_key_is_never_overwritten(tmp_path: Path) -> None:
    first = PrivateKey.generate()
    first.save(tmp_path / "key.pem", None)
    with pytest.raises(KeyUseError, match="never overwritten"):
        PrivateKey.generate().save(tmp_path / "key.pem", None)
    assert PrivateKey.load(tmp_path / "key.pem", never).key_id == first.key_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["key.pem"]


def test_public_key_of_another_scheme_is_refused() -> None:
    pem = (
        rsa.generate_private_key(65537, 2048)
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(KeyUseError, match=r"expected a key for ed25519 or ecdsa-p256-sha256"):
        PublicKey.parse(pem, "public.pem")
    with pytest.raises(KeyUseError, match="expected a public key in PEM"):
        PublicKey.parse(b"text", "public.pem")


def signer_script(folder: Path, body: str) -> str:
    path = folder / "signer.py"
    path.write_text(f"import sys\nfrom pathlib import Path\n{body}\n")
    return f"{sys.executable} {path}"


SIGN = """
sys.path[:0] = {path!r}
from builder.attest.keys import PrivateKey
key = PrivateKey.load(Path({key!r}), lambda: b"")
sys.stdout.buffer.write({expression})
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_external_signer_signs_like_the_key_itself(tmp_path: Path, scheme: str) -> None:
    key = PrivateKey.generate(scheme)
    key.save(tmp_path / "key.pem", None)
    (tmp_path / "public.pem").write_bytes(key.public.pem)
    expression = "key.sign(sys.stdin.buffer.read())"
    body = SIGN.format(path=sys.path, key=str(tmp_path / "key.pem"), expression=expression)
    signer = choose_signer(
        {
            "SIGN_COMMAND": signer_script(tmp_path, body),
            "SIGN_KEY": str(tmp_path / "public.pem"),
        },
        print,
        tmp_path / "checkout",
    )
    assert isinstance(signer, CommandSigner)
    assert signer.key_id == key.key_id
    assert signer.sign(MESSAGE) == key.sign(MESSAGE)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("sys.exit(3)", "failed with exit code 3"),
        ("pass", r"what the signer wrote \(0 bytes\) is not"),
        ("sys.stdout.write('00' * 64)", r"what the signer wrote \(128 bytes\) is not"),
        ("sys.stdout.write('x' * 100_000)", r"is not a raw ed25519 signature"),
    ],
)
def test_external_signer_that_does_not_sign_is_refused(
    tmp_path: Path, body: str, problem: str
) -> None:
    signer = CommandSigner(signer_script(tmp_path, body), PrivateKey.generate().public)
    with pytest.raises(KeyUseError, match=problem):
        signer.sign(MESSAGE)


def test_external_signer_that_does_not_exist_is_named() -> None:
    with pytest.raises(KeyUseError, match="cannot be run"):
        CommandSigner("no-such-signer --key 1", PrivateKey.generate().public).sign(MESSAGE)


def test_external_signer_needs_its_public_key(tmp_path: Path) -> None:
    with pytest.raises(KeyUseError, match="SIGN_COMMAND needs its public key"):
        choose_signer({"SIGN_COMMAND": "sign"}, print, tmp_path)


def test_key_below_the_checkout_is_refused(tmp_path: Path) -> None:
    PrivateKey.generate().save(tmp_path / "keys" / "key.pem", None)
    with pytest.raises(KeyUseError, match="does not belong into a checkout"):
        choose_signer({"SIGN_KEY": str(tmp_path / "keys" / "key.pem")}, print, tmp_path)


def test_without_a_key_one_is_made_once_for_the_account(tmp_path: Path) -> None:
    said: list[str] = []
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = choose_signer(environment, said.append, tmp_path / "checkout")
    again = choose_signer(environment, said.append, tmp_path / "checkout")
    assert first.key_id == again.key_id
    path = tmp_path / "config" / "sparkcache" / LOCAL_KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sum("made the key" in line for line in said) == 1
    assert sum("local-unverified" in line and "signing with" in line for line in said) == 2


def test_passphrase_comes_from_a_descriptor() -> None:
    read, write_end = os.pipe()
    os.write(write_end, b"correct horse\n")
    os.close(write_end)
    assert read_passphrase({"SIGN_KEY_PASSPHRASE_FD": str(read)}, "key") == b"correct horse"
    os.close(read)


@pytest.mark.parametrize("number", ["999", "x", "-1"])
def test_passphrase_descriptor_that_is_not_open_is_named(number: str) -> None:
    with pytest.raises(KeyUseError, match=f"SIGN_KEY_PASSPHRASE_FD={number}: expected an open"):
        read_passphrase({"SIGN_KEY_PASSPHRASE_FD": number}, "key")


def test_without_a_terminal_the_descriptor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/null").open() as null:
        monkeypatch.setattr("sys.stdin", null)
        with pytest.raises(KeyUseError, match="SIGN_KEY_PASSPHRASE_FD"):
            read_passphrase({}, "passphrase of key.pem")
