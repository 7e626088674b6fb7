"""LoRA adapters for tests: PEFT's, on copies of the zoo's models, and the rows that an engine accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from inflight.adapters.lora_modules import Module
from inflight.core.request.adapter import LoraWeights, Matrix, RawBuffer, StoredAdapter
from tests.models.zoo import ZooModel

MODULES = {
    "q_proj": Module.ATTN_Q,
    "k_proj": Module.ATTN_K,
    "v_proj": Module.ATTN_V,
    "o_proj": Module.ATTN_DENSE,
    "gate_proj": Module.MLP_H_TO_4H,
    "up_proj": Module.MLP_GATE,
    "down_proj": Module.MLP_4H_TO_H,
    "c_attn": Module.ATTN_QKV,
    "attn.c_proj": Module.ATTN_DENSE,
    "c_fc": Module.MLP_H_TO_4H,
    "mlp.c_proj": Module.MLP_4H_TO_H,
    "self_attention.dense": Module.ATTN_DENSE,
    "dense_h_to_4h": Module.MLP_H_TO_4H,
    "dense_4h_to_h": Module.MLP_4H_TO_H,
}
"""Modules by the ends of their names in transformers."""

ALL_LINEAR = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "falcon": ["self_attention.dense", "dense_h_to_4h", "dense_4h_to_h"],
    "bloom": ["self_attention.dense", "dense_h_to_4h", "dense_4h_to_h"],
    "others": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
"""PEFT's `target_modules`, by `model_type`: those that adapters may change here."""
_PLACE = re.compile(r"\.(?:layers|h)\.(\d+)\.(.*)$")

Row = tuple[Module, int, Tensor, Tensor, Tensor | None]
"""Module, layer, A [rank, in], B [out, rank] with its scale, magnitudes [out]."""


@dataclass(frozen=True)
class Adapter:
    """An adapter and its oracle, PEFT with the adapter beside the weights.

    Attributes:
        weights: The adapter as an engine accepts it.
        oracle: Its logits, greedy tokens and beams.
    """

    weights: LoraWeights
    oracle: ZooModel

    def merged(self) -> ZooModel:
        """Return transformers' model with the adapter added to its weights."""
        return ZooModel(self.oracle.folder, deepcopy(self.oracle.oracle).merge_and_unload())


def lora_config(model: ZooModel, **options: Any) -> peft.LoraConfig:
    """Return a config for all linear layers; `options` are a LoraConfig's, without those of other families."""
    family = model.oracle.config.model_type
    targets = ALL_LINEAR.get(family, ALL_LINEAR["others"])
    for pattern in {"rank_pattern", "alpha_pattern"} & options.keys():
        known = {name: value for name, value in options[pattern].items() if name.split(".")[-1] in targets}
        options = {**options, pattern: known}
    values = {"target_modules": targets, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(fan_in_fan_out=family == "gpt2", **{**values, **options})


def make_adapter(model: ZooModel, seed: int = 0, **options: Any) -> Adapter:
    """Make an adapter by `lora_config`; its magnitudes differ from the weights' own, which have no effect."""
    torch.manual_seed(seed)
    found = peft.get_peft_model(deepcopy(model.oracle), lora_config(model, **options)).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.6, 1.6))
    return Adapter(weights_of(found), ZooModel(model.folder, found))


def weights_of(
    model: peft.PeftModel, name: str = "default", dtype: torch.dtype = torch.float32
) -> LoraWeights:
    """Return the rows of one of a PEFT model's adapters."""
    return pack_rows(list(_rows_of(model, name)), dtype)


def pack_rows(rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> LoraWeights:
    """Pack the rows as in a request, the shorter ones padded with zeros."""
    flat = [
        torch.cat([a.flatten(), b.flatten(), *([] if magnitude is None else [magnitude])])
        for *_, a, b, magnitude in rows
    ]
    padded = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True).to(dtype)
    config = tuple(
        (int(module), layer, len(a), int(magnitude is not None)) for module, layer, a, _, magnitude in rows
    )
    numbers = padded.contiguous().view(torch.uint8).numpy().tobytes()
    matrix = Matrix((padded.shape[0], padded.shape[1]), str(dtype).removeprefix("torch."), RawBuffer(numbers))
    return LoraWeights(matrix, config)


def stored(weights: LoraWeights, handle: int) -> StoredAdapter:
    """Return the adapter as an adapter cache would store it."""
    rank = max(row[2] for row in weights.config)
    return StoredAdapter(handle, handle.to_bytes(16, "big"), handle, rank, weights)


def random_weights(
    sizes: dict[Module, tuple[int, int]], num_layers: int, rank: int, seed: int = 0, scale: float = 1.0
) -> LoraWeights:
    """Return an adapter of some modules (inputs, outputs) on every layer."""
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))

    return pack_rows(
        [
            (module, layer, draw(rank, inner) / inner**0.5, draw(outer, rank) * scale, None)
            for layer in range(num_layers)
            for module, (inner, outer) in sizes.items()
        ]
    )


@torch.no_grad()
def _rows_of(model: peft.PeftModel, adapter: str) -> Iterator[Row]:
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A:
            continue
        place = _PLACE.search(path)
        assert place is not None, path
        module = next(module for name, module in MODULES.items() if place[2].endswith(name))
        a = layer.lora_A[adapter].weight
        b = layer.lora_B[adapter].weight * layer.scaling[adapter]
        magnitude = None
        if layer.use_dora[adapter]:
            weight = layer.get_base_layer().weight
            whole = (weight.T if layer.fan_in_fan_out else weight) + b @ a
            magnitude = layer.lora_magnitude_vector[adapter].weight / whole.norm(dim=1)
        yield module, int(place[1]), a, b, magnitude
