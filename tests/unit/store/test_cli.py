import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkcache_connector.cli import main
from sparkcache_connector.store import Store
from tests.store_testing import (
    IDENTITY,
    attention,
    digest,
    open_store,
    pack_files,
    recurrent,
    restore,
    root_files,
)

ONE, TWO = digest("one"), digest("two")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    with open_store(path) as store:
        store.publish(ONE, 256, [attention(range(5)), recurrent("one")])
        store.publish(TWO, 512, [attention(range(7)), recurrent("two")], base=ONE)
    return path


@pytest.fixture
def running(root: Path) -> Iterator[Store]:
    with open_store(root) as store:
        yield store


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = main([*map(str, arguments), "--format", "json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_ls_lists_roots_beside_a_running_engine(
    running: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restore(running, ONE)
    running.maintain()
    code, value = run(capsys, "ls", root)
    assert code == 0
    assert [one["context"] for one in value["roots"]] == [ONE.hex(), TWO.hex()]
    assert value["roots"][1]["pages"] == 8
    assert main(["ls", str(root)]) == 0
    assert "2 roots" in capsys.readouterr().out
    assert run(capsys, "ls", root, "--identity", "00")[1] == {"roots": []}


def test_show_describes_a_delta(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = run(capsys, "show", root, TWO.hex()[:10])
    assert code == 0
    assert [group["kind"] for group in value["groups"]] == ["full-attention", "recurrent"]
    assert [group["runs"] for group in value["groups"]] == [2, 1]
    assert len(value["packs"]) == 2
    assert main(["show", str(root), TWO.hex()]) == 0
    assert "group 1: recurrent, 1 pages of 5000 bytes from block 3" in capsys.readouterr().out


def test_show_needs_exactly_one_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", root, "zz")[0] == 2
    assert main(["show", str(root), ""]) == 2
    assert "2 roots with a context that begins with ''" in capsys.readouterr().err


def test_verify_passes_what_is_whole(
    running: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, value = run(capsys, "verify", root)
    assert code == 0
    assert value["checked"] == {"roots": 2, "packs": 2, "pages": 9, "bytes": 7 * 4096 + 10000}
    assert value["findings"] == []


def damage_page(root: Path) -> str:
    with pack_files(root)[0].open("r+b") as file:
        file.seek(4096)
        file.write(b"wrong")
    return "page-mismatch"


def damage_header(root: Path) -> str:
    with pack_files(root)[0].open("r+b") as file:
        file.seek(40)
        file.write(b"wrong")
    return "malformed"


def lose_pack(root: Path) -> str:
    pack_files(root)[0].unlink()
    return "pack-missing"


def truncate_pack(root: Path) -> str:
    os.truncate(pack_files(root)[0], 8192)
    return "truncated"


def damage_manifest(root: Path) -> str:
    with root_files(root)[0].open("r+b") as file:
        file.seek(60)
        file.write(b"wrong")
    return "forged"


@pytest.mark.parametrize(
    "damage", [damage_page, damage_header, lose_pack, truncate_pack, damage_manifest]
)
def test_verify_finds_damage(root: Path, capsys: pytest.CaptureFixture[str], damage: Any) -> None:
    reason = damage(root)
    code, value = run(capsys, "verify", root)
    assert code == 1
    assert value["damaged"] >= 1
    assert {one["reason"] for one in value["findings"] if not one["harmless"]} == {reason}
    assert main(["verify", str(root)]) == 1
    assert "DAMAGE" in capsys.readouterr().out


def test_verify_calls_debris_harmless(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "packs" / ".tmp-00").write_bytes(b"x")
    (root / "packs" / ("0" * 32 + ".pack")).write_bytes(b"x")
    code, value = run(capsys, "verify", root)
    assert code == 0
    assert len(value["findings"]) == 2


def test_gc_removes_debris_and_surplus(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "packs" / ".tmp-00").write_bytes(b"x")
    code, value = run(capsys, "gc", root, "--high-bytes", "4096", "--low-bytes", "1K")
    assert code == 0
    assert value["evicted"] == 2
    assert value["roots"] == value["allocated_bytes"] == 0
    assert pack_files(root) == root_files(root) == []
    assert not list(root.rglob(".tmp-*"))


def test_gc_expires(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "gc", root, "--ttl", "3600")[1]["expired"] == 0
    assert run(capsys, "gc", root, "--ttl", "0")[1]["expired"] == 2


def test_gc_rotates_and_destroys_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run(capsys, "stats", root)[1]["keys"]
    assert run(capsys, "gc", root, "--rotate-key")[1]["rewritten"] == 2
    (after,) = run(capsys, "stats", root)[1]["keys"]
    assert after not in before
    assert run(capsys, "gc", root, "--destroy-key", before[0])[0] == 2
    assert run(capsys, "gc", root, "--destroy-key", "key")[0] == 2
    assert run(capsys, "gc", root, "--destroy-key", after)[1]["revoked"] == 2
    assert run(capsys, "ls", root)[1] == {"roots": []}


def test_gc_leaves_a_running_engine_alone(
    running: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", str(root), "--high-bytes", "1"]) == 3
    assert f"owned by process {os.getpid()}" in capsys.readouterr().err
    assert len(running.inventory()) == 2


def test_stats_knows_the_owner(
    running: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, value = run(capsys, "stats", root)
    assert code == 0
    assert value["owner_pid"] == os.getpid()
    assert value["catalog"] == "in use"
    assert value["allocated_bytes"] == running.stats().allocated_bytes
    running.close()
    assert run(capsys, "stats", root)[1]["owner_pid"] is None


def test_a_missing_or_damaged_catalog_is_read_from_the_manifests(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "catalog.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    code, value = run(capsys, "ls", root)
    assert code == 0
    assert len(value["roots"]) == 2
    (root / "catalog.sqlite").unlink()
    assert run(capsys, "stats", root)[1]["catalog"] == "rebuilt from manifests"
    assert not (root / "catalog.sqlite").exists()


def test_identity_lists_identities(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = run(capsys, "identity", root)
    assert code == 0
    (only,) = value["identities"]
    assert only["identity"] == IDENTITY.hex()
    assert only["roots"] == 2


def test_bench_measures_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, value = run(capsys, "bench", tmp_path, "--page", "64K", "--total", "1M", "--repeat", "1")
    assert code == 0
    assert value["files"] == 2
    assert value["series"]["save"]["best_gb_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "verify", "gc", "stats", "identity", "bench"])
def test_no_such_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["0", "x", "1X", "-1", ""])
def test_sizes_that_are_none(tmp_path: Path, size: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["gc", str(tmp_path), f"--high-bytes={size}"])
    assert caught.value.code == 2


def test_the_command_needs_neither_vllm_nor_torch(root: Path) -> None:
    program = (
        "import sys; from sparkcache_connector.cli import main; code = main(sys.argv[1:]);"
        "assert not {'vllm', 'torch', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "ls", str(root)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
