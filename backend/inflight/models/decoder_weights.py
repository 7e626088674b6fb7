"""A loaded model's tensors, in the layout the forward pass reads, whatever the checkpoint's family.

Linear weights are [out, in]. Query, key and value projections are one matrix, and so are the gate and up
projections of a gated MLP: fewer, larger products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b. Called with [..., in], returns [..., out]."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its input and output."""
        return self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def at(self, index: int) -> Linear:
        """Return one of a stack of experts' matrices."""
        return Linear(self.weight[index], None if self.bias is None else self.bias[index])


@dataclass(frozen=True, slots=True)
class Norm:
    """The parameters of an RMSNorm (no bias) or LayerNorm, each [size]."""

    weight: Tensor
    bias: Tensor | None = None


LinearT = TypeVar("LinearT")


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[LinearT]):
    """A layer's experts, gated ones: all of them, or those that a rank has (`ExpertsConfig.held`).

    Attributes:
        router: Of all experts, [count, hidden_size].
        up: Gate above up of each expert that is held: weights [held, 2 * intermediate_size, hidden_size], and
            biases [held, 2 * intermediate_size] if there are any.
        down: Likewise [held, hidden_size, intermediate_size] and [held, hidden_size]. Of ranks that have slices of
            the same experts, whose results are added up, the first has the biases.
        shared_gate: [1, hidden_size]; None if there is none.
        choice_bias: [count] float32, added to probabilities where experts are chosen; None if there is none.
    """

    router: Linear
    up: LinearT
    down: LinearT
    shared_gate: Linear | None
    choice_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention beside `LayerWeights.qkv`; heads are this rank's.

    Attributes:
        query_norm: Over what queries are projected from [query_rank]; None if that is hidden states.
        query_up: [heads * query_head_dim, query_rank], of each head the part without positions first; None
            likewise.
        kv_norm: Over the compressed latent [kv_rank].
        kv_up: [heads * (nope_head_dim + value_head_dim), kv_rank], of each head keys first.
    """

    query_norm: Norm | None
    query_up: Linear | None
    kv_norm: Norm
    kv_up: Linear


@dataclass(frozen=True, slots=True)
class Layer(Generic[LinearT]):
    """One decoder layer. Its projections are `Linear`, or what a `Sink` has made of them.

    Attributes:
        attention_norm: Before attention; None if there is none.
        attention_post_norm: On what attention gives; None if there is none.
        qkv: Query heads, key heads, value heads, in this order: [query_size + 2 * kv_size, hidden_size]. Of latent
            attention queries, or what they are projected from, the compressed latent and the shared key.
        query_norm: Over each query head [head_dim], or over all [query_size]; None without qk_norm.
        key_norm: Over each key head [head_dim], or over all [kv_size]; None without qk_norm.
        output: [hidden_size, num_heads * output_head_dim].
        mlp_norm: Before the MLP; None if there is none.
        mlp_post_norm: On what the MLP gives; None if there is none.
        experts: None in a layer without.
        up: Gate above up if the MLP is gated [2 * intermediate_size, hidden_size], else up alone. Beside
            experts it is of the MLP that all tokens go through; None if there is none.
        down: [hidden_size, intermediate_size]; None likewise.
        latent: None unless attention is latent.
        sinks: The learned score of each query head, [num_heads]; None if there are none.
    """

    attention_norm: Norm | None
    qkv: LinearT
    query_norm: Norm | None
    key_norm: Norm | None
    output: LinearT
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    up: LinearT | None
    down: LinearT | None
    mlp_post_norm: Norm | None
    experts: ExpertWeights[LinearT] | None = None
    latent: LatentWeights | None = None
    sinks: Tensor | None = None


LayerWeights = Layer[Linear]
"""A layer as it is read."""

LayerT = TypeVar("LayerT")


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[LayerT, LinearT]):
    """The whole model, or a part of it: LayerWeights and a Linear, or what a `Sink` has made of them.

    Attributes:
        embedding: [vocab_size, hidden_size]; None behind the first pipeline stage.
        position_embedding: [position_offset + max_positions, hidden_size]; None if positions are not learned, and
            behind the first stage.
        layers: First to last, at least one.
        final_norm: Before the output projection; None before the last stage.
        lm_head: [vocab_size, hidden_size]; shares the embedding's memory if tied; None before the last stage.
    """

    embedding: Tensor | None
    position_embedding: Tensor | None
    layers: tuple[LayerT, ...]
    final_norm: Norm | None
    lm_head: LinearT | None


PlainWeights = DecoderWeights[LayerWeights, Linear]
