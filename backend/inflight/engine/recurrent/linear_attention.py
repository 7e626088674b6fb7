"""Linear attention with decay, in torch's operators: the recurrence of gated DeltaNet and Mamba-2.

A head's state S [key_dim, value_dim] maps keys to values. For each token, with query q, key k and value v, the
state decays, v is added at k, and the output is read at q:

    S = exp(log_decay) S
    S = S + k^T v                       (Mamba-2)
    S = S + k^T (beta (v - k S))        (delta rule, which replaces the value that S has at the key)
    output = q S

In Kimi Delta Attention every row of S, that is, every dimension of keys, has its own decay.

`step` computes one token of each of many sequences. `scan` computes many tokens of one sequence in pieces of
`PIECE` tokens: within a piece in parallel, as attention with a mask of decays; from piece to piece by the state.
If each dimension of keys has its own decay, the mask applies before dimensions are summed, which takes more
memory, so pieces are shorter. Logarithms of decays are summed over a piece in float64: the difference of two large
sums would be inexact in float32.

References: Dao and Gu, Transformers are SSMs, 2024; Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Attend: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]"
"""The type of `step` and `scan`."""

PIECE = 64
"""Number of tokens that `scan` computes in parallel."""

DIMENSION_PIECE = 16
"""Number of tokens that `scan` computes in parallel if each dimension of keys has its own decay."""


def step(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the next token of each sequence.

    Args:
        queries: [sequences, heads, key_dim] float32.
        keys: The same shape.
        values: [sequences, heads, value_dim] float32.
        log_decay: [sequences, heads] or [sequences, heads, key_dim] float32, at most 0.
        beta: [sequences, heads] float32; None: without the delta rule.
        states: [sequences, heads, key_dim, value_dim] float32.

    Returns:
        Outputs [sequences, heads, value_dim] float32, and the states after these tokens.
    """
    decay = log_decay.exp().unsqueeze(-1)
    states = states * (decay if decay.dim() == states.dim() else decay.unsqueeze(-1))
    if beta is not None:
        held = (keys.unsqueeze(-2) @ states).squeeze(-2)
        values = (values - held) * beta.unsqueeze(-1)
    states = torch.addcmul(states, keys.unsqueeze(-1), values.unsqueeze(-2))
    return (queries.unsqueeze(-2) @ states).squeeze(-2), states


def scan(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the next tokens of one sequence; equal, up to rounding, to one call of `step` for each token.

    Args:
        queries: [tokens, heads, key_dim] float32.
        keys: The same shape.
        values: [tokens, heads, value_dim] float32.
        log_decay: [tokens, heads] or [tokens, heads, key_dim] float32, at most 0.
        beta: [tokens, heads] float32; None: without the delta rule.
        state: [heads, key_dim, value_dim] float32.

    Returns:
        Outputs [tokens, heads, value_dim] float32, and the state after the last token.
    """
    if log_decay.dim() == keys.dim():
        return _scan_dimensions(queries, keys, values, log_decay, beta, state)
    num_tokens = queries.shape[0]
    queries, keys, values = (_in_pieces(each) for each in (queries, keys, values))
    total_decay = _in_pieces(log_decay.unsqueeze(-1)).squeeze(-1).cumsum(-1, dtype=torch.float64)
    # The decay between any two tokens of a piece, [later, earlier].
    between = (total_decay.unsqueeze(-1) - total_decay.unsqueeze(-2)).float().tril().exp().tril()
    until_end = (total_decay[..., -1:] - total_decay).float().exp()
    total_decay = total_decay.float()
    since_begin = total_decay.exp().unsqueeze(-1)
    within = (queries @ keys.mT) * between
    read_before = None
    if beta is not None:
        # Each written value depends on the values of earlier tokens of the piece: a triangular system.
        weights = _in_pieces(beta.unsqueeze(-1))
        weighed = keys * weights
        system = (weighed @ keys.mT) * between
        sides = torch.cat((values * weights, weighed * since_begin), dim=-1)
        solved = _solve(system, sides)
        values, read_before = solved.split_with_sizes((values.shape[-1], keys.shape[-1]), dim=-1)
    queries, keys = queries * since_begin, keys * until_end.unsqueeze(-1)
    decay = total_decay[..., -1].exp()[..., None, None]
    outputs = torch.empty_like(values)
    for piece in range(values.shape[0]):
        written = values[piece]
        if read_before is not None:
            written = written - read_before[piece] @ state
        outputs[piece] = queries[piece] @ state + within[piece] @ written
        state = state * decay[piece] + keys[piece].mT @ written
    return outputs.transpose(1, 2).flatten(0, 1)[:num_tokens], state


def _scan_dimensions(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `scan` where each dimension of keys has its own decay."""
    num_tokens, size = queries.shape[0], DIMENSION_PIECE
    all_decays = _in_pieces(log_decay, size).cumsum(-2, dtype=torch.float64)
    weights = None if beta is None else _in_pieces(beta.unsqueeze(-1), size)
    is_later = torch.ones(size, size, dtype=torch.bool, device=queries.device).triu(1)[..., None]
    queries, keys, values = (_in_pieces(each, size) for each in (queries, keys, values))
    outputs = torch.empty_like(values)
    for piece, (query, key, value, total) in enumerate(zip(queries, keys, values, all_decays, strict=True)):
        between = (total.unsqueeze(-2) - total.unsqueeze(-3)).float().masked_fill(is_later, -torch.inf).exp()
        since_begin = total.float().exp()
        written = value
        if weights is not None:
            weighed = key * weights[piece]
            system = (weighed.unsqueeze(-2) * key.unsqueeze(-3) * between).sum(-1)
            written = weights[piece] * value - (weighed * since_begin) @ state
            written = _solve(system, written)
        within = (query.unsqueeze(-2) * key.unsqueeze(-3) * between).sum(-1)
        outputs[piece] = (query * since_begin) @ state + within @ written
        until_end = (total[:, -1:] - total).float().exp()
        state = state * since_begin[:, -1].unsqueeze(-1) + (key * until_end).mT @ written
    return outputs.transpose(1, 2).flatten(0, 1)[:num_tokens], state


def _solve(system: Tensor, sides: Tensor) -> Tensor:
    """Solve lower triangular systems, with 1 in place of their diagonals."""
    solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
    return solve(system, sides, upper=False, unitriangular=True)


def _in_pieces(x: Tensor, size: int = PIECE) -> Tensor:
    """Return [tokens, heads, width] as [pieces, heads, size, width], padded with zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    return torch.unflatten(padded, 0, (-1, size)).transpose(1, 2)
