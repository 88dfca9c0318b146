"""builder.port: what becomes of each hunk on another release, and what is exported."""

from __future__ import annotations

import pytest

from builder.git import Git
from builder.patcher import Content, apply_series
from builder.patchfile import Patch
from builder.port import PatchReport, Port, contract_changes, export_port, try_series
from builder.scratch import export_series, import_series
from builder.source import SourceFile

OLD = b"".join(b"line %d\n" % number for number in range(1, 31))
EDITED = OLD.replace(b"line 5\n", b"line five\n").replace(b"line 25\n", b"line 25\nadded\n")
MESSAGE = "Say five\n\nWhy: words.\nUpstream-Status: none.\nBase: v1 0\n"
PATH = "vllm/a.py"


@pytest.fixture(scope="module")
def patch(tmp_path_factory: pytest.TempPathFactory) -> Patch:
    """A patch with two hunks, made by git."""
    folder = tmp_path_factory.mktemp("port") / "old"
    import_series(folder, [SourceFile(PATH, "100644", OLD)], (), "v1")
    (folder / PATH).write_bytes(EDITED)
    git = Git(folder)
    git.run("commit", "--quiet", "--all", "--cleanup=verbatim", "--file=-", data=MESSAGE.encode())
    ((name, data),) = export_series(folder).items()
    return Patch.parse(data, name)


def port(patch: Patch, new: bytes | None) -> tuple[PatchReport, ...]:
    return try_series([patch], {PATH: OLD}.get, {PATH: new}.get)


def outcomes(patch: Patch, new: bytes | None) -> list[tuple[str, int]]:
    (report,) = port(patch, new)
    return [(hunk.outcome.value, hunk.offset) for hunk in report.hunks]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (OLD, [("clean", 0), ("clean", 0)]),
        (b"new\n" * 3 + OLD, [("moved", 3), ("moved", 3)]),
        (OLD.replace(b"line 15\n", b"line 15\n\n\n"), [("clean", 0), ("moved", 2)]),
        (OLD.replace(b"line 2\n", b""), [("merged", -1), ("moved", -1)]),
        (EDITED, [("already upstream", 0), ("already upstream", 0)]),
        (OLD.replace(b"line 25\n", b"line 25\nadded\n"), [("clean", 0), ("already upstream", 0)]),
        (OLD.replace(b"line 5\n", b"line V\n"), [("conflict", 0), ("clean", 0)]),
        (None, [("conflict", 0), ("conflict", 0)]),
    ],
    ids=["same", "lines above", "lines between", "context gone", "contained", "half contained",
         "changed otherwise", "file gone"],
)  # fmt: skip
def test_each_hunk_is_judged_by_itself(
    patch: Patch, new: bytes | None, expected: list[tuple[str, int]]
) -> None:
    assert outcomes(patch, new) == expected


def test_a_conflict_does_not_fit_and_keeps_the_hunks_that_did(patch: Patch) -> None:
    new = OLD.replace(b"line 5\n", b"line V\n")
    reports = port(patch, new)
    assert not Port(reports, ()).fits
    assert reports[0].files == {PATH: new.replace(b"line 25\n", b"line 25\nadded\n")}


def test_a_module_that_the_release_has_itself_does_not_fit(patch: Patch) -> None:
    assert Port(port(patch, OLD), ()).fits
    assert not Port(port(patch, OLD), (), ("vllm/module.py",)).fits


@pytest.mark.parametrize("new", [b"new\n" * 3 + OLD, OLD.replace(b"line 2\n", b"")])
def test_the_exported_series_applies_exactly_to_the_new_release(patch: Patch, new: bytes) -> None:
    reports = port(patch, new)
    ((name, data),) = export_port(reports, {PATH: new}.get, "v2", "v2 1").items()
    exported = Patch.parse(data, name)
    assert exported.trailers == patch.trailers | {"Base": "v2 1"}
    assert exported.message.split("Base:")[0] == patch.message.split("Base:")[0]
    after = apply_series([exported], {PATH: Content("100644", new)}.get)
    assert after == {PATH: Content("100644", reports[0].files[PATH] or b"")}


def test_a_patch_that_is_upstream_altogether_is_left_out(patch: Patch) -> None:
    assert export_port(port(patch, EDITED), {PATH: EDITED}.get, "v2", "v2") == {}


def test_contract_changes_name_the_symbols_that_moved_under_us() -> None:
    old = {"vllm/a.py": b"def f(a): ...\ndef g(): ...\n", "vllm/b.py": b"x = 1\n"}
    new = {"vllm/a.py": b"def f(a, b): ...\n"}
    contract = {"vllm/a.py": ("f", "g"), "vllm/b.py": ()}
    first, second = contract_changes(contract, (), old.get, new.get)
    assert first.symbols == ("f: def f(a) -> def f(a, b)", "g: gone")
    assert (second.path, second.gone) == ("vllm/b.py", True)
    assert contract_changes(contract, (), old.get, old.get) == ()
