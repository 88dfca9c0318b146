"""``make demo``: serve, ask, kill -9, serve again, ask the same; prints what a user would see.

A tiny hybrid model behind the OpenAI API, on the CPU, with the wheels of the bundle. The
numbers are this machine's; the claim is the last line, and the exit code.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import engine_env, offline_engine, tiny_models

PROMPT_TOKENS = 6_000
ANSWER_TOKENS = 24
START_SECONDS = 240


@dataclass(frozen=True)
class Answer:
    """What one request showed: text, seconds to the first token, tokens not computed again."""

    text: str
    first_token: float
    cached: int


class DemoError(Exception):
    """The demo could not show what it is for."""


@contextmanager
def serving(
    model: Path, site: Path, cache: Path, log: Path
) -> Iterator[tuple[int, subprocess.Popen]]:
    """A server on a free port; it is killed when the block ends, if it still runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "SparkCacheConnector",
        "kv_connector_module_path": "sparkcache_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spark_cache_root": str(cache)},
    }
    command = [
        engine_env.interpreter("patched"), "-P", "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "8192",
        "--mamba-cache-mode", "align", "--enable-prompt-tokens-details",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    environment = os.environ | offline_engine.ENVIRONMENT
    environment |= {"PYTHONPATH": str(site), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait_until_ready(port, process, log)
        yield port, process
    finally:
        # The server's engine is a process of its own: the whole group goes, like a power cut.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(port: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            errors = [
                line for line in log.read_text(errors="replace").splitlines() if "Error" in line
            ]
            shown = "\n".join(errors[:5])
            raise DemoError(f"the server ended with {process.returncode}; see {log}:\n{shown}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise DemoError(f"the server was not ready after {START_SECONDS} s; see {log}")


def ask(port: int, prompt: list[int]) -> Answer:
    """One greedy completion, streamed."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    start = time.monotonic()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise DemoError(f"the server answered {response.status}: {response.read()[:500]!r}")
    text, first, cached = "", 0.0, 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event["choices"]:
            first = first or time.monotonic() - start
            text += event["choices"][0]["text"]
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text, first, cached)


def _wait_for_roots(cache: Path, log: Path) -> int:
    """Wait until publications have ended: no new root has come for a second."""
    known, quiet = 0, time.monotonic()
    deadline = quiet + 60
    while time.monotonic() < deadline:
        found = len(list(cache.glob("rank-*/roots/*/*.root")))
        if found != known:
            known, quiet = found, time.monotonic()
        if known and time.monotonic() - quiet > 1:
            return known
        time.sleep(0.1)
    raise DemoError(f"nothing was published within a minute; see {log}")


def main() -> int:
    """Run the demo; return 0 only if the restarted server continued correctly."""
    start = time.monotonic()
    model = engine_env.tiny_model("granite", engine_env.interpreter("patched"))
    prompt = random.Random(1).choices(range(tiny_models.VOCABULARY), k=PROMPT_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        site, cache = (Path(scratch) / name for name in ("site", "cache"))
        log = engine_env.REPOSITORY / "build" / "demo.log"
        log.parent.mkdir(exist_ok=True)
        log.unlink(missing_ok=True)
        (wheel,) = engine_env.BUNDLE.glob("sparkcache_connector-*.whl")
        subprocess.run(
            [engine_env.interpreter("base"), "-m", "pip", "install", "--quiet", "--no-deps",
             "--no-index", "--disable-pip-version-check", "--target", site, wheel],
            check=True,
        )  # fmt: skip
        print(f"serving a tiny Mamba2 hybrid, prompt of {PROMPT_TOKENS:,} tokens", flush=True)
        with serving(model, site, cache, log) as (port, _):
            ask(port, prompt[:64])  # the first request of a process pays for its warm-up
            before = ask(port, prompt)
            _show("first ask", before)
            print(f"published     {_wait_for_roots(cache, log)} roots; now kill -9", flush=True)
        with serving(model, site, cache, log) as (port, _):
            ask(port, prompt[:64])
            after = ask(port, prompt)
            _show("after restart", after)
    same = after.text == before.text
    speedup = before.first_token / after.first_token
    print(
        f"demo: {'same answer' if same else 'ANOTHER ANSWER'}, {after.cached:,} of "
        f"{PROMPT_TOKENS:,} tokens restored, first token {speedup:.1f} times sooner, "
        f"{time.monotonic() - start:.0f} s in all"
    )
    return 0 if same and after.cached > PROMPT_TOKENS // 2 and not before.cached else 1


def _show(what: str, answer: Answer) -> None:
    print(
        f"{what:13} first token {answer.first_token * 1e3:6.0f} ms, {answer.cached:5,} tokens "
        f"cached, answer {answer.text[:24]!r}…",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DemoError, engine_env.EngineError) as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(1)
