import hashlib
import itertools
import json
import os
import time

import pytest

from sparkcache_connector import contract as module
from sparkcache_connector.contract import Contract, examine, require
from sparkcache_connector.errors import ContractError
from sparkcache_connector.file_memo import DigestMemo

PATCHED = "spark.1"
# path -> (content in the release, content with our series); None: not there.
TREE = {
    "vllm/v1/core/a.py": ("a", "a patched"),
    "vllm/v1/core/b.py": ("b", "b patched"),
    "vllm/v1/core/same.py": ("same", "same"),
    "vllm/v1/core/added.py": (None, "added"),
}


def sha(text):
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def document():
    return {
        "schema": "sparkcache.contract/v1",
        "target": "v0.28.0",
        "version": "0.28.0",
        "states": {"upstream": "the release as published", PATCHED: "with our patch series"},
        "files": [
            {
                "path": path,
                "sha256": {"upstream": sha(before), PATCHED: sha(after)},
                "symbols": {},
            }
            for path, (before, after) in TREE.items()
        ],
    }


def parse(changed=None):
    return Contract.parse(json.dumps(changed or document()).encode())


def install(site, states):
    for path, state in zip(TREE, states, strict=True):
        content = TREE[path][state == PATCHED]
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(content)
            os.utime(file, (1, 1))


@pytest.fixture
def memo(tmp_path):
    return DigestMemo(tmp_path / "contract.memo", "sha256")


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site-packages"


def test_whole_trees_are_recognised(site, memo):
    for state in ("upstream", PATCHED):
        install(site, [state] * 4)
        assert examine(site, parse(), memo).state == state


@pytest.mark.parametrize("states", list(itertools.product(["upstream", PATCHED], repeat=4)))
def test_every_half_patched_tree_is_refused_with_an_odd_file(site, memo, states):
    install(site, states)
    distinguishing = {states[0], states[1], states[3]}
    if len(distinguishing) == 1:
        assert require(site, parse(), memo, recurrent=False) == states[0]
        return
    with pytest.raises(ContractError, match="every file of the lease contract in one state") as c:
        require(site, parse(), memo, recurrent=False)
    assert any(path in c.value.found for path in TREE)
    assert "same.py" not in c.value.found


@pytest.mark.parametrize("path", TREE)
def test_one_edited_byte_is_refused_with_the_file_and_its_digest(site, memo, path):
    install(site, [PATCHED] * 4)
    (site / path).write_text("edited")
    with pytest.raises(ContractError, match=f"{path} \\({sha('edited')}\\)"):
        require(site, parse(), memo, recurrent=False)


@pytest.mark.parametrize("path", TREE)
def test_missing_file_is_refused_and_called_absent(site, memo, path):
    install(site, [PATCHED] * 4)
    (site / path).unlink()
    with pytest.raises(ContractError) as caught:
        require(site, parse(), memo, recurrent=False)
    # The added file is absent in the release too, so it is reported by that state's name.
    expected = "upstream" if path.endswith("added.py") else "absent"
    assert f"{path} ({expected})" in caught.value.found


def test_unpatched_tree_serves_attention_only_models_and_no_others(site, memo):
    install(site, ["upstream"] * 4)
    assert require(site, parse(), memo, recurrent=False) == "upstream"
    with pytest.raises(ContractError, match="the patched tree, because this model has recurrent"):
        require(site, parse(), memo, recurrent=True)


def test_many_odd_files_are_counted(site, memo):
    many = document()
    for i in range(8):
        many["files"].append(
            {"path": f"vllm/x{i}.py", "sha256": {"upstream": "0" * 64, PATCHED: "1" * 64}}
        )
    install(site, [PATCHED] * 4)
    with pytest.raises(ContractError, match="and 4 more"):
        require(site, parse(many), memo, recurrent=False)


def test_next_start_reads_no_file_again(site, memo, tmp_path, monkeypatch):
    install(site, [PATCHED] * 4)
    now = time.time_ns() + 10**10
    monkeypatch.setattr(module.time, "time_ns", lambda: now)
    examine(site, parse(), memo)
    again = DigestMemo(tmp_path / "contract.memo", "sha256")
    monkeypatch.setattr(module.hashlib, "file_digest", None)
    assert examine(site, parse(), again).state == PATCHED


def test_changed_file_of_same_size_and_mtime_is_read_again(site, memo, monkeypatch):
    install(site, [PATCHED] * 4)
    now = time.time_ns() + 10**10
    monkeypatch.setattr(module.time, "time_ns", lambda: now)
    assert examine(site, parse(), memo).state == PATCHED
    file = site / "vllm/v1/core/a.py"
    file.write_text("A patched")
    os.utime(file, (1, 1))
    assert examine(site, parse(), memo).state is None


def test_unreadable_file_is_refused_with_its_path(site, memo):
    install(site, [PATCHED] * 4)
    file = site / "vllm/v1/core/a.py"
    file.unlink()
    file.mkdir()
    with pytest.raises(ContractError, match=r"core/a\.py: expected a readable file"):
        examine(site, parse(), memo)


def broken(change):
    d = document()
    change(d)
    return d


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema="sparkcache.contract/v2"),
        lambda d: d.update(extra=1),
        lambda d: d.pop("states"),
        lambda d: d.update(files=[]),
        lambda d: d["states"].pop("upstream"),
        lambda d: d["files"].append(d["files"][0]),
        lambda d: d["files"][0].update(path="/etc/passwd"),
        lambda d: d["files"][0].update(path="vllm/../../x"),
        lambda d: d["files"][0].update(sha256={"upstream": "0" * 64}),
        lambda d: d["files"][0]["sha256"].update(upstream="0" * 63),
        lambda d: d["files"][0]["sha256"].update(upstream=7),
        lambda d: d["files"][0].update(unknown=1),
        lambda d: d.update(files=[7]),
    ],
)
def test_contract_that_is_not_understood_refuses(change):
    with pytest.raises(ContractError, match=r"contract.json: expected a lease contract"):
        parse(broken(change))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000])
def test_bytes_that_are_no_contract_refuse(data):
    with pytest.raises(ContractError, match=r"contract.json: expected a lease contract"):
        Contract.parse(data)


def test_digest_is_that_of_the_bytes_that_were_read():
    data = json.dumps(document(), indent=3).encode()
    assert Contract.parse(data).sha256 == hashlib.sha256(data).hexdigest()


def test_version_without_a_shipped_contract_refuses():
    with pytest.raises(ContractError, match=r"vLLM 9\.9\.9\+spark\.1: expected a version"):
        module.shipped_contract("9.9.9+spark.1")
