"""Linear attention with decay, in torch's operators: what gated DeltaNet and Mamba-2 compute of their states.

A head's state S [key_dim, value_dim] is a map from keys to values. Each token decays it, writes its value at its
key, and reads it at its query:

    S = exp(log_decay) S
    S = S + k^T v                       (Mamba-2)
    S = S + k^T (beta (v - k S))        (delta rule: what the state holds at the key already is not written again)
    output = q S

`step` does that for one token of each of many sequences. `scan` computes many tokens of one sequence in pieces of
`PIECE` tokens: within a piece in parallel, as attention with a mask of decays; from piece to piece by the state.

References: Dao and Gu, Transformers are SSMs, 2024; Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 64
"""Tokens that `scan` computes in parallel."""


def step(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Give each sequence its next token.

    Args:
        queries: [sequences, heads, key_dim] float32.
        keys: The same shape.
        values: [sequences, heads, value_dim] float32.
        log_decay: [sequences, heads] float32, at most 0.
        beta: [sequences, heads] float32 of the delta rule; None: without it.
        states: [sequences, heads, key_dim, value_dim] float32.

    Returns:
        Outputs [sequences, heads, value_dim] float32, and the new states.
    """
    states = states * log_decay.exp()[..., None, None]
    if beta is not None:
        held = (keys.unsqueeze(-2) @ states).squeeze(-2)
        values = (values - held) * beta.unsqueeze(-1)
    states = torch.addcmul(states, keys.unsqueeze(-1), values.unsqueeze(-2))
    return (queries.unsqueeze(-2) @ states).squeeze(-2), states


def scan(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Give one sequence its next tokens; equal to as many calls of `step` up to rounding.

    Args:
        queries: [tokens, heads, key_dim] float32.
        keys: The same shape.
        values: [tokens, heads, value_dim] float32.
        log_decay: [tokens, heads] float32, at most 0.
        beta: [tokens, heads] float32 of the delta rule; None: without it.
        state: [heads, key_dim, value_dim] float32.

    Returns:
        Outputs [tokens, heads, value_dim] float32, and the new state.
    """
    num_tokens = queries.shape[0]
    queries, keys, values = (_in_pieces(each) for each in (queries, keys, values))
    total_decay = _in_pieces(log_decay.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    # Of the decay between two tokens of a piece; the later one is the row.
    between = (total_decay.unsqueeze(-1) - total_decay.unsqueeze(-2)).tril().exp().tril()
    since_begin, until_end = total_decay.exp().unsqueeze(-1), (total_decay[..., -1:] - total_decay).exp()
    within = (queries @ keys.mT) * between
    read_before = None
    if beta is not None:
        # Every token subtracts what those before it in the piece have written, which is a triangular system.
        weights = _in_pieces(beta.unsqueeze(-1))
        weighed = keys * weights
        system = (weighed @ keys.mT) * between
        sides = torch.cat((values * weights, weighed * since_begin), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        values, read_before = solved.split((values.shape[-1], keys.shape[-1]), dim=-1)
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


def _in_pieces(x: Tensor) -> Tensor:
    """[tokens, heads, width] as [pieces, heads, PIECE, width], filled up with zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -len(x) % PIECE))
    return padded.unflatten(0, (-1, PIECE)).transpose(1, 2)
