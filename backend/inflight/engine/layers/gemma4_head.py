"""Gemma 4's draft head, which reads the model's keys and values and has none of its own.

For the token at position p it reads the token's embedding and the model's hidden state at p - 1, and its layers
attend to the model's keys and values at positions before p, as a token at p. To guess more tokens, it stays at p
and reads its own guess with its own output in place of the hidden state, so that the guesses see no keys of each
other. It has nothing to store for later guesses but the model's hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.attention.gathering import GatheringAttention
from inflight.engine.attention.gathering_metadata import GatheringMetadata
from inflight.engine.collectives import join_logits
from inflight.engine.interfaces import DraftedModel
from inflight.engine.kv_cache import KvCache
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.draft_head import DraftHead, likeliest
from inflight.engine.layers.layer_operations import apply_norm
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow
from inflight.models.decoder_config import Gemma4HeadConfig
from inflight.models.gemma4_weights import ClusterWeights, Gemma4HeadWeights
from inflight.models.sharding import Part


class Gemma4Head(DraftHead):
    """Guesses draft tokens with Gemma 4's draft head.

    Args:
        model: The decoder of the model, with `DecoderConfig.gemma4_head`.
        config: The head.
        part: The rank's part of the head's layers.
        weights: The weights of the head.
        cache: The KV cache of this model.
    """

    advances = False

    def __init__(
        self,
        model: DraftedModel,
        config: Gemma4HeadConfig,
        part: Part,
        weights: Gemma4HeadWeights,
        cache: KvCache,
    ) -> None:
        super().__init__(model, _make_layers(model, config, part, weights), cache)
        self._cache, self._weights, self._config = cache, weights, config

    def clear(self, block_ids: Tensor) -> None:
        torch.unflatten(self._hidden, 0, (-1, self._size)).index_fill_(0, block_ids, 0)

    def _stored(self, hidden: Tensor, between: Mapping[int, Tensor]) -> Tensor:
        return self._model.normalize(hidden)

    def _fill_layer(self, packed: PackedBatch) -> None:
        """Do nothing: the layers have no keys and values of their own."""

    def _read(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        return self._weights.before(torch.cat([self._model.embed(packed), hidden], dim=-1))

    def _forward(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        output = self._layer.forward(packed, self._cache, self._read(packed, hidden))
        return apply_norm(output, self._weights.final_norm, self._config.layers.norm_eps)

    def _next(self, output: Tensor) -> Tensor:
        return self._weights.after(output)

    def _choose(self, output: Tensor) -> Tensor:
        clusters = self._weights.clusters
        if clusters is None:
            return likeliest(self._logits(output))
        return self._choose_in(clusters, output)

    def _logits(self, output: Tensor) -> Tensor:
        logits = F.linear(output, self._weights.output).float()
        return join_logits(logits, self._config.layers.vocab_size, self._model.collectives)

    def _choose_in(self, clusters: ClusterWeights, output: Tensor) -> Tensor:
        """Return the likeliest token [rows] of the likeliest clusters."""
        chosen = F.linear(output, clusters.centers).topk(self._config.clusters_per_token, dim=-1).indices
        token_ids = clusters.token_ids[chosen].flatten(1)
        # [rows, tokens, hidden_size] @ [rows, hidden_size, 1]
        logits = (self._weights.output[token_ids] @ output[..., None]).squeeze(-1)
        return token_ids.gather(1, logits.argmax(dim=-1, keepdim=True)).squeeze(1)


class _EarlierKeys(GatheringAttention):
    """Attention of generation rows that see the keys before their own position, which has none yet."""

    def prepare(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, GatheringMetadata]:
        earlier = replace(
            packed,
            positions=(packed.positions - 1).clamp(min=0),
            generation_lengths=(packed.generation_lengths - 1).clip(min=1),
        )
        return super().prepare(earlier, cache, windows)


def _make_layers(
    model: DraftedModel, config: Gemma4HeadConfig, part: Part, weights: Gemma4HeadWeights
) -> Decoder:
    """Return a decoder of the head's layers, on torch's operators.

    Under a window of n tokens, transformers lets the head see the n + 1 tokens before it.
    """
    longest = model.max_sequence_length
    windows = tuple(
        None if window is None or window + 1 >= longest else AttentionWindow(window + 1)
        for window in config.layers.sliding_windows
    )
    attention = _EarlierKeys(partial(F.scaled_dot_product_attention, scale=config.layers.attention_scale))
    return Decoder(config.layers, weights.decoder, windows, longest, part, model.collectives, attention)
