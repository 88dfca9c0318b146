"""What the engine's own options must be, refused by name before serving starts.

Each rule guards against something that would be silently wrong, not merely slow.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkcache_connector.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine's options that decide whether persistence can be right.

    Attributes:
        kv_role: of ``kv_transfer_config``.
        load_failure_policy: of ``kv_transfer_config``.
        prefix_caching: whether prefix caching is on.
        recurrent: whether the model has recurrent groups.
        mamba_cache_mode: of the cache configuration; only read for such models.
        pipeline_parallel: degree.
        decode_context_parallel: degree.
        prefill_context_parallel: degree.
    """

    kv_role: str
    load_failure_policy: str
    prefix_caching: bool
    recurrent: bool
    mamba_cache_mode: str
    pipeline_parallel: int
    decode_context_parallel: int
    prefill_context_parallel: int


def refuse_unsafe(facts: EngineFacts) -> None:
    """Apply every rule.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _require(
        "kv_role",
        facts.kv_role == "kv_both",
        "'kv_both', because every rank stores and restores",
        repr(facts.kv_role),
        'write "kv_role": "kv_both" in --kv-transfer-config',
    )
    _require(
        "kv_load_failure_policy",
        facts.load_failure_policy == "recompute",
        "'recompute', because what cannot be authenticated is computed again",
        repr(facts.load_failure_policy),
        'write "kv_load_failure_policy": "recompute" in --kv-transfer-config',
    )
    for name, degree in (
        ("pipeline_parallel_size", facts.pipeline_parallel),
        ("decode_context_parallel_size", facts.decode_context_parallel),
        ("prefill_context_parallel_size", facts.prefill_context_parallel),
    ):
        _require(name, degree == 1, "1", str(degree), "use tensor parallelism instead")
    _require(
        "enable_prefix_caching",
        facts.prefix_caching or not facts.recurrent,
        "on, because only then vLLM keeps recurrent states at boundaries",
        "off",
        "remove --no-enable-prefix-caching",
    )
    _require(
        "mamba_cache_mode",
        not facts.recurrent or facts.mamba_cache_mode == "align",
        "'align', because only then a state belongs to a known boundary",
        repr(facts.mamba_cache_mode),
        "add --mamba-cache-mode align",
    )


def _require(option: str, holds: bool, expected: str, found: str, next_step: str) -> None:
    if not holds:
        raise ConfigError(option, expected=expected, found=found, next_step=next_step)
