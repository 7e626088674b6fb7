"""Adapters made by PEFT, and as random tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch

from inflight.adapters.lora_modules import Module, module_sizes
from inflight.adapters.lora_tensors import read_lora_tensors
from inflight.core.request.adapter import LoraWeights
from inflight.models.decoder_config import DecoderConfig
from tests.models.zoo import ZooModel

LLAMA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2_LAYERS = ["c_attn", "c_proj", "c_fc"]


def linear_layers(case: str) -> list[str]:
    return GPT2_LAYERS if case.startswith("gpt2") else LLAMA_LAYERS


def make_peft_model(model: ZooModel, seed: int = 0, **options: Any) -> Any:
    """Return a random adapter on a copy of the model; with DoRA, its magnitudes are not the initial ones."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    adapted = peft.get_peft_model(copy.deepcopy(model.oracle), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return adapted.eval()


def save_adapter(adapted: Any, folder: Path, **options: Any) -> Path:
    adapted.save_pretrained(folder, **options)
    return folder


def make_weights(
    decoder: DecoderConfig,
    rows: Sequence[tuple[Module, int, int]],
    seed: int = 0,
    dtype: Any = np.float32,
    padding: int = 0,
    columns: int = 4,
    is_dora: bool = False,
) -> LoraWeights:
    """Random rows of (module, layer, rank)."""
    layers = range(decoder.num_layers)
    sizes = {module: size for layer in layers for module, size in module_sizes(decoder, layer).items()}
    lengths = [
        rank * (sizes[module].inner + sizes[module].outer) + is_dora * sizes[module].outer
        for module, _, rank in rows
    ]
    weights = np.zeros((1, len(rows), max(lengths) + padding), dtype)
    # A row's numbers depend only on its module and layer, so that rows may be reordered.
    for (module, layer, _), length, row in zip(rows, lengths, weights[0]):
        row[:length] = np.random.default_rng((seed, module, layer)).normal(size=length)
    config = [[int(module), layer, rank, int(is_dora)][:columns] for module, layer, rank in rows]
    return read_lora_tensors(weights, np.array([config], np.int32))
