"""The two ends of a model, embedding and logits, whose vocabulary several ranks may hold parts of."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from inflight.engine.torch.collectives import Collectives
from inflight.models.sharding import Range


def embed(
    token_ids: Tensor, here: Range, look_up: Callable[[Tensor], Tensor], collectives: Collectives
) -> Tensor:
    """The embeddings of `token_ids` [rows].

    Args:
        token_ids: Of the whole vocabulary.
        here: Which ids this rank has, maybe none.
        look_up: From ids, counted from the first of `here`, to [rows, hidden_size].
        collectives: The ranks that have the others.
    """
    if collectives.size == 1:
        return look_up(token_ids)
    begin, end = here
    is_here = (token_ids >= begin) & (token_ids < end)
    found = look_up(token_ids[is_here] - begin)
    x = found.new_zeros((len(token_ids), found.shape[1]))
    x[is_here] = found
    return collectives.all_reduce(x)


def join_logits(logits: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """[rows, vocab_size] from every rank's [rows, its part]; the last ranks may have fewer ids, or none."""
    if collectives.size == 1:
        return logits
    widest = -(-vocab_size // collectives.size)
    padded = F.pad(logits, (0, widest - logits.shape[-1]))
    return collectives.all_gather(padded)[..., :vocab_size].contiguous()
