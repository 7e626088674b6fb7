"""A loaded model's tensors, in the layout that the forward pass uses for every family.

Linear weights are [out, in]. Query, key and value projections are one matrix, and so are the gate and up
projections of a gated MLP, so that there are fewer and larger products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.models.recurrent import RecurrentWeights


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear layer y = x Wᵀ + b. Called with [..., in], returns [..., out]."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the layer's input and output."""
        return self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def at(self, index: int) -> Linear:
        """Return the layer of one expert from a stack of experts' matrices."""
        return Linear(self.weight[index], None if self.bias is None else self.bias[index])


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of an RMSNorm (no bias) or LayerNorm, each [size]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms of a layer with both experts and an MLP, each [hidden_size].

    Attributes:
        router: Norm on the router's input.
        before: Norm on the experts' input.
        after: Norm on the experts' result.
        shared_after: Norm on the shared MLP's result.
    """

    router: Norm
    before: Norm
    after: Norm
    shared_after: Norm


@dataclass(frozen=True, slots=True)
class AltUpWeights:
    """A layer's weights for several residual streams (`AltUpConfig`), n in number.

    Attributes:
        router: Projection of the active stream to the inputs of the two following ones, [n, hidden_size].
        router_norm: Norm on the router's input, [hidden_size].
        prediction: Projection to the weights of all streams in each predicted stream, [n * n, n].
        correction: Projection to the factors of corrections minus 1, [n, n].
        output_scale: Factors of the active stream where per-layer embeddings read it, [hidden_size].
    """

    router: Linear
    router_norm: Norm
    prediction: Linear
    correction: Linear
    output_scale: Tensor


@dataclass(frozen=True, slots=True)
class LaurelWeights:
    """Weights of a low-rank branch beside attention (LAuReL).

    Attributes:
        down: [laurel_rank, hidden_size].
        up: [hidden_size, laurel_rank].
        norm: Norm on the result of `up`, [hidden_size].
    """

    down: Linear
    up: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Weights outside of layers for several residual streams (`AltUpConfig`), n in number.

    Attributes:
        split: Projections of the embedding to all streams but the first, [(n - 1) * hidden_size, hidden_size];
            None after the first stage.
        join: Projections of all streams but the first before the final norm, in the same order and shape; None
            before the last stage.
    """

    split: Linear | None
    join: Linear | None


