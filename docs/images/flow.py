"""Draws flow.svg: how a release becomes a proven wheel, and how a state survives a restart.

``python docs/images/flow.py`` rewrites the picture; a test holds it to this script.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, ROW, BOX, GAP = 940, 132, 148, 40
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}"
    ".head{font-weight:600}.small{font-size:11.5px;fill:#57606a}"
    "rect{fill:#f6f8fa;stroke:#8c959f;rx:6}.proof{fill:#dafbe1;stroke:#2da44e}"
    "path{stroke:#57606a;fill:none;marker-end:url(#tip)}"
    "svg{background:#fff}"
)


@dataclass(frozen=True)
class Step:
    """A box: a head line, two lines of detail, and whether it decides something."""

    head: str
    detail: tuple[str, str]
    proof: bool = False


ROWS: tuple[tuple[str, tuple[Step, ...]], ...] = (
    (
        "build: once per release",
        (
            Step("vLLM 0.28.0", ("git, sdist or wheel:", "one pinned identity")),
            Step("patch", ("exact bytes, exact", "position, pinned result")),
            Step("package", ("patched wheel +", "connector wheel")),
            Step("attest", ("signed statements of", "what went in")),
            Step("verify", ("a yes, or every", "reason for the no"), proof=True),
        ),
    ),
    (
        "save: while a prompt is computed",
        (
            Step("prefill", ("stops exactly at", "a boundary")),
            Step("proof", ("hash, group and token", "count all match"), proof=True),
            Step("pin", ("the block is not", "recycled meanwhile")),
            Step("capture", ("off the model's", "thread, BLAKE3")),
            Step("NVMe", ("pack, then manifest,", "each synced")),
        ),
    ),
    (
        "restore: after a restart",
        (
            Step("prompt", ("digest per chunk of", "256 tokens")),
            Step("quorum", ("longest boundary that", "every rank holds")),
            Step("read", ("eight workers,", "manifest order")),
            Step("authenticate", ("each page, before it", "is placed"), proof=True),
            Step("place", ("into new blocks; else", "miss and recompute")),
        ),
    ),
)


def draw() -> str:
    """Return the picture as SVG text."""
    height = ROW * len(ROWS) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>How SparkCache builds, saves and restores</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#57606a;'
        'marker-end:none"/></marker></defs>',
    ]
    for row, (title, steps) in enumerate(ROWS):
        top = row * ROW + 28
        parts.append(f'<text x="20" y="{top}" class="small">{escape(title)}</text>')
        for column, step in enumerate(steps):
            left = 20 + column * (BOX + GAP)
            kind = ' class="proof"' if step.proof else ""
            parts.append(f'<rect x="{left}" y="{top + 12}" width="{BOX}" height="76"{kind}/>')
            lines = ((step.head, "head"), (step.detail[0], "small"), (step.detail[1], "small"))
            for index, (text, style) in enumerate(lines):
                parts.append(
                    f'<text x="{left + 12}" y="{top + 36 + 20 * index}" class="{style}">'
                    f"{escape(text)}</text>"
                )
            if column:
                parts.append(f'<path d="M{left - GAP + 4} {top + 50}h{GAP - 8}"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("flow.svg").write_text(draw(), encoding="utf-8", newline="\n")
