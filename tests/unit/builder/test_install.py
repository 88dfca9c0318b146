"""builder.install and its parts on a small environment; the kill sweep is in tests/crash."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.cli import main
from builder.connector_wheel import connector_wheel, read_source
from builder.environment import Environment, EnvironmentProblemError, edit_record
from builder.install import FOLDER, JOURNAL
from builder.journal import After, Before, Journal, Operation, State
from builder.wheel_record import Row
from tests import small_environment, small_wheel
from tests.small_checkout import make_checkout
from tests.small_environment import SITE, TAG, snapshot
from tests.small_target import MODULE, MODULES, NAME, PATCHED, PLATFORMS, SCHEDULER, TOUCHED, WHEELS
from verify.errors import FormatError

PYC = "vllm/v1/core/sched/__pycache__/scheduler." + TAG + ".pyc"
RECORD = f"{small_wheel.DIST_INFO}/RECORD"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return make_checkout(tmp_path_factory.mktemp("template") / "checkout")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, checkout):
    wheel = tmp_path_factory.mktemp("wheel") / small_wheel.FILENAME
    shutil.copy(checkout / "index" / WHEELS["cuda-x86_64"], wheel)
    return small_environment.make(tmp_path_factory.mktemp("pristine") / "env", wheel)


@pytest.fixture
def env(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "env", symlinks=True)


@pytest.fixture
def run(checkout, env, capsys):
    def run(command, *options):
        code = main(["--checkout", str(checkout), command, "--venv", str(env), *options])
        return code, capsys.readouterr().err

    return run


def record_rows(data):
    return {row[0]: row[1:] for row in csv.reader(io.StringIO(data.decode(), newline=""))}


def test_patched_files_modules_and_connector_are_in_place_and_recorded(run, env, pristine):
    assert run("install")[0] == 0
    site = env / SITE
    assert (site / TOUCHED).read_bytes() == PATCHED
    assert (site / TOUCHED).stat().st_mode & 0o777 == 0o664
    assert (site / MODULE).read_bytes() == MODULES[MODULE]
    assert not (site / PYC).exists()
    assert (env / "bin" / "sparkcache").read_text().startswith(f"#!{env.absolute()}/bin/python\n")
    assert os.access(env / "bin" / "sparkcache", os.X_OK)
    rows = record_rows((site / RECORD).read_bytes())
    old = record_rows((pristine / SITE / RECORD).read_bytes())
    assert rows.keys() ^ old.keys() == {MODULE, PYC}
    assert {path for path in old if path in rows and rows[path] != old[path]} == {TOUCHED}
    (info,) = site.glob("sparkcache_connector-*.dist-info")
    rows |= record_rows((info / "RECORD").read_bytes())
    assert "../../../bin/sparkcache" in rows
    for path, (digest, _) in rows.items():
        if digest:
            data = (site / path).read_bytes()
            assert Row.of(data).digest == digest, path
    assert (site / small_wheel.DIST_INFO / "METADATA").read_bytes() == small_wheel.METADATA


def test_uninstall_restores_bytes_modes_and_times(run, env, pristine):
    assert run("install")[0] == 0
    assert run("uninstall")[0] == 0
    assert snapshot(env) == snapshot(pristine)


def test_bytecode_that_python_wrote_meanwhile_goes_with_the_rest(run, env, pristine):
    assert run("install")[0] == 0
    command = [sys.executable, "-m", "compileall", "-q", str(env / SITE)]
    subprocess.run(command, check=True)
    # as the environment's own Python would have named it
    own = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    assert list((env / SITE / "sparkcache_connector" / "__pycache__").glob(f"*.{own}.pyc"))
    assert run("uninstall")[0] == 0
    ours = {path: value for path, value in snapshot(env).items() if "__pycache__" not in path}
    assert ours == {p: v for p, v in snapshot(pristine).items() if "__pycache__" not in p}
    assert (env / SITE / PYC).read_bytes() == (pristine / SITE / PYC).read_bytes()
    assert not (env / SITE / "sparkcache_connector").exists()


def test_a_file_that_other_environments_share_is_never_written_through(run, env, tmp_path):
    shared = tmp_path / "cache-of-a-package-manager"
    shared.mkdir()
    for path in (TOUCHED, RECORD, PYC):
        os.link(env / SITE / path, shared / path.replace("/", "_"))
    before = snapshot(shared)
    assert run("install")[0] == 0
    assert snapshot(shared) == before
    assert run("uninstall")[0] == 0
    assert snapshot(shared) == before
    assert (env / SITE / TOUCHED).stat().st_nlink == 1


@pytest.mark.parametrize("path", [TOUCHED, PLATFORMS, "vllm/version.py"])
def test_a_foreign_preimage_anywhere_refuses_and_changes_nothing(run, env, path):
    (env / SITE / path).write_bytes(b"mine = 1\n")
    before = snapshot(env)
    code, err = run("install")
    assert code == 1
    assert f"{path}: expected SHA-256" in err
    assert snapshot(env) == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda env: (env / "pyvenv.cfg").unlink(), "expected a virtual environment (pyvenv.cfg)"),
        (
            lambda env: shutil.rmtree(env / SITE / small_wheel.DIST_INFO),
            "expected one installed vLLM, found none",
        ),
        (
            lambda env: (env / SITE / small_wheel.DIST_INFO).rename(
                env / SITE / "vllm-0.27.1.dist-info"
            ),
            "found vllm-0.27.1.dist-info; install the target's own version first",
        ),
        (
            lambda env: (env / SITE / "sparkcache_connector").mkdir(),
            "expected no connector yet",
        ),
        (
            lambda env: (
                (env / SITE / TOUCHED).unlink(),
                (env / SITE / TOUCHED).symlink_to(env / SITE / "vllm/version.py"),
            ),
            "scheduler.py: expected a regular file",
        ),
    ],
)
def test_an_environment_that_is_not_the_targets_is_refused(run, env, change, match):
    change(env)
    before = snapshot(env)
    code, err = run("install")
    assert code == 1
    assert match in err
    assert snapshot(env) == before


def test_installing_twice_is_one_installation(run, env):
    assert run("install")[0] == 0
    before = snapshot(env)
    code, err = run("install")
    assert code == 0
    assert "is installed already" in err
    assert snapshot(env) == before


def test_a_file_that_was_edited_after_the_installation_refuses_both_ways(run, env):
    assert run("install")[0] == 0
    (env / SITE / TOUCHED).write_bytes(b"mine = 1\n")
    (env / SITE / MODULE).unlink()
    before = snapshot(env)
    for command in ("uninstall", "install"):
        code, err = run(command)
        assert code == 1
        digest = hashlib.sha256(b"mine = 1\n").hexdigest()
        assert f"{SITE}/{TOUCHED}: SHA-256 {digest}" in err
        assert (f"{SITE}/{MODULE}: gone" in err) == (command == "install")
        assert snapshot(env) == before


def test_without_an_installation_there_is_nothing_to_take_back(run):
    code, err = run("uninstall")
    assert code == 1
    assert "expected an installation in place, found none" in err


def test_a_damaged_journal_or_kept_file_refuses_and_changes_nothing(run, env):
    assert run("install")[0] == 0
    journal = env / FOLDER / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole.replace(b'"installed"', b'"elsewhere"'))
    before = snapshot(env)
    for command in ("install", "uninstall"):
        code, err = run(command)
        assert code == 1
        assert "expected a known state, found 'elsewhere'" in err
        assert snapshot(env) == before
    journal.write_bytes(whole)
    kept = env / FOLDER / "before" / hashlib.sha256(SCHEDULER).hexdigest()
    kept.write_bytes(b"damaged")
    code, err = run("uninstall")
    assert code == 1
    assert f"{kept}: expected the bytes that its name says" in err
    kept.write_bytes(SCHEDULER)
    assert run("uninstall")[0] == 0


def test_a_connector_wheel_of_a_bundle_brings_its_native_library(run, env, checkout, tmp_path):
    contract = (checkout / "overlay" / "targets" / NAME / "contract.json").read_bytes()
    library = "sparkcache_connector/native/x86_64/lib.so"
    files = {"sparkcache_connector/contract.json": contract, library: b"\x7fELF"}
    wheel = connector_wheel(checkout, read_source(checkout), files, architecture="x86_64")
    with (tmp_path / wheel.filename).open("wb") as sink:
        wheel.write(sink)
    assert run("install", "--connector", str(tmp_path / wheel.filename))[0] == 0
    assert (env / SITE / library).read_bytes() == b"\x7fELF"


def test_a_connector_wheel_of_another_checkout_is_refused(run, env, checkout, tmp_path):
    files = {"sparkcache_connector/contract.json": b"{}\n"}
    wheel = connector_wheel(checkout, read_source(checkout), files)
    with (tmp_path / wheel.filename).open("wb") as sink:
        wheel.write(sink)
    before = snapshot(env)
    code, err = run("install", "--connector", str(tmp_path / wheel.filename))
    assert code == 1
    assert "sparkcache_connector/contract.json is not this checkout's" in err
    assert snapshot(env) == before


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_record_is_edited_row_by_row_and_nothing_else_changes(end):
    data = f'a.py,sha256=x,1{end}"b, c.py",sha256=y,2{end}d.pyc,,{end}R,,{end}'.encode()
    row = Row.of(b"new")
    new = f"{row.digest},{row.size}"
    assert edit_record(data, {"d.pyc"}, {"b, c.py": row, "z.py": row, "e.py": row}) == (
        f'a.py,sha256=x,1{end}"b, c.py",{new}{end}R,,{end}e.py,{new}{end}z.py,{new}{end}'.encode()
    )
    assert edit_record(data, (), {}) == data


digests = st.binary(max_size=3).map(lambda data: hashlib.sha256(data).hexdigest())
modes = st.integers(0, 0o7777)
operations = st.builds(
    Operation,
    st.text("abc/", min_size=1, max_size=6).filter(lambda p: "//" not in f"/{p}/"),
    st.builds(Before, digests, modes, st.integers(0, 2**62)),
    st.none() | st.builds(After, digests, modes),
)
journals = st.builds(
    Journal,
    st.sampled_from(State),
    st.just("v1"),
    st.just("cpu-x86_64"),
    digests,
    st.just("lib/site"),
    st.just(("a", "a/b")),
    st.just(()),
    st.lists(operations, max_size=4, unique_by=lambda o: o.path).map(tuple),
)


@given(journals)
def test_a_journal_comes_back_as_written(journal):
    assert Journal.parse(journal.dump(), "j") == journal


@given(journals, st.data())
def test_a_damaged_journal_is_refused_or_is_another_one(journal, data):
    whole = journal.dump()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    try:
        other = Journal.parse(damaged, "j")
    except FormatError:
        return
    assert other != journal


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b'"path":"a"', b'"path":"../a"', "without empty"),
        (b'"path":"a"', b'"path":"/a"', "without empty"),
        (b'"site":"s"', b'"site":".."', "without empty"),
        (b'"mode":420', b'"mode":4096', "expected permission bits, found 4096"),
        (b'"after":{"mode":420,"sha256":"' + b"0" * 64 + b'"}', b'"after":null', "before or after"),
        (b"install/v1", b"install/v2", "schema"),
    ],
)
def test_a_journal_that_leads_elsewhere_is_refused(old, new, match):
    after = After("0" * 64, 0o644)
    journal = Journal(
        State.INSTALLED, "v1", "b", "0" * 64, "s", (), (), (Operation("a", None, after),)
    )
    whole = journal.dump()
    assert old in whole
    with pytest.raises(FormatError, match=match):
        Journal.parse(whole.replace(old, new), "j")


def test_two_vllms_in_one_environment_are_refused(env):
    shutil.copytree(env / "lib" / "python3.11", env / "lib" / "python3.12")
    with pytest.raises(EnvironmentProblemError, match="expected one installed vLLM, found lib/py"):
        Environment.open(env)