LinearT = TypeVar("LinearT")


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[LinearT]):
    """A layer's experts, whose MLPs are gated if the model's are: all experts, or this rank's
    (`ExpertsConfig.held`).

    Attributes:
        router: Router of all experts, [count, hidden_size].
        up: Gate above up of each of the rank's n experts: weights [n, 2 * intermediate_size, hidden_size],
            and biases [n, 2 * intermediate_size] if there are any; without gates, up alone. With `latent`, the
            latent width replaces hidden_size.
        down: Weights [n, hidden_size, intermediate_size], and biases [n, hidden_size] if there are any. If
            ranks have slices of the same experts, whose results are summed, only the first of these ranks has
            the biases.
        shared_gate: [1, hidden_size]; None if there is none.
        choice_bias: [count] float32, added to probabilities when experts are chosen; None if there is none.
        norms: Norms of router, experts and shared MLP; None if there are none.
        scales: [count], factors by which the experts' weights are multiplied; None if there are none.
        latent: Projection of hidden states to the experts' inputs, and of the sum of the experts' outputs
            to hidden states; None if experts read and write hidden states.
    """

    router: Linear
    up: LinearT
    down: LinearT
    shared_gate: Linear | None
    choice_bias: Tensor | None = None
    norms: ExpertNorms | None = None
    scales: Tensor | None = None
    latent: tuple[Linear, Linear] | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention other than `LayerWeights.qkv`; heads are this rank's.

    Attributes:
        query_norm: Norm over the vector from which queries are projected, [query_rank]; None if queries are
            projected from hidden states.
        query_up: [heads * query_head_dim, query_rank], in each head the part without rotation first; None if
            queries are projected from hidden states.
        kv_norm: Norm over the compressed latent, [kv_rank].
        kv_up: [heads * (nope_head_dim + value_head_dim), kv_rank], in each head keys first.
    """

    query_norm: Norm | None
    query_up: Linear | None
    kv_norm: Norm
    kv_up: Linear


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """Weights with which a layer adds per-layer embeddings to the residual stream (`LayerInputsConfig`).

    Attributes:
        gate: Projection of the residual stream, [size, hidden_size].
        output: Projection of the product with the per-layer embedding, [hidden_size, size].
        norm: Norm on the output projection's result, [hidden_size].
    """

    gate: Linear
    output: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class TokenInputWeights:
    """Weights with which per-layer embeddings are made from tokens, for the layers of a stage
    (`LayerInputsConfig`).

    Attributes:
        embedding: The separate table's columns for these layers, [vocab_size, num_layers * size].
        projection: Projection of ordinary embeddings, [num_layers * size, hidden_size].
        norm: Norm on each layer's part of the projection's result, [size].
    """

    embedding: Tensor
    projection: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Layer(Generic[LinearT]):
    """One decoder layer. Its projections are `Linear`, or the results of a `Sink`.

    Attributes:
        attention_norm: Norm before attention; None if there is none.
        attention_post_norm: Norm on attention's output; None if there is none.
        input_projection: Query heads, key heads, value heads, in this order: [query_size + 2 * kv_size,
            hidden_size]; without value heads if keys are values; without key and value heads if the layer reads
            another layer's. With `attention_gate`, the gates of all query heads come first, [query_size,
            hidden_size]. With latent attention: queries, or the vector from which they are projected, the
            compressed latent and the shared key. In a recurrent layer: the input projection, the rows of
            `RecurrentConfig.sections`. None in a layer with neither attention nor a recurrent part.
        query_norm: Norm over each query head [head_dim], or over all [query_size]; None without qk_norm.
        key_norm: Norm over each key head [head_dim], or over all [kv_size]; None without qk_norm, or without keys.
        output_projection: [hidden_size, num_heads * output_head_dim], or the output projection of a recurrent
            layer. None in a layer with neither attention nor a recurrent part.
        mlp_norm: Norm before the MLP; None if there is none.
        mlp_post_norm: Norm on the MLP's output; None if there is none.
        experts: The layer's experts; None in a layer without experts.
        up: Gate above up if the MLP is gated, [2 * intermediate_size, hidden_size], otherwise up alone. In
            a layer with experts, the shared MLP's; None if there is no MLP.
        down: [hidden_size, intermediate_size]; None if there is no MLP.
        latent: Weights of latent attention; None for other attention.
        sinks: The learned score of each query head, [num_heads]; None if there are none.
        head_gates: Projection of attention's input to the gates of heads, [num_heads, hidden_size]; None if there
            are none.
        recurrent: Weights of the recurrent part other than projections; None in a layer without one.
        recurrent_projections: Input and output projections of the recurrent part, in a layer with attention too;
            None in other layers.
        inputs: Weights for per-layer embeddings; None if there are none.
        activation: [4], the parameters of xIELU (`xielu` in `engine/layers/layer_operations.py`); None if the
            activation has no parameters.
        scale: [1], a factor of the residual stream after the layer; None if there is none.
        altup: Weights for several residual streams; None if there is one.
        laurel: The low-rank branch beside attention; None if there is none.
    """

    attention_norm: Norm | None
    input_projection: LinearT | None
    query_norm: Norm | None
    key_norm: Norm | None
    output_projection: LinearT | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    up: LinearT | None
    down: LinearT | None
    mlp_post_norm: Norm | None
    experts: ExpertWeights[LinearT] | None = None
    latent: LatentWeights | None = None
    sinks: Tensor | None = None
    head_gates: Linear | None = None
    recurrent: RecurrentWeights | None = None
    recurrent_projections: tuple[LinearT, LinearT] | None = None
    inputs: LayerInputWeights | None = None
    activation: Tensor | None = None
    scale: Tensor | None = None
    altup: AltUpWeights | None = None
    laurel: LaurelWeights | None = None

    @property
    def qkv(self) -> LinearT:
        """`input_projection`, of a layer with attention or a recurrent part."""
        assert self.input_projection is not None, "the layer has neither attention nor a recurrent part"
        return self.input_projection

    @property
    def output(self) -> LinearT:
        """`output_projection`, of a layer with attention or a recurrent part."""
        assert self.output_projection is not None, "the layer has neither attention nor a recurrent part"
        return self.output_projection

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP or experts."""
        return self.up is not None or self.experts is not None

    @property
    def first_norm(self) -> Norm | None:
        """The norm on the layer's input."""
        return self.mlp_norm if self.input_projection is None else self.attention_norm


LayerWeights = Layer[Linear]
"""A layer as it is read, before a `Sink` converts it."""

LayerT = TypeVar("LayerT")


@dataclass(frozen=True, slots=True)
class DraftHeadWeights(Generic[LayerT, LinearT]):
    """Weights of a draft head, which shares the model's embedding and output projection.

    Attributes:
        embedding_norm: Norm on the embedding of the newest token.
        hidden_norm: Norm on the hidden state before that token.
        projection: [hidden_size, 2 * hidden_size]: its inputs are the normed embedding, then the normed hidden
            state.
        decoder: The head's layer (`DecoderConfig.draft_layer`) alone.
        final_norm: Norm on the layer's output.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    projection: LinearT
    decoder: DecoderWeights[LayerT, LinearT]
    final_norm: Norm


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[LayerT, LinearT]):
    """The whole model, or a part of it, with layers and projections as a `Sink` returns them.

    Attributes:
        embedding: [vocab_size, hidden_size]; None after the first pipeline stage.
        position_embedding: [position_offset + max_positions, hidden_size]; None if positions are not learned, and
            after the first stage.
        layers: At least one layer, in order.
        final_norm: Norm before the output projection; None before the last stage.
        lm_head: [vocab_size, hidden_size]; shares the embedding's memory if tied; None before the last stage.
        token_inputs: Weights that make per-layer embeddings; None if there are none.
        streams: Weights for several residual streams; None if there is one.
        embedding_norm: Norm on embeddings; None if there is none, and after the first stage.
    """

    embedding: Tensor | None
    position_embedding: Tensor | None
    layers: tuple[LayerT, ...]
    final_norm: Norm | None
    lm_head: LinearT | None
    token_inputs: TokenInputWeights | None = None
    streams: StreamWeights | None = None
    embedding_norm: Norm | None = None


PlainWeights = DecoderWeights[LayerWeights, Linear]
