"""builder.series: a patch folder is one coherent series, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.series import Series, SeriesError, has_notice, parse_series

BASE = "v9 " + "a" * 40
PATCH = f"""From x
Subject: one

Why: because
Upstream-Status: none
Base: {BASE}

diff --git a/f b/f
new file mode 100644
index {"0" * 40}..e69de29bb2d1d6434b8b29ae775ad8c2e48c5391
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "0001-a.patch").write_text(PATCH)
    (tmp_path / "series").write_text("# order matters\n0001-a.patch  # first\n\n")
    return tmp_path


def test_reads_the_listed_patches_in_order(folder):
    (folder / "0000-z.patch").write_text(PATCH.replace("a/f b/f", "a/g b/g"))
    (folder / "series").write_text("0001-a.patch\n0000-z.patch\n")
    series = Series.read(folder, BASE)
    assert [patch.name for patch in series.patches] == ["0001-a.patch", "0000-z.patch"]
    assert series.paths() == ("f", "g")
    assert series.touching("g") == ("0000-z.patch",)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("0002-b.patch", PATCH, "0002-b.patch .*expected every patch in `series`"),
        ("series", "0003-c.patch\n0001-a.patch\n", "0003-c.patch .*No such file"),
        ("0001-a.patch", PATCH.replace("Why:", "What:"), "expected the trailer `Why:`"),
        ("0001-a.patch", PATCH.replace("Upstream-Status", "Status"), "`Upstream-Status:`"),
        ("0001-a.patch", PATCH.replace("a" * 40, "b" * 40), "expected `Base: v9 a+`, found .*b+"),
    ],
)
def test_an_incoherent_folder_is_refused(folder, name, text, match):
    (folder / name).write_text(text)
    with pytest.raises(SeriesError, match=match):
        Series.read(folder, BASE)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"a.patch\na.patch\n", "line 2: expected each patch once, found a.patch again"),
        (b"../a.patch\n", "line 1: expected a `.patch` file"),
        (b"sub/a.patch\n", "line 1: expected a `.patch` file"),
        (b"a.diff\n", "line 1: expected a `.patch` file, found 'a.diff'"),
        (b"\xff\n", "line 1: expected a `.patch` file"),
    ],
)
def test_a_malformed_series_file_is_refused(text, match):
    with pytest.raises(SeriesError, match=match):
        parse_series(text, Path("v9/series"))


def test_no_series_file_is_named(tmp_path):
    with pytest.raises(SeriesError, match=r"series .*expected a readable file"):
        Series.read(tmp_path, BASE)


def test_the_notice_counts_only_near_the_top():
    notice = b"# Modified by SparkCache for vLLM: see patches/v9\n"
    assert has_notice(b"# SPDX\n" + notice)
    assert not has_notice(b"#\n" * 2000 + notice)
