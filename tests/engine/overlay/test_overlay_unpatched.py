"""O5: without opt-in the engine behaves as unpatched, step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import unpatched_script
import vllm

SCRIPTS = int(os.environ.get("SPARKCACHE_UNPATCHED_SCRIPTS", "60"))
STOCK = os.environ.get("SPARKCACHE_STOCK_PYTHON")


@pytest.mark.skipif(not STOCK, reason="SPARKCACHE_STOCK_PYTHON names no unpatched vLLM 0.28.0")
def test_o5_without_opt_in_every_step_equals_the_unpatched_engines() -> None:
    script = Path(unpatched_script.__file__)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    ran = subprocess.run(
        [
            str(STOCK),
            "-c",
            "import vllm, runpy, sys; print('engine', vllm.__file__);"
            " sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]);"
            " runpy.run_path(sys.argv[0], run_name='__main__')",
            str(script),
            "0",
            str(SCRIPTS),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    (engine,) = [line for line in ran.stdout.splitlines() if line.startswith("engine ")]
    assert Path(engine.split(" ", 1)[1]) != Path(vllm.__file__), sys.executable
    stock = [line for line in ran.stdout.splitlines() if line[:1].isdigit()]
    ours = [
        f"{number} {line}" for number in range(SCRIPTS) for line in unpatched_script.play(number)
    ]
    assert len(ours) == len(stock) == SCRIPTS * 60
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == theirs
    text = "\n".join(ours)
    for happened in ('"preempted": ["r', '"copies": [[', '"tails": {', '"zero": [', '"spec": {"r'):
        assert happened in text, f"no script led to {happened}"
