"""Chooses kernels in Triton's language for the operations of a layer on a device.

As for attention, each kernel is tried with the model's own sizes, for numbers of rows at the edges of tiles, and
compared with torch's operators, which replace kernels that raise or give other results.
Used on the loading thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.cuda.trial import IsOff, has_triton, log_not_used
from inflight.engine.kv_cache import KvCache
from inflight.engine.kv_quantization import KvQuantization
from inflight.engine.layers.layer_operations import LayerOperations
from inflight.models import DecoderConfig
from inflight.models.decoder_weights import Norm
from inflight.models.recurrent import KimiDelta, Mamba2, RecurrentConfig, total_size

_ROWS = (1, 63, 64, 65, 128, 129)
_TOLERANCE = 0.05  # results are around 1, and half precision has errors of some hundredths of the largest
_POSITIONS = 50
_STEPS = 4  # sequences in generation; each has a state of its own
_TOKENS_PER_BLOCK = 16


def find_operations(
    decoder: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: KvQuantization | None = None,
) -> LayerOperations:
    """Return the operations of a model's layers; kernels compute those for which their results are correct.

    Args:
        decoder: The decoder, as this rank computes it.
        dtype: Data type of activations.
        device: The device of activations.
        quantization: 8-bit format in which the KV cache stores keys and values; None: not quantized.
    """
    torchs = LayerOperations(decoder)
    if device.type != "cuda" or not has_triton():
        return torchs
    from inflight.engine.layers.kernel_operations import KernelLayerOperations  # imports triton

    given = dtype, device, quantization
    right = [
        part
        for part in sorted(KernelLayerOperations(decoder).parts)
        if _is_right(part, lambda part=part: KernelLayerOperations(decoder, {part}), torchs, *given)
    ]
    return KernelLayerOperations(decoder, frozenset(right)) if right else torchs


def _is_right(
    part: str,
    make: Callable[[], LayerOperations],
    torchs: LayerOperations,
    dtype: torch.dtype,
    device: torch.device,
    quantization: KvQuantization | None,
) -> bool:
    try:
        check_operations(make(), torchs, dtype, device, quantization)
    except IsOff as reason:
        log_not_used(part, reason)
        return False
    return True


def check_operations(
    tried: LayerOperations,
    torchs: LayerOperations,
    dtype: torch.dtype,
    device: torch.device,
    quantization: KvQuantization | None = None,
) -> None:
    """Compare all operations with torch's. Raises IsOff if one raises or gives other results."""
    for num_rows in _ROWS:
        results: list[dict[str, Tensor]] = []
        for operations in (tried, torchs):
            draw = torch.Generator(device).manual_seed(num_rows)
            try:
                found = dict(
                    _results(operations, torchs.decoder, num_rows, dtype, device, draw, quantization)
                )
            except Exception as error:  # an unsupported kernel may raise anything
                raise IsOff(str(error).split("\n")[0]) from error
            results.append(found)
        for what, expected in results[1].items():
            error = (results[0][what].float() - expected.float()).abs().max()
            if not error < _TOLERANCE:  # true for NaN too
                raise IsOff(f"{what} of {num_rows} rows is wrong by {float(error):.3g}")


def _results(
    operations: LayerOperations,
    decoder: DecoderConfig,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    draw: torch.Generator,
    quantization: KvQuantization | None,
) -> Iterator[tuple[str, Tensor]]:
    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).to(of)

    for weight_dtype in {dtype, torch.float32}:
        norm = Norm(random(decoder.hidden_size, of=weight_dtype) / 4 + 1)
        x, computed = (random(num_rows, decoder.hidden_size) / 2 for _ in range(2))
        total, normed = operations.add_norm(x, computed, norm)
        yield f"a sum (weights of {weight_dtype})", total
        yield f"its norm (weights of {weight_dtype})", normed
    if decoder.latent is None:
        yield from _heads(operations, decoder.only(0), num_rows, dtype, device, random, quantization)
    if decoder.recurrent is not None:
        yield from _linear_attention(operations, decoder.recurrent, num_rows, random)
        yield from _short_convolution(operations, decoder.recurrent, num_rows, random)
    inner = random(num_rows, decoder.intermediate_size * (2 if decoder.gated_mlp else 1))
    parameters = random(4) if decoder.activation == "xielu" else None
    yield "an activation", operations.activate(inner, parameters)


