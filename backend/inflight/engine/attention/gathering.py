"""Attention over gathered KV blocks: the blocks are copied into one piece, then attended to.

It runs everywhere. `GATHERING` uses torch's scaled dot product attention, `BY_PRODUCTS` plain matrix products.

A key head is never copied for the query heads that share it. In a context chunk it is broadcast over these query
heads; in generation they are passed as the rows of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.attention.gathering_metadata import (
    ChunkMetadata,
    GatheringMetadata,
    GenerationMetadata,
    LinearBiases,
    make_metadata,
)
from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig

_TILE_ROWS = 16  # divides the number of rows of every kernel's tiles
_MAX_SCORES = 1 << 26  # 256 MiB in float32


Kernel = Callable[..., Tensor]
"""A function that computes attention over contiguous keys and values; arguments as in `GatheringAttention`."""


class GatheringAttention:
    """Copies the blocks to read into one piece, and attends to the copy.

    Args:
        kernel: `torch.nn.functional.scaled_dot_product_attention`, or an equivalent. It takes queries [entries,
            heads, rows, head_dim], keys and values [entries, heads, keys, head_dim], `scale`, the factor of the
            scores (None: head_dim ** -0.5), and either `attn_mask`, which is added to the scores and broadcast to
            [entries, heads, rows, keys], or `is_causal`: row i reads the keys up to i. For a model with learned
            sinks it also takes `sinks`, an additional score of each row without key or value, broadcast to
            [entries, heads, rows]. It returns the output of every query, in the queries' shape.
        biases: The model's linear biases; None: it has none.
    """

    has_fixed_shapes = False
    takes_fixed_rows = False
    name = "over gathered KV blocks"

    def __init__(self, kernel: Kernel, biases: LinearBiases | None = None) -> None:
        self._kernel, self._biases = kernel, biases

    def prepare(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, GatheringMetadata]:
        return {window: make_metadata(packed, cache, window, self._biases) for window in windows}

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        metadata: GatheringMetadata,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = keys.shape[1]
        queries = queries.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        read = torch.empty_like(queries)
        by_group = None if sinks is None else sinks.view(queries.shape[1:3])
        for chunk in metadata.chunks:
            self._attend_chunk(read, queries, keys, values, layer, chunk, cache, by_group)
        for group in metadata.generation:
            self._attend_generation(read, queries, layer, group, cache, by_group)
        return read.view(num_rows, num_heads * head_dim)

    def _attend_chunk(
        self,
        read: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        chunk: ChunkMetadata,
        cache: KvCache,
        sinks: Tensor | None,
    ) -> None:
        """Compute a chunk's rows together; for some numbers of rows, the last row separately, like a generation
        row.

        With a mask and a key head broadcast by a stride of 0, torch's memory-efficient CUDA kernel computes a last
        tile of a single row wrongly: it takes heads for rows, and reads their masks out of bounds (torch 2.11 and
        2.13). Its tiles have 32, 64 or 128 rows.
        """
        rows = slice(chunk.begin, chunk.end)
        if chunk.block_ids is None:
            keys, values = keys[rows], values[rows]
        else:
            keys, values = cache.gather(layer, chunk.block_ids)
            keys, values = keys[: chunk.num_keys], values[: chunk.num_keys]
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [kv_heads, keys, head_dim]
        if chunk.mask is not None and (chunk.end - chunk.begin) % _TILE_ROWS == 1:
            last = slice(chunk.end - 1, chunk.end)
            read[last] = self._kernel(
                queries[last],
                keys[None],
                values[None],
                attn_mask=chunk.mask[..., -1, :][None],
                **_sinks_argument(sinks),
            )
            rows = slice(chunk.begin, chunk.end - 1)
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            return
        by_head = queries[rows].permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
        shape = (*by_head.shape[:2], *keys.shape[1:])
        result = self._kernel(
            by_head,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(shape),
            attn_mask=None if chunk.mask is None else chunk.mask[..., :num_rows, :],
            is_causal=chunk.mask is None,
            **_sinks_argument(None if sinks is None else sinks[:, :, None]),
        )
        read[rows] = result.permute(2, 0, 1, 3)

    def _attend_generation(
        self,
        read: Tensor,
        queries: Tensor,
        layer: int,
        group: GenerationMetadata,
        cache: KvCache,
        sinks: Tensor | None,
    ) -> None:
        rows = slice(group.begin, group.end)
        keys, values = cache.gather(layer, group.block_ids)
        shape = (group.end - group.begin, group.mask.shape[-1], *keys.shape[1:])
        read[rows] = self._kernel(
            # [rows, kv_heads, group, head_dim]: a group's heads take the place of query positions
            queries[rows],
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask,
            **_sinks_argument(sinks),
        )


def _sinks_argument(sinks: Tensor | None) -> dict[str, Tensor]:
    """Return the keyword arguments for learned sinks; empty for a model without sinks, whose kernel has no
    parameter for them."""
    return {} if sinks is None else {"sinks": sinks}


def share_of_keys(log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of the softmax that learned sinks leave to the keys; `log_sums` are the keys' log-sum-exps.

    The share is s / (s + exp(sink)) with s the sum of exponentials; attention's results are multiplied by it.
    """
    return torch.sigmoid(log_sums - sinks.float())


