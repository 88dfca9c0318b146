"""``python -m tests.soak``: let an engine live, die and live again, and check every answer.

Lives follow one another on one cache root with a small quota. In each, random turns of random
conversations are asked, up to eight at a time in a pool of blocks that is too small for them;
some are aborted, the engine's own prefix cache is emptied now and then, and most lives end by
SIGKILL in the middle of their work. A second engine without a connector computes every prompt
from its first token and says what the right answer is.

Steps, per life:

1. the engine starts on what earlier lives left, and is asked until it is warm;
2. it comes to rest, and what the process holds is counted;
3. it is asked for the rest of its time, comes to rest, and is counted again: nothing may be in
   use, nothing may have grown;
4. it is asked once more and killed, or ended in order; nothing of it stays in /dev/shm, the
   store is within its quota, and every root, pack and page in it is whole.

The last life is a control: every kind of harm is done to it, and each must be noticed. A soak
that would overlook a wrong answer or a leak therefore fails, as one does that never restored,
evicted, preempted, aborted or killed anything.

Exit codes: 0 all of this held, 1 something did not, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.conversations import DISTINCT_TURNS, Conversations, Turn
from tests.soak.judge import (
    STORE_SLACK_BYTES,
    Answer,
    Tally,
    difference,
    leaks,
    metric,
)
from tests.support import engine_env
from tests.support.engine_process import EngineProcess, EngineProcessError

ROOT = Path(__file__).resolve().parents[2]
QUOTA_BYTES = 8 << 20
ENGINE = {"max_model_len": 2_048, "max_num_batched_tokens": 512, "max_num_seqs": 8}
HYBRID = ("granite", "lfm2")
BLOCKS = {"granite": 72, "lfm2": 72, "llama": 64, "sliding": 96}
"""Blocks of the pool: enough for one or two long prompts, not for eight."""
# oneDNN keeps something for each shape that it has seen, some hundred megabytes in the end, with
# or without a connector. Kept small, growth that remains is somebody's leak.
SMALL_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "LRU_CACHE_CAPACITY": "8",
    "MALLOC_ARENA_MAX": "1",
}
OPTIONS = {
    "spark_cache_chunk_tokens": 128,
    "spark_cache_checkpoint_interval_tokens": 512,
    "spark_cache_min_span_tokens": 256,
    "spark_cache_max_bytes": QUOTA_BYTES,
}
WIDTH = 8
WARM_ANSWERS = 20
CONTROL_SECONDS = 15.0
PATIENCE_SECONDS = 900.0
"""A machine too busy to show everything in the time it was given gets so much more of it."""
HARM = ("answer", "blocks", "memory", "threads", "descriptors", "shared memory")


@dataclass
class Family:
    """One model: who says what is right about it, and the turns whose answers are known."""

    name: str
    model: Path
    reference: EngineProcess
    conversations: Conversations
    pending: dict[str, Turn] = field(default_factory=dict)
    known: deque[tuple[Turn, Answer]] = field(default_factory=lambda: deque(maxlen=DISTINCT_TURNS))
    ready: bool = False
    _asked: int = 0

    def pump(self) -> None:
        """Keep the reference busy and learn what it says."""
        for event in self.reference.take():
            self.ready |= event["event"] == "ready"
            if event["event"] == "answer":
                turn = self.pending.pop(event["id"])
                answer = Answer.of(event)
                self.known.append((turn, answer))
                self.conversations.answered(turn, answer.tokens)
        while self.ready and len(self.pending) < 4:
            turn = self.conversations.turn()
            self._asked += 1
            self.pending[str(self._asked)] = turn
            self.reference.send(_ask(str(self._asked), turn))


@dataclass
class Life:
    """One engine under test."""

    process: EngineProcess
    family: Family
    chance: random.Random
    tally: Tally
    asked: dict[str, tuple[Turn, Answer]] = field(default_factory=dict)
    abort_at: dict[str, float] = field(default_factory=dict)
    seen: set[Turn] = field(default_factory=set)
    forget_at: float = 0.0
    _number: int = 0

    def run(self, until: float) -> None:
        """Ask, abort and forget until then."""
        while time.monotonic() < until:
            self._pump()
            now = time.monotonic()
            while len(self.asked) < WIDTH and self.family.known:
                self._ask()
            for request in [r for r, at in self.abort_at.items() if at <= now]:
                del self.abort_at[request]
                self.process.send({"do": "abort", "id": request})
            if now >= self.forget_at:
                self.forget_at = now + self.chance.uniform(0.5, 3)
                self.process.send({"do": "forget"})

    def rest(self) -> dict[str, Any]:
        """Let everything be answered, then count what the process holds."""
        deadline = time.monotonic() + 300
        while self.asked:
            self._pump()
            if time.monotonic() > deadline:
                self.tally.wrong.append(("work", f"{len(self.asked)} requests never answered"))
                break
        settled = self.process.call({"do": "settle"}, "settled")
        settled["shared memory"] = sorted(self.process.shared_memory())
        return settled

    def _ask(self) -> None:
        # Recent turns more often: their beginnings are what the quota still holds.
        known = self.family.known
        recent = len(known) - 1 - int(len(known) * self.chance.random() ** 2)
        turn, answer = known[max(recent, 0)]
        self._number += 1
        request = str(self._number)
        self.asked[request] = turn, answer
        self.process.send(_ask(request, turn))
        if self.chance.random() < 0.12:
            self.abort_at[request] = time.monotonic() + self.chance.random() ** 2

    def _pump(self) -> None:
        select.select([self.process.descriptor, self.family.reference.descriptor], [], [], 0.05)
        self.family.pump()
        for event in self.process.take():
            if event["event"] == "answer":
                self._answered(event)
            elif event["event"] == "aborted":
                self.asked.pop(event["id"], None)
                self.tally.aborted += 1

    def _answered(self, event: dict[str, Any]) -> None:
        self.abort_at.pop(event["id"], None)
        turn, expected = self.asked.pop(event["id"])
        self.tally.checked += 1
        self.tally.cached += event["cached"] > 0
        if wrong := difference(expected, Answer.of(event)):
            prompt = len(turn.prompt)
            text = (
                f"{self.family.name}, conversation {turn.conversation}, prompt of {prompt} tokens, "
                f"{event['cached']} of them cached: {wrong}"
            )
            self.tally.wrong.append(("answer", text))


def _ask(request: str, turn: Turn) -> dict[str, Any]:
    return {"do": "ask", "id": request, "prompt": turn.prompt, "tokens": turn.answer_tokens}


class Soak:
    """All lives of one run."""

    def __init__(self, seed: int, families: list[str], scratch: Path) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.scratch = scratch
        self.cache = scratch / "cache"
        self.lived = False
        self.start_seconds = 0.0
        self._stack = contextlib.ExitStack()
        self.families = [self._family(name) for name in families]

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _family(self, name: str) -> Family:
        model = engine_env.tiny_model(name, engine_env.interpreter("patched"))
        job = {
            "model": str(model),
            "engine": ENGINE | {"enable_prefix_caching": False, "num_gpu_blocks_override": 256},
        }
        process = EngineProcess(job, self.scratch / f"reference-{name}.log")
        self._stack.enter_context(process)
        return Family(name, model, process, Conversations(random.Random(f"{self.seed} {name}")))

    def live(self, seconds: float, *, kill: bool, harm: Sequence[str] = ()) -> Tally:
        """One life, harmed once it is warm; what happened in it."""
        tally = Tally(lives=1)
        family = self.families[self.chance.randrange(len(self.families))]
        began = time.monotonic()
        with self._start(family) as process:
            life = Life(process, family, random.Random(self.chance.random()), tally)
            self._wait(process, family)  # (1)
            self.start_seconds = time.monotonic() - began
            end = time.monotonic() + seconds
            while tally.checked < WARM_ANSWERS and time.monotonic() < end:
                life.run(time.monotonic() + 0.2)
            first = life.rest()  # (2)
            for name in harm:
                process.call({"do": "harm", "name": name}, "harmed")
            before = tally.checked
            while time.monotonic() < end or tally.checked - before < WARM_ANSWERS:
                life.run(time.monotonic() + 0.2)
            last = life.rest()  # (3)
            self._account(tally, first, last)
            life.run(time.monotonic() + 0.5 + 2 * self.chance.random())
            mapped = process.shared_memory()
            if kill:  # (4)
                process.kill()
                tally.killed += 1
            else:
                life.rest()
                process.end()
        stayed = {name for name in mapped if Path(name).exists()}
        for name in stayed:
            Path(name).unlink()
        if stayed:
            self._found(tally, {"shared memory": f"left behind: {', '.join(sorted(stayed))}"})
        self._check_store(tally)
        self.lived = True
        return tally

    def _start(self, family: Family) -> EngineProcess:
        engine = ENGINE | {"num_gpu_blocks_override": BLOCKS[family.name]}
        if family.name in HYBRID:
            engine["mamba_cache_mode"] = "align"
        job = {
            "model": str(family.model),
            "engine": engine,
            "options": OPTIONS | {"spark_cache_root": str(self.cache)},
        }
        return EngineProcess(job, self.scratch / "engine.log", variables=SMALL_CACHES)

    def _wait(self, process: EngineProcess, family: Family) -> None:
        while True:
            select.select([process.descriptor, family.reference.descriptor], [], [], 1.0)
            family.pump()
            if family.known and any(e["event"] == "ready" for e in process.take()):
                return

    def _account(self, tally: Tally, first: dict[str, Any], last: dict[str, Any]) -> None:
        tally.restored += metric(last, "sparkcache_restores_total", "received")
        tally.preempted += metric(last, "vllm:num_preemptions_total")
        tally.evicted += metric(last, "sparkcache_evictions_total", "capacity")
        tally.grown_bytes = last["memory"] - first["memory"]
        if self.lived:
            tally.restored_first += metric(first, "sparkcache_restores_total", "received")
        self._found(tally, leaks(first, last))

    def _found(self, tally: Tally, kinds: dict[str, str]) -> None:
        tally.wrong += kinds.items()

    def _check_store(self, tally: Tally) -> None:
        rank = self.cache / "rank-0"
        kept = (p for name in ("packs", "roots") for p in (rank / name).rglob("*") if p.is_file())
        used = sum(file.stat().st_blocks * 512 for file in kept)
        if used > QUOTA_BYTES + STORE_SLACK_BYTES:
            self._found(tally, {"quota": f"{used} bytes on disk of at most {QUOTA_BYTES}"})
        done = subprocess.run(
            [sys.executable, "-m", "sparkcache_connector.cli", "verify", rank],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            self._found(tally, {"store": (done.stdout + done.stderr).strip()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=sorted(BLOCKS),
        help="models, one drawn per life (default: three of them, one in less than ten minutes)",
    )
    parser.add_argument(
        "--break",
        dest="harm",
        nargs="+",
        choices=HARM,
        default=[],
        help="do this harm in every life, to see the soak fail",
    )
    parser.add_argument("--keep", action="store_true", help="keep cache root and logs")
    options = parser.parse_args(arguments)
    short = options.minutes < 10
    families = options.families or (["granite"] if short else ["granite", "llama", "lfm2"])
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        code = run(options.minutes * 60, options.seed, families, options.harm, scratch)
    except (EngineProcessError, engine_env.EngineError) as error:
        print(f"soak: {error}", file=sys.stderr)
        code = 1
    if options.keep or code:
        print(f"soak: cache root and logs are in {scratch}", file=sys.stderr)
    else:
        shutil.rmtree(scratch)
    return code


def run(seconds: float, seed: int, families: list[str], harm: list[str], scratch: Path) -> int:
    """Lives for so long, then the control; 0 if everything held."""
    began = time.monotonic()
    tally = Tally()
    with Soak(seed, families, scratch) as soak:
        # Long lives show growth, short ones many deaths.
        longest = max(seconds / 12, 20.0)
        while True:
            left = seconds - (time.monotonic() - began) - CONTROL_SECONDS - soak.start_seconds
            if tally.lives and left < 2 * soak.start_seconds and not tally.missing():
                break
            if left < -PATIENCE_SECONDS:
                break
            length = min(longest, max(left - soak.start_seconds, 10.0))
            life = soak.live(length, kill=tally.lives % 4 != 3, harm=harm)
            tally.add(life)
            _tell(tally.lives, life)
        control = soak.live(CONTROL_SECONDS, kill=True, harm=HARM) if not harm else Tally()
    overlooked = [] if harm else sorted(set(HARM) - control.kinds())
    missing = tally.missing()
    held = not (tally.wrong or overlooked or missing)
    minutes = (time.monotonic() - began) / 60
    noticed = "not run" if harm else f"overlooked {overlooked}" if overlooked else "all noticed"
    print(
        f"soak: {minutes:.1f} min, seed {seed}, {' '.join(families)}: {tally.line()}; "
        f"wrong or leaked: {len(tally.wrong)}; "
        f"{'; '.join(missing) + '; ' if missing else ''}"
        f"harm done on purpose: {noticed}: {'held' if held else 'NOT HELD'}"
    )
    return 0 if held else 1


def _tell(number: int, life: Tally) -> None:
    print(f"life {number}: {life.line()}", flush=True)
    for kind, text in life.wrong[:20]:
        print(f"  {kind}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
