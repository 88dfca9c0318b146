"""A model hub's cache with what upstream's tests ask for, so that they run without a network.

    .engine/stock/bin/python -m tests.conformance.hub_cache DIRECTORY

Most tests read a configuration only; its numbers are those of the released model where a test
depends on them. The few that generate get random weights of a small shape under the same name.
What is missing here fails alike in both columns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support import tiny_models

REVISION = "0" * 40

_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _OPT
    | {
        "hidden_size": 768,
        "ffn_dim": 3072,
        "word_embed_proj_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "do_layer_norm_before": True,
    },
    "facebook/opt-350m": _OPT
    | {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "word_embed_proj_dim": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "do_layer_norm_before": False,
    },
    "Qwen/Qwen1.5-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}


def write(home: Path) -> None:
    """Fill `home`, which tests then take as HF_HOME."""
    for name, configuration in CONFIGURATIONS.items():
        place = _snapshot(home, name)
        (place / "config.json").write_text(json.dumps(configuration, indent=2, sort_keys=True))
    for name in (
        "hmellor/tiny-random-LlamaForCausalLM",
        "meta-llama/Llama-3.2-1B-Instruct",
    ):
        tiny_models.write(tiny_models.FAMILIES["llama"](), _snapshot(home, name), seed=0)
    tiny_models.write(_qwen3(), _snapshot(home, "Qwen/Qwen3-0.6B"), seed=0)


def _qwen3():
    from transformers import Qwen3Config

    llama = tiny_models.FAMILIES["llama"]().to_dict()
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return Qwen3Config(**{key: llama[key] for key in (*shape, *heads)}, tie_word_embeddings=False)


def _snapshot(home: Path, name: str) -> Path:
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    place = folder / "snapshots" / REVISION
    place.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    return place


if __name__ == "__main__":
    write(Path(sys.argv[1]))
