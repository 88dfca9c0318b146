"""`python -m builder key` and `python -m builder trust`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from builder.attest.keys import PrivateKey, PublicKey
from builder.cli import main


@pytest.fixture
def passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that gives the passphrase each time it is read."""
    descriptor = os.memfd_create("passphrase")
    os.write(descriptor, b"correct horse")
    monkeypatch.setenv("SIGN_KEY_PASSPHRASE_FD", str(descriptor))
    os.lseek(descriptor, 0, os.SEEK_SET)


@pytest.mark.usefixtures("passphrase")
@pytest.mark.parametrize("option", [(), ("--ecdsa",)])
def test_new_key_is_encrypted_and_its_public_half_printed(
    tmp_path: Path, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key.pem"
    assert main(["key", "new", *option, str(path)]) == 0
    out, err = capsys.readouterr()
    assert b"ENCRYPTED" in path.read_bytes()
    key = PublicKey.parse(out.encode(), "stdout")
    assert key.key_id in err
    assert PrivateKey.load(path, lambda: b"correct horse").key_id == key.key_id


def test_plain_key_is_made_on_purpose_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key.pem"
    assert main(["key", "new", "--plain", str(path)]) == 0
    first = capsys.readouterr().out
    assert main(["key", "public", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert main(["key", "new", "--plain", str(path)]) == 1
    assert "never overwritten" in capsys.readouterr().err


def public(folder: Path, name: str) -> Path:
    path = folder / f"{name}.pem"
    path.write_bytes(PrivateKey.generate().public.pem)
    return path


def test_trust_root_is_written_from_public_keys(tmp_path: Path) -> None:
    first, second = public(tmp_path, "a"), public(tmp_path, "b")
    out = tmp_path / "trust.json"
    options = ["--builder", str(first), "--builder", str(second), "--builder-threshold", "2"]
    assert main(["trust", *options, "--expires", "2027-12-31T00:00:00Z", "--out", str(out)]) == 0
    found = json.loads(out.read_bytes())
    assert found["roles"] == {"builder": {"keys": sorted(found["keys"]), "threshold": 2}}
    assert {key["pem"].encode() for key in found["keys"].values()} == {
        first.read_bytes(),
        second.read_bytes(),
    }


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        ((), 2, "no key"),
        (("--builder", "missing.pem"), 1, "cannot be read: No such file"),
        (("--builder", "KEY", "--builder", "KEY"), 1, "named twice"),
        (("--builder", "KEY", "--builder-threshold", "2"), 1, "threshold from 1 to 1"),
    ],
)
def test_trust_root_that_says_nothing_is_not_written(
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = str(public(tmp_path, "a"))
    out = tmp_path / "trust.json"
    arguments = [key if option == "KEY" else option for option in options]
    expires = ["--expires", "2027-12-31T00:00:00Z", "--out", str(out)]
    assert main(["trust", *arguments, *expires]) == code
    assert problem in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("time", ["tomorrow", "2027-12-31T00:00:00"])
def test_time_without_zone_or_sense_is_a_usage_error(tmp_path: Path, time: str) -> None:
    out = str(tmp_path / "trust.json")
    with pytest.raises(SystemExit) as caught:
        main(["trust", "--builder", "x", "--expires", time, "--out", out])
    assert caught.value.code == 2
