"""Is the installed vLLM a tree that this connector knows? Checked before anything else.

``contract.json`` (docs/build.md) lists, per file that the connector's assumptions rest on,
the SHA-256 that the file has in each known state of the tree. The steps:

1. read and parse the contract; anything unknown in it refuses;
2. digest every file it names, remembered by file identity;
3. the tree is in state S only if *every* file is; a mixture is refused with its files;
4. the unpatched state serves attention-only models and says so; models with recurrent state
   need the overlay.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Final

from sparkcache_connector.errors import ContractError
from sparkcache_connector.file_memo import DigestMemo, FileIdentity, is_digest

SCHEMA: Final = "sparkcache.contract/v1"
UPSTREAM: Final = "upstream"
ABSENT: Final = "absent"
MEMO_ALGORITHM: Final = "sha256"
_NAMED_FILES: Final = 4


@dataclass(frozen=True, slots=True)
class ContractFile:
    """One file and, per state, its SHA-256 or None where it must be absent."""

    path: str
    sha256: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Contract:
    """The parsed contract.

    Attributes:
        target: e.g. ``v0.28.0``.
        version: the release's version.
        states: what each state of the tree is, in words.
        files: what to look at.
        sha256: digest of the very bytes that were parsed.
    """

    target: str
    version: str
    states: Mapping[str, str]
    files: tuple[ContractFile, ...]
    sha256: str

    @classmethod
    def parse(cls, data: bytes, source: str = "contract.json") -> Contract:
        """Read a contract.

        Raises:
            ContractError: it is not one, or not of a schema that is known here.
        """
        try:
            document: Any = json.loads(data, object_pairs_hook=_no_duplicates)
            return cls._from(document, hashlib.sha256(data).hexdigest())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ContractError(
                source,
                expected=f"a lease contract of schema {SCHEMA}",
                found=f"{type(error).__name__}: {error}",
                next_step="install the connector again from the bundle of this vLLM",
            ) from None

    @classmethod
    def _from(cls, document: Any, digest: str) -> Contract:
        if set(document) != {"schema", "target", "version", "states", "files"}:
            raise ValueError(f"keys {sorted(document)}")
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        states: dict[str, str] = dict(document["states"])
        files = tuple(_file(entry, set(states)) for entry in document["files"])
        if not files or len({file.path for file in files}) != len(files):
            raise ValueError("no files, or one file twice")
        if UPSTREAM not in states:
            raise ValueError(f"states {sorted(states)} without {UPSTREAM!r}")
        return cls(str(document["target"]), str(document["version"]), states, files, digest)


@dataclass(frozen=True, slots=True)
class Examination:
    """What a tree is.

    Attributes:
        state: the state that every file is in, or None for a mixture.
        files: per file what was found: its states, or ``absent``, or its digest.
    """

    state: str | None
    files: Mapping[str, str]


def shipped_contract(version: str) -> Contract:
    """The contract that came with this package, or with the checkout it runs from.

    Raises:
        ContractError: there is none for this version of vLLM.
    """
    package = resources.files("sparkcache_connector")
    checkout = Path(str(package)).parent / "overlay" / "targets"
    public = version.partition("+")[0]
    for candidate in (package / "contract.json", checkout / f"v{public}" / "contract.json"):
        try:
            data = candidate.read_bytes()
        except OSError:
            continue
        contract = Contract.parse(data, str(candidate))
        if contract.version == public:
            return contract
    raise ContractError(
        f"vLLM {version}",
        expected="a version that a shipped lease contract describes",
        found="none",
        next_step="install the vLLM wheel and the connector wheel of one bundle",
    )


def examine(site: Path, contract: Contract, memo: DigestMemo) -> Examination:
    """Look at the tree under ``site``, the directory that holds ``vllm/``; steps 2 and 3."""
    possible = set(contract.states)
    found: dict[str, str] = {}
    for file in contract.files:  # (2)
        digest = _digest(site / file.path, memo)
        states = {state for state, accepted in file.sha256.items() if accepted == digest}
        possible &= states
        found[file.path] = " or ".join(sorted(states)) or digest or ABSENT
    memo.save()
    # (3) Two states that agree on every file are one tree; the patched name is the richer one.
    state = max(possible, key=lambda s: (s != UPSTREAM, s)) if possible else None
    return Examination(state, found)


def require(site: Path, contract: Contract, memo: DigestMemo, *, recurrent: bool) -> str:
    """Refuse a tree that is not known, or that cannot serve this model; step 4.

    Args:
        site: directory that holds ``vllm/``.
        contract: what to expect.
        memo: SHA-256 digests by file identity.
        recurrent: whether the model has recurrent groups.

    Returns:
        The state of the tree.

    Raises:
        ContractError: naming the files that do not fit.
    """
    examination = examine(site, contract, memo)
    if examination.state is None:
        raise _mixture(site, contract, examination)
    if recurrent and examination.state == UPSTREAM:
        raise ContractError(
            f"vLLM in {site}",
            expected="the patched tree, because this model has recurrent state",
            found=f"state {UPSTREAM!r}: {contract.states[UPSTREAM]}",
            next_step=f"install the {contract.target} wheel of the bundle",
        )
    return examination.state


def _mixture(site: Path, contract: Contract, examination: Examination) -> ContractError:
    # Shown against the state that most files are in: those that differ are the odd ones.
    fits = {
        state: [f for f in contract.files if state in examination.files[f.path].split(" or ")]
        for state in contract.states
    }
    nearest = max(fits, key=lambda s: (len(fits[s]), s != UPSTREAM))
    odd = [f.path for f in contract.files if f not in fits[nearest]]
    shown = ", ".join(f"{path} ({examination.files[path]})" for path in odd[:_NAMED_FILES])
    more = f" and {len(odd) - _NAMED_FILES} more" if len(odd) > _NAMED_FILES else ""
    return ContractError(
        f"vLLM in {site}",
        expected=f"every file of the lease contract in one state, e.g. {nearest!r}",
        found=f"{shown}{more}",
        next_step=f"install the {contract.target} wheel of the bundle again, whole",
    )


def _digest(path: Path, memo: DigestMemo) -> str | None:
    try:
        with path.open("rb") as file:
            before = FileIdentity.of(os.fstat(file.fileno()))
            known = memo.get(before)
            if known is not None:
                return known
            started = time.time_ns()
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = FileIdentity.of(os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ContractError(
            str(path),
            expected="a readable file",
            found=error.strerror or type(error).__name__,
            next_step="repair the installation, then start again",
        ) from error
    if before == after and before.settled_at(started):
        memo.put(before, digest)
    return digest


def _file(entry: Any, states: set[str]) -> ContractFile:
    if not {"path", "sha256"} <= set(entry) <= {"path", "sha256", "symbols"}:
        raise ValueError(f"keys {sorted(entry)} of a file")
    path, digests = str(entry["path"]), dict(entry["sha256"])
    parts = PurePosixPath(path).parts
    if PurePosixPath(path).is_absolute() or not {".", ".."}.isdisjoint(parts) or len(parts) < 2:
        raise ValueError(f"path {path!r}")
    if set(digests) != states:
        raise ValueError(f"states {sorted(digests)} of {path}")
    if not all(d is None or (isinstance(d, str) and is_digest(d)) for d in digests.values()):
        raise ValueError(f"digests of {path}")
    return ContractFile(path, digests)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key twice")
    return result
