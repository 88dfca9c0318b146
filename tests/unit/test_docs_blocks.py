"""Every fenced block of the documentation says what is done with it, and that is done here."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from verify.cli import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "csrc/**/*.md", "bench/**/*.md", "overlay/**/*.md")
    for path in ROOT.glob(pattern)
)
NEEDS = {"needs:docker", "needs:gpu", "needs:network", "needs:long"}
WIDEST = 100


@dataclass(frozen=True)
class Block:
    """A fenced block: where it opens, what its info string says, and its text."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def label(self) -> str:
        return self.info.partition(" ")[2]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif opened is None:
            opened, lines = (number, line[3:].strip()), []
        else:
            found.append(Block(page, *opened, "\n".join(lines) + "\n"))
            opened = None
    assert opened is None, f"{page.name}: the block at line {opened} never closes"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text(encoding="utf-8"))]


def labelled(label: str) -> list[Block]:
    return [block for block in BLOCKS if block.label == label]


def parse(block: Block) -> None:
    """Raise unless the block is well-formed in its language."""
    match block.language:
        case "sh":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        case "python":
            ast.parse(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            yaml.safe_load(block.text)
        case "text":
            assert all(len(line) <= WIDEST for line in block.text.splitlines())
        case other:
            pytest.fail(f"{block}: nothing here parses {other!r}")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_labelled_and_well_formed(block: Block) -> None:
    assert block.label in {"run", "parse", *NEEDS}, f"{block}: label {block.label!r}"
    parse(block)


RECIPES = [block for block in BLOCKS if block.page.parent == ROOT / "docs" / "ci"]


def scripts(value: object) -> Iterator[str]:
    """What a pipeline's shells run: GitHub's ``run``, GitLab's ``script``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("run", "script"):
                yield "\n".join(inner) if isinstance(inner, list) else inner
            else:
                yield from scripts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from scripts(inner)


def commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, redirections and operators cut off."""
    for line in script.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set(";|&><()"):
                if words:
                    yield words
                words = [] if word != ">" else ["#"]
            else:
                words.append(word)


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_recipes_call_what_there_is_and_let_nothing_through_but_zero(block: Block) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    judged = 0
    for script in scripts(yaml.safe_load(block.text)):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for words in commands(script):
            if words[0] == "make":
                assert words[1] in targets, words
            elif words[0].endswith("python3") or words[0].endswith("python"):
                at = next(n for n, each in enumerate(words) if each.endswith(("verify", ".pyz")))
                parser().parse_args(words[at + 1 :])  # exits when it is not so
                judged += 1
    assert judged, "a recipe judges something"
    assert "continue-on-error" not in block.text
    assert "allow_failure: true" not in block.text


@pytest.mark.parametrize("block", labelled("run"), ids=str)
def test_run_blocks_run(block: Block) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euo", "pipefail"], input=block.text, text=True, cwd=ROOT, check=True,
        env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def test_relative_links_lead_to_files() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert dead == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [("```sh\nls\n```\n", "label ''"), ("```sh maybe\nls\n```\n", "label 'maybe'")],
)
def test_an_unlabelled_block_fails(text: str, problem: str) -> None:
    (block,) = blocks_of(ROOT / "x.md", text)
    with pytest.raises(AssertionError, match=problem):
        test_every_block_is_labelled_and_well_formed(block)


def test_a_malformed_block_fails() -> None:
    (block,) = blocks_of(ROOT / "x.md", "```python parse\nx = (\n```\n")
    with pytest.raises(SyntaxError):
        parse(block)
