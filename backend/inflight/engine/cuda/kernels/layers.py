"""The operations of a decoder layer between its matrix products, each in one kernel.

The kernels compute in float32 and round where torch's operators round, so that results differ from torch's only
by the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.kv_levels import levels_of, or_any, store_head
from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import PER_BATCH, launch, power_of_two

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
"""The activations that `gated_activation` supports, by their names in DecoderConfig."""

_COLUMNS = 1024  # columns of an activation per program


@jit()
def _add_norm(
    x: Value, computed: Value, weight: Value, sums: Value, normed: Value, x_row: Value, computed_row: Value,
    size: Value, eps: Value, BLOCK: constexpr,
):  # fmt: skip
    """Compute a row's residual sum, rounded, and its RMSNorm. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    first = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(computed + row * computed_row + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(
        tl.float32
    )  # read asynchronously while the sum is made
    total = (first + second).to(sums.dtype.element_ty)
    tl.store(sums + row * size + columns, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    tl.store(normed + row * size + columns, (wide * scale * factors).to(normed.dtype.element_ty), mask=inside)


@jit(do_not_specialize_on_alignment=PER_BATCH)
def _rotate_and_write(
    qkv: Value, turned: Value, query_weight: Value, key_weight: Value, cosines: Value, sines: Value,
    positions: Value, places: Value, key_cache: Value, value_cache: Value, key_scales: Value,
    value_scales: Value, qkv_row: Value, cache_token: Value, eps: Value, HEADS: constexpr,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, WIDTH: constexpr, ROTARY_DIM: constexpr, HAS_NORMS: constexpr,
    LEVELS: constexpr,
):  # fmt: skip
    """Process one head of a row: rotate a query, rotate and store a key, or store a value.

    Grid: rows, HEADS + 2 * KV_HEADS. `cosines` and `sines` are [positions, ROTARY_DIM / 2] float32.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    source = qkv + row * qkv_row + head * HEAD_DIM
    numbers = tl.load(source + columns, mask=inside, other=0.0)
    place = tl.load(places + row)
    target = place * cache_token + columns
    if head >= HEADS + KV_HEADS:
        kv_head = head - HEADS - KV_HEADS
        target += kv_head * HEAD_DIM
        store_head(value_cache, target, value_scales, place * KV_HEADS + kv_head, numbers, inside, LEVELS)
    else:
        half: constexpr = ROTARY_DIM // 2
        is_turned = columns < ROTARY_DIM
        partner = tl.where(columns < half, columns + half, columns - half)
        is_partner = inside & is_turned
        result = numbers.to(tl.float32)
        others = tl.load(source + partner, mask=is_partner, other=0.0).to(tl.float32)
        if HAS_NORMS:
            weight = key_weight
            if head < HEADS:
                weight = query_weight
            factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            other_factors = tl.load(weight + partner, mask=is_partner, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(result * result, axis=0) / HEAD_DIM + eps)
            # Rounded, as torch rounds the norm's result before the rotation.
            result = (result * scale * factors).to(numbers.dtype).to(tl.float32)
            others = (others * scale * other_factors).to(numbers.dtype).to(tl.float32)
        if ROTARY_DIM > 0:
            angle = tl.load(positions + row) * half + tl.where(columns < half, columns, columns - half)
            cosine = tl.load(cosines + angle, mask=is_partner, other=1.0)
            sine = tl.load(sines + angle, mask=is_partner, other=0.0)
            result = result * cosine + tl.where(columns < half, -others, others) * sine
        rounded = result.to(numbers.dtype)
        tl.store(turned + (row * (HEADS + KV_HEADS) + head) * HEAD_DIM + columns, rounded, mask=inside)
        if head >= HEADS:
            kv_head = head - HEADS
            target += kv_head * HEAD_DIM
            store_head(key_cache, target, key_scales, place * KV_HEADS + kv_head, rounded, inside, LEVELS)


@jit()
def _gated_activation(
    inner: Value, results: Value, inner_row: Value, size: Value, ACTIVATION: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Compute the activation of a row's first half, rounded, times its second half.

    Grid: rows, blocks of columns.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(inner + row * inner_row + columns, mask=inside, other=0.0)
    up = tl.load(inner + row * inner_row + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if ACTIVATION == 0:
        wide = wide * tl.sigmoid(wide)
    elif ACTIVATION == 1:
        scaled = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)  # sqrt(2 / pi)
        wide = wide * tl.sigmoid(2 * scaled)  # 0.5 * (1 + tanh(scaled))
    elif ACTIVATION == 2:
        wide = 0.5 * wide * (1 + tl.erf(wide * 0.7071067811865476))  # sqrt(1 / 2)
    else:
        wide = tl.maximum(wide, 0.0)
    result = wide.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(results + row * size + columns, result.to(results.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, computed: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + computed and the RMSNorm of this sum, each [rows, size] in the dtype of `x`.

    Args:
        x: [rows, size], the last dimension contiguous.
        computed: The output of attention or MLP, like `x`.
        weight: [size].
        eps: The norm's epsilon.
    """
    num_rows, size = x.shape
    sums, normed = torch.empty((2, num_rows, size), dtype=x.dtype, device=x.device)
    block = power_of_two(size)
    launch(
        _add_norm, (num_rows,), x, computed, weight, sums, normed, x.stride(0), computed.stride(0), size, eps,
        BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return sums, normed


def rotate_and_write(
    qkv: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor, Tensor] | None,
    places: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return queries [rows, num_heads, head_dim] and keys [rows, kv_heads, head_dim]; store keys and values.

    Args:
        qkv: [rows, num_heads + 2 * kv_heads, head_dim]: heads of queries, keys and values.
        num_heads: Number of query heads.
        norms: Weights [head_dim] of the RMSNorms of query heads and key heads; None: there are none.
        eps: The norms' epsilon.
        rotation: Cosines and sines, [positions, rotary_dim / 2] float32, contiguous, and the rows' positions,
            [rows] int64; None: no rotation.
        places: [rows] int64, see `KvCache.write`.
        caches: The stored keys and values, [tokens, kv_heads, head_dim], contiguous.
        scales: Scales of 8-bit caches, [tokens, kv_heads] float32, contiguous.
    """
    num_rows, all_heads, head_dim = qkv.shape
    kv_heads = (all_heads - num_heads) // 2
    turned = torch.empty((num_rows, num_heads + kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    cosines, sines, positions = rotation or (qkv, qkv, places)
    query_weight, key_weight = norms or (qkv, qkv)
    width = power_of_two(head_dim)
    launch(
        _rotate_and_write, (num_rows, all_heads),
        qkv, turned, query_weight, key_weight, cosines, sines, positions, places, *caches, *or_any(scales, caches),
        qkv.stride(0), caches[0].stride(0), eps,
        HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, WIDTH=width,
        ROTARY_DIM=0 if rotation is None else 2 * cosines.shape[1], HAS_NORMS=norms is not None,
        LEVELS=levels_of(caches[0].dtype),
        num_warps=1 if width <= 128 else 2,
    )  # fmt: skip
    return turned[:, :num_heads], turned[:, num_heads:]


def gated_activation(inner: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up [rows, size], from gate and up side by side, [rows, 2 * size]. See ACTIVATIONS."""
    num_rows, size = inner.shape[0], inner.shape[1] // 2
    results = torch.empty((num_rows, size), dtype=inner.dtype, device=inner.device)
    block = min(_COLUMNS, power_of_two(size))
    launch(
        _gated_activation, (num_rows, -(-size // block)), inner, results, inner.stride(0), size,
        ACTIVATION=ACTIVATIONS[activation], BLOCK=block,
    )  # fmt: skip
    return results
