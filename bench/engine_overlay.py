"""What the overlay costs an engine that does not use it: patched against published vLLM.

``python -m bench.engine_overlay [--rounds N] [--connector none|passive]``. A hybrid model answers
the same prompts on both builds, each in an engine process of its own, in the order stock, patched,
patched, stock, so that a machine that slows down or speeds up favours neither. The claim is about
throughput, by the clock and by processor time: the ratio patched over stock is within noise, which
is what stock shows against itself in the same rounds. Exits 1 when the claim does not hold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass

from tests.support import engine_env, offline_engine, tiny_models

TOKENS = 64
FLOOR = 0.02
"""A share of the throughput that no run on a shared machine resolves."""


@dataclass(frozen=True)
class Sample:
    """One engine's measured batches: tokens computed or generated per second, by both clocks."""

    wall: float
    processor: float


def measure(name: str, model: str, engine: dict[str, object]) -> Sample:
    """Run the workload on the build `name`; its first batch warms the engine."""
    rng = random.Random(5)
    batches = [
        [rng.choices(range(tiny_models.VOCABULARY), k=rng.randrange(200, 900)) for _ in range(8)]
        for _ in range(4)
    ]
    job = {"model": model, "engine": engine, "batches": batches, "tokens": TOKENS}
    result = offline_engine.run(engine_env.interpreter(name), job, timeout=900)
    tokens = sum(len(prompt) + TOKENS for prompts in batches[1:] for prompt in prompts)
    timed = result["batches"][1:]
    return Sample(
        wall=tokens / sum(batch["seconds"] for batch in timed),
        processor=tokens / sum(batch["processor"] for batch in timed),
    )


def main() -> int:
    """Measure, print, compare with the noise."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_overlay", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connector", choices=["none", "passive"], default="none")
    args = parser.parse_args()
    model = str(engine_env.tiny_model("granite", engine_env.interpreter("stock")))
    passive = args.connector == "passive"
    engine = {"kv_transfer_config": offline_engine.PASSIVE} if passive else {}

    rounds = []
    for number in range(args.rounds):
        order = ("stock", "patched", "patched", "stock")
        rounds.append([measure(name, model, engine) for name in order])
        print(f"engine overlay: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    held = True
    for clock in ("wall", "processor"):
        rates = [[getattr(sample, clock) for sample in samples] for samples in rounds]
        ratio = statistics.median((b + c) / (a + d) for a, b, c, d in rates)
        itself = statistics.median(max(a, d) / min(a, d) - 1 for a, _, _, d in rates)
        noise = max(itself, FLOOR)
        stock = statistics.median((a + d) / 2 for a, _, _, d in rates)
        within = ratio >= 1 - noise
        held = held and within
        print(
            f"engine overlay: connector {args.connector}, {clock} clock, stock {stock:.0f} "
            f"tokens/s, patched/stock {ratio:.4f}, stock against itself ±{itself:.4f}: "
            f"{'within noise' if within else 'SLOWER'}"
        )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
