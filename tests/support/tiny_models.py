"""Models small enough for a CPU test whose every answer depends on every page and state.

    .engine/stock/bin/python tests/support/tiny_models.py granite [--seed 1]

prints the folder of a model, made on the first call. vLLM's own dummy weights do not serve: their
logits are uniform, so that any KV cache passes. Weights drawn with a wide spread from a fixed seed
do: zero one page of the context, or take one state from another boundary, and the greedy
continuation changes (tests/e2e/test_engine_models.py).

| family  | layers                              | stands for                            |
|---------|-------------------------------------|---------------------------------------|
| granite | Mamba2, attention, Mamba2, Mamba2   | Mamba2 hybrids                        |
| lfm2    | short convolution and attention     | short-convolution hybrids             |
| llama   | attention                           | attention-only models, one group      |
| sliding | attention, sliding and full         | attention-only models, several groups |
| idefics | a vision encoder, then llama's      | models that read images               |

The tokenizer has a token per byte and a visible token for each other id: equal text is equal
tokens. There is no end-of-sequence token, so that lengths are what the caller asks for. Where a
prompt for idefics has the token `IMAGE`, the engine puts the `IMAGE_TOKENS` tokens of an image.

Runs inside an engine environment (torch, transformers).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CACHE = Path(__file__).resolve().parents[2] / ".engine" / "models"
VOCABULARY = 512
LONGEST_CONTEXT = 32_768
# An image is one token in a prompt, the last; the engine knows these by their names.
IMAGE = VOCABULARY - 1
IMAGE_PIXELS = 128  # of a side
_TILE_PIXELS = 64  # of a side: four tiles, and the whole once more at the size of one
_PATCH_PIXELS = 8
_PATCHES_PER_FEATURE = 2  # of a side
_FEATURES = (_TILE_PIXELS // _PATCH_PIXELS // _PATCHES_PER_FEATURE) ** 2  # of a tile
_IMAGE_NAMES = [
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    "<global-img>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
]
# Before each tile are two tokens, after each row one, before the whole one, and one at the end.
IMAGE_TOKENS = 5 * (2 + _FEATURES) + 2 + 1 + 1

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST_CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


def _granite() -> PretrainedConfig:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        intermediate_size=256,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        attention_multiplier=0.25,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_chunk_size=64,
    )


def _lfm2() -> PretrainedConfig:
    from transformers import Lfm2Config

    return Lfm2Config(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        intermediate_size=256,
        block_auto_adjust_ff_dim=False,
        conv_L_cache=8,  # released models have 3, too short a memory to show a fault ten tokens on
        # Read by vLLM 0.28.0; transformers has since derived them from the sizes above.
        conv_dim=128,
        block_dim=128,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
    )


def _llama() -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, num_hidden_layers=3, intermediate_size=256, head_dim=32)


def _sliding() -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=256,
        intermediate_size=256,
        head_dim=32,
    )


def _idefics() -> PretrainedConfig:
    from transformers import Idefics3Config

    return Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": _TILE_PIXELS,
            "patch_size": _PATCH_PIXELS,
            "initializer_range": 0.2,
        },
        text_config=_llama(),
        scale_factor=_PATCHES_PER_FEATURE,
        image_token_id=IMAGE,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "granite": _granite,
    "lfm2": _lfm2,
    "llama": _llama,
    "sliding": _sliding,
    "idefics": _idefics,
}


def build(family: str, *, seed: int = 0, cache: Path = CACHE) -> Path:
    """Return the folder of a model of `family`, which is made unless it is already in `cache`.

    Two seeds give two fine-tunes of one architecture: equal shapes, other weights.
    """
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    place = cache / f"{family}-{seed}-{key}"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache, prefix=".partial-"))
        try:
            write(FAMILIES[family](), partial, seed)
            os.rename(partial, place)  # noqa: PTH104 -- fails where another process was first
        except OSError:
            if not place.exists():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return place


def write(config: PretrainedConfig, place: Path, seed: int) -> None:
    """Write a model of `config` with weights drawn from `seed`, and its tokenizer, into `place`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = hasattr(config, "vision_config")
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            # The defaults forget within a few tokens, and with them any fault of a state ...
            if name.endswith("A_log"):
                torch.nn.init.uniform_(weight, math.log(0.001), math.log(0.01))
            # ... or attend to every token alike, which hides the loss of a hundred of them.
            elif name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                torch.nn.init.constant_(weight, 2.5)
    model.save_pretrained(place)
    if reads_images:
        _processor().save_pretrained(place)
    else:
        _tokenizer().save_pretrained(place)


def _processor():
    """What makes tokens of text and of images."""
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": IMAGE_PIXELS}, max_image_size={"longest_edge": _TILE_PIXELS}
    )
    tokenizer = _tokenizer(_IMAGE_NAMES)
    tokenizer.add_tokens(_IMAGE_NAMES, special_tokens=True)
    return Idefics3Processor(images, tokenizer, image_seq_len=_FEATURES)


def _tokenizer(last: Sequence[str] = ()):
    """The tokenizer; `last` are the names of the last tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{number}>" for number in range(len(alphabet), VOCABULARY)]
    names[VOCABULARY - len(last) :] = last
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args(arguments)
    print(build(options.family, seed=options.seed, cache=options.cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
