"""Lives of an engine, for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support import engine_env, offline_engine, tiny_models

HERE = Path(__file__).parent
# Two ranks on two busy cores take minutes for what a quiet machine does in seconds.
LONGEST_SECONDS = 900

Batches = list[Any] | dict[str, Any]


def live(model: Path, batches: Batches, packages: Path | None = None, **job: Any) -> dict[str, Any]:
    """One life of an engine; its answers, named as the batches are if these are named.

    ``packages`` comes first on the import path.
    """
    named = isinstance(batches, dict)
    job |= {"model": str(model), "batches": list(batches.values()) if named else batches}
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        code, log = _run(answer.name, packages, job)
        tail = "\n".join(log.splitlines()[-40:])
        expected = -signal.SIGKILL if job.get("kill") else 0
        assert code == expected, f"ended with {code}:\n{tail}"
        answers: dict[str, Any] = json.loads(Path(answer.name).read_bytes())
        answers["log"] = log
        if named:
            answers["batches"] = dict(zip(batches, answers["batches"], strict=True))
        return answers


def refused(model: Path, packages: Path, **options: Any) -> str:
    """What an engine with the connector of ``packages`` says that does not start."""
    job = {"model": str(model), "batches": [], "options": options}
    code, log = _run(os.devnull, packages, job)
    assert code == 1, log
    return log


def _run(answer: str, packages: Path | None, job: dict[str, Any]) -> tuple[int, str]:
    """Run a life to its end; its exit code and what it said."""
    environment = os.environ | offline_engine.ENVIRONMENT
    if packages is not None:
        environment["PYTHONPATH"] = f"{packages}{os.pathsep}{environment['PYTHONPATH']}"
    with subprocess.Popen(
        [engine_env.interpreter("patched"), "-P", HERE / "one_life.py", answer],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            log, _ = process.communicate(json.dumps(job), timeout=LONGEST_SECONDS)
        finally:
            # Its ranks are processes of their own, and outlive it when it is too slow.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, log


def model_of(family: str, seed: int = 0) -> Path:
    return engine_env.tiny_model(family, engine_env.interpreter("patched"), seed=seed)


def options(root: Path, **more: Any) -> dict[str, Any]:
    return {"spark_cache_root": str(root), "spark_cache_min_span_tokens": 256, **more}


def tokens(answers: dict[str, Any], batch: int | str = 0) -> list[list[int]]:
    return [answer["tokens"] for answer in answers["batches"][batch]]


def cached(answers: dict[str, Any], batch: int | str = 0) -> list[int]:
    return [answer["cached"] for answer in answers["batches"][batch]]


def prompt(seed: int, length: int) -> list[int]:
    """Token ids drawn from a seed."""
    return random.Random(seed).choices(range(tiny_models.VOCABULARY), k=length)


def findings(answers: dict[str, Any]) -> str:
    """What `sparkcache doctor` said at the end, beside the running engine."""
    return "\n".join(answers["doctor"]["findings"])
