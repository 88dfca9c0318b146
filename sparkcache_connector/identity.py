"""The identity: everything that must be equal for stored bytes to be reusable.

An identity is written as canonical JSON (sorted keys, no spaces, ASCII) and named by the
BLAKE3 digest of exactly those bytes. Two identities that differ anywhere never meet. A
value that is not known is not left out: it refuses, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from blake3 import blake3

from sparkcache_connector.errors import IdentityError

SCHEMA: Final = "sparkcache-identity/v1"
_CONTEXT: Final = "sparkcache 2026-11 identity v1"

FULL: Final = "full"
SLIDING: Final = "sliding"
RECURRENT: Final = "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIdentity:
    """One KV cache group as it lies in memory.

    Attributes:
        kind: ``full``, ``sliding`` or ``recurrent``.
        spec: the engine's class name of the group's spec.
        block_tokens: tokens per block; for a recurrent group the distance of its boundaries.
        window_tokens: sliding window, 0 without one.
        page_bytes: stored bytes of one page on one rank.
        layers: layer names in the order in which a page lists them.
        layout: per layer what the engine registered: shape of a page, strides, dtype.
    """

    kind: str
    spec: str
    block_tokens: int
    window_tokens: int
    page_bytes: int
    layers: tuple[str, ...]
    layout: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one rank's bytes depend on. Text fields must not be empty unless said otherwise.

    Attributes:
        namespace: the operator's free text; may be empty.
        target_weights: digest of the target model's weights, or the operator's name for them.
        draft_weights: the same for a draft model; empty without one.
        model: canonical JSON of everything in the model configuration that reaches compute.
        quantization: quantization method and its settings; ``none`` without.
        model_dtype: dtype of activations.
        kv_cache_dtype: dtype of the KV cache, resolved (never ``auto``).
        attention_backend: backend per layer class, and its memory layout.
        engine_version: vLLM's version with its local part.
        overlay: digest of the contract state that the installed tree is in.
        tensor_parallel: degree.
        decode_context_parallel: degree.
        rank: this rank inside the tensor-parallel group.
        chunk_tokens: tokens per link of the context digest.
        groups: the KV cache groups in the engine's order.
    """

    namespace: str
    target_weights: str
    draft_weights: str
    model: str
    quantization: str
    model_dtype: str
    kv_cache_dtype: str
    attention_backend: str
    engine_version: str
    overlay: str
    tensor_parallel: int
    decode_context_parallel: int
    rank: int
    chunk_tokens: int
    groups: tuple[GroupIdentity, ...]

    def __post_init__(self) -> None:
        for item in fields(self):
            _require_known(item.name, getattr(self, item.name))
        for index, group in enumerate(self.groups):
            for item in fields(group):
                _require_known(f"groups[{index}].{item.name}", getattr(group, item.name))
        if not 0 <= self.rank < self.tensor_parallel:
            raise _unknown("rank", f"{self.rank} of {self.tensor_parallel}")

    def to_bytes(self) -> bytes:
        """The canonical JSON that is hashed, stored and shown."""
        return canonical_json({"schema": SCHEMA, **asdict(self)})

    def digest(self) -> bytes:
        """The 32-byte name of this identity."""
        return blake3(self.to_bytes(), derive_key_context=_CONTEXT).digest()


def canonical_json(value: object) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII, no NaN.

    Raises:
        IdentityError: something in it is not plain JSON data.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _unknown("identity", str(error)) from None
    return text.encode("ascii")


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields in which two stored identities differ, as ``doctor`` and ``identity`` show them."""
    return {
        name: (one.get(name), other.get(name))
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    }


_MAY_BE_EMPTY: Final = frozenset({"namespace", "draft_weights"})
_NEVER_RESOLVED: Final = frozenset({"", "auto", "unknown"})


def _require_known(name: str, value: object) -> None:
    short = name.rpartition(".")[2]
    if isinstance(value, bool) or not isinstance(value, (str, int, tuple)):
        raise _unknown(name, repr(value))
    if isinstance(value, str) and short not in _MAY_BE_EMPTY and value in _NEVER_RESOLVED:
        raise _unknown(name, repr(value))
    if isinstance(value, int) and value < 0:
        raise _unknown(name, str(value))
    if isinstance(value, tuple) and short == "groups" and not value:
        raise _unknown(name, "no group at all")


def _unknown(name: str, found: str) -> IdentityError:
    return IdentityError(
        f"identity field {name}",
        expected="a known value, because stored bytes depend on it",
        found=found,
        next_step="report this model and engine configuration; it is not cached until it is known",
    )
