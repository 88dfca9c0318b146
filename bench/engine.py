"""What the connector's performance claims are made of: ``python -m bench.engine [PART …]``.

A real engine, tiny models, this machine's CPU. Numbers are ratios against a ruler of the same run,
taken in turns so that a machine that slows down favours neither side; best and median. The parts:

* ``restore``: time to the first token of a restored prompt, against computing one of that length
  on an engine without the connector, hybrid and dense;
* ``gaps``: inter-token gaps of a running request while another one is restored, against its gaps
  while nothing else happens, and while the same prompt is a hit in the engine's own prefix cache,
  whose admission costs as much;
* ``publish``: throughput with publishing at the default interval, against the same connector
  with publishing off;
* ``scheduler``: what the scheduler's hooks cost per step with 64 running requests;
* ``interval``: what a checkpoint interval writes, costs and saves (docs/operations.md);
* ``offloading``: vLLM's own file-system tier, where it runs.

Exits 0 either way: a busy machine is not a defect. The last line says which goals were met.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.engine_session import Session, prompt
from sparkcache_connector.scheduler.boundaries import BoundaryPolicy
from tests.support import engine_env
from tests.support.engine_process import EngineProcessError

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("granite", "llama")
KIND = {"granite": "hybrid", "llama": "dense"}
LENGTHS = (1_024, 4_096, 16_384)
TAIL = 100
"""Tokens past the last boundary, which are computed in any case."""
UNIT = 256
INTERVALS = (256, 512, 1_024, 2_048, 4_096, 8_192)
INTERVAL_PROMPT = 8_192 + TAIL


@dataclass(frozen=True)
class Goal:
    """One line of the verdict."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def line(self) -> str:
        """For people."""
        sign = "<=" if self.at_most else ">="
        word = "met   " if self.met else "MISSED"
        return f"{word}  {self.name}: {self.value:.3f} ({sign} {self.limit})"


@contextmanager
def engines(family: str) -> Iterator[dict[str, Session]]:
    """Three engines of one model, of which one at a time is asked.

    ``plain`` has no connector, ``spark`` has it with every default, ``off`` does not publish.
    """
    kinds: dict[str, dict[str, object] | None] = {
        "plain": None,
        "spark": {},
        "off": {"spark_cache_store": False},
    }
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-engine-")))
        found = {}
        for name, options in kinds.items():
            if options is not None:
                options = {"spark_cache_root": str(scratch / name), **options}
            found[name] = stack.enter_context(Session(family, scratch / f"{name}.log", options))
        for session in found.values():
            session.wait()
        yield found


