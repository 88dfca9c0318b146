"""builder.compose and builder.contract on a small release."""

from __future__ import annotations

import hashlib

import pytest

from builder.compose import CompositionError, compose, read_modules
from builder.contract import ContractError, make_contract
from builder.patcher import Content
from builder.series import Series
from builder.target import Layout, Target
from tests.small_target import (
    COMMIT,
    MODULE,
    MODULES,
    NAME,
    PATCHED,
    SCHEDULER,
    TARGET_YAML,
    TOUCHED,
    SmallTarget,
    patch,
    release,
)
from verify import strictjson
from verify.gitobj import File, blob_id, tree_ids
from verify.manifest import Entry, Manifest

RELEASE = Manifest(
    {
        path: Entry(mode, hashlib.sha256(data).hexdigest())
        for path, (mode, data) in release().items()
    }
)
CONTENTS = {path: Content(mode, data) for path, (mode, data) in release().items()}


def composed(tmp_path, small):
    layout = Layout.open(small.write(tmp_path), NAME)
    series = Series.read(layout.patches, f"{NAME} {COMMIT}")
    before = {path: CONTENTS.get(path) for path in series.paths()}
    return compose(series, read_modules(layout.modules), before, RELEASE)


def test_only_patched_files_and_modules_differ_from_the_release(tmp_path):
    composition = composed(tmp_path, SmallTarget())
    assert composition.changes() == {
        TOUCHED: Content("100644", PATCHED),
        MODULE: Content("100644", MODULES[MODULE]),
    }
    files = {path: data for path, (_, data) in release().items()}
    files |= {TOUCHED: PATCHED, **MODULES}
    manifest = composition.manifest(RELEASE)
    assert {path: entry.sha256 for path, entry in manifest.files.items()} == {
        path: hashlib.sha256(data).hexdigest() for path, data in files.items()
    }
    modes = {path: mode for path, (mode, _) in release().items()}
    expected = tree_ids(
        File(path, modes.get(path, "100644"), blob_id(data)) for path, data in files.items()
    )
    found = composition.git_trees(
        {path: File(path, mode, blob_id(data)) for path, (mode, data) in release().items()}
    )
    assert found == expected


def test_a_patch_may_add_and_delete_files(tmp_path):
    new = b"x = 1\n"
    both = patch({"vllm/new.py": (None, new), "vllm/version.py": (
        release()["vllm/version.py"][1], None)})  # fmt: skip
    composition = composed(tmp_path, SmallTarget(patches={"0001-x.patch": both}, modules={}))
    assert composition.changes() == {
        "vllm/new.py": Content("100644", new),
        "vllm/version.py": None,
    }
    assert "vllm/version.py" not in composition.manifest(RELEASE).files


NOTICE_LESS = SCHEDULER.replace(b"[1]", b"[2]")


@pytest.mark.parametrize(
    ("small", "match"),
    [
        (
            {"patches": {"1.patch": patch({TOUCHED: (SCHEDULER, NOTICE_LESS)})}},
            "scheduler.py: expected the notice `Modified by SparkCache for vLLM`",
        ),
        (
            {"patches": {"1.patch": patch({"setup.py": (b"import setuptools\n", b"\n")})}},
            "setup.py: expected patches to files below vllm/ only",
        ),
        (
            {"patches": {
                "1.patch": patch({TOUCHED: (SCHEDULER, PATCHED)}),
                "2.patch": patch({TOUCHED: (PATCHED, SCHEDULER)}),
            }},
            "change it and change it back",
        ),
        ({"modules": {"vllm/version.py": b""}}, "expected modules to add files, this one exists"),
        ({"modules": {TOUCHED: b""}}, "expected modules to add files, this one exists"),
        ({"modules": {"vllm/version.py/x.py": b""}}, "its folder vllm/version.py is a file"),
        ({"modules": {"other/x.py": b""}}, "expected a path below vllm/"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, small, match):
    with pytest.raises(CompositionError, match=match):
        composed(tmp_path, SmallTarget(**small))


def test_a_link_among_the_modules_is_refused_and_bytecode_is_not_a_module(tmp_path):
    layout = Layout.open(SmallTarget().write(tmp_path), NAME)
    cache = layout.modules / "vllm" / "__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").write_bytes(b"")
    assert set(read_modules(layout.modules)) == {MODULE}
    (layout.modules / "vllm/v1/core/link.py").symlink_to("boundary.py")
    with pytest.raises(CompositionError, match=r"link\.py: expected a regular file, found a link"):
        read_modules(layout.modules)


def contract(tmp_path, text=TARGET_YAML):
    composition = composed(tmp_path, SmallTarget(target_yaml=text))
    return make_contract(Target.parse(text.encode(), "t"), composition, CONTENTS)


def test_the_contract_states_each_file_in_each_state(tmp_path):
    value = strictjson.parse(contract(tmp_path), "contract.json")
    sha256 = {path: hashlib.sha256(data).hexdigest() for path, (_, data) in release().items()}
    schedule = {
        "upstream": "def schedule(self) -> list[int]",
        "spark.1": "def schedule(self, step: int=0) -> list[int]",
    }
    config = {"upstream": "self.config", "spark.1": "self.config"}
    assert value == {
        "schema": "sparkcache.contract/v1",
        "target": NAME,
        "version": "0.28.0",
        "states": {
            "upstream": "the release as published",
            "spark.1": "with our patch series",
        },
        "files": [
            {
                "path": MODULE,
                "sha256": {
                    "upstream": None,
                    "spark.1": hashlib.sha256(MODULES[MODULE]).hexdigest(),
                },
                "symbols": {},
            },
            {
                "path": TOUCHED,
                "sha256": {
                    "upstream": sha256[TOUCHED],
                    "spark.1": hashlib.sha256(PATCHED).hexdigest(),
                },
                "symbols": {"Scheduler.schedule": schedule, "Scheduler.config": config},
            },
            {
                "path": "vllm/version.py",
                "sha256": dict.fromkeys(("upstream", "spark.1"), sha256["vllm/version.py"]),
                "symbols": {},
            },
        ],
    }


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("Scheduler.config", "Scheduler.konfig", "the nearest is Scheduler.config"),
        ("vllm/version.py:", "vllm/verzion.py:", "expected it in the release or among our mod"),
    ],
)
def test_a_contract_on_what_does_not_exist_is_refused(tmp_path, old, new, match):
    with pytest.raises(ContractError, match=match):
        contract(tmp_path, TARGET_YAML.replace(old, new))
