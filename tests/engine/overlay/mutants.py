"""Breaks the overlay in many small ways and expects its tests to notice each.

``python tests/engine/overlay/mutants.py [NAME …]`` in the engine environment. The
heavy imports are made once; each mutant is a forked process that changes one piece of
source while it is imported and runs the suite until the first failure. Exits with 1
if a mutant survives.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CORE = "vllm.v1.core."
CHOICE = CORE + "recurrent_boundary_choice"
PINS = CORE + "recurrent_boundary_pins"
BOUNDARIES = CORE + "recurrent_boundaries"
RECOVERY = CORE + "hybrid_load_recovery"
SCHEDULER = CORE + "sched.scheduler"
MANAGER = CORE + "kv_cache_manager"
GROUPS = CORE + "single_type_kv_cache_manager"
MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

# Whatever takes long to import and does not import what the mutants change.
COSTLY_IMPORTS = (
    "torch",
    "hypothesis.stateful",
    "pytest",
    "vllm.config",
    "vllm.sampling_params",
    "vllm.v1.core.block_pool",
    "vllm.v1.structured_output",
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer",
)

PROOF, CHOSEN, LIFETIMES, OPT_IN, LOADS, DOC, RANDOM = (
    f"test_overlay_{name}.py"
    for name in ("proof", "chosen", "lifetimes", "opt_in", "load_failure", "doc", "random")
)
SUITE = (PROOF, OPT_IN, LOADS, LIFETIMES, CHOSEN, DOC, RANDOM)


@dataclass(frozen=True)
class Mutant:
    """One change of one place; ``likely`` is the file whose tests are tried first."""

    name: str
    module: str
    old: str
    new: str
    likely: str


MUTANTS = (
    # What is proven
    Mutant("the hash is not compared", BOUNDARIES,
           "and self.block.block_hash == self.block_hash", "", PROOF),
    Mutant("the token count is not compared", BOUNDARIES,
           "and self.block.block_hash_num_tokens == self.boundary", "", PROOF),
    Mutant("a part of the groups is enough", BOUNDARIES,
           "if len(proven) == len(self._recurrent):", "if proven:", PROOF),
    Mutant("the slot after the boundary's", BOUNDARIES,
           "slot = boundary // manager.block_size - 1", "slot = boundary // manager.block_size",
           PROOF),
    Mutant("the last entry of the table", BOUNDARIES,
           "block = blocks[slot]", "block = blocks[-1]", PROOF),
    Mutant("any call past a boundary offers it", BOUNDARIES,
           "if num_tokens not in choice.targets:",
           "num_tokens = max((t for t in choice.targets if 0 < t <= num_tokens), default=-1)\n"
           "        if num_tokens < 0:", PROOF),
    Mutant("every aligned chunk end is offered", BOUNDARIES,
           "if num_tokens not in choice.targets:", "if num_tokens % 2304:", PROOF),
    Mutant("proof is not checked again at the hand-over", BOUNDARIES,
           "[entry.ready[g] for g in sorted(entry.ready) if entry.ready[g].is_proven]",
           "[entry.ready[g] for g in sorted(entry.ready)]", PROOF),
    Mutant("a tail that a running step advanced is trusted", BOUNDARIES,
           "if num_tokens == request.num_computed_tokens:", "if True:", OPT_IN),
    Mutant("a tail that a running step advanced serves hits", BOUNDARIES,
           "self._hide_advanced_tail(request, num_tokens)", "pass", OPT_IN),
    Mutant("the tail of a load is forgotten", BOUNDARIES,
           "            self._expect_own_tail(request, num_tokens)\n        else:",
           "            pass\n        else:", OPT_IN),
    # Boundaries inside a block, retention
    Mutant("a chosen copy goes into vLLM's own field", BOUNDARIES,
           "return not entry.is_own_tail", "return False", CHOSEN),
    Mutant("vLLM's own tail is taken out of its field", BOUNDARIES,
           "return not entry.is_own_tail", "return True", OPT_IN),
    Mutant("the registered state serves hits at once", BOUNDARIES,
           "manager.cached_blocks_this_step.add(block_hash)", "pass", CHOSEN),
    Mutant("the unmasked state serves hits at once", BOUNDARIES,
           "manager.cached_blocks_this_step.add(block.block_hash)", "pass", CHOSEN),
    Mutant("a given-up copy keeps its hash", BOUNDARIES,
           "self._pool.evict_blocks({block.block_id})", "pass", CHOSEN),
    Mutant("copies are never given up", BOUNDARIES,
           "return bool(cancelled)", "return False", CHOSEN),
    Mutant("the mask hides chosen boundaries", BOUNDARIES,
           "            chosen\n            and not block.is_null",
           "            False\n            and not block.is_null", CHOSEN),
    Mutant("the mask hides no boundary", BOUNDARIES,
           "            chosen\n            and not block.is_null",
           "            True\n            and not block.is_null", CHOSEN),
    # Lifetimes
    Mutant("a pin takes no reference", PINS,
           "self._block_pool.touch((block,))", "pass", LIFETIMES),
    Mutant("a pin takes two references", PINS,
           "self._block_pool.touch((block,))", "self._block_pool.touch((block, block))", LIFETIMES),
    Mutant("cleanup forgets one pin", PINS,
           "return list(pins.values())", "return list(pins.values())[1:]", LIFETIMES),
    Mutant("serials are reused", PINS,
           "serial = next(self._next_serial)", "serial = len(self._request_of) + 1", LIFETIMES),
    Mutant("True is a serial", PINS,
           "            if type(serial) is not int:\n                continue\n"
           "            request_id =",
           "            if not isinstance(serial, int):\n                continue\n"
           "            request_id =", LIFETIMES),
    Mutant("undelivered candidates outlive their request", BOUNDARIES,
           "self._undelivered.pop(request_id, None)", "pass", LIFETIMES),
    Mutant("the choice outlives the admission", BOUNDARIES,
           "self._choices.forget(request_id)", "pass", CHOSEN),
    Mutant("free ends no pin", MANAGER,
           "self.block_pool.free_blocks(\n"
           "            self.recurrent_boundaries.forget(request.request_id)\n        )",
           "pass", LIFETIMES),
    Mutant("deferred free ends no pin", MANAGER,
           "return self.recurrent_boundaries.forget(request.request_id) + blocks",
           "return blocks", LIFETIMES),
    Mutant("recycling is not deferred for the opted-in", SCHEDULER,
           "kv_transfer_config.is_kv_consumer or opts_in(self.connector)",
           "kv_transfer_config.is_kv_consumer", LIFETIMES),
    Mutant("captured pins are not drained", SCHEDULER,
           "if captured_blocks := self.recurrent_boundaries.take_captured():",
           "if captured_blocks := None:", LIFETIMES),
    # Several connectors
    Mutant("one child's release is enough", PINS,
           "if len(votes) == len(voters):", "if votes:", LIFETIMES),
    Mutant("children that did not opt in have a vote", PINS,
           "voters = {i: c for i, c in enumerate(connectors) if opts_in(c)}",
           "voters = dict(enumerate(connectors))", LIFETIMES),
    Mutant("votes outlive their pins", PINS,
           "for request_id in gone & self._serials_of.keys():", "for request_id in ():", LIFETIMES),
    Mutant("spent serials open new votes", PINS,
           "continue  # spent", "pass", LIFETIMES),
    Mutant("all children must opt in", MULTI,
           "return any(\n            c.supports_recurrent_boundary_blocks is True",
           "return all(\n            c.supports_recurrent_boundary_blocks is True", LIFETIMES),
    Mutant("children that did not opt in are asked", CHOICE,
           "for connector in filter(opts_in, connectors):", "for connector in connectors:",
           LIFETIMES),
    # Opting in
    Mutant("something truthy opts in", CHOICE,
           'return getattr(connector, "supports_recurrent_boundary_blocks", False) is True',
           'return bool(getattr(connector, "supports_recurrent_boundary_blocks", False))', OPT_IN),
    Mutant("a pure consumer is offered blocks", BOUNDARIES,
           "if not (opts_in(connector) and is_kv_producer):", "if not opts_in(connector):", OPT_IN),
    # Choice and stops
    Mutant("the replay boundary at the prompt's end", CHOICE,
           "return (num_prompt_tokens - 1) // hash_block_size",
           "return num_prompt_tokens // hash_block_size", PROOF),
    Mutant("a stop at the very end of the budget is missed", CHOICE,
           "if start < b <= end]", "if start < b < end]", CHOSEN),
    Mutant("the last stop instead of the first", CHOICE,
           "        return min(\n            (stop for stop in candidates",
           "        return max(\n            (stop for stop in candidates", CHOSEN),
    Mutant("a chunk runs past the end of a block", CHOICE,
           "if start < block_end <= end:", "if False:", CHOSEN),
    Mutant("a stop stalls multi-module MTP", CHOICE,
           "if 0 < request.num_tokens - stop < self.prefill_lookahead:", "if False:", CHOSEN),
    Mutant("a stop splits a multimodal item", CHOICE,
           "if not self.whole_mm_items:", "if True:", CHOSEN),
    Mutant("the drafter's reach is not counted before an item", CHOICE,
           "item.mm_position.offset - self.prefill_lookahead", "item.mm_position.offset", CHOSEN),
    Mutant("a stop inside a block without fine hits", CHOICE,
           "if not self.inside_blocks or not", "if not", CHOSEN),
    Mutant("the prompt's length is a valid boundary", CHOICE,
           "if not 0 < b < num_prompt_tokens or b % unit",
           "if not 0 < b <= num_prompt_tokens or b % unit", CHOSEN),
    Mutant("any multiple is valid", CHOICE,
           "if not 0 < b < num_prompt_tokens or b % unit",
           "if not 0 < b < num_prompt_tokens", CHOSEN),
    Mutant("True is a boundary", CHOICE,
           "all(type(b) is int for b in answer)", "all(isinstance(b, int) for b in answer)",
           CHOSEN),
    Mutant("the connector is asked in every pass", CHOICE,
           "if choice is None or choice.num_prompt_tokens != request.num_prompt_tokens:",
           "if True:", CHOSEN),
    Mutant("a grown prompt keeps its old choice", CHOICE,
           "if choice is None or choice.num_prompt_tokens != request.num_prompt_tokens:",
           "if choice is None:", CHOSEN),
    Mutant("an invalid answer falls back to the replay boundary", CHOICE,
           "            unit,\n            num_prompt_tokens,\n        )\n"
           "        return Choice(num_prompt_tokens, (), frozenset())",
           "            unit,\n            num_prompt_tokens,\n        )\n"
           "        return Choice(num_prompt_tokens, (), "
           "frozenset({replay_boundary(num_prompt_tokens, unit)}))", CHOSEN),
    Mutant("the chunk is floored before the stop", SCHEDULER,
           "        elif end < prefill_end:", "        if end < prefill_end:", CHOSEN),
    Mutant("copies are paid for with preemptions", SCHEDULER,
           "if self.recurrent_boundaries.give_up_copies(request.request_id):", "if False:", CHOSEN),
    Mutant("a lonely request takes the same pins again", SCHEDULER,
           "self.recurrent_boundaries.offer_nothing_of(request)", "pass", CHOSEN),
    # Failed loads
    Mutant("the null block fails every load", RECOVERY,
           "invalid = invalid_block_ids - {kv_cache_manager.block_pool.null_block.block_id}",
           "invalid = invalid_block_ids", LOADS),
    Mutant("running requests are sent back too", RECOVERY,
           "if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS",
           "if not request.is_finished()", LOADS),
    Mutant("a failed load keeps its tokens", RECOVERY,
           "request.num_computed_tokens = 0", "pass", LOADS),
    Mutant("only the first group can fail", RECOVERY,
           "*kv_cache_manager.get_block_ids(request.request_id)",
           "*kv_cache_manager.get_block_ids(request.request_id)[:1]", LOADS),
    Mutant("one group is treated like several", SCHEDULER,
           "if len(self.kv_cache_config.kv_cache_groups) > 1:",
           "if len(self.kv_cache_config.kv_cache_groups) > 0:", LOADS),
    Mutant("failed hybrid loads are not retried", SCHEDULER,
           "self.failed_recving_kv_req_ids |= failed_req_ids", "pass", LOADS),
    Mutant("a failed load keeps its reservation", SCHEDULER,
           "self._inflight_prefills -= {self.requests[i] for i in failed_req_ids}", "pass", LOADS),
    Mutant("a load takes fewer blocks than none", GROUPS,
           "max(cdiv(num_total_computed_tokens, self.block_size) - len(req_blocks), 0)",
           "cdiv(num_total_computed_tokens, self.block_size) - len(req_blocks)", LOADS),
)  # fmt: skip


class Mutated(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text()
        if source.count(self.mutant.old) != 1:
            sys.stderr.write(f"{self.mutant.name}: its place is not in {fullname} exactly once\n")
            os._exit(70)
        changed = source.replace(self.mutant.old, self.mutant.new)
        return compile(changed, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        loader = Mutated(fullname, spec.origin)
        loader.mutant = self.mutant
        spec.loader = loader
        return spec


def in_child(mutant: Mutant, log: Path) -> int:
    """Run the suite on one mutant; the exit code of pytest, or 70 if it does not apply."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os._exit(_run_suite(mutant, log))
    except BaseException:
        traceback.print_exc()
        os._exit(71)


