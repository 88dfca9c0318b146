"""The table of docs/overlay.md is what the scheduler does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from boundary_harness import GLM_16, GLM_256, make_engine

DOC = Path(__file__).resolve().parents[3] / "docs" / "overlay.md"
PATCHES = Path(__file__).resolve().parents[3] / "patches" / "v0.28.0"
ROW = re.compile(r"^\| ([\d,]+) \| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ROWS = ROW.findall(DOC.read_text())


def numbers(cell: str) -> list[int]:
    return [int(word.replace(",", "")) for word in cell.split() if word != "–"]


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 30
    assert {h for _, h, *_ in ROWS} == {"16", "256"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]).replace(" ", "+"))
def test_expected_hand_overs(row: tuple[str, ...]) -> None:
    prompt, hash_block, chosen, ends, handed_over = row
    engine = make_engine({"16": GLM_16, "256": GLM_256}[hash_block])
    (count,) = numbers(prompt)
    engine.add("r", count, max_tokens=3, chosen=tuple(numbers(chosen)))
    done, seen, offers = 0, [], []
    for number, step in enumerate(engine.run(), 1):
        done += step.tokens.get("r", 0)
        if done <= count:
            seen.append(done)
        copies = {move.dst_block_id for move in step.output.kv_cache_block_copies or ()}
        offers += [
            f"{boundary:,}@{number}{'*' if block_id in copies else ''}"
            for _, block_id, boundary in step.blocks.get("r", ())
        ]
    assert seen == numbers(ends)
    assert (" ".join(offers) or "–") == handed_over


def test_the_number_of_lines_that_upstream_files_gain() -> None:
    added = removed = 0
    for patch in sorted(PATCHES.glob("*.patch")):
        body = patch.read_text().split("\ndiff --git ", 1)[1]
        added += len(re.findall(r"^\+(?!\+\+ )", body, re.MULTILINE))
        removed += len(re.findall(r"^-(?!-- )", body, re.MULTILINE))
    # A patch that changes what an earlier one added counts both ways: compare the net.
    told = re.search(r"adds (\d+) lines to \d+ upstream files and takes (\d+) out", DOC.read_text())
    assert told is not None
    net = int(told[1]) - int(told[2])
    assert added - removed == net
    assert net < 200