def ratios(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Best over best, median over median, of (measured, ruler)."""
    measured, ruler = zip(*pairs, strict=True)
    return (
        min(measured) / min(ruler),
        statistics.median(measured) / statistics.median(ruler),
    )


def restore(family: str, three: dict[str, Session], rounds: int) -> list[Goal]:
    """Time to the first token, restored and computed."""
    goals = []
    for length in LENGTHS:
        pairs = [_restored(three, length, number) for number in range(rounds)]
        best, median = ratios(pairs)
        restored, computed = zip(*pairs, strict=True)
        print(
            f"restore {KIND[family]:6} {length:6} tokens: first token {min(restored):7.3f} s "
            f"(median {statistics.median(restored):.3f}), computed {min(computed):7.3f} s "
            f"(median {statistics.median(computed):.3f}): {1 / best:.1f} times sooner "
            f"(median {1 / median:.1f})",
            flush=True,
        )
        goals.append(Goal(f"restored over computed, {KIND[family]}, {length}", best, 1.0, True))
    return goals


def _restored(three: dict[str, Session], length: int, number: int) -> tuple[float, float]:
    asked = prompt(length, length + TAIL)
    spark = three["spark"]
    if not number:
        spark.ask(asked)
        spark.settle()
    spark.forget()
    found = spark.ask(asked)
    if found.cached != length:
        raise SystemExit(f"{found.cached} of {length} tokens were restored")
    three["plain"].forget()
    ruler = three["plain"].ask(asked)
    if ruler.cached:
        raise SystemExit(f"the ruler had {ruler.cached} tokens cached")
    return found.first, ruler.first


def gaps(family: str, three: dict[str, Session], rounds: int) -> list[Goal]:
    """Inter-token gaps of a running request: beside restores, beside own hits, and alone."""
    length, spark = LENGTHS[-1], three["spark"]
    # One token past the boundary: what the restored request computes is one token too.
    asked = prompt("gaps", length + 1)
    computing = spark.ask(asked)
    spark.settle()
    beside: dict[str, list[float]] = {"restore": [], "hit": [], "nothing": []}
    for number in range(rounds):
        for what, found in _gaps(spark, asked, number).items():
            beside[what] += found
    restore, hit, nothing = (_p99(found) for found in beside.values())
    medians = ", ".join(f"{statistics.median(found) * 1e3:.1f}" for found in beside.values())
    print(
        f"gaps {KIND[family]:6} {length} tokens: P99 {restore * 1e3:.1f} ms of "
        f"{len(beside['restore'])} gaps during a restore, {hit * 1e3:.1f} ms while the same prompt "
        f"is answered from the engine's own prefix cache, {nothing * 1e3:.1f} ms alone (medians "
        f"{medians}); computing the prompt takes {computing.first * 1e3:.0f} ms",
        flush=True,
    )
    kind = KIND[family]
    return [
        Goal(f"P99 gap beside a restore over alone, {kind}", restore / nothing, 1.2, True),
        Goal(f"the same over beside the engine's own hit, {kind}", restore / hit, 1.2, True),
    ]


def _gaps(spark: Session, asked: list[int], number: int) -> dict[str, list[float]]:
    """Gaps of one running request, by what they overlap: ``restore``, own ``hit``, ``nothing``."""
    spark.send(prompt(("running", number), 64), 400)
    windows: list[tuple[str, float, float]] = []
    for what in itertools.cycle(("restore", "hit")):
        if what == "restore":
            spark.forget()
            spark.pause(0.05)  # emptying a cache is not part of it
        spark.send(asked, 1)
        reply = spark.reply()
        if len(reply.times) > 1:  # the running request has ended first
            spark.reply()
            break
        if reply.cached:
            windows.append((what, reply.began, reply.ended))
        spark.pause(0.05)
    stamps = [reply.began + t for t in reply.times]
    found: dict[str, list[float]] = {"restore": [], "hit": [], "nothing": []}
    # The first gaps are those of its own start.
    for before, after in list(itertools.pairwise(stamps))[2:]:
        beside = [what for what, start, end in windows if before < end and start < after]
        found[beside[0] if beside else "nothing"].append(after - before)
    return found


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) * 99 // 100, len(values) - 1)]


def publish(family: str, three: dict[str, Session], rounds: int) -> list[Goal]:
    """Throughput with publishing on and off, and without the connector."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in three}
    for number in range(rounds):
        for name in list(three)[:: 1 if number % 2 else -1]:
            rates[name].append(_throughput(three[name], (name, number)))
    for name, found in rates.items():
        wall, processor = zip(*found, strict=True)
        print(
            f"publish {KIND[family]:6} {name:5}: best {max(wall):.0f} tokens/s (median "
            f"{statistics.median(wall):.0f}), best by processor time {max(processor):.0f}",
            flush=True,
        )
    on, off = (max(wall for wall, _ in rates[name]) for name in ("spark", "off"))
    return [Goal(f"throughput, publishing on over off, {KIND[family]}", on / off, 0.99, False)]


def _throughput(session: Session, name: object) -> tuple[float, float]:
    """Prompt and answer tokens per second, by the clock and by processor time, of one wave."""
    prompts = [prompt((name, number), 2_500) for number in range(6)]
    before = session.settle()
    for tokens in prompts:
        session.send(tokens, 48)
    replies = [session.reply() for _ in prompts]
    seconds = max(r.ended for r in replies) - min(r.began for r in replies)
    after = session.settle()
    tokens_done = sum(len(tokens) + 48 for tokens in prompts)
    return tokens_done / seconds, tokens_done / (after["processor"] - before["processor"])


def scheduler(rounds: int) -> list[Goal]:
    """The scheduler's hooks, on the real scheduler; see ``engine_scheduler``."""
    done = subprocess.run(
        [engine_env.interpreter("patched"), "-P", ROOT / "bench" / "engine_scheduler.py"],
        input=json.dumps({"rounds": rounds}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    goals = []
    for name, row in json.loads(done.stdout).items():
        print(
            f"scheduler {name:6}, 64 running requests: hooks {row['step'][0]:.1f} us a step "
            f"(median {row['step'][1]:.1f}), {row['mean'][0]:.1f} us with an admission every ten "
            f"steps ({row['mean'][1]:.1f}), of a step of {row['whole']:.0f} us",
            flush=True,
        )
        goals.append(Goal(f"scheduler's hooks, us per step, {name}", row["step"][0], 50.0, True))
        goals.append(
            Goal(f"the same with an admission every ten steps, {name}", row["mean"][0], 50.0, True)
        )
    return goals


def interval(family: str, three: dict[str, Session], rounds: int) -> list[Goal]:
    """What an interval writes, costs and saves, for a hybrid."""
    if KIND[family] != "hybrid":
        return []
    spark, plain = three["spark"], three["plain"]
    print(
        f"interval, a hybrid's prompt of {INTERVAL_PROMPT} tokens, beside an engine without "
        "the connector:\n  interval  roots  KiB written  publishing ms  first token x  "
        "processor x  computed again, mean  most"
    )
    rows: dict[int, list[tuple[float, ...]]] = {}
    for number in range(rounds):
        ruler = _asked_alone(plain, prompt(("ruler", number), INTERVAL_PROMPT))
        for tokens in INTERVALS:
            spark.call("interval", "changed", tokens=tokens)
            found = _asked_alone(spark, prompt((tokens, number), INTERVAL_PROMPT))
            row = (found[0] / ruler[0], found[1] / ruler[1], *found[2:])
            rows.setdefault(tokens, []).append(row)
    for tokens, measured in rows.items():
        mean, most = expected_recompute(tokens)
        first, processor, roots, written, seconds = map(
            statistics.median, zip(*measured, strict=True)
        )
        print(
            f"  {tokens:8}  {roots:5.0f}  {written / 1024:11.0f}  {seconds * 1e3:13.0f}"
            f"  {first:13.3f}  {processor:11.3f}  {mean:20.0f}  {most:4}",
            flush=True,
        )
    return []


def _asked_alone(session: Session, tokens: list[int]) -> tuple[float, ...]:
    """Seconds to the first token and of processor time; roots, bytes and seconds of publishing."""
    before = session.settle()
    first = session.ask(tokens).first
    after = session.settle()
    published = (
        after["metrics"].get(name, 0) - before["metrics"].get(name, 0)
        for name in (
            "sparkcache_publications_total,stored",
            "sparkcache_published_bytes_total",
            "sparkcache_publication_seconds_total",
        )
    )
    return first, after["processor"] - before["processor"], *published


def expected_recompute(tokens: int) -> tuple[float, int]:
    """Tokens computed again by a second prompt, over every shared length: mean and most."""
    policy = BoundaryPolicy(unit=UNIT, interval=tokens, recurrent_block=128, min_span=1)
    targets = (0, *policy.targets(INTERVAL_PROMPT))
    lost = [shared - max(t for t in targets if t <= shared) for shared in range(INTERVAL_PROMPT)]
    return statistics.mean(lost), max(lost)


def offloading(rounds: int) -> list[Goal]:
    """The file-system tier of vLLM itself: started as documented, or its reason why not."""
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as scratch:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "fs", "root_dir": f"{scratch}/fs"}],
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        log = Path(scratch) / "log"
        try:
            with Session("llama", log, None, kv_transfer_config=transfer) as other:
                other.wait()
                asked = prompt("offloading", LENGTHS[1] + TAIL)
                computed = other.ask(asked).first
                other.settle()
                times = []
                for _ in range(rounds):
                    other.forget()
                    times.append(other.ask(asked).first)
        except EngineProcessError:
            errors = [line for line in log.read_text().splitlines() if "supported on" in line]
            reason = errors[-1].split("Exception: ")[-1] if errors else "see vLLM's log"
            print(f"offloading: vLLM's OffloadingConnector does not run here: {reason}")
            return []
    print(
        f"offloading dense {LENGTHS[1]} tokens: first token {min(times):.3f} s, computed "
        f"{computed:.3f} s"
    )
    return []


# Parts that ask the three engines of each family, and parts that start what they need.
ASKING: dict[str, Callable[[str, dict[str, Session], int], list[Goal]]] = {
    "restore": restore,
    "gaps": gaps,
    "publish": publish,
    "interval": interval,
}
APART: dict[str, Callable[[int], list[Goal]]] = {
    "scheduler": scheduler,
    "offloading": offloading,
}


def main() -> int:
    """Measure, print, compare with the goals."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join([*ASKING, *APART]))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.parts or [*ASKING, *APART]
    if unknown := sorted(set(chosen) - {*ASKING, *APART}):
        parser.error(
            f"no part named {', '.join(unknown)}; there are {', '.join([*ASKING, *APART])}"
        )
    goals: list[Goal] = []
    if asking := [ASKING[name] for name in chosen if name in ASKING]:
        for family in arguments.families:
            with engines(family) as three:
                for part in asking:
                    goals += part(family, three, arguments.rounds)
    for name in chosen:
        if name in APART:
            goals += APART[name](arguments.rounds)
    for goal in goals:
        print(goal.line())
    print(f"bench engine: {sum(goal.met for goal in goals)} of {len(goals)} goals met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
