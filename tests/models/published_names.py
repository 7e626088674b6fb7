"""Names of tensors in published checkpoints that differ from those that transformers writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def _olmo_hybrid(config: Any, tensors: Tensors) -> Tensors:
    """Return the tensors with norms named by the kind of the layer, and with convolutions of queries, keys and
    values.

    transformers divides convolutions into three equal parts instead, and names all norms as in recurrent layers.
    """
    sizes = [config.linear_num_key_heads * config.linear_key_head_dim] * 2
    sizes.append(config.linear_num_value_heads * config.linear_value_head_dim)
    for layer, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{layer}."
        if kind == "linear_attention":
            names = [f"{prefix}linear_attn.{each}_conv1d.weight" for each in "qkv"]
            parts = torch.cat([tensors[name] for name in names]).split(sizes)
            tensors |= {name: part.clone() for name, part in zip(names, parts)}
        else:
            norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
            tensors[f"{prefix}post_attention_layernorm.weight"] = norm
    return tensors


def _renamed(pattern: str, name: str) -> Callable[[Any, Tensors], Tensors]:
    return lambda config, tensors: {re.sub(pattern, name, each): tensors[each] for each in tensors}


PUBLISHED_NAMES: dict[str, Callable[[Any, Tensors], Tensors]] = {
    "olmo-hybrid": _olmo_hybrid,
    "kimi-linear": _renamed(r"\.block_sparse_moe\.(\w+_proj)", r".mlp.\1"),
    "kimi-k2.5": _renamed(r"^language_model\.model\.blocks\.", "language_model.model.layers."),
}
"""By model of the zoo: makes the published tensors, from the configuration and those that transformers wrote."""
