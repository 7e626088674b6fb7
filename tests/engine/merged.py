"""Random LoRA adapters as rows of `lora_weights`, and transformers' model with them added to its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.adapters.lora_modules import Module
from inflight.core.request.adapter import LoraWeights, Matrix, RawBuffer, StoredAdapter
from tests.models.zoo import ZooModel

LLAMA = {
    Module.ATTN_Q: ("self_attn.q_proj",),
    Module.ATTN_K: ("self_attn.k_proj",),
    Module.ATTN_V: ("self_attn.v_proj",),
    Module.ATTN_DENSE: ("self_attn.o_proj",),
    Module.MLP_H_TO_4H: ("mlp.gate_proj",),
    Module.MLP_GATE: ("mlp.up_proj",),
    Module.MLP_4H_TO_H: ("mlp.down_proj",),
}
LLAMA_FUSED = {
    Module.ATTN_QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    Module.ATTN_DENSE: ("self_attn.o_proj",),
    Module.MLP_GATE_UP: ("mlp.up_proj", "mlp.gate_proj"),
    Module.MLP_4H_TO_H: ("mlp.down_proj",),
}
GPT2 = {
    Module.ATTN_QKV: ("attn.c_attn",),
    Module.ATTN_DENSE: ("attn.c_proj",),
    Module.MLP_H_TO_4H: ("mlp.c_fc",),
    Module.MLP_4H_TO_H: ("mlp.c_proj",),
}
"""The linear layers of transformers that form a module, by name within a layer; several are concatenated."""

Modules = dict[Module, tuple[str, ...]]


@dataclass(frozen=True)
class Merged:
    """An adapter, and the model with the adapter in its weights.

    Attributes:
        stored: The adapter as the engine receives it.
        model: The model with the adapter in its weights.
    """

    stored: StoredAdapter
    model: ZooModel


def modules_of(model: ZooModel) -> Modules:
    """Return the modules that are separate linear layers in the checkpoint."""
    return GPT2 if model.oracle.config.model_type == "gpt2" else LLAMA


def make_adapter(
    model: ZooModel,
    rank: int | Callable[[Module, int], int] = 8,
    modules: Modules | None = None,
    layers: Sequence[int] | None = None,
    has_magnitude: Callable[[Module], bool] = lambda module: False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Merged:
    """Return an adapter of random values that are large enough to change every token.

    Args:
        model: The model to adapt.
        rank: Rank of every module, or a function of module and layer; 0: the module is not changed there.
        modules: The modules to change; None: `modules_of`.
        layers: The layers to change; None: all.
        has_magnitude: Whether a module has magnitudes (DoRA).
        seed: Seed of the values.
        dtype: Dtype of the tensor; the merged model has the values rounded to it.
    """
    generator = torch.Generator().manual_seed(seed)
    oracle = deepcopy(model.oracle)
    blocks = oracle.transformer.h if hasattr(oracle, "transformer") else oracle.model.layers
    rows: list[Tensor] = []
    config: list[tuple[int, ...]] = []
    for index, block in enumerate(blocks):
        for module, names in (modules or modules_of(model)).items():
            own_rank = rank if isinstance(rank, int) else rank(module, index)
            if (layers is not None and index not in layers) or not own_rank:
                continue
            weights = [_weight(block.get_submodule(name)) for name in names]
            outer, inner = sum(len(weight) for weight in weights), weights[0].shape[1]
            a = torch.randn(own_rank, inner, generator=generator) / inner**0.5
            b = torch.randn(outer, own_rank, generator=generator) / own_rank**0.5
            magnitude = torch.rand(outer, generator=generator) + 0.5
            a, b, magnitude = (each.to(dtype).float() for each in (a, b, magnitude))
            parts = [a.flatten(), b.flatten(), *([magnitude] if has_magnitude(module) else [])]
            rows.append(torch.cat(parts).to(dtype))
            config.append((int(module), index, own_rank, int(has_magnitude(module))))
            delta = b @ a
            with torch.no_grad():
                for weight in weights:
                    own, delta = delta[: len(weight)], delta[len(weight) :]
                    factor, magnitude = magnitude[: len(weight), None], magnitude[len(weight) :]
                    weight.add_(own).mul_(factor if has_magnitude(module) else 1.0)
    adapter = LoraWeights(_to_matrix(rows), tuple(config))
    stored = StoredAdapter(seed, bytes(16), seed, max(row[2] for row in config), adapter)
    return Merged(stored, ZooModel(model.folder, oracle))


def _weight(linear: Any) -> Tensor:
    """Return the weight [out, in]; GPT-2's are stored transposed."""
    return linear.weight.data.T if type(linear).__name__ == "Conv1D" else linear.weight.data


def _to_matrix(rows: Sequence[Tensor]) -> Matrix:
    """Return the rows padded with zeros to more than the widest row."""
    width = max(len(row) for row in rows) + 3
    padded = torch.zeros(len(rows), width, dtype=rows[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    data = padded.view(torch.uint8).numpy().tobytes()
    return Matrix((len(rows), width), str(padded.dtype).removeprefix("torch."), RawBuffer(data))
