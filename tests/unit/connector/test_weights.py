import json
import os
import time

import pytest
from blake3 import blake3

from sparkcache_connector.errors import IdentityError
from sparkcache_connector.file_memo import DigestMemo, FileIdentity
from sparkcache_connector.weights import digest_checkpoint, digest_file


def later():
    return time.time_ns() + 10**10


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model-00001.safetensors").write_bytes(os.urandom(300_000))
    (directory / "model-00002.safetensors").write_bytes(os.urandom(10))
    (directory / "config.json").write_text("{}")
    (directory / "README.md").write_text("not read by a loader")
    return directory


@pytest.fixture
def memo(tmp_path):
    return DigestMemo(tmp_path / "memo.json", "blake3")


def name(checkpoint, memo):
    return digest_checkpoint(checkpoint, "auto", memo)


def test_file_digest_is_plain_blake3(tmp_path, memo):
    for size in (0, 1, 70_000):
        file = tmp_path / f"{size}.bin"
        file.write_bytes(os.urandom(size))
        assert digest_file(file, memo) == blake3(file.read_bytes()).hexdigest()


def test_name_does_not_depend_on_where_the_checkpoint_lies(checkpoint, memo):
    before = name(checkpoint, memo)
    moved = checkpoint.rename(checkpoint.with_name("elsewhere"))
    assert name(moved, memo) == before


@pytest.mark.parametrize("victim", ["model-00001.safetensors", "config.json"])
def test_one_changed_byte_of_same_size_and_mtime_is_another_name(checkpoint, memo, victim):
    before = name(checkpoint, memo)
    file = checkpoint / victim
    status = file.stat()
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert name(checkpoint, memo) != before


def test_swapped_files_are_another_name(checkpoint, memo):
    before = name(checkpoint, memo)
    one, two = checkpoint / "model-00001.safetensors", checkpoint / "model-00002.safetensors"
    one.rename(checkpoint / "x")
    two.rename(one)
    (checkpoint / "x").rename(two)
    assert name(checkpoint, memo) != before


def test_files_that_no_loader_reads_do_not_matter(checkpoint, memo):
    before = name(checkpoint, memo)
    (checkpoint / "README.md").write_text("other")
    assert name(checkpoint, memo) == before


def test_links_into_a_blob_store_are_followed(checkpoint, memo, tmp_path):
    before = name(checkpoint, memo)
    blob = tmp_path / "blob"
    (checkpoint / "config.json").rename(blob)
    (checkpoint / "config.json").symlink_to(blob)
    assert name(checkpoint, memo) == before


def test_remembered_file_is_not_read_again(tmp_path, memo, monkeypatch):
    file = tmp_path / "w.bin"
    file.write_bytes(b"x" * 100)
    digest = digest_file(file, memo, clock_ns=later)
    memo.save()
    again = DigestMemo(tmp_path / "memo.json", "blake3")
    monkeypatch.setattr("sparkcache_connector.weights.blake3", None)
    assert digest_file(file, again, clock_ns=later) == digest


def test_file_that_changed_a_moment_ago_is_not_remembered(tmp_path, memo):
    file = tmp_path / "w.bin"
    file.write_bytes(b"x")
    digest_file(file, memo)
    assert memo.get(FileIdentity.of(file.stat())) is None


def test_file_that_changes_while_it_is_read_is_refused(tmp_path, memo):
    file = tmp_path / "w.bin"
    file.write_bytes(b"x")

    def clock():
        with file.open("ab") as f:
            f.write(b"y")
        return later()

    with pytest.raises(IdentityError, match="changed while it was read"):
        digest_file(file, memo, clock_ns=clock)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"schema":"sparkcache-file-memo/v2","files":{}}',
        '{"schema":"sparkcache-file-memo/v1","algorithm":"blake3","files":[]}',
        '{"schema":"sparkcache-file-memo/v1","algorithm":"sha256","files":{}}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_damaged_or_newer_memo_is_empty_and_is_replaced(tmp_path, content):
    path = tmp_path / "memo.json"
    path.write_bytes(content.encode("latin-1"))
    path.chmod(0o600)
    file = tmp_path / "w.bin"
    file.write_bytes(b"x")
    memo = DigestMemo(path, "blake3")
    digest = digest_file(file, memo, clock_ns=later)
    memo.save()
    assert DigestMemo(path, "blake3").get(FileIdentity.of(file.stat())) == digest


def test_memo_that_others_may_write_is_not_believed(tmp_path):
    file = tmp_path / "w.bin"
    file.write_bytes(b"x")
    path = tmp_path / "memo.json"
    key = FileIdentity.of(file.stat()).key()
    planted = {"schema": "sparkcache-file-memo/v1", "algorithm": "blake3", "files": {key: "0" * 64}}
    path.write_text(json.dumps(planted))
    path.chmod(0o622)
    assert digest_file(file, DigestMemo(path, "blake3")) == blake3(b"x").hexdigest()
    path.chmod(0o600)
    assert digest_file(file, DigestMemo(path, "blake3")) == "0" * 64


def test_memo_is_private_and_a_failed_save_is_harmless(tmp_path):
    memo = DigestMemo(tmp_path / "memo.json", "blake3")
    memo.put(FileIdentity(1, 2, 3, 4, 5), "0" * 64)
    memo.save()
    assert (tmp_path / "memo.json").stat().st_mode & 0o777 == 0o600
    lost = DigestMemo(tmp_path / "no" / "memo.json", "blake3")
    lost.put(FileIdentity(1, 2, 3, 4, 5), "0" * 64)
    lost.save()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memo.json"]


@pytest.mark.parametrize("load_format", ["dummy", "runai_streamer", "tensorizer", "my_loader"])
def test_loader_without_digestible_files_refuses_and_names_the_option(
    checkpoint, memo, load_format
):
    with pytest.raises(IdentityError, match=f"{load_format}.*spark_cache_target_checkpoint_sha256"):
        digest_checkpoint(checkpoint, load_format, memo)


def test_directory_without_weights_refuses(tmp_path, memo):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IdentityError, match="no weight file"):
        digest_checkpoint(tmp_path, "auto", memo)


def test_missing_checkpoint_refuses_with_the_path(tmp_path, memo):
    with pytest.raises(IdentityError, match=r"weight file .*/gone"):
        digest_checkpoint(tmp_path / "gone", "auto", memo)
