"""Lives of an engine, for the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support import engine_env, offline_engine

HERE = Path(__file__).parent


def live(model: Path, batches: list[Any], **job: Any) -> dict[str, Any]:
    """One life of an engine; its answers."""
    job |= {"model": str(model), "batches": batches}
    python = engine_env.interpreter("patched")
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        process = subprocess.run(
            [python, "-P", HERE / "one_life.py", answer.name],
            input=json.dumps(job),
            env=os.environ | offline_engine.ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        tail = "\n".join(process.stdout.splitlines()[-40:])
        expected = -signal.SIGKILL if job.get("kill") else 0
        assert process.returncode == expected, f"ended with {process.returncode}:\n{tail}"
        answers: dict[str, Any] = json.loads(Path(answer.name).read_bytes())
        answers["log"] = process.stdout
        return answers


def model_of(family: str, seed: int = 0) -> Path:
    return engine_env.tiny_model(family, engine_env.interpreter("patched"), seed=seed)


def options(root: Path, **more: Any) -> dict[str, Any]:
    return {"spark_cache_root": str(root), "spark_cache_min_span_tokens": 256, **more}


def tokens(answers: dict[str, Any], batch: int = 0) -> list[list[int]]:
    return [answer["tokens"] for answer in answers["batches"][batch]]


def cached(answers: dict[str, Any], batch: int = 0) -> list[int]:
    return [answer["cached"] for answer in answers["batches"][batch]]


def flip_a_bit_of_every_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for offset in range(4096, len(data), 4096):
        data[offset] ^= 1
    path.write_bytes(data)
