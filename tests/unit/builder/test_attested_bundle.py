"""What the build signs is what the judge accepts: keys, trust root and bundle end to end."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builder.attest.keys import ECDSA_P256, SCHEMES, PrivateKey, PublicKey
from builder.attest.trust import Role, trust_root
from tests.small_checkout import make_checkout
from tests.small_target import NAME

BASE = "cpu-x86_64"
EXPIRES = datetime.datetime(2027, 12, 31, tzinfo=datetime.UTC)
BEFORE, AFTER = "2027-12-30T23:59:59Z", "2027-12-31T00:00:01Z"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("template") / "checkout")


@pytest.fixture
def checkout(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "checkout"))


def build(checkout: Path, key: Path) -> Path:
    environment = os.environ | {"XDG_CACHE_HOME": str(checkout / "cache"), "SIGN_KEY": str(key)}
    done = subprocess.run(
        [sys.executable, "-m", "builder", "build", "--target", NAME, "--base", BASE, "--offline"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return checkout / "dist" / NAME


def new_key(folder: Path, name: str, scheme: str) -> tuple[Path, PublicKey]:
    key = PrivateKey.generate(scheme)
    key.save(folder / name, None)
    return folder / name, key.public


def trusted(folder: Path, *keys: PublicKey) -> Path:
    path = folder / "trust.json"
    path.write_bytes(trust_root({"builder": Role(keys, len(keys))}, EXPIRES))
    return path


def judge(dist: Path, trust: Path, at: str = BEFORE) -> tuple[int, str]:
    """Ask verify.pyz, from elsewhere."""
    options = ["--trust", str(trust), "--require-attestation", "--at", at]
    done = subprocess.run(
        [sys.executable, "-I", str(dist / "verify.pyz"), "bundle", str(dist / BASE), *options],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bundle_signed_by_a_trusted_key_passes(checkout: Path, scheme: str) -> None:
    key, public = new_key(checkout.parent, "key.pem", scheme)
    dist = build(checkout, key)
    code, output = judge(dist, trusted(checkout.parent, public))
    assert code == 0, output
    assert "ATT-" in output


def test_other_key_missing_key_and_expired_root_are_refused(checkout: Path) -> None:
    key, public = new_key(checkout.parent, "key.pem", ECDSA_P256)
    _, other = new_key(checkout.parent, "other.pem", ECDSA_P256)
    dist = build(checkout, key)
    folders = [checkout.parent / name for name in ("other", "both", "expired")]
    for folder in folders:
        folder.mkdir()
    assert judge(dist, trusted(folders[0], other))[0] == 1
    assert judge(dist, trusted(folders[1], public, other))[0] == 1
    assert judge(dist, trusted(folders[2], public), at=AFTER)[0] == 1


def test_attestations_of_another_bundle_are_refused(checkout: Path) -> None:
    key, public = new_key(checkout.parent, "key.pem", ECDSA_P256)
    dist = build(checkout, key)
    kept = (dist / BASE / "attestations.intoto.jsonl").read_bytes()
    notice = checkout / "NOTICE"
    notice.write_bytes(notice.read_bytes() + b"More.\n")
    dist = build(checkout, key)
    trust = trusted(checkout.parent, public)
    assert judge(dist, trust)[0] == 0
    (dist / BASE / "attestations.intoto.jsonl").write_bytes(kept)
    code, output = judge(dist, trust)
    assert code == 1
    assert "NOTICE" in output
