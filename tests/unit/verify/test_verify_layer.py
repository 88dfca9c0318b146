"""Files of an image layer over an installed release, and a site directory as the subject."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.verify import small_target as small
from tests.unit.verify.small_target import F
from verify.judges.case import Options
from verify.judges.site import judge_venv
from verify.report import Report, Status

BASE = "cuda-x86_64"
INFO = f"vllm-{small.VERSION}.dist-info"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small.write(folder, small.checkout())
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site directory with the base wheel installed and the layer's files over it."""
    folder = tmp_path / "usr" / "local" / "lib" / "python3.12" / "dist-packages"
    small.write(folder, small.installed(small.base_wheel(BASE), INFO))
    small.write(folder.parents[2], {"bin/vllm": (small.X, small.SCRIPT)})
    for path, post in small.POST.items():
        if post is None:
            (folder / path).unlink()
        else:
            small.write(folder, {path: (F, post)})
    small.write(folder, small.MODULES)
    info = f"sparkcache_connector-{small.CONNECTOR_VERSION}.dist-info"
    small.write(folder, small.installed(small.connector_wheel(), info))
    return folder


def bad(report: Report) -> set[str]:
    return {f.check for f in report.findings if f.status in (Status.FAIL, Status.UNDECIDED)}


def test_a_layer_over_a_release_passes_and_is_named(site: Path, home: Path) -> None:
    report = judge_venv(site, Options(home=home))
    assert not bad(report), report.findings
    notes = [f.message for f in report.findings if f.check == "PKG-16"]
    assert notes == [
        "judged as a layer over an installed release: version and RECORD stay the release's"
    ]


def test_the_prefix_of_that_directory_is_judged_alike(site: Path, home: Path) -> None:
    assert not bad(judge_venv(site.parents[2], Options(home=home)))


def test_a_release_without_the_layer_fails_by_its_patches(tmp_path: Path, home: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    small.write(site, small.installed(small.base_wheel(BASE), INFO))
    small.write(tmp_path, {"bin/vllm": (small.X, small.SCRIPT)})
    report = judge_venv(site, Options(home=home))
    assert bad(report) == {"PATCH-3", "PATCH-5", "TREE-6", "CONTRACT-3"}
    assert not bad(judge_venv(site, Options(home=home, patched=False)))


@pytest.mark.parametrize(
    ("apply", "expected"),
    [
        (lambda site: (site / "vllm/crlf.py").write_bytes(b"x"), {"TREE-1", "PKG-5"}),
        (
            lambda site: small.write(site, {"vllm/core/scheduler.py": small.SCHEDULER}),
            {"PATCH-3", "CONTRACT-3"},
        ),
        (
            lambda site: small.write(site, {"vllm/core/scheduler.py": b"def schedule(): ...\n"}),
            {"PATCH-4", "CONTRACT-2", "CONTRACT-4"},
        ),
        (lambda site: (site / "vllm/extra.py").write_text(""), {"TREE-3", "PKG-4"}),
        (lambda site: (site / "vllm/spark/__init__.py").unlink(), {"TREE-6"}),
        (
            lambda site: small.write(site, {"vllm/connector/gone.py": b"OLD = 1\n"}),
            {"PATCH-5"},
        ),
        (
            lambda site: small.write(site, {f"{INFO}/METADATA": b"Version: 1\n"}),
            {"TREE-1", "PKG-5"},
        ),
        (lambda site: (site / INFO / "RECORD").unlink(), {"PKG-4"}),
    ],
    ids=["untouched", "missed", "wrong", "extra", "module", "undeleted", "metadata", "record"],
)
def test_one_wrong_byte_in_a_layered_image_fails_its_own_checks(
    site: Path, home: Path, apply: Callable[[Path], object], expected: set[str]
) -> None:
    apply(site)
    assert bad(judge_venv(site, Options(home=home))) == expected
