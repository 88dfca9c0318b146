"""Make a LoRA adapter for the tiny Llama: `tiny_adapter.py FOLDER SEED`, beside an engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
HIDDEN = 128
LAYERS = 3
OUTPUTS = {"q_proj": 128, "v_proj": 64}


def write(place: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, outputs in OUTPUTS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (outputs, RANK)}
            for part, shape in shapes.items():
                drawn = torch.randn(shape, generator=generator) * 0.2
                tensors[f"{prefix}.{part}.weight"] = drawn
    save_file(tensors, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(OUTPUTS),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (place / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