def _linear_attention(
    operations: LayerOperations, recurrent: RecurrentConfig, num_rows: int, random: Callable[..., Tensor]
) -> Iterator[tuple[str, Tensor]]:
    if recurrent.state_shape is None:
        return
    heads, key_dim, value_dim = recurrent.state_shape

    def draw(*shape: int) -> Tensor:
        return random(*shape, of=torch.float32)

    queries, keys = (F.normalize(draw(num_rows, heads, key_dim), dim=-1) for _ in range(2))
    values = draw(num_rows, heads, value_dim)
    by_dimension = isinstance(recurrent, KimiDelta)
    log_decay = -draw(num_rows, heads, *([key_dim] if by_dimension else [])).abs() / 4
    beta = None if isinstance(recurrent, Mamba2) else draw(num_rows, heads).sigmoid()
    given = queries, keys, values, log_decay, beta
    read, state = operations.recurrent.scan(*given, draw(heads, key_dim, value_dim))
    yield "a prompt's linear attention", read
    yield "a prompt's state of linear attention", state
    states = draw(min(num_rows, _STEPS), heads, key_dim, value_dim)
    read, states = operations.recurrent.step(
        queries[:_STEPS],
        keys[:_STEPS],
        values[:_STEPS],
        log_decay[:_STEPS],
        None if beta is None else beta[:_STEPS],
        states,
    )
    yield "generation's linear attention", read
    yield "generation's states of linear attention", states


def _short_convolution(
    operations: LayerOperations, recurrent: RecurrentConfig, num_rows: int, random: Callable[..., Tensor]
) -> Iterator[tuple[str, Tensor]]:
    columns, width = total_size(recurrent.conv_sections), recurrent.conv_width
    weights, bias = random(columns, width, of=torch.float32) / 2, random(columns, of=torch.float32) / 2
    for what, shape in (("a prompt", (1, num_rows)), ("generation", (num_rows, 1))):
        inputs, states = random(*shape, columns), random(shape[0], width - 1, columns)
        outputs, new_states = operations.recurrent.convolve(inputs, states, weights, bias)
        yield f"the short convolution of {what}", outputs
        yield f"its state after {what}", new_states


def _heads(
    operations: LayerOperations,
    decoder: DecoderConfig,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    random: Callable[..., Tensor],
    quantization: KvQuantization | None,
) -> Iterator[tuple[str, Tensor]]:
    num_blocks = -(-num_rows // _TOKENS_PER_BLOCK)
    cache = KvCache(decoder, num_blocks, _TOKENS_PER_BLOCK, dtype, device, quantization)
    places = torch.arange(num_rows, device=device).flip(0)
    positions = torch.arange(num_rows, device=device) % _POSITIONS
    norms = None
    if decoder.qk_norm == "heads":
        norms = Norm(random(decoder.head_dim) / 4 + 1), Norm(random(decoder.head_dim) / 4 + 1)
    heads = decoder.num_heads + 2 * decoder.num_kv_heads
    for rope in dict.fromkeys(decoder.ropes):
        rotation, kind = None, "without positions"
        if rope is not None:
            rotary_dim = rope.rotary_dim(decoder.rotary_head_dim)
            angles = random(_POSITIONS, rotary_dim // 2, of=torch.float32)
            rotation = operations.rotation(angles.cos(), angles.sin(), positions)
            kind = f"of which {rotary_dim} dimensions are rotated"
        qkv = random(num_rows, heads, decoder.head_dim)
        queries, keys, values = operations.heads(qkv, norms, rotation, places, 0, cache)
        yield f"queries, {kind},", queries
        yield f"keys, {kind},", keys
        yield "values", values
        read = cache.gather(0, torch.arange(num_blocks, device=device))
        for what, rows, stored in zip(("keys", "values"), (keys, values), read, strict=True):
            stored = stored.clone()  # it is read again for the next rotation
            if quantization is not None:  # a correct key that differs in its last bit may have another level
                stored[places] -= quantization.restore(*quantization.round(rows), dtype)
            yield f"{what} in the cache, {kind},", stored
