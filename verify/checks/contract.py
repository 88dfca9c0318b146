"""CONTRACT: the files on which the connector's assumptions about block lifetime rest.

1. ``contract.json`` is the pinned one, is for this target, and agrees with the pins.
2. Every file of the contract has bytes that it accepts in some state.
3. All files are in the one state that was asked for; a tree passes only as a whole.
4. Where bytes are not accepted: which of the required symbols changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from verify.anchor import Anchor
from verify.checks.base import Basis
from verify.digest import Digest, ReadError
from verify.errors import FormatError
from verify.expect import composed_manifest
from verify.holders import Holder, hidden
from verify.pins import UPSTREAM, Contract, ContractFile
from verify.report import Recorder
from verify.symbols import fingerprints


def judge_contract(anchor: Anchor, basis: Basis, rec: Recorder) -> Contract | None:
    """Run step 1; None when there is no contract to judge with."""
    # (1)
    pins = basis.pins
    if anchor.contract is None:
        rec.fail(
            "CONTRACT-1",
            "contract.json",
            "the contract beside the pins is missing",
            expected=pins.contract_sha256,
            actual="no file",
        )
        return None
    actual = hashlib.sha256(anchor.contract).hexdigest()
    if actual != pins.contract_sha256:
        rec.fail(
            "CONTRACT-1",
            "contract.json",
            "not the pinned contract",
            expected=pins.contract_sha256,
            actual=actual,
        )
        return None
    try:
        contract = Contract.parse(anchor.contract, "contract.json")
    except FormatError as error:
        rec.fail("CONTRACT-1", "contract.json", str(error))
        return None
    for place, expected, found in _disagreements(contract, basis):
        message = f"the contract does not agree with the pins: {place}"
        rec.fail("CONTRACT-1", "contract.json", message, expected=expected, actual=found)
    rec.passed("CONTRACT-1", f"{len(contract.files)} files, {actual[:16]}…")
    return None if rec.tripped("CONTRACT-1") else contract


def judge_state(
    contract: Contract,
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    state: str,
    rec: Recorder,
) -> None:
    """Run steps 2 to 4: the files of ``holder`` are the contract's, in ``state``."""
    elsewhere: dict[str, list[str]] = {}
    for file in contract.files:
        digest = digests.get(file.path)
        if isinstance(digest, ReadError) or (digest is None and hidden(holder, file.path)):
            continue  # reported already
        actual = digest.sha256 if digest is not None else None
        states = {name for name, accepted in file.sha256.items() if accepted == actual}
        if not states:
            # (2)
            rec.fail(
                "CONTRACT-2",
                file.path,
                "the contract accepts these bytes in no state",
                expected=_accepted(file),
                actual=actual or "no file",
            )
            # (4)
            if digest is not None:
                _judge_symbols(holder, file, state, rec)
        elif state not in states:
            elsewhere.setdefault(", ".join(sorted(states)), []).append(file.path)
    # (3)
    for states_found, paths in sorted(elsewhere.items()):
        rec.fail(
            "CONTRACT-3",
            paths[0] if len(paths) == 1 else None,
            f"{len(paths)} of {len(contract.files)} files are in another state: "
            + ", ".join(paths),
            expected=f"every file in state {state}",
            actual=f"state {states_found}",
        )
    for check in ("CONTRACT-2", "CONTRACT-3", "CONTRACT-4"):
        rec.passed(check, f"{len(contract.files)} files in state {state}")


def _disagreements(contract: Contract, basis: Basis) -> Iterator[tuple[str, str, str]]:
    pins = basis.pins
    if contract.target != pins.target:
        yield "target", pins.target, contract.target
    if contract.version != pins.version:
        yield "version", pins.version, contract.version
    states = {UPSTREAM, pins.state}
    if not states <= contract.states.keys():
        yield "states", ", ".join(sorted(states)), ", ".join(sorted(contract.states))
        return
    truth = {
        UPSTREAM: basis.release.files,
        pins.state: composed_manifest(pins, basis.release).files,
    }
    for file in contract.files:
        for state, files in truth.items():
            known = files.get(file.path)
            expected = known.sha256 if known is not None else None
            if file.sha256[state] != expected:
                place = f"{file.path} in state {state}"
                yield place, expected or "absent", file.sha256[state] or "absent"


def _accepted(file: ContractFile) -> str:
    return " or ".join(
        f"{sha256 or 'no file'} ({state})" for state, sha256 in sorted(file.sha256.items())
    )


def _judge_symbols(holder: Holder, file: ContractFile, state: str, rec: Recorder) -> None:
    # (4)
    try:
        found = fingerprints(holder.read(file.path), file.path)
    except FormatError as error:
        rec.fail("CONTRACT-4", file.path, str(error), expected="Python source")
        return
    except ReadError as error:
        rec.fail("CONTRACT-4", file.path, str(error), expected=error.expected, actual=error.actual)
        return
    for symbol, by_state in sorted(file.symbols.items()):
        expected = by_state[state]
        if found.get(symbol) != expected:
            rec.fail(
                "CONTRACT-4",
                file.path,
                f"the connector relies on {symbol}, which has changed",
                expected=expected or "no such symbol",
                actual=found.get(symbol, "no such symbol"),
            )
