"""The kernel of `engine/recurrent/short_convolution.py`, for chunks and generation rows."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import launch, power_of_two

_TOKENS = 16  # per program
_COLUMNS = 128  # per program


@jit()
def _inputs_of(
    inputs: Value, states: Value, tokens: Value, columns: Value, exists: Value, token_stride: Value,
    num_columns: Value, WIDTH: constexpr,
):  # fmt: skip
    """Load the inputs of tokens of a sequence, [tokens, columns]; those of negative tokens are in its state."""
    offsets = tokens.to(tl.int64)[:, None] * token_stride + columns[None, :]
    given = tl.load(inputs + offsets, mask=exists & (tokens >= 0)[:, None], other=0.0)
    places = (tokens + (WIDTH - 1))[:, None] * num_columns + columns[None, :]
    kept = tl.load(states + places, mask=exists & (tokens < 0)[:, None], other=0.0)
    return tl.where((tokens < 0)[:, None], kept, given)


@jit(
    do_not_specialize=["num_tokens", "sequence_stride"],
    do_not_specialize_on_alignment=["inputs"],  # the first row of a chunk may be anywhere in a batch
)
def _convolve(
    inputs: Value, states: Value, weights: Value, bias: Value, outputs: Value, new_states: Value,
    sequence_stride: Value, token_stride: Value, num_tokens: Value, num_columns: Value, WIDTH: constexpr,
    TOKENS: constexpr, COLUMNS: constexpr, KEPT: constexpr, HAS_BIAS: constexpr,
):  # fmt: skip
    """Convolve some columns of some tokens of a sequence. The program of the first tokens stores the new state.

    Grid: sequences, blocks of tokens, blocks of columns. KEPT: a power of two, at least WIDTH - 1.
    """
    sequence = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    inputs += sequence * sequence_stride
    states += sequence * (WIDTH - 1) * num_columns
    exists = (tokens < num_tokens)[:, None] & is_column[None, :]
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        earlier = tokens + (tap - (WIDTH - 1))
        known = _inputs_of(inputs, states, earlier, columns, exists, token_stride, num_columns, WIDTH)
        weight = tl.load(weights + columns * WIDTH + tap, mask=is_column, other=0.0)
        total += known.to(tl.float32) * weight[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    rows = (sequence * num_tokens + tokens)[:, None] * num_columns + columns[None, :]
    tl.store(outputs + rows, total.to(outputs.dtype.element_ty), mask=exists)
    if tl.program_id(1) == 0:
        kept = tl.arange(0, KEPT)
        is_kept = (kept < WIDTH - 1)[:, None] & is_column[None, :]
        last = kept + (num_tokens - (WIDTH - 1))
        state = _inputs_of(inputs, states, last, columns, is_kept, token_stride, num_columns, WIDTH)
        places = (sequence * (WIDTH - 1) + kept)[:, None] * num_columns + columns[None, :]
        tl.store(new_states + places, state, mask=is_kept)


def convolve(inputs: Tensor, states: Tensor, weights: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve the next tokens of each sequence, as `engine.recurrent.short_convolution.convolve`."""
    if inputs.stride(2) != 1:
        inputs = inputs.contiguous()
    num_sequences, num_tokens, num_columns = inputs.shape
    outputs = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    states, weights = states.contiguous(), weights.contiguous()
    new_states = torch.empty_like(states)
    tokens, columns = 1 if num_tokens == 1 else _TOKENS, min(_COLUMNS, power_of_two(num_columns))
    width = weights.shape[1]
    launch(
        _convolve, (num_sequences, -(-num_tokens // tokens), -(-num_columns // columns)),
        inputs, states, weights, weights if bias is None else bias, outputs, new_states, inputs.stride(0),
        inputs.stride(1), num_tokens, num_columns,
        WIDTH=width, TOKENS=tokens, COLUMNS=columns, KEPT=power_of_two(width - 1), HAS_BIAS=bias is not None,
    )  # fmt: skip
    return outputs, new_states
