"""PKG 8 and 9: the interpreter would import the vLLM that was judged.

8. Of all places on the import path, the first that provides vLLM is the judged one; it is
   installed as one distribution, not as a source tree, a module or a zip file.
9. No code runs at start that cannot be judged: it could put another vLLM first, or change
   the one that was judged after it is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from verify.interpreter import Candidate, Environment
from verify.report import Recorder

_KINDS = {
    "namespace": "a directory without __init__",
    "module": "a single module",
    "zip": "a zip file",
    "editable": "an editable install",
}


def judge_candidates(
    env: Environment, within: Sequence[Path] | None, rec: Recorder
) -> Candidate | None:
    """Run step 8 up to the place; return the one to judge.

    ``within`` are the directories of which one must provide vLLM; None accepts any.
    """
    # (8)
    for problem in env.unknowns:
        rec.undecided("PKG-8", None, f"which vLLM would be imported is not certain: {problem}")
    candidates = env.candidates("vllm")
    wanted = [each for each in candidates if within is None or each.entry.path in within]
    if not wanted:
        where = ", ".join(str(entry.path) for entry in env.entries)
        message = "no vLLM would be imported"
        rec.fail("PKG-8", None, message, expected=f"vllm/ in one of {where}", actual="none")
        return None
    chosen = wanted[0]
    if candidates[0] is not chosen:
        first = candidates[0]
        rec.fail(
            "PKG-8",
            str(first.path),
            f"another vLLM would be imported first: {first.entry.why}",
            expected=str(chosen.path),
            actual=str(first.path),
        )
    if chosen.kind in _KINDS:
        rec.fail(
            "PKG-8",
            str(chosen.path),
            f"vLLM would be imported from {_KINDS[chosen.kind]}",
            expected="a package of an installed wheel",
            actual=_KINDS[chosen.kind],
        )
    for other in candidates:
        if other is not chosen and other is not candidates[0]:
            rec.note("PKG-8", str(other.path), f"a vLLM that is never imported: {other.entry.why}")
    return chosen


def judge_distributions(names: Sequence[str], expected: Collection[str], rec: Recorder) -> None:
    """Run step 8 for the distributions that own files of ``vllm/``."""
    # (8)
    if len(names) != 1:
        rec.fail(
            "PKG-8",
            None,
            "vllm/ does not belong to exactly one distribution",
            expected=" or ".join(sorted(expected)),
            actual=", ".join(names) or "none",
        )


def judge_startup(env: Environment, accepted: Collection[str], rec: Recorder) -> None:
    """Run step 9; ``accepted`` are digests of files that the caller knows."""
    # (9)
    for each in env.startup:
        if each.known is not None:
            rec.note("PKG-9", str(each.file), f"runs at start: {each.known}")
        elif each.sha256 is not None and each.sha256 in accepted:
            rec.note("PKG-9", str(each.file), f"runs at start and is accepted: {each.what}")
        else:
            rec.undecided(
                "PKG-9",
                str(each.file),
                f"code that cannot be judged runs at start: {each.what}",
                expected="no code, or an accepted digest",
                actual=f"sha256 {each.sha256}" if each.sha256 else "a file that cannot be read",
            )
    rec.passed("PKG-9", f"{len(env.startup)} pieces of code, all known")
    rec.passed("PKG-8", f"{len(env.entries)} path entries")