def cpu_attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Tensor,
) -> Tensor:
    """A `Kernel`: torch's scaled dot product attention for CPUs, which can return its softmaxes' log-sum-exps.

    Raises NotImplementedError on other devices, whose kernels return log-sum-exps in other ways.
    """
    if query.device.type != "cpu":
        raise NotImplementedError("torch's kernel on this device cannot add learned sinks")
    read, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=is_causal, attn_mask=attn_mask, scale=scale
    )
    return (read * share_of_keys(log_sums, sinks)[..., None]).to(query.dtype)


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """A `Kernel` of matrix products in float32, with which other kernels are compared.

    With `soft_cap`, scores become cap * tanh(score / cap) before the mask is added. Entries are processed a few at
    a time, as the scores of all entries may not fit into memory.
    """
    num_entries, num_heads, num_rows, head_dim = query.shape
    num_keys = key.shape[2]
    if attn_mask is None:
        attn_mask = torch.full((num_rows, num_keys), -torch.inf, device=query.device).triu_(1)
    masks = attn_mask.expand(num_entries, num_heads, num_rows, num_keys)
    ends = masks[..., :0] if sinks is None else sinks.expand(masks.shape[:3])[..., None]
    size = max(1, _MAX_SCORES // (num_heads * num_rows * num_keys))
    parts: list[Tensor] = []
    for part in zip(*(torch.split(tensor, size) for tensor in (query, key, value, masks, ends)), strict=True):
        queries, keys, values, mask, end = (tensor.float() for tensor in part)
        scores = (queries * (head_dim**-0.5 if scale is None else scale)) @ keys.transpose(-1, -2)
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores = scores + mask
        if sinks is not None:
            scores = torch.cat([scores, end], dim=-1)
        parts.append((scores.softmax(dim=-1)[..., :num_keys] @ values).to(query.dtype))
    return torch.cat(parts)


GATHERING = GatheringAttention(F.scaled_dot_product_attention)
BY_PRODUCTS = GatheringAttention(by_products)


def gathering(decoder: DecoderConfig) -> GatheringAttention:
    """Return `GATHERING` for this model's scores; capped scores are computed by products, as torch's kernel has no
    cap.

    For a model with learned sinks it works on CPUs only; on other devices `check_attention` refuses it, and
    products are used.
    """
    if decoder.attention_soft_cap is not None:
        return by_plain_products(decoder)
    kernel = cpu_attention_with_sinks if decoder.learned_sinks else F.scaled_dot_product_attention
    if decoder.attention_scale is None and decoder.alibi is None and not decoder.learned_sinks:
        return GATHERING
    return GatheringAttention(partial(kernel, scale=decoder.attention_scale), _biases(decoder))


def by_plain_products(decoder: DecoderConfig) -> GatheringAttention:
    """Return `BY_PRODUCTS` for this model's scores."""
    scale, soft_cap = decoder.attention_scale, decoder.attention_soft_cap
    if scale is None and soft_cap is None and decoder.alibi is None:
        return BY_PRODUCTS
    return GatheringAttention(partial(by_products, scale=scale, soft_cap=soft_cap), _biases(decoder))


def _biases(decoder: DecoderConfig) -> LinearBiases | None:
    return decoder.alibi and LinearBiases(decoder.alibi, decoder.num_kv_heads)
