"""Reads the weights of an EAGLE-3 head (`eagle_head.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import DecoderWeights, LayerT, LinearT, Norm
from inflight.models.eagle_head import EMBEDDING, EMBEDDING_NORM, FUSION, HIDDEN_NORM, TARGETS
from inflight.models.find_sources import find_sources
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part, Shard
from inflight.models.sink import Sink
from inflight.models.weight_reader import WeightReader
from inflight.models.weight_sources import (
    DecoderSources,
    LinearSource,
    NormSource,
    StoredRows,
    TensorSource,
    tensors,
)


@dataclass(frozen=True, slots=True)
class EagleWeights(Generic[LayerT, LinearT]):
    """Weights of an EAGLE-3 head.

    Attributes:
        decoder: The layer, whose attention has inputs of width 2 * hidden_size and no norm before it, the final
            norm, and the output projection [draft_vocab_size, hidden_size].
        fusion: [hidden_size, 3 * hidden_size]: makes one hidden state of those after three of the model's layers.
        embedding_norm: Norm on the embedding of the newest token, the first half of attention's input.
        hidden_norm: Norm on the hidden state before that token, the other half.
        embedding: The head's own embedding [vocab_size, hidden_size]; None: the model's.
        token_ids: [draft_vocab_size] int64, the model's token for each guess; None: they are the same.
    """

    decoder: DecoderWeights[LayerT, LinearT]
    fusion: LinearT
    embedding_norm: Norm
    hidden_norm: Norm
    embedding: Tensor | None
    token_ids: Tensor | None


@dataclass(frozen=True, slots=True)
class EagleSources:
    """Stored tensors of a head, without `d2t`."""

    decoder: DecoderSources
    fusion: LinearSource
    embedding_norm: NormSource
    hidden_norm: NormSource
    embedding: TensorSource | None


def eagle_part(shard: Shard) -> Part:
    """Return the part of an EAGLE-3 head that a rank has, which does not embed tokens by itself."""
    return Part(shard, (0, 1), is_first_stage=False)


def eagle_bytes(head: ModelDescription, dtype: torch.dtype, shard: Shard) -> int:
    """Return the memory that a rank's part of a head takes if nothing is quantized, in bytes."""
    with Checkpoint(head.folder, may_be_pickled=True) as checkpoint:
        return sum(tensor.num_bytes(dtype) for tensor in tensors(_find_sources(head, checkpoint, shard)))


def load_eagle_weights(
    sink: Sink[LayerT, LinearT],
    head: ModelDescription,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> EagleWeights[LayerT, LinearT]:
    """Read a rank's part of a head onto `device` as `dtype`.

    Args:
        sink: Converts the projections and the layer.
        head: The head, whose tensors were checked (`with_eagle_head`).
        vocab_size: Number of the model's tokens.
        dtype: Dtype of embeddings and vectors.
        device: Device of the weights.
        shard: The rank's part.

    Raises:
        ConfigError: The file is damaged, or `d2t` names a token that the model does not have.
    """
    with Checkpoint(head.folder, may_be_pickled=True) as checkpoint:
        sources = _find_sources(head, checkpoint, shard)
        reader = WeightReader(checkpoint, dtype, device, sink, None, lambda _: None)
        token_ids = None
        if TARGETS in checkpoint.tensors:
            offsets = checkpoint.read(TARGETS).long()
            token_ids = torch.arange(len(offsets)) + offsets
            low, high = int(token_ids.min()), int(token_ids.max())
            if low < 0 or high >= vocab_size:
                raise ConfigError(
                    f"{head.folder}: {TARGETS} leads to tokens {low} to {high}, expected 0 to {vocab_size - 1}: "
                    "each number is added to its index"
                )
        return EagleWeights(
            decoder=reader.read(sources.decoder),
            fusion=reader.projection(sources.fusion),
            embedding_norm=reader.norm(sources.embedding_norm),
            hidden_norm=reader.norm(sources.hidden_norm),
            embedding=None if sources.embedding is None else reader.plain(sources.embedding),
            token_ids=None if token_ids is None else token_ids.to(device),
        )


def _find_sources(head: ModelDescription, checkpoint: Checkpoint, shard: Shard) -> EagleSources:
    hidden, embedding = head.decoder.hidden_size, f"{EMBEDDING}.weight"
    decoder = find_sources(head, eagle_part(shard))
    layer = decoder.layers[0]
    assert layer.qkv is not None, "the layer has attention"
    doubled = replace(layer.qkv.weight, columns=2 * hidden, kept=(0, 2 * hidden))
    layer = replace(layer, qkv=replace(layer.qkv, weight=doubled))
    table = None
    if embedding in checkpoint.tensors:
        rows = checkpoint.tensors[embedding].shape[0]
        table = TensorSource((_whole(embedding, rows),), hidden, (0, hidden))
    fusion = TensorSource((_whole(f"{FUSION}.weight", hidden),), 3 * hidden, (0, 3 * hidden))
    return EagleSources(
        replace(decoder, layers=(layer,)),
        LinearSource(fusion, None, False),
        _norm(EMBEDDING_NORM, hidden),
        _norm(HIDDEN_NORM, hidden),
        table,
    )


def _whole(name: str, rows: int) -> StoredRows:
    return StoredRows(name, rows, ((0, rows),))


def _norm(module: str, size: int) -> NormSource:
    return NormSource(TensorSource((_whole(f"{module}.weight", size),)), None, 0.0, False)
