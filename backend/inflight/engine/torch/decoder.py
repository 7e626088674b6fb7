"""The forward pass in torch's operators, one class for all families.

A pipeline stage has some of the layers, and starts from the hidden states of the stage before. The two ends of a
model, embedding and logits, are here for compiled layers too: several ranks may hold parts of their vocabulary.

Everything that is per family was settled when the checkpoint was read; the branches here are on properties that a
DecoderConfig names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.decoding.row_kernels import RowKernels
from inflight.engine.additional_outputs import HiddenStates
from inflight.engine.packing import PackedBatch
from inflight.engine.torch.attention import GATHERING, Attention
from inflight.engine.torch.collectives import ALONE, Collectives
from inflight.engine.torch.kv_cache import KvCache
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig, LayerWeights, Linear, Norm, PlainWeights
from inflight.models.rope import rope_tables
from inflight.models.sharding import Part, Range

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Decoder:
    """A model, or a part of one: its weights, and the tables of its rotary positions.

    Args:
        config: What the checkpoint says.
        weights: Of that model, or of this part of it.
        layer_windows: Per layer of the whole model what a token sees, instead of `config.sliding_windows`.
        max_sequence_length: Longest sequence in tokens.
        part: Which part of the model this is; None: all of it.
        collectives: The ranks that have the other parts of these layers; all of them run the same batches.
        attention: How rows read keys and values.

    Attributes:
        config: Of the whole model.
        dtype: Of weights, activations and KV cache.
        has_fixed_shapes: As `attention` says.
        needs_cleared_blocks: Whether what a KV block held before may reach a sequence that takes it over.
        row_kernels: Computes over its rows of logits when tokens are chosen.
    """

    needs_cleared_blocks = True
    row_kernels = RowKernels()

    def __init__(
        self,
        config: DecoderConfig,
        weights: PlainWeights,
        layer_windows: tuple[AttentionWindow | None, ...],
        max_sequence_length: int,
        part: Part | None = None,
        collectives: Collectives = ALONE,
        attention: Attention = GATHERING,
    ) -> None:
        part = part or Part.whole(config)
        self.config = config
        self.has_fixed_shapes = attention.has_fixed_shapes
        self._attention = attention
        self._part = part.held_config(config)
        self._vocabulary = part.shard.split(config.vocab_size)
        self._collectives = collectives
        self._first_layer = part.layers[0]
        self._layer_windows = layer_windows[slice(*part.layers)]
        self._windows = tuple(dict.fromkeys(self._layer_windows))
        self._weights = weights
        self._activation = _ACTIVATIONS[config.activation]
        any_weight = weights.layers[0].attention_norm.weight
        self.dtype = any_weight.dtype
        self._rope = None
        if config.rope is not None:
            cos, sin = rope_tables(config.rope, config.head_dim, max_sequence_length)
            self._rope = cos.to(any_weight.device), sin.to(any_weight.device)

    def forward(
        self,
        packed: PackedBatch,
        cache: KvCache,
        hidden: Tensor | None = None,
        between: HiddenStates | None = None,
    ) -> Tensor:
        """The last layer's output [rows, hidden_size]; fills the cache.

        The next stage takes it as `hidden`, and at the last stage `logits` does. At the first, `hidden` is None.
        `between` keeps what it wants of the hidden states between layers.
        """
        weights = self._weights
        plans = self._attention.plan(packed, cache, self._windows)
        places = _places(packed, cache.tokens_per_block)
        x = self._embed(packed) if hidden is None else hidden
        rotation = None if self._rope is None else _rotation(*self._rope, packed.positions)
        for index, layer in enumerate(weights.layers):
            if between is not None:
                between.keep(self._first_layer + index, x)
            plan = plans[self._layer_windows[index]]
            x = x + self._attend(
                self._norm(x, layer.attention_norm), rotation, index, layer, places, plan, cache
            )
            x = x + self._mlp(self._norm(x, layer.mlp_norm), layer)
        return x

    def forward_to_logits(self, packed: PackedBatch, cache: KvCache, hidden: Tensor | None = None) -> Tensor:
        """At the last stage, `logits` of the rows that choose tokens, of what `forward` returns."""
        return self.logits(self.forward(packed, cache, hidden), packed.sampled_rows)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[n, vocab_size] float32, of the rows [n] int64 of what `forward` returned."""
        norm, head = self._weights.final_norm, self._weights.lm_head
        assert norm is not None and head is not None, "the last stage makes the logits"
        logits = head(self._norm(hidden[rows], norm)).float()
        return join_logits(logits, self.config.vocab_size, self._collectives)

    def normalize(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [n, hidden_size] of what `forward` returned, at the last stage."""
        norm = self._weights.final_norm
        assert norm is not None, "the last stage has the final norm"
        return self._norm(hidden, norm)

    def _embed(self, packed: PackedBatch) -> Tensor:
        learned = self._weights.position_embedding
        return embed(packed, self._vocabulary, self._look_up, self._collectives, learned)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        assert self._weights.embedding is not None, "the first stage embeds the tokens"
        return F.embedding(token_ids, self._weights.embedding)

    def _row_parallel(self, linear: Linear, x: Tensor) -> Tensor:
        """Every rank has some of the inputs; the bias is added once, to the sum."""
        if self._collectives.size == 1:
            return linear(x)
        total = self._collectives.all_reduce(F.linear(x, linear.weight))
        return total if linear.bias is None else total + linear.bias

    def _attend(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        index: int,
        layer: LayerWeights,
        places: Tensor,
        plan: Any,
        cache: KvCache,
    ) -> Tensor:
        heads, kv_heads = self._part.num_heads, self._part.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self._part.head_dim)
        queries_keys, values = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = queries_keys.split((heads, kv_heads), dim=1)
            queries_keys = torch.cat(
                [self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)], dim=1
            )
        if rotation is not None:
            queries_keys = _rotate(queries_keys, *rotation)
        queries, keys = queries_keys.split((heads, kv_heads), dim=1)
        cache.write(index, places, keys, values)
        read = self._attention.attend(queries, keys, values, index, plan, cache)
        return self._row_parallel(layer.output, read)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        if not self.config.gated_mlp:
            return self._row_parallel(layer.down, self._activation(layer.up(x)))
        gate, up = layer.up(x).chunk(2, dim=-1)
        return self._row_parallel(layer.down, self._activation(gate).mul_(up))

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return apply_norm(x, norm, self.config.norm_eps)


def _rotation(all_cos: Tensor, all_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin of each row's angles, [rows, 1, head_dim] float32, as `_rotate` takes them."""
    cos, sin = all_cos[positions], all_sin[positions]
    return torch.cat([cos, cos], dim=-1).unsqueeze(1), torch.cat([-sin, sin], dim=-1).unsqueeze(1)


def _places(packed: PackedBatch, tokens_per_block: int) -> Tensor:
    """[rows], where each token's keys and values go: block * tokens_per_block + offset."""
    blocks = packed.block_tables[packed.slots, packed.positions // tokens_per_block]
    return blocks * tokens_per_block + packed.positions % tokens_per_block


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of the heads [rows, heads, head_dim], computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    return torch.addcmul(x * cos, swapped, signed_sin).to(x.dtype)


def apply_norm(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """An RMSNorm or a LayerNorm over the last dimension."""
    if norm.bias is None:
        return F.rms_norm(x, x.shape[-1:], norm.weight, eps)
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)


def embed(
    packed: PackedBatch,
    here: Range,
    look_up: Callable[[Tensor], Tensor],
    collectives: Collectives,
    position_embedding: Tensor | None,
) -> Tensor:
    """The embeddings of the rows' tokens, [rows, hidden_size], with those of their positions if these are learned.

    Args:
        packed: Token ids of the whole vocabulary, and positions.
        here: Which ids this rank has, maybe none.
        look_up: From ids, counted from the first of `here`, to [rows, hidden_size].
        collectives: The ranks that have the others.
        position_embedding: [max_positions, hidden_size]; None if positions are not learned.
    """
    if collectives.size == 1:
        x = look_up(packed.token_ids)
    else:
        begin, end = here
        is_here = (packed.token_ids >= begin) & (packed.token_ids < end)
        found = look_up(packed.token_ids[is_here] - begin)
        x = found.new_zeros((len(packed.token_ids), found.shape[1]))
        x[is_here] = found
        x = collectives.all_reduce(x)
    return x if position_embedding is None else x + F.embedding(packed.positions, position_embedding)


def join_logits(logits: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """[rows, vocab_size] from every rank's [rows, its part]; the last ranks may have fewer ids, or none."""
    if collectives.size == 1:
        return logits
    widest = -(-vocab_size // collectives.size)
    padded = F.pad(logits, (0, widest - logits.shape[-1]))
    return collectives.all_gather(padded)[..., :vocab_size].contiguous()
