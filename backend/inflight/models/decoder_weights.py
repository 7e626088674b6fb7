"""A loaded model's tensors, in the layout the forward pass reads, whatever the checkpoint's family.

Linear weights are [out, in]. Query, key and value projections are one matrix, and so are the gate and up
projections of a gated MLP: fewer, larger products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b. Called with [..., in], returns [..., out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """The parameters of an RMSNorm (no bias) or LayerNorm, each [size]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        attention_norm: Before attention.
        qkv: Query heads, key heads, value heads, in this order: [query_size + 2 * kv_size, hidden_size].
        query_norm: Over each query head [head_dim]; None without qk_norm.
        key_norm: Over each key head [head_dim]; None without qk_norm.
        output: [hidden_size, query_size].
        mlp_norm: Before the MLP.
        up: Gate above up if the MLP is gated [2 * intermediate_size, hidden_size], else up alone.
        down: [hidden_size, intermediate_size].
    """

    attention_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


LayerT = TypeVar("LayerT")
HeadT = TypeVar("HeadT")


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[LayerT, HeadT]):
    """The whole model, or a part of it: LayerWeights and a Linear, or what a `Finisher` has made of them.

    Attributes:
        embedding: [vocab_size, hidden_size]; None behind the first pipeline stage.
        position_embedding: [max_positions, hidden_size]; None with rotary positions, and behind the first stage.
        layers: First to last, at least one.
        final_norm: Before the output projection; None before the last stage.
        lm_head: [vocab_size, hidden_size]; shares the embedding's memory if tied; None before the last stage.
    """

    embedding: Tensor | None
    position_embedding: Tensor | None
    layers: tuple[LayerT, ...]
    final_norm: Norm | None
    lm_head: HeadT | None


PlainWeights = DecoderWeights[LayerWeights, Linear]
