"""Reads the weights of Gemma 4's draft head (`gemma4_head.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import LayerWeights, Linear, Norm, PlainWeights
from inflight.models.find_sources import find_sources
from inflight.models.gemma4_head import AFTER, BEFORE, CENTROIDS, ORDERING
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
class ClusterWeights:
    """The clusters into which a head divides tokens.

    Attributes:
        centers: [clusters, hidden_size]: the likeliest clusters have the largest products with the output.
        token_ids: [clusters, tokens in each] int64.
    """

    centers: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class Gemma4HeadWeights:
    """Weights of a draft head, whose width is called hidden_size here.

    Attributes:
        decoder: The layers, without embedding and output projection.
        before: [hidden_size, 2 * width of the model]: its inputs are the model's embedding of a token, then the
            hidden state before the token.
        after: [width of the model, hidden_size]: makes the hidden state for the next guess.
        final_norm: Norm on the last layer's output.
        output: The output projection [vocab_size, hidden_size], of which a rank has its part of the tokens; with
            clusters every rank has all of it.
        clusters: The clusters; None: every token gets a logit.
    """

    decoder: PlainWeights
    before: Linear
    after: Linear
    final_norm: Norm
    output: Tensor
    clusters: ClusterWeights | None


@dataclass(frozen=True, slots=True)
class Gemma4HeadSources:
    """Stored tensors of a head, without the token ids of clusters."""

    decoder: DecoderSources
    before: LinearSource
    after: LinearSource
    final_norm: NormSource
    output: TensorSource
    centers: TensorSource | None


def gemma4_part(head: ModelDescription, shard: Shard) -> Part:
    """Return the part of a head's layers that a rank has."""
    return Part(shard, (0, head.decoder.num_layers), is_first_stage=False, is_last_stage=False)


def gemma4_head_bytes(model: ModelDescription, dtype: torch.dtype, shard: Shard) -> int:
    """Return the memory that a rank's part of a model's head takes, in bytes."""
    head = model.gemma4_head
    assert head is not None, "the model was described with the head"
    with Checkpoint(head.folder) as checkpoint:
        sources = tensors(_find_sources(model, head, checkpoint, shard))
        return sum(tensor.num_bytes(dtype) for tensor in sources)


def load_gemma4_head(
    sink: Sink[LayerWeights, Linear],
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> Gemma4HeadWeights:
    """Read a rank's part of a model's head onto `device` as `dtype`.

    Args:
        sink: Converts the projections and the layers.
        model: The model with the head, whose tensors were checked (`with_gemma4_head`).
        dtype: Dtype of output projection and vectors.
        device: Device of the weights.
        shard: The rank's part.

    Raises:
        ConfigError: The file is damaged, or the clusters do not have each token once.
    """
    head = model.gemma4_head
    assert head is not None, "the model was described with the head"
    with Checkpoint(head.folder) as checkpoint:
        sources = _find_sources(model, head, checkpoint, shard)
        reader = WeightReader(checkpoint, dtype, device, sink, None, lambda _: None)
        clusters = None
        if sources.centers is not None:
            token_ids = checkpoint.read(ORDERING).long()
            if not torch.equal(token_ids.sort().values, torch.arange(len(token_ids))):
                raise ConfigError(
                    f"{head.folder}: tensor {ORDERING!r} does not have each number from 0 to {len(token_ids) - 1} "
                    "once, expected an order of all tokens"
                )
            centers = reader.plain(sources.centers)
            clusters = ClusterWeights(centers, token_ids.view(len(centers), -1).to(device))
        return Gemma4HeadWeights(
            decoder=reader.read(sources.decoder),
            before=reader.projection(sources.before),
            after=reader.projection(sources.after),
            final_norm=reader.norm(sources.final_norm),
            output=reader.plain(sources.output),
            clusters=clusters,
        )


def _find_sources(
    model: ModelDescription, head: ModelDescription, checkpoint: Checkpoint, shard: Shard
) -> Gemma4HeadSources:
    config, names, width = model.decoder.gemma4_head, head.names, model.decoder.hidden_size
    assert config is not None, "the model was described with the head"
    hidden, vocab_size = head.decoder.hidden_size, head.decoder.vocab_size
    has_own = f"{names.lm_head}.weight" in checkpoint.tensors
    own = (0, vocab_size) if config.num_clusters else shard.split(vocab_size)
    output = StoredRows(
        f"{names.lm_head if has_own else names.base + names.embedding}.weight", vocab_size, (own,)
    )
    norm = _whole(f"{names.base}{names.final_norm}", hidden)
    return Gemma4HeadSources(
        decoder=find_sources(head, gemma4_part(head, shard)),
        before=LinearSource(_matrix(BEFORE, hidden, 2 * width), None),
        after=LinearSource(_matrix(AFTER, width, hidden), None),
        final_norm=NormSource(TensorSource((norm,)), None, 0.0, False),
        output=TensorSource((output,), hidden, (0, hidden)),
        centers=_matrix(CENTROIDS, config.num_clusters, hidden) if config.num_clusters else None,
    )


def _matrix(module: str, rows: int, columns: int) -> TensorSource:
    return TensorSource((_whole(module, rows),), columns, (0, columns))


def _whole(module: str, rows: int) -> StoredRows:
    return StoredRows(f"{module}.weight", rows, ((0, rows),))
