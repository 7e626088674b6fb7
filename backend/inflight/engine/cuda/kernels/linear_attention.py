"""Linear attention with decay: the recurrence of `engine/recurrent/linear_attention.py`, in one kernel each.

A program computes one head and a block of value columns, which do not depend on each other. The state stays in
registers from the first token to the last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import launch, power_of_two

PIECE = 16
"""Number of tokens that `scan` computes in parallel."""

_MIN_WIDTH = 16  # columns of the smallest product that tl.dot computes
_VALUES = 32  # value columns per program


@jit()
def _step(
    queries: Value, keys: Value, values: Value, log_decay: Value, beta: Value, states: Value, outputs: Value,
    new_states: Value, KEY_DIM: constexpr, VALUE_DIM: constexpr, KEYS: constexpr, VALUES: constexpr,
    HAS_BETA: constexpr, BY_DIMENSION: constexpr,
):  # fmt: skip
    """Compute one token of a head. Grid: sequences * heads, blocks of value columns."""
    row = tl.program_id(0).to(tl.int64)
    dimensions = tl.arange(0, KEYS)
    columns = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = dimensions < KEY_DIM, columns < VALUE_DIM
    places = row * KEY_DIM * VALUE_DIM + dimensions[:, None] * VALUE_DIM + columns[None, :]
    inside = is_key[:, None] & is_value[None, :]
    state = tl.load(states + places, mask=inside, other=0.0)
    key = tl.load(keys + row * KEY_DIM + dimensions, mask=is_key, other=0.0)
    query = tl.load(queries + row * KEY_DIM + dimensions, mask=is_key, other=0.0)
    value = tl.load(values + row * VALUE_DIM + columns, mask=is_value, other=0.0)
    if BY_DIMENSION:
        decay = tl.load(log_decay + row * KEY_DIM + dimensions, mask=is_key, other=0.0)
        state *= tl.exp(decay)[:, None]
    else:
        state *= tl.exp(tl.load(log_decay + row))
    if HAS_BETA:
        value = (value - tl.sum(key[:, None] * state, axis=0)) * tl.load(beta + row)
    state += key[:, None] * value[None, :]
    read = tl.sum(query[:, None] * state, axis=0)
    tl.store(outputs + row * VALUE_DIM + columns, read, mask=is_value)
    tl.store(new_states + places, state, mask=inside)


@jit(do_not_specialize=["num_tokens"])
def _scan(
    queries: Value, keys: Value, values: Value, log_decay: Value, beta: Value, states: Value, outputs: Value,
    new_states: Value, num_tokens: Value, HEADS: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr,
    KEYS: constexpr, VALUES: constexpr, PIECE: constexpr, HAS_BETA: constexpr,
):  # fmt: skip
    """Compute all tokens of a head, PIECE at a time. Grid: heads, blocks of value columns."""
    head = tl.program_id(0)
    dimensions = tl.arange(0, KEYS)
    columns = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = dimensions < KEY_DIM, columns < VALUE_DIM
    places = head * KEY_DIM * VALUE_DIM + dimensions[:, None] * VALUE_DIM + columns[None, :]
    inside = is_key[:, None] & is_value[None, :]
    state = tl.load(states + places, mask=inside, other=0.0)
    tokens = tl.arange(0, PIECE)
    is_earlier = tokens[:, None] > tokens[None, :]
    for first in range(0, num_tokens, PIECE):
        rows = (first + tokens).to(tl.int64) * HEADS + head
        exists = first + tokens < num_tokens
        of_keys = rows[:, None] * KEY_DIM + dimensions[None, :]
        of_values = rows[:, None] * VALUE_DIM + columns[None, :]
        key = tl.load(keys + of_keys, mask=exists[:, None] & is_key[None, :], other=0.0)
        written = tl.load(values + of_values, mask=exists[:, None] & is_value[None, :], other=0.0)
        total = tl.cumsum(tl.load(log_decay + rows, mask=exists, other=0.0), axis=0)
        last = tl.sum(tl.where(tokens == PIECE - 1, total, 0.0), axis=0)
        # Decay from an earlier token of the piece, the columns, to a later one.
        between = tl.exp(tl.where(is_earlier, total[:, None] - total[None, :], 0.0))
        since_begin = tl.exp(total)[:, None]
        if HAS_BETA:
            # Each written value depends on those of earlier tokens: a triangular system, inverted row by row.
            weight = tl.load(beta + rows, mask=exists, other=0.0)[:, None]
            products = tl.dot(key * weight, tl.trans(key), input_precision="tf32x3")
            system = tl.where(is_earlier, -products * between, 0.0)
            inverse = system
            for index in range(1, PIECE):
                is_row = tokens[:, None] == index
                solved = tl.sum(tl.where(is_row, system, 0.0), axis=0)
                solved += tl.sum(solved[:, None] * inverse, axis=0)
                inverse = tl.where(is_row, solved[None, :], inverse)
            inverse += tl.where(tokens[:, None] == tokens[None, :], 1.0, 0.0)
            known = tl.dot(key * since_begin, state, input_precision="tf32x3")
            written = tl.dot(inverse, weight * (written - known), input_precision="tf32x3")
        query = tl.load(queries + of_keys, mask=exists[:, None] & is_key[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        scores = tl.where(tokens[:, None] >= tokens[None, :], scores * between, 0.0)
        read = tl.dot(query * since_begin, state, input_precision="tf32x3")
        read += tl.dot(scores, written, input_precision="tf32x3")
        tl.store(outputs + of_values, read, mask=exists[:, None] & is_value[None, :])
        until_end = key * tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(until_end), written, input_precision="tf32x3")
    tl.store(new_states + places, state, mask=inside)


def step(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the next token of each sequence, as `engine.recurrent.linear_attention.step`."""
    given = [each.contiguous() for each in (queries, keys, values, log_decay)]
    outputs, new_states = torch.empty_like(given[2]), torch.empty_like(states)
    key_dim, value_dim = states.shape[-2:]
    width = min(_VALUES, power_of_two(value_dim))
    launch(
        _step, (queries.shape[0] * queries.shape[1], -(-value_dim // width)),
        *given, given[3] if beta is None else beta.contiguous(), states.contiguous(), outputs, new_states,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, KEYS=power_of_two(key_dim), VALUES=width,
        HAS_BETA=beta is not None, BY_DIMENSION=log_decay.dim() == keys.dim(),
    )  # fmt: skip
    return outputs, new_states


def scan(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the next tokens of one sequence, as `engine.recurrent.linear_attention.scan`.

    Heads must have one decay for all dimensions of keys: `log_decay` is [tokens, heads].
    """
    given = [each.contiguous() for each in (queries, keys, values, log_decay)]
    outputs, new_state = torch.empty_like(given[2]), torch.empty_like(state)
    num_heads, key_dim, value_dim = state.shape
    width = max(_MIN_WIDTH, min(_VALUES, power_of_two(value_dim)))
    launch(
        _scan, (num_heads, -(-value_dim // width)),
        *given, given[3] if beta is None else beta.contiguous(), state.contiguous(), outputs, new_state,
        queries.shape[0],
        HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEYS=max(_MIN_WIDTH, power_of_two(key_dim)),
        VALUES=width, PIECE=PIECE, HAS_BETA=beta is not None,
    )  # fmt: skip
    return outputs, new_state
