"""The paged KV cache: keys and values of every layer in blocks of a fixed number of tokens.

Layout: [layers, 2, blocks, tokens_per_block, kv_heads, head_dim], where 2 stands for keys and values; with latent
attention the size is 1, as values are part of the keys. If keys and values are quantized to 8 bits
(`kv_quantization.py`), this tensor has bytes, and another one has their scales, [layers, 2, blocks,
tokens_per_block, kv_heads]. If layers differ in heads, each group of equal layers has tensors of its own, so that
a block takes no more memory than its layers need. Layers that read another layer's keys and values are not
counted; a draft head's layer (`layers/draft_head.py`), if the head has keys and values of its own, is the last
one, and for the head there is also a tensor of hidden states, [1, 1, blocks, tokens_per_block, hidden_size].
Compiled layers have their own order inside a block (cpu/source/attention.h) and use neither `write` nor `gather`.

The cache does not know which sequence has which block. The null block, which is additional to the scheduler's
blocks, is zero and pads block tables of shorter sequences. With CUDA graphs, whose attention never reads past a
sequence's end, padding rows write to the null block.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.block_memory import CacheBytes, Entries
from inflight.engine.host_memory import zeros
from inflight.engine.kv_quantization import KvQuantization, head_bytes
from inflight.engine.packing import PackedBatch
from inflight.engine.recurrent.states import RecurrentStates
from inflight.models import DecoderConfig

Numbers = NDArray[np.int64] | list[int]
"""Slots or positions of rows, [rows] on the host."""


def block_bytes(
    decoder: DecoderConfig,
    tokens_per_block: int,
    dtype: torch.dtype,
    quantization: KvQuantization | None = None,
) -> int:
    """Return the size of one block over all layers in bytes, scales included."""
    of_hidden = decoder.hidden_size * dtype.itemsize if decoder.drafts else 0
    # heads of keys, and of values if values are stored separately
    return tokens_per_block * (
        of_hidden
        + sum(
            each.cached_size // each.head_dim * head_bytes(each.head_dim, dtype, quantization)
            for each in _cached_layers(decoder)
        )
    )


def _cached_layers(decoder: DecoderConfig) -> list[DecoderConfig]:
    """Return the configuration of each layer with keys and values of its own; a draft head's is the last one, if
    it has any."""
    layers = [decoder.at(layer) for layer in decoder.cached_layers]
    return [*layers, decoder.draft_layer] if decoder.has_draft_layer else layers


def describe_quantization(decoder: DecoderConfig, quantization: KvQuantization) -> str:
    """Describe the format of keys and values and the memory that it saves."""
    whole, stored = (block_bytes(decoder, 1, torch.bfloat16, each) for each in (None, quantization))
    return (
        f"keys and values in {quantization.name} with a scale for each token and head, "
        f"{whole / stored:.2f} times the tokens of bfloat16"
    )


def cache_places(packed: PackedBatch, tokens_per_block: int) -> Tensor:
    """Return the place of each row's keys and values, [rows]: block * tokens_per_block + offset in the block."""
    blocks = packed.block_tables[packed.slots, packed.positions // tokens_per_block]
    return blocks * tokens_per_block + packed.positions % tokens_per_block


class KvCache:
    """Device memory for `num_blocks` blocks and the null block.

    Args:
        decoder: The decoder, as this rank computes it.
        num_blocks: Number of blocks for sequences.
        tokens_per_block: Tokens per block.
        dtype: Data type of the keys and values that are written and read.
        device: The device of the memory.
        quantization: 8-bit format of keys and values; None: not quantized.
        states: Recurrent states of the slots; None for a model without recurrent layers.

    Attributes:
        null_block: Id of the block that no sequence uses.
        dtype: Data type of keys and values in computations.
        quantization: 8-bit format of keys and values; None: they are stored in `dtype`.
        states: The argument of the same name.
        hidden: [tokens, hidden_size], by the places of `write`: the last layer's output at each token after the
            final norm, which the draft head reads; [0, hidden_size] without a draft head.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: KvQuantization | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        self.states = states
        self.num_blocks = self.null_block = num_blocks
        self.tokens_per_block = tokens_per_block
        self.dtype, self.quantization = dtype, quantization
        of_layers = _cached_layers(decoder)
        self._head_shapes = [(each.num_kv_heads, each.head_dim) for each in of_layers]
        forms = [
            (each.cached_size // each.kv_size, *shape) for each, shape in zip(of_layers, self._head_shapes)
        ]
        stored = dtype if quantization is None else quantization.stored
        has_scales = int(quantization is not None)
        self._blocks: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._layers: list[Tensor] = [torch.empty(0)] * len(of_layers)
        self._layer_scales: list[Tensor] = list(self._layers)
        for num_parts, heads, head_dim in dict.fromkeys(forms):
            places = [place for place, each in enumerate(forms) if each == (num_parts, heads, head_dim)]
            shape = (len(places), num_parts, num_blocks + 1)
            blocks = _allocate((*shape, tokens_per_block * heads * head_dim), stored, device)
            scales = _allocate((*shape, has_scales * tokens_per_block * heads), torch.float32, device)
            for place, *of_layer in zip(places, blocks, scales):
                self._layers[place], self._layer_scales[place] = of_layer
            self._blocks.append(blocks)
            self._scales.append(scales)
        self._tokens = [
            layer.view(len(layer), -1, *shape) for layer, shape in zip(self._layers, self._head_shapes)
        ]
        num_hidden = num_blocks + 1 if decoder.drafts else 0
        shape = (1, 1, num_hidden, tokens_per_block * decoder.hidden_size)
        self._hidden = _allocate(shape, dtype, device)
        self.hidden = self._hidden.view(-1, decoder.hidden_size)
        self._scratch = torch.empty(
            (max((parts for parts, *_ in forms), default=1), 0), dtype=stored, device=device
        )

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's stored keys and values, [num_blocks + 1, tokens_per_block * kv_size]; the order inside a
        block is unspecified. With latent attention values are the keys."""
        return [(layer[0], layer[-1]) for layer in self._layers]

    @property
    def all_tokens(self) -> Tensor:
        """Keys and values of all tokens, [layers, 2, tokens, kv_heads, head_dim], where `tokens` is indexed like
        the `places` of `write`; with latent attention the second size is 1. Only if all layers have equal
        heads."""
        (blocks,) = self._blocks
        return torch.unflatten(blocks.flatten(2), 2, (-1, *self._head_shapes[0]))

    @property
    def layer_scales(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's scales of keys and of values, [num_blocks + 1, tokens_per_block * kv_heads] float32, in
        unspecified order; [num_blocks + 1, 0] if the cache is not quantized."""
        return [(layer[0], layer[-1]) for layer in self._layer_scales]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's stored keys and values: [num_blocks + 1, tokens_per_block, kv_heads, head_dim]."""
        shape = (self.tokens_per_block, *self._head_shapes[layer])
        parts = torch.unflatten(self._layers[layer], -1, shape)
        return parts[0], parts[-1]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the scales of a layer's keys and values, by token as in `tokens`: [tokens, kv_heads] float32,
        contiguous.

        None if the cache is not quantized.
        """
        if self.quantization is None:
            return None
        scales = self._layer_scales[layer]
        parts = scales.view(len(scales), -1, self._head_shapes[layer][0])
        return parts[0], parts[-1]

    def draft_layer(self) -> KvCache:
        """Return the keys and values of the draft head's layer as a cache with this layer only."""
        part = copy.copy(self)
        for name in ("_head_shapes", "_layers", "_layer_scales", "_tokens"):
            setattr(part, name, getattr(self, name)[-1:])
        part._blocks, part._scales = ([each[0][None]] for each in (part._layers, part._layer_scales))
        part.states = None
        return part

    @property
    def device(self) -> torch.device:
        """The device that the cache is on."""
        return self._scratch.device

    def as_bytes(self) -> CacheBytes:
        """Return the blocks, with their scales, and the snapshots of recurrent state as bytes."""
        snapshots = None if self.states is None else self.states.snapshots
        return CacheBytes(Entries(self._memories(), dimension=2), snapshots, self.device.type == "cpu")

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy each source block to its target block, in all layers. No source may be a target."""
        for memory in self._memories():
            for blocks in memory:  # layer by layer, as a copy of all layers' blocks would take much memory
                blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def clear(self, block_ids: Tensor) -> None:
        """Zero blocks that a sequence is about to use.

        Masked keys have weight 0, but 0 times an infinity left by an earlier sequence's overflow is not 0.
        """
        for memory in self._memories():
            memory.index_fill_(2, block_ids, 0)

    def prepare(self, batch: ScheduledBatch, num_tokens: NDArray[np.int64]) -> None:
        """Do nothing: rows read blocks in place."""

    def forget(self, batch: ScheduledBatch) -> None:
        """Do nothing: restarted sequences write their blocks anew."""

    def has_room_beside(self, slots: Numbers, positions: Numbers, num_rows: int) -> bool:
        """Return True: rows of the null slot all write to the null block."""
        return True

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [rows, kv_heads, head_dim] each.

        `places` [rows] are block * tokens_per_block + offset. With latent attention `values` are the `keys`.
        """
        scales = self.scales(layer)
        for index, (part, rows) in enumerate(zip(self._tokens[layer], (keys, values))):
            if self.quantization is None or scales is None:
                part.index_copy_(0, places, rows)
            else:
                levels, scales_of_rows = self.quantization.round(rows)
                part.index_copy_(0, places, levels)
                scales[index].index_copy_(0, places, scales_of_rows)

    def tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's stored keys and values by the places of `write`: [tokens, kv_heads, head_dim],
        contiguous."""
        parts = self._tokens[layer]
        return parts[0], parts[-1]

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of blocks into one piece, each [blocks * tokens_per_block, kv_heads, head_dim].

        The result is in `dtype`, even if the cache is quantized. It is in scratch memory, which saves an
        allocation and page faults in every layer, and is valid until the next call.
        """
        blocks, count = self._layers[layer], block_ids.shape[0]
        size = count * blocks.shape[2]
        if self._scratch.shape[1] < size:
            self._scratch = self._scratch.new_empty((len(self._scratch), _round_up(count) * blocks.shape[2]))
        found: list[Tensor] = []
        for part in range(len(blocks)):
            target = self._scratch[part, :size].view(count, -1)
            torch.index_select(blocks[part], 0, block_ids, out=target)
            rows = target.view(-1, *self._head_shapes[layer])
            if self.quantization is not None:
                scales = self._layer_scales[layer][part].index_select(0, block_ids).view(rows.shape[:2])
                rows = self.quantization.restore(rows, scales, self.dtype)
            found.append(rows)
        return found[0], found[-1]

    def _memories(self) -> tuple[Tensor, ...]:
        """Return all tensors of the cache, each [layers, 2 or 1, blocks + 1, any]."""
        hidden = (self._hidden,) if len(self.hidden) else ()
        return (*self._blocks, *(() if self.quantization is None else self._scales), *hidden)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    on_host = device.type == "cpu"
    return zeros(shape, dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
