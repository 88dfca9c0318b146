"""Pictures are made by the script beside them."""

from __future__ import annotations

import runpy
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def test_the_flow_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(IMAGES / "flow.py"))["draw"]()
    assert (IMAGES / "flow.svg").read_text(encoding="utf-8") == drawn
