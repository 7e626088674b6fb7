"""Splits an adapter's rows into low-rank matrices of a rank's linear layers: unfuses modules and cuts slices.

Used for every kind of device. Shapes and ids were checked when the adapter was stored (`inflight.adapters`). Loop
thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.adapters.lora_modules import FUSED_MODULES, RECURRENT_INPUTS, Module, ModuleSize, module_sizes
from inflight.core.request.adapter import LoraWeights
from inflight.engine.matrices import to_tensor
from inflight.models.decoder_config import DecoderConfig
from inflight.models.rope_config import RopeConfig
from inflight.models.sharding import Part, Range, Shard

_ROW_PARALLEL = (Module.ATTN_DENSE, Module.MLP_4H_TO_H, Module.MAMBA_OUT_PROJ)
_WHOLE = (Module.ATTN_Q_A, Module.ATTN_KV_A)
_ROTATED = (Module.ATTN_Q, Module.ATTN_K)


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's change to a linear layer: y = m * (W x + B (A x)) + bias, with m = 1 except for DoRA.

    Attributes:
        a: [rank, in], in the adapter's dtype.
        b: [out, rank], with the adapter's scale multiplied in.
        magnitude: m, [out]; None: m is 1.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return self.a.shape[0]


def low_rank_layers(
    adapter: LoraWeights, decoder: DecoderConfig, part: Part
) -> dict[int, dict[Module, LowRank]]:
    """Return an adapter's changes to `SPLIT_MODULES` on this rank, by index of the layer among the rank's layers.

    Args:
        adapter: An adapter that was checked against the model.
        decoder: Configuration of the whole model.
        part: The rank's part. Row-parallel modules get a slice of A's columns, other modules a slice of B's
            rows and of the magnitudes.
    """
    first, last = part.layers
    layers: dict[int, dict[Module, LowRank]] = {}
    rows = to_tensor(adapter.weights)
    for row, (module_id, layer, rank, *is_dora) in zip(rows, adapter.config, strict=True):
        if first <= layer < last:
            module, sizes, of_layer = Module(module_id), module_sizes(decoder, layer), decoder.at(layer)
            whole = _read_row(row, sizes[module], rank, bool(is_dora and is_dora[0]))
            for each, low_rank in _taken_apart(module, whole, sizes):
                layers.setdefault(layer - first, {})[each] = _cut(
                    each, low_rank, of_layer, decoder.ropes[layer], part.shard
                )
    return layers


def _read_row(row: Tensor, size: ModuleSize, rank: int, has_magnitude: bool) -> LowRank:
    ends = np.cumsum([rank * size.inner, size.outer * rank, size.outer]).tolist()
    a = row[: ends[0]].view(rank, size.inner)
    b = row[ends[0] : ends[1]].view(size.outer, rank)
    return LowRank(a, b, row[ends[1] : ends[2]] if has_magnitude else None)


def _taken_apart(
    module: Module, whole: LowRank, sizes: dict[Module, ModuleSize]
) -> list[tuple[Module, LowRank]]:
    """Split a fused module into its parts, each with the whole A and some rows of B; other modules are
    unchanged."""
    found: list[tuple[Module, LowRank]] = []
    begin = 0
    for part in FUSED_MODULES.get(module, (module,)):
        rows = slice(begin, begin + sizes[part].outer)
        magnitude = None if whole.magnitude is None else whole.magnitude[rows]
        found.append((part, LowRank(whole.a, whole.b[rows], magnitude)))
        begin = rows.stop
    return found


def _cut(
    module: Module, whole: LowRank, decoder: DecoderConfig, rope: RopeConfig | None, shard: Shard
) -> LowRank:
    """Return a shard's part of a module's matrices, in a layer with these rotary positions."""
    if module is Module.ATTN_Q and decoder.attention_gate:
        magnitude = None if whole.magnitude is None else _own_gated_queries(whole.magnitude, decoder, shard)
        return LowRank(whole.a, _own_gated_queries(whole.b, decoder, shard), magnitude)
    if module in RECURRENT_INPUTS:
        ranges = shard.recurrent_rows(decoder, RECURRENT_INPUTS.index(module))
        return _reordered(whole, torch.tensor([row for rows in ranges for row in range(*rows)]))
    begin, end = _slice(module, whole, decoder, shard)
    if module in _ROTATED and decoder.latent is None and rope is not None and rope.interleaved:
        whole = _in_halves(whole, rope, decoder.head_dim)
    if module in _ROW_PARALLEL:
        return LowRank(whole.a[:, begin:end], whole.b, whole.magnitude)
    magnitude = None if whole.magnitude is None else whole.magnitude[begin:end]
    return LowRank(whole.a, whole.b[begin:end], magnitude)


def _in_halves(whole: LowRank, rope: RopeConfig, head_dim: int) -> LowRank:
    """Return an adapter's change with the outputs of each head in the order that the rotation uses."""
    of_head = [row for rows in rope.rows_in_halves(head_dim) for row in range(*rows)]
    heads = range(0, len(whole.b), head_dim)
    return _reordered(whole, torch.tensor([head + row for head in heads for row in of_head]))


def _reordered(whole: LowRank, order: Tensor) -> LowRank:
    """Return an adapter's change with some outputs, in this order."""
    magnitude = None if whole.magnitude is None else whole.magnitude[order]
    return LowRank(whole.a, whole.b[order], magnitude)


def _own_gated_queries(rows: Tensor, decoder: DecoderConfig, shard: Shard) -> Tensor:
    """Return this shard's outputs of a query projection with gates: all gates, then all queries.

    In `rows` each head's query is followed by its gates.
    """
    by_head = torch.unflatten(rows, 0, (decoder.num_heads, 2, decoder.head_dim))
    own = by_head[slice(*shard.split(decoder.num_heads))]
    return own.transpose(0, 1).flip(0).flatten(0, 2)


def _slice(module: Module, whole: LowRank, decoder: DecoderConfig, shard: Shard) -> Range:
    """Return a shard's range of a module's outputs, or of its inputs if it is row-parallel."""
    if module in _WHOLE:
        return 0, len(whole.b)
    if module in (Module.ATTN_K, Module.ATTN_V):
        return shard.kv_rows(decoder)
    width = whole.a.shape[1] if module in _ROW_PARALLEL else len(whole.b)
    return shard.split(width)
