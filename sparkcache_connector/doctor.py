"""Why nothing hits, in one page: what the ranks of one machine hold, compared.

Looks at everything under ``spark_cache_root``: the cache root of each rank, and the
identities that engines left there when they started. Reads only, beside a running engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sparkcache_connector.identity import SCHEMA, difference
from sparkcache_connector.store.errors import StoreError
from sparkcache_connector.store.view import View
from sparkcache_connector.telemetry.health import DIRECTORY as HEALTH
from sparkcache_connector.telemetry.health import Health, read_health

IDENTITIES: Final = "identities"
_RANK: Final = re.compile(r"(?:replica-\d+-)?rank-(\d+)")
_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's cache root.

    Attributes:
        name: directory, e.g. ``rank-0``.
        rank: its rank.
        owner: process id of the engine that runs on it, or None.
        current: identity of the engine that started last, in hexadecimal; empty if unknown.
        roots: per identity its context digests.
        quarantined: roots out of service because their bytes were wrong.
        problem: why the cache root cannot be read; empty otherwise.
        health: what the engine that ran on it last said of itself, or None.
    """

    name: str
    rank: int
    owner: int | None = None
    current: str = ""
    roots: Mapping[str, frozenset[bytes]] | None = None
    quarantined: int = 0
    problem: str = ""
    health: Health | None = None

    @property
    def held(self) -> frozenset[bytes]:
        """Roots that the current identity can restore."""
        return (self.roots or {}).get(self.current, frozenset())


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        ranks: one state per cache root.
        common: roots that every rank here holds under its current identity.
        findings: what keeps requests from hitting, most telling first; empty if nothing does.
    """

    ranks: tuple[RankState, ...]
    common: int
    findings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data for scripts."""
        return {
            "ranks": [
                {
                    "name": state.name,
                    "owner_pid": state.owner,
                    "identity": state.current,
                    "roots": len(state.held),
                    "other_identities": {
                        name: len(roots)
                        for name, roots in sorted((state.roots or {}).items())
                        if name != state.current
                    },
                    "quarantined": state.quarantined,
                    "problem": state.problem,
                    "off": dict(state.health.off) if state.health else {},
                    "failures": dict(state.health.failures) if state.health else {},
                }
                for state in self.ranks
            ],
            "roots_on_every_rank": self.common,
            "findings": list(self.findings),
        }

    def as_text(self) -> Iterator[str]:
        """One page."""
        for state in self.ranks:
            runs = f"engine {state.owner}" if state.owner is not None else "no engine"
            others = len(state.roots or {}) - (state.current in (state.roots or {}))
            yield (
                f"{state.name}: {runs}, identity {state.current[:16] or 'unknown'}, "
                f"{len(state.held)} roots, {others} other identities"
            )
        yield f"roots on every rank: {self.common}"
        yield from self.findings or ("nothing here keeps requests from hitting",)


def examine(root: Path, key_file: str | None = None) -> Diagnosis:
    """Look at everything under ``spark_cache_root``."""
    described = _identities(root / IDENTITIES)
    names = sorted(path.name for path in root.iterdir() if _RANK.fullmatch(path.name))
    ranks = tuple(
        replace(
            _state(root / name, described, key_file),
            health=read_health(root / HEALTH / f"{name}.json"),
        )
        for name in names
    )
    common = frozenset.intersection(*(state.held for state in ranks)) if ranks else frozenset()
    findings = list(_findings(ranks, described, common))
    return Diagnosis(ranks, len(common), tuple(findings))


def _identities(directory: Path) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """What identities stand for, with the time when an engine last started with each."""
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    if not directory.is_dir():
        return found
    for path in directory.glob("*.json"):
        try:
            document = json.loads(path.read_bytes())
            if isinstance(document, dict) and document.get("schema") == SCHEMA:
                found[path.stem] = (path.stat().st_mtime_ns, document)
        except (OSError, ValueError, RecursionError):
            continue
    return found


def _state(
    path: Path, described: Mapping[str, tuple[int, Mapping[str, Any]]], key_file: str | None
) -> RankState:
    match = _RANK.fullmatch(path.name)
    assert match is not None
    rank = int(match[1])
    mine = [(when, name) for name, (when, doc) in described.items() if doc.get("rank") == rank]
    current = max(mine)[1] if mine else ""
    try:
        with View.open(path, key_file) as view:
            roots = {
                digest.hex(): frozenset(view.catalog.contexts(digest))
                for digest, *_ in view.catalog.identities()
            }
            quarantined = len(view.area.quarantine.names())
            return RankState(path.name, rank, view.owner, current, roots, quarantined)
    except StoreError as error:
        return RankState(path.name, rank, current=current, problem=str(error))


def _findings(
    ranks: Sequence[RankState],
    described: Mapping[str, tuple[int, Mapping[str, Any]]],
    common: frozenset[bytes],
) -> Iterator[str]:
    if not ranks:
        yield "no rank has a cache root here: is this the engine's spark_cache_root?"
    for state in ranks:
        yield from _said(state)
    for state in ranks:
        if state.problem:
            yield f"{state.name}: {state.problem}"
        elif not state.current:
            yield f"{state.name}: no engine left its identity here; start one"
        elif not state.held and state.roots:
            yield from _changed(state, described)
        if state.quarantined:
            yield f"{state.name}: {state.quarantined} roots with wrong bytes are in quarantine"
    for state in ranks:
        lacking = frozenset().union(*(s.held for s in ranks)) - state.held
        if lacking and state.current:
            yield f"{state.name}: lacks {len(lacking)} roots that other ranks hold; none is offered"
    for state in ranks[:1]:
        degree = described.get(state.current, (0, {}))[1].get("tensor_parallel", len(ranks))
        if degree > len(ranks):
            yield f"{degree - len(ranks)} of {degree} ranks have their cache roots elsewhere"
    if ranks and not common and not any(state.roots for state in ranks):
        yield "nothing is stored yet: serve a prompt longer than spark_cache_min_span_tokens"


def _said(state: RankState) -> Iterator[str]:
    """What the engine said of itself, running or not."""
    health = state.health
    if health is None:
        return
    whose = f"engine {health.pid}" if state.owner == health.pid else "the last engine, now ended"
    for what, reason in sorted(health.off.items()):
        yield f"{state.name}: {what} is off ({whose}): {reason}"
    for what, reasons in sorted(health.failures.items()):
        if reasons:
            counted = ", ".join(f"{times} {reason}" for reason, times in sorted(reasons.items()))
            yield f"{state.name}: {what} that failed ({whose}): {counted}"


def _changed(
    state: RankState, described: Mapping[str, tuple[int, Mapping[str, Any]]]
) -> Iterator[str]:
    """The identity changed: say in what, against the identity with the most roots."""
    roots = state.roots or {}
    other = max(roots, key=lambda name: len(roots[name]))
    yield (
        f"{state.name}: the engine that started last has another identity than the "
        f"{len(roots[other])} roots stored under {other[:16]}"
    )
    if other not in described:
        yield "  what that identity stands for was not recorded"
        return
    for name, (was, now) in difference(described[other][1], described[state.current][1]).items():
        yield f"  {name}: {_short(was)} -> {_short(now)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
