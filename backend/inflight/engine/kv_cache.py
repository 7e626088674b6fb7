"""The paged KV cache: keys and values of every layer in blocks of a fixed number of tokens.

Layout [layers, 2, blocks, tokens_per_block, kv_heads, head_dim]; 2 is keys, values. With latent attention it is 1:
values are what keys are, and stored once. Where keys and values are rounded to 8 bits (`kv_rounding.py`) that
tensor is of bytes, and another has their scales, [layers, 2, blocks, tokens_per_block, kv_heads]. Compiled layers
have an order of their own inside a block (cpu/source/attention.h) and use neither `write` nor `gather`. Which
sequence holds which block is not known here. One block more than the scheduler knows of, the null block, is zero:
it fills block tables up where a batch's sequences differ in length. With CUDA graphs, whose attention never reads
past a sequence's end, the rows that fill a batch up write there instead.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.host_memory import zeros
from inflight.engine.kv_rounding import KvRounding, head_bytes
from inflight.engine.packing import PackedBatch
from inflight.engine.recurrent.states import RecurrentStates
from inflight.models import DecoderConfig

Numbers = NDArray[np.int64] | list[int]
"""Of rows, on the host: their slots, or positions."""


def block_bytes(
    decoder: DecoderConfig, tokens_per_block: int, dtype: torch.dtype, rounding: KvRounding | None = None
) -> int:
    """Bytes of one block over all layers, scales included."""
    num_heads = decoder.cached_size // decoder.head_dim  # of keys, and of values where these are apart
    return decoder.num_cached_layers * tokens_per_block * num_heads * head_bytes(decoder, dtype, rounding)


def describe_rounding(decoder: DecoderConfig, rounding: KvRounding) -> str:
    """How keys and values are stored, and what that saves, in words."""
    whole, stored = (block_bytes(decoder, 1, torch.bfloat16, each) for each in (None, rounding))
    return (
        f"keys and values in {rounding.name} with a scale for each token and head, {whole / stored:.2f} times the "
        "tokens of bfloat16"
    )


def cache_places(packed: PackedBatch, tokens_per_block: int) -> Tensor:
    """[rows], where each token's keys and values go: block * tokens_per_block + offset."""
    blocks = packed.block_tables[packed.slots, packed.positions // tokens_per_block]
    return blocks * tokens_per_block + packed.positions % tokens_per_block


class KvCache:
    """Device memory for `num_blocks` blocks and the null block.

    Args:
        decoder: As this rank computes it.
        num_blocks: That sequences may have.
        tokens_per_block: Of each.
        dtype: Of the keys and values that are written and read.
        device: Where the memory is.
        rounding: How they are stored; None: as they are.
        states: The recurrent states beside them, if the model has any.

    Attributes:
        null_block: Id of the block that no sequence has.
        dtype: Of keys and values as they are computed with.
        rounding: How they are stored; None: in that dtype.
        states: As given.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: KvRounding | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        self.states = states
        self.num_blocks = self.null_block = num_blocks
        self.tokens_per_block = tokens_per_block
        self.dtype, self.rounding = dtype, rounding
        self._head_shape = (decoder.num_kv_heads, decoder.head_dim)
        block_size = tokens_per_block * decoder.kv_size
        self._num_parts = decoder.cached_size // decoder.kv_size
        shape = (decoder.num_cached_layers, self._num_parts, num_blocks + 1, block_size)
        stored = dtype if rounding is None else rounding.stored
        self._blocks = _allocate(shape, stored, device)
        self._tokens = self._blocks.view(decoder.num_cached_layers, self._num_parts, -1, *self._head_shape)
        num_scales = 0 if rounding is None else tokens_per_block * decoder.num_kv_heads  # of a block
        self._scales = _allocate((*shape[:3], num_scales), torch.float32, device)
        self._scratch = torch.empty((self._num_parts, 0, block_size), dtype=stored, device=device)

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values as they are stored, [num_blocks + 1, tokens_per_block * kv_size], in any
        order.
        """
        return [(layer[0], layer[1]) for layer in self._blocks]

    @property
    def all_tokens(self) -> Tensor:
        """All keys and values by the places that `write` takes: [layers, 2, tokens, kv_heads, head_dim].

        With latent attention 1 instead of 2.
        """
        return self._tokens

    @property
    def layer_scales(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's scales of keys and of values, [num_blocks + 1, tokens_per_block * kv_heads] float32, in any
        order; [num_blocks + 1, 0] where nothing is rounded.
        """
        return [(layer[0], layer[1]) for layer in self._scales]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values as they are stored: [num_blocks + 1, tokens_per_block, kv_heads, head_dim]."""
        parts = self._blocks[layer].unflatten(-1, (self.tokens_per_block, *self._head_shape))
        return parts[0], parts[-1]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The scales of a layer's keys and values, by token as in `tokens`: [tokens, kv_heads] float32,
        contiguous.

        None where nothing is rounded.
        """
        if self.rounding is None:
            return None
        parts = self._scales[layer].view(self._num_parts, -1, self._head_shape[0])
        return parts[0], parts[-1]

    @property
    def device(self) -> torch.device:
        """The device that the cache is on."""
        return self._blocks.device

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give each target block what its source holds, over all layers; no block is read after it was written."""
        for memory in self._memories():
            for blocks in memory:  # a layer at a time: the blocks of all would be much memory
                blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def clear(self, block_ids: Tensor) -> None:
        """Zero blocks that a sequence takes over.

        Masked keys have weight 0, but 0 times what an earlier sequence's overflow left would not be 0.
        """
        for memory in self._memories():
            memory.index_fill_(2, block_ids, 0)

    def prepare(self, batch: ScheduledBatch, num_tokens: NDArray[np.int64]) -> None:
        """Nothing: rows read blocks where they lie."""

    def forget(self, batch: ScheduledBatch) -> None:
        """Nothing: sequences that start again write their blocks anew."""

    def has_room_beside(self, slots: Numbers, positions: Numbers, num_rows: int) -> bool:
        """Always: rows of the null slot all go to the null block."""
        return True

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [rows, kv_heads, head_dim] each.

        `places` [rows] are block * tokens_per_block + offset. With latent attention `values` are the `keys`.
        """
        scales = self.scales(layer)
        for index, (part, rows) in enumerate(zip(self._tokens[layer], (keys, values))):
            if self.rounding is None or scales is None:
                part.index_copy_(0, places, rows)
            else:
                levels, scales_of_rows = self.rounding.round(rows)
                part.index_copy_(0, places, levels)
                scales[index].index_copy_(0, places, scales_of_rows)

    def tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, as they are stored, by the places that `write` takes: [tokens, kv_heads,
        head_dim], contiguous.
        """
        parts = self._tokens[layer]
        return parts[0], parts[-1]

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks one after another, each [blocks * tokens_per_block, kv_heads, head_dim].

        In `dtype`, whatever they are stored as. Valid until the next call: both lie in scratch memory, which saves
        allocating and faulting it in again for every layer.
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
            rows = target.view(-1, *self._head_shape)
            if self.rounding is not None:
                scales = self._scales[layer, part].index_select(0, block_ids).view(rows.shape[:2])
                rows = self.rounding.restore(rows, scales, self.dtype)
            found.append(rows)
        return found[0], found[-1]

    def _memories(self) -> tuple[Tensor, ...]:
        """All that a block has: [layers, 2 or 1, blocks + 1, any] each."""
        return (self._blocks,) if self.rounding is None else (self._blocks, self._scales)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    on_host = device.type == "cpu"
    return zeros(shape, dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
