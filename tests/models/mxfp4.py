"""gpt-oss checkpoints with experts packed as MXFP4, which transformers cannot write on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def random_blocks(experts: int, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bytes with scales from 1/64 to 1/8, in the stored shapes of [experts, rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)


def pack(folder: Path) -> Tensors:
    """Replace a checkpoint's experts by random packed ones; return transformers' dequantized tensors by name."""
    tensors, unpacked = load_file(folder / "model.safetensors"), {}
    for number, name in enumerate(sorted(name for name in tensors if name.endswith(STACKS))):
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales = random_blocks(experts, rows, columns, number)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, QUANTIZATION)
    return unpacked


def set_quantization(folder: Path, quantization: object) -> None:
    """Write config.json's `quantization_config`."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
