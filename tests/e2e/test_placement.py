"""The native library of the connector's wheel, and torch: each restores what the other stored.

The connector is imported from the wheel that the build made, unpacked: what ships is what runs.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restarting import cached, live, model_of, options, refused, tokens
from tests.support import engine_env, tiny_models

pytestmark = pytest.mark.engine

BOUNDARY = 1_280
PROMPT = random.Random(11).choices(range(tiny_models.VOCABULARY), k=BOUNDARY + 7)
LIBRARY = "sparkcache_connector/native/x86_64/libsparkcache_placement.so"


@pytest.fixture(scope="module")
def model() -> Path:
    return model_of("granite")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The connector's wheel, unpacked as an installer would."""
    (wheel,) = engine_env.BUNDLE.glob("sparkcache_connector-*-manylinux_2_28_x86_64.whl")
    folder = tmp_path_factory.mktemp("packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def lives(model: Path, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An answer without a cache, a life that stores by the library, and one that is killed each."""
    root = tmp_path_factory.mktemp("cache")

    def life(mode: str | None, **job: Any) -> dict[str, Any]:
        chosen = {} if mode is None else {"spark_cache_cuda_restore": mode}
        return live(model, [[PROMPT]], packages, options=options(root, **chosen), **job)

    return {
        "recomputed": live(model, [[PROMPT]]),
        # nothing chosen: the default takes the library that the wheel carries
        "stored": life(None, roots=1, kill=True),
        "off": life("off", kill=True),
        "on": life("on", kill=True),
    }


def test_the_default_is_the_library_of_the_wheel_and_it_captures(lives, packages):
    (placement,) = lives["stored"]["placements"]
    assert placement["name"] == "native host"
    assert Path(placement["connector"]).is_relative_to(packages)
    assert placement["captured"] > 0
    assert cached(lives["stored"]) == [0]
    assert tokens(lives["stored"]) == tokens(lives["recomputed"])


@pytest.mark.parametrize(("mode", "name"), [("off", "torch"), ("on", "native host")])
def test_what_the_library_stored_is_restored_by(lives, mode, name):
    life = lives[mode]
    (placement,) = life["placements"]
    assert placement["name"] == name
    assert placement["restored"] > 0
    assert cached(life) == [BOUNDARY]
    assert tokens(life) == tokens(lives["recomputed"])
    free, all_blocks, held = life["free_blocks"]
    assert (free, held) == (all_blocks, 0)


def test_one_wrong_byte_of_the_library_refuses_startup(model, packages, tmp_path):
    harmed = tmp_path / "packages"
    shutil.copytree(packages, harmed)
    data = bytearray((harmed / LIBRARY).read_bytes())
    data[len(data) // 2] ^= 1
    (harmed / LIBRARY).write_bytes(data)
    said = refused(model, harmed, **options(tmp_path / "cache"))
    assert f"{harmed / LIBRARY}: SHA-256 is {hashlib.sha256(data).hexdigest()}" in said
    assert "reinstall the connector" in said


@pytest.mark.full
def test_a_library_of_another_abi_refuses_startup(model, packages, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    library = tmp_path / "other.so"
    code = tmp_path / "other.c"
    code.write_text(
        "int sparkcache_query(unsigned abi, unsigned* info) { (void)abi; info[0] = 2; return 7; }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", code, "-o", library], check=True)
    named = {
        "spark_cache_cuda_placement_library": str(library),
        "spark_cache_cuda_placement_library_sha256": hashlib.sha256(
            library.read_bytes()
        ).hexdigest(),
    }
    said = refused(model, packages, **options(tmp_path / "cache", **named))
    assert "speaks ABI 2, this connector 1" in said


@pytest.mark.full
def test_the_library_forced_on_where_there_is_none_refuses_startup(model, packages, tmp_path):
    bare = tmp_path / "packages"
    shutil.copytree(packages, bare)
    shutil.rmtree(bare / "sparkcache_connector" / "native")
    said = refused(model, bare, **options(tmp_path / "cache", spark_cache_cuda_restore="on"))
    assert "spark_cache_cuda_restore=on: this installation carries no native library" in said
