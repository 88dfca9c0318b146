"""The identity of a running engine, read from its configuration objects.

Reads attributes only and decides nothing but what is left out: names and paths (contents are
digested instead), and limits that do not change what a token's KV bytes are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sparkcache_connector.config import Config
from sparkcache_connector.errors import IdentityError
from sparkcache_connector.identity import GroupIdentity, Identity, canonical_json
from sparkcache_connector.weights import digest_checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from sparkcache_connector.file_memo import DigestMemo

# Where a configuration says which directory it came from or who wrote it.
_NAMES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
# What a multimodal item becomes before it reaches the model. The engine's name of an item is a
# digest of what came in, and does not cover the engine's own settings.
_MULTIMODAL: Final = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)


def engine_identity(
    vllm_config: VllmConfig,
    config: Config,
    *,
    groups: tuple[GroupIdentity, ...],
    backends: Mapping[str, Any],
    kv_layout: str,
    engine_version: str,
    overlay: str,
    rank: int,
    memo: DigestMemo,
) -> Identity:
    """Put together what one rank's bytes depend on.

    Raises:
        IdentityError: naming what is not known.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = _draft_model(vllm_config)
    load_format = _load_format(vllm_config)
    kv_dtype = str(vllm_config.cache_config.cache_dtype)
    return Identity(
        namespace=config.namespace,
        target_weights=config.target_checkpoint_sha256
        or digest_checkpoint(Path(model.model), load_format, memo),
        draft_weights=(
            config.draft_checkpoint_sha256 or digest_checkpoint(Path(draft), load_format, memo)
            if draft
            else ""
        ),
        model=_model_text(model.hf_config, model.multimodal_config),
        quantization=str(model.quantization or "none"),
        model_dtype=str(model.dtype),
        kv_cache_dtype=str(model.dtype) if kv_dtype == "auto" else kv_dtype,
        attention_backend=_backend_text(backends.values(), kv_layout),
        engine_version=engine_version,
        overlay=overlay,
        tensor_parallel=parallel.tensor_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        rank=rank,
        chunk_tokens=config.chunk_tokens,
        groups=groups,
    )


def _draft_model(vllm_config: VllmConfig) -> str:
    """The directory of a draft model with weights of its own; empty without one."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    path = str(getattr(draft, "model", "") or "")
    return "" if path == vllm_config.model_config.model else path


def _load_format(vllm_config: VllmConfig) -> str:
    load_format = vllm_config.load_config.load_format
    return str(getattr(load_format, "value", load_format))


def _model_text(hf_config: Any, multimodal: Any) -> str:
    try:
        document = json.loads(hf_config.to_json_string(use_diff=False))
        if multimodal is not None:
            document["engine_multimodal"] = _multimodal(multimodal)
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise IdentityError(
            "identity field model",
            expected="a model configuration that can be written as JSON",
            found=f"{type(hf_config).__name__} ({error})",
            next_step="report this model; it is not cached until its configuration is known",
        ) from None
    return canonical_json(_without_names(document)).decode("ascii")


def _multimodal(options: Any) -> Any:
    values = {name: getattr(options, name) for name in _MULTIMODAL}
    scales = options.mm_encoder_fp8_scale_path
    if options.mm_encoder_attn_dtype == "fp8" and scales is None:
        raise IdentityError(
            "identity field model",
            expected="an image encoder whose scales do not depend on earlier requests",
            found="mm_encoder_attn_dtype 'fp8' with scales calibrated at run time",
            next_step="name fixed scales with mm_encoder_fp8_scale_path, or do without fp8 there",
        )
    if scales is not None:
        values["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return json.loads(json.dumps(values, default=_name_of_choice))


def _name_of_choice(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"{type(value).__name__} is not plain JSON data")


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_names(v) for k, v in value.items() if k not in _NAMES}
    if isinstance(value, list):
        return [_without_names(v) for v in value]
    return value


def _backend_text(backends: Iterable[Any], kv_layout: str) -> str:
    names = sorted({f"{b.__module__}.{b.__qualname__}" for b in backends})
    return f"{' '.join(names) or 'no-attention'} {kv_layout}"
