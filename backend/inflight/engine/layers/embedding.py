"""Token embeddings of a batch, for every decoder that has them: divided among ranks, with virtual tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.collectives import Collectives
from inflight.engine.packing import PackedBatch
from inflight.models import DecoderConfig
from inflight.models.sharding import Range


def embed(
    packed: PackedBatch,
    config: DecoderConfig,
    here: Range,
    look_up: Callable[[Tensor], Tensor],
    collectives: Collectives,
    position_embedding: Tensor | None,
) -> Tensor:
    """Return the embeddings of the rows' tokens, [rows, hidden_size], plus learned position embeddings if there
    are any.

    The embeddings of virtual tokens come with the batch, complete on every rank.

    Args:
        packed: Token ids of the whole vocabulary, virtual tokens, and positions.
        config: The scale and other properties of embeddings.
        here: The range of ids whose embeddings this rank has; may be empty.
        look_up: Returns embeddings [rows, hidden_size] of ids, which are relative to the first of `here`.
        collectives: Collectives over the ranks that have the other ids.
        position_embedding: [max_positions, hidden_size]; None if positions are not learned.
    """
    virtual = packed.virtual
    if collectives.size == 1:
        known = packed.token_ids if virtual is None else packed.token_ids.index_fill(0, virtual.rows, 0)
        x = look_up(known)
    else:
        begin, end = here
        if begin == end:
            x = look_up(packed.token_ids[:0]).new_zeros((len(packed.token_ids), config.hidden_size))
        else:  # look up every token: only the device knows how many ids this rank has
            x = look_up((packed.token_ids - begin).clamp(0, end - begin - 1))
            is_here = (packed.token_ids >= begin) & (packed.token_ids < end)
            x = x.masked_fill(~is_here[:, None], 0)
        x = collectives.all_reduce(x)
    if virtual is not None:
        x = x.index_copy(0, virtual.rows, virtual.embeddings)
    if config.embedding_scale != 1:
        x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)  # rounded as in transformers
    if position_embedding is None:
        return x
    return x + F.embedding(packed.positions + config.position_offset, position_embedding)
