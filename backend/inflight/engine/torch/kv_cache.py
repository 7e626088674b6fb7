"""The paged KV cache: keys and values of every layer in blocks of a fixed number of tokens.

Layout [layers, 2, blocks, tokens_per_block, kv_heads, head_dim]; 2 is keys, values. With latent attention it is 1:
values are what keys are, and stored once. Compiled layers have an order
of their own inside a block (native/source/attention.h) and use neither `write` nor `gather`. Which sequence holds
which block is not known here. One block more than the scheduler knows of, the null block, is zero: it fills
block tables up where a batch's sequences differ in length. With CUDA graphs, whose attention never reads past a
sequence's end, the rows that fill a batch up write there instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.torch.host_memory import zeros
from inflight.models import DecoderConfig


def block_bytes(decoder: DecoderConfig, tokens_per_block: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return decoder.num_layers * tokens_per_block * decoder.cached_size * dtype.itemsize


class KvCache:
    """Device memory for `num_blocks` blocks and the null block.

    Attributes:
        null_block: Id of the block that no sequence has.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = self.null_block = num_blocks
        self.tokens_per_block = tokens_per_block
        self._head_shape = (decoder.num_kv_heads, decoder.head_dim)
        block_size = tokens_per_block * decoder.kv_size
        self._num_parts = decoder.cached_size // decoder.kv_size
        shape = (decoder.num_layers, self._num_parts, num_blocks + 1, block_size)
        on_host = device.type == "cpu"
        self._blocks = zeros(shape, dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self._tokens = self._blocks.view(decoder.num_layers, self._num_parts, -1, *self._head_shape)
        self._scratch = torch.empty((self._num_parts, 0, block_size), dtype=dtype, device=device)

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values, [num_blocks + 1, tokens_per_block * kv_size], in any order."""
        return [(layer[0], layer[1]) for layer in self._blocks]

    @property
    def all_tokens(self) -> Tensor:
        """All keys and values by the places that `write` takes: [layers, 2, tokens, kv_heads, head_dim].

        With latent attention 1 instead of 2.
        """
        return self._tokens

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values where they are: [num_blocks + 1, tokens_per_block, kv_heads, head_dim]."""
        parts = self._blocks[layer].unflatten(-1, (self.tokens_per_block, *self._head_shape))
        return parts[0], parts[-1]

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self._blocks.device

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are."""
        return self._blocks.dtype

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give each target block what its source holds, over all layers; no block is read after it was written."""
        for blocks in self._blocks:  # a layer at a time: the blocks of all would be much memory
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def clear(self, block_ids: Tensor) -> None:
        """Zero blocks that a sequence takes over.

        Masked keys have weight 0, but 0 times what an earlier sequence's overflow left would not be 0.
        """
        self._blocks.index_fill_(2, block_ids, 0)

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [rows, kv_heads, head_dim] each.

        `places` [rows] are block * tokens_per_block + offset. With latent attention `values` are the `keys`.
        """
        for part, rows in zip(self._tokens[layer], (keys, values)):
            part.index_copy_(0, places, rows)

    def tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values by the places that `write` takes: [tokens, kv_heads, head_dim], contiguous."""
        parts = self._tokens[layer]
        return parts[0], parts[-1]

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks one after another, each [blocks * tokens_per_block, kv_heads, head_dim].

        Valid until the next call: both lie in scratch memory, which saves allocating and faulting it in again for
        every layer.
        """
        count = block_ids.shape[0]
        if self._scratch.shape[1] < count:
            self._scratch = self._scratch.new_empty(
                (self._num_parts, _round_up(count), self._scratch.shape[2])
            )
        found = []
        for part in range(self._num_parts):
            target = self._scratch[part, :count]
            torch.index_select(self._blocks[layer, part], 0, block_ids, out=target)
            found.append(target.view(-1, *self._head_shape))
        return found[0], found[-1]


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
