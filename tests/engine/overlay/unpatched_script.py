"""Drives a scheduler through recorded scripts and prints every output, one JSON line a step.

Runs on the patched and on the unpatched vLLM 0.28.0; what it prints must be equal
as long as the connector does not opt in (O5).
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from boundary_harness import (
    GLM_16,
    GLM_256,
    SAME_BLOCK,
    TWO_GROUPS,
    Engine,
    Geometry,
    Group,
    make_engine,
    token_ids,
)

SMALL = Geometry((Group("full", 8), Group("mamba", 16, 3), Group("mamba", 16, 3)), 4, 16)
EQUAL = Geometry((Group("full", 16), Group("mamba", 16)), 4, 16)
ATTENTION = Geometry((Group("full", 16),), 16, 16)
SMALL_GEOMETRIES = (SMALL, EQUAL, ATTENTION)
LARGE_GEOMETRIES = (GLM_16, GLM_256, SAME_BLOCK, TWO_GROUPS)


def dump(engine: Engine, output: Any) -> dict[str, Any]:
    """Everything that the worker is told, and what is left of the pool."""
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    pool = engine.pool
    return {
        "tokens": output.num_scheduled_tokens,
        "spec": output.scheduled_spec_decode_tokens,
        "new": [[r.req_id, r.block_ids, r.num_computed_tokens] for r in new],
        "cached": [
            cached.req_ids,
            sorted(cached.resumed_req_ids),
            cached.new_block_ids,
            cached.num_computed_tokens,
        ],
        "common": output.num_common_prefix_blocks,
        "finished": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "zero": output.new_block_ids_to_zero,
        "copies": [[c.src_block_id, c.dst_block_id] for c in output.kv_cache_block_copies or ()],
        "tails": output.partial_tail_offloads,
        "free": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()][:64],
        "references": [b.ref_cnt for b in pool.blocks],
        "hashed": [b.block_hash_num_tokens for b in pool.blocks],
    }


def play(seed: int, steps: int = 60) -> list[str]:
    """One script. Every decision comes from the seed, none from the scheduler's state."""
    rng = random.Random(seed)
    large = seed % 5 == 0
    geometry = rng.choice(LARGE_GEOMETRIES if large else SMALL_GEOMETRIES)
    mode = rng.choice(["sync", "speculative", "overlap", "async"])
    connector = rng.choice([None, "Recorder", "Truthy"])
    engine = make_engine(
        geometry,
        connector,
        budget=8192 if large else rng.choice([16, 24, 40, 200]),
        blocks=400 if large else rng.randrange(24, 90),
        max_seqs=rng.randrange(1, 5),
        depth=2 if mode in ("overlap", "async") else 1,
        asynchronous=mode == "async",
        role=rng.choice(["kv_both", "kv_producer", "kv_consumer"]),
        priority=rng.random() < 0.3,
        speculative=3 if mode == "speculative" else 0,
    )
    if mode == "speculative":
        engine.draft = lambda request_id: [7, 8, 9]
        engine.accept = lambda request_id, drafts: rng.randrange(0, 4)
    lines = []
    for number in range(steps):
        if rng.random() < 0.35:
            length = rng.randrange(1, 10000 if large else 120)
            name = f"r{number}"
            tokens = token_ids(rng.choice("abc"), length)
            if connector and rng.random() < 0.2 and length > 16:
                engine.connector.matched[name] = (length - 1) // 16 * 16
            engine.add(name, tokens, max_tokens=rng.randrange(1, 12), priority=rng.randrange(3))
        if rng.random() < 0.05 and engine.scheduler.requests:
            engine.abort(sorted(engine.scheduler.requests)[0])
        if rng.random() < 0.04 and engine.scheduler.running:
            engine.preempt(engine.scheduler.running[-1].request_id)
        loading = [
            r.request_id
            for r in engine.scheduler.skipped_waiting
            if r.status.name == "WAITING_FOR_REMOTE_KVS"
            and r.request_id not in engine.scheduler.finished_recving_kv_req_ids
            and (r.request_id, None) not in engine.load_results
        ]
        if loading and rng.random() < 0.5:
            engine.finish_load(loading[0], engine.requests[loading[0]].num_computed_tokens)
        step = engine.schedule()
        lines.append(json.dumps(dump(engine, step.output), sort_keys=True))
        if len(engine.inflight) >= engine.depth:
            engine.complete()
    return lines


if __name__ == "__main__":
    for script in range(int(sys.argv[1]), int(sys.argv[2])):
        for line in play(script):
            print(f"{script} {line}")
