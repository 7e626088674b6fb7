"""An EAGLE-3 head, which guesses tokens from the hidden states after three of the model's layers.

It is a `DraftHead` whose hidden states are a projection of these three, and whose guesses are of its own, smaller
vocabulary. Attention reads embedding and hidden state side by side, each after a norm of its own, and the residual
stream begins with the hidden state. A guessed token's hidden state is the layer's output before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.interfaces import DraftedModel, DraftLayer
from inflight.engine.kv_cache import KvCache
from inflight.engine.layers.draft_head import DraftHead
from inflight.engine.layers.layer_operations import apply_norm
from inflight.engine.packing import PackedBatch
from inflight.models.eagle_weights import EagleWeights


class EagleHead(DraftHead):
    """Guesses draft tokens with an EAGLE-3 head.

    Args:
        model: The decoder of the model, with `DecoderConfig.eagle`.
        layer: As for `DraftHead`, with the head's output projection.
        fusion: Computes `EagleWeights.fusion`.
        weights: The weights of the head.
        cache: The KV cache of this model.
    """

    def __init__(
        self,
        model: DraftedModel,
        layer: DraftLayer,
        fusion: Callable[[Tensor], Tensor],
        weights: EagleWeights[Any, Any],
        cache: KvCache,
    ) -> None:
        super().__init__(model, layer, cache)
        self._fusion, self._eps = fusion, model.config.draft_layer.norm_eps
        config, eagle = model.config, model.config.eagle
        assert eagle is not None, "the model was described with the head"
        self._weights, self._order = weights, eagle.read_layers
        rope = eagle.layer.ropes[0]
        self._has_model_rope = rope in config.ropes and eagle.layer.head_dim == config.rotary_head_dim

    def _stored(self, hidden: Tensor, between: Mapping[int, Tensor]) -> Tensor:
        read = [between.get(number, hidden) for number in self._order]  # after all layers: the output
        return self._fusion(torch.cat(read, dim=-1))

    def _forward(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        return self._layer.forward(packed, self._cache, hidden, read=self._read(packed, hidden))

    def _read(self, packed: PackedBatch, hidden: Tensor) -> Tensor:
        weights, eps = self._weights, self._eps
        embedded = apply_norm(self._embed(packed), weights.embedding_norm, eps)
        return torch.cat([embedded, apply_norm(hidden, weights.hidden_norm, eps)], dim=-1)

    def _next(self, output: Tensor) -> Tensor:
        return output

    def _logits(self, output: Tensor) -> Tensor:
        return self._layer.logits(output, torch.arange(len(output), device=output.device))

    def _token_ids(self, guesses: Tensor) -> Tensor:
        of_model = self._weights.token_ids
        return guesses if of_model is None else of_model[guesses]

    def _of_layer(self, packed: PackedBatch) -> PackedBatch:
        return packed if self._has_model_rope else replace(packed, rotations=None)

    def _embed(self, packed: PackedBatch) -> Tensor:
        """Return embeddings [rows, hidden_size], of which the norm removes any scale that the model has."""
        table, virtual = self._weights.embedding, packed.virtual
        if table is None:
            return self._model.embed(packed)
        if virtual is None:
            return F.embedding(packed.token_ids, table)
        known = packed.token_ids.index_fill(0, virtual.rows, 0)
        return F.embedding(known, table).index_copy(0, virtual.rows, virtual.embeddings)
