"""builder.cli and `python -m builder acquire`: exit codes, and what goes where."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from builder import cli
from builder.commands import acquire as acquire_command
from builder.console import Console
from builder.errors import BuildError
from tests.simple_index import SimpleIndex, serve
from tests.small_target import SDIST, WHEELS, SmallTarget

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose files are on the index that this user's pip is configured for."""
    root = SmallTarget().write(tmp_path / "checkout")
    files = {path.name: path.read_bytes() for path in (root / "index").iterdir()}
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serve(SimpleIndex(files)) as index:
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index.url}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        yield root


def run(checkout, *arguments):
    return cli.main(["--checkout", str(checkout), *arguments])


def test_pin_and_acquire_work_through_the_users_index_and_then_offline(checkout, capsys):
    assert run(checkout, "pin") == 0
    capsys.readouterr()
    assert run(checkout, "acquire", "all", "--offline") == 0
    out = capsys.readouterr().out.splitlines()
    expected = [SDIST, *(WHEELS[base] for base in ("cuda-x86_64", "cpu-x86_64"))]
    assert len(out) == len(expected)
    for line, name in zip(out, expected, strict=True):
        digest, _, path = line.partition("  ")
        data = (checkout / "index" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest
        assert Path(path).read_bytes() == data


def test_without_arguments_the_wheel_of_this_machine_is_acquired(checkout, capsys, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert run(checkout, "acquire") == 0
    wheel = (checkout / "index" / WHEELS["cuda-x86_64"]).read_bytes()
    assert capsys.readouterr().out.startswith(hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert run(checkout, "acquire") == 1
    assert "no base wheel for riscv64; choose one of cuda-x86_64" in capsys.readouterr().err


def test_an_unknown_file_is_a_usage_error(checkout, capsys):
    assert run(checkout, "acquire", "nonsense") == cli.USAGE
    assert "unknown file 'nonsense'; known: all, sdist, cuda-x86_64" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["pin", "--nonsense"]])
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            BuildError("x: expected a, found b"),
            cli.REFUSED,
            "builder acquire: x: expected a, found",
        ),
        (KeyboardInterrupt(), cli.INTERRUPTED, "interrupted; run it again to continue"),
        (RuntimeError("a bug"), cli.INTERNAL, "internal error; please report"),
    ],
)
def test_every_ending_has_its_exit_code(monkeypatch, capsys, error, code, said):
    def fail(args, console):
        raise error

    monkeypatch.setattr(acquire_command, "run", fail)
    assert cli.main(["acquire"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert ("Traceback" in captured.err) == (code == cli.INTERNAL)


def test_every_command_has_help_that_names_it(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("acquire", "pin", "patch", "compose", "target", "install", "uninstall", "build"):
        assert re.search(rf"^\s+{name}\s+\S", text, re.MULTILINE), name


def test_the_documented_exit_codes_are_the_codes():
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    table = text.partition("## builder")[2].partition("\n## ")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert codes == {cli.DONE, cli.REFUSED, cli.USAGE, cli.INTERNAL, cli.INTERRUPTED}


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_bar_is_drawn_on_a_terminal_and_removed_at_the_end(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("builder.console.time.monotonic", lambda: float(next(clock)))
    stream = Terminal()
    with Console(stream).progress("f.whl", 10_000_000, 5_000_000) as advance:
        advance(2_500_000)
        advance(2_500_000)
    assert "f.whl [##################......]  75% 7.5 MB" in stream.text
    assert re.search(r"\r\x1b\[Kf\.whl: done, 10\.0 MB in \d+\.0 s\n\Z", stream.text)