def _run_suite(mutant: Mutant, log: Path) -> int:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.meta_path.insert(0, Finder(mutant))
    import pytest

    files = (mutant.likely, *(name for name in SUITE if name != mutant.likely))
    options = ["-q", "-x", "--tb=line", "--show-capture=no", "-p", "no:asyncio"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *(str(HERE / name) for name in files)]))


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or any(n in m.name for n in names)]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["SPARKCACHE_MUTANT"] = "1"
    os.chdir(ROOT)
    for name in COSTLY_IMPORTS:
        importlib.import_module(name)
    loaded = {m.module for m in chosen} & sys.modules.keys()
    assert not loaded, f"imported before they could be changed: {loaded}"
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            log = Path(scratch) / "log"
            code = in_child(mutant, log)
            verdict = {1: "killed", 0: "SURVIVED"}.get(code, f"BROKEN (exit {code})")
            by = ""
            if code == 1:
                failed = [x for x in log.read_text().splitlines() if x.startswith("FAILED")]
                by = " by " + failed[0].split("::")[1].split(" ")[0] if failed else ""
            else:
                survivors.append(mutant.name)
                if code:
                    sys.stderr.write(log.read_text()[-600:])
            seconds = time.monotonic() - began
            print(
                f"{number:3}/{len(chosen)} {verdict:9} {seconds:5.1f}s {mutant.name}{by}",
                flush=True,
            )
    print(
        f"mutants: {len(chosen) - len(survivors)} of {len(chosen)} killed"
        + (f"; alive: {', '.join(survivors)}" if survivors else "")
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
