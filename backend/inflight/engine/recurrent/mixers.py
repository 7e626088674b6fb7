"""Recurrent layers in torch's operators, without the input projection before and the output projection after them.

A sequence's state has two parts: the convolution's inputs for the last tokens, [conv_width - 1, columns] in the
model's dtype, and the state of linear attention, `RecurrentConfig.state_shape` in float32, or an empty tensor in
layers without linear attention. `scan` computes the next tokens of one sequence, `step` the next token of each of
many sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.recurrent.linear_attention import Attend
from inflight.engine.recurrent.operations import BY_TORCH, RecurrentOperations
from inflight.models.recurrent import (
    GatedDelta,
    KimiDelta,
    Mamba2,
    RecurrentConfig,
    RecurrentWeights,
    total_size,
)

State = tuple[Tensor, Tensor]
"""The state of the convolution, and the state of linear attention."""

Sum = Callable[[Tensor], Tensor]
"""A function that returns the sum of a tensor over the ranks that share a layer; it may overwrite the tensor."""

_L2_EPS = 1e-6


class Mixer(ABC):
    """A recurrent layer without its projections; subclasses define the columns of the input projection.

    Args:
        weights: The layer's weights.
        activation: Activation after the convolution; not used by `ShortConvMixer`.
        operations: Linear attention and the short convolution.
    """

    def __init__(
        self,
        weights: RecurrentWeights,
        activation: Callable[[Tensor], Tensor],
        operations: RecurrentOperations,
    ) -> None:
        self._weights = weights
        self._activation = activation
        self._operations = operations

    def scan(self, projected: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute the next tokens of one sequence.

        Args:
            projected: Output of the input projection, [tokens, columns of `sections`].
            state: State before the first of the tokens.

        Returns:
            Rows for `finish`, [tokens, output_width], and the state after the last token.
        """
        rows, conv = self._convolve(self._conv_inputs(projected)[None], state[0][None])
        output, new_state = self._read(rows.squeeze(0), projected, state[1], self._operations.scan)
        return output, (conv.squeeze(0), new_state)

    def step(self, projected: Tensor, states: State) -> tuple[Tensor, State]:
        """Compute the next token of each sequence: as `scan`, but rows and states are [sequences, …]."""
        rows, conv = self._convolve(self._conv_inputs(projected).unsqueeze(1), states[0])
        output, new_states = self._read(rows.squeeze(1), projected, states[1], self._operations.step)
        return output, (conv, new_states)

    def _convolve(self, inputs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return self._operations.convolve(inputs, states, self._weights.conv, self._weights.conv_bias)

    def finish(self, rows: Tensor) -> Tensor:
        """Return the input of the output projection, [rows, output_width], given the results of `scan` and `step`.

        Every rank calls it with the same number of rows.
        """
        return rows

    def _conv_inputs(self, projected: Tensor) -> Tensor:
        """Return the inputs of the convolution, [rows, columns]; by default the first columns."""
        return projected[:, : len(self._weights.conv)]

    @abstractmethod
    def _read(
        self, convolved: Tensor, projected: Tensor, state: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return rows for `finish`, and the new state of linear attention."""


class GatedDeltaMixer(Mixer):
    """A layer of gated DeltaNet, without its projections."""

    def __init__(
        self,
        config: GatedDelta,
        weights: RecurrentWeights,
        activation: Callable[[Tensor], Tensor],
        operations: RecurrentOperations,
    ) -> None:
        super().__init__(weights, activation, operations)
        self._config = config

    def _read(
        self, convolved: Tensor, projected: Tensor, state: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        config, weights = self._config, self._weights
        assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
        key_width, num_heads = config.num_key_heads * config.key_dim, config.num_value_heads
        rows = self._activation(convolved).float()
        queries, keys, values = rows.split_with_sizes((key_width, key_width, config.output_width), dim=1)
        queries, keys = (self._normalize(each) for each in (queries, keys))
        rest = projected[:, total_size(config.conv_sections) :]
        gates, beta, steps = rest.split_with_sizes((config.output_width, num_heads, num_heads), dim=1)
        log_decay = weights.decay * F.softplus(steps.float() + weights.step_bias)
        values = torch.unflatten(values, 1, (num_heads, -1))
        scaled = queries * config.key_dim**-0.5
        beta = config.beta_scale * beta.sigmoid().float()
        read, new_state = attend(scaled, keys, values, log_decay, beta, state)
        read = F.rms_norm(read.to(projected.dtype).float(), (config.value_dim,), eps=config.norm_eps)
        read = weights.norm * read.to(projected.dtype)
        gated = read.float() * torch.unflatten(F.silu(gates.float()), 1, (num_heads, -1))
        return gated.flatten(1).to(projected.dtype), new_state

    def _normalize(self, x: Tensor) -> Tensor:
        """Return queries or keys normalized to length 1, repeated for each value head."""
        config = self._config
        heads = to_unit_length(torch.unflatten(x, 1, (config.num_key_heads, config.key_dim)))
        return heads.repeat_interleave(config.num_value_heads // config.num_key_heads, dim=1)


class KimiDeltaMixer(Mixer):
    """A layer of Kimi Delta Attention, without its projections."""

    def __init__(
        self,
        config: KimiDelta,
        weights: RecurrentWeights,
        activation: Callable[[Tensor], Tensor],
        operations: RecurrentOperations,
    ) -> None:
        super().__init__(weights, activation, operations)
        self._config = config

    def _read(
        self, convolved: Tensor, projected: Tensor, state: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        config, weights = self._config, self._weights
        assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
        assert weights.step_up is not None and weights.gate_up is not None
        dim = config.head_dim
        rows = self._activation(convolved).float()
        queries, keys, values = (self._by_head(each) for each in rows.chunk(3, dim=1))
        rest = projected[:, total_size(config.conv_sections) :]
        steps, beta, gates = rest.split_with_sizes((dim, config.num_heads, dim), dim=1)
        steps = F.linear(steps, weights.step_up).float() + weights.step_bias
        read, new_state = attend(
            to_unit_length(queries) * dim**-0.5,
            to_unit_length(keys),
            values,
            weights.decay[:, None] * F.softplus(self._by_head(steps)),
            beta.sigmoid().float(),
            state,
        )
        read = (
            F.rms_norm(read.to(projected.dtype).float(), (dim,), eps=config.norm_eps) * weights.norm.float()
        )
        gated = read * self._by_head(F.linear(gates, weights.gate_up).float()).sigmoid()
        return gated.flatten(1).to(projected.dtype), new_state

    def _by_head(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (self._config.num_heads, self._config.head_dim))


class Mamba2Mixer(Mixer):
    """A layer of Mamba-2, without its projections; `all_reduce` sums over the ranks that share groups of heads."""

    def __init__(
        self,
        config: Mamba2,
        weights: RecurrentWeights,
        activation: Callable[[Tensor], Tensor],
        operations: RecurrentOperations,
        all_reduce: Sum,
    ) -> None:
        super().__init__(weights, activation, operations)
        self._config = config
        self._all_reduce = all_reduce

    def _conv_inputs(self, projected: Tensor) -> Tensor:
        width = self._config.output_width
        return projected[:, width : width + total_size(self._config.conv_sections)]

    def _read(
        self, convolved: Tensor, projected: Tensor, state: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        config, weights = self._config, self._weights
        assert weights.decay is not None and weights.step_bias is not None
        group_width = config.num_groups * config.state_dim
        rows = self._activation(convolved).float()
        values, keys, queries = rows.split_with_sizes((config.output_width, group_width, group_width), dim=1)
        values = torch.unflatten(values, 1, (config.num_heads, config.head_dim))
        steps = projected[:, -config.num_heads :].float() + weights.step_bias
        steps = F.softplus(steps).clamp(*config.step_limit)
        read, new_state = attend(
            self._by_head(queries),
            self._by_head(keys),
            values * steps.unsqueeze(-1),
            steps * weights.decay,
            None,
            state,
        )
        if weights.skip is not None:
            read = read + values * weights.skip.unsqueeze(-1)
        gated = read.flatten(1) * F.silu(projected[:, : config.output_width].float())
        return (gated if config.has_norm else gated.to(projected.dtype)), new_state

    def finish(self, rows: Tensor) -> Tensor:
        config, norm = self._config, self._weights.norm
        if norm is None:
            return rows
        groups = torch.unflatten(rows, 1, (config.num_groups, -1))
        variance = groups.square().mean(-1, keepdim=True)
        if config.num_group_ranks > 1:
            variance = self._all_reduce(variance) / config.num_group_ranks
        normed = groups * torch.rsqrt(variance + config.norm_eps)
        return norm * normed.flatten(1).to(norm.dtype)

    def _by_head(self, x: Tensor) -> Tensor:
        """Return queries or keys repeated for each head of their group, [rows, heads, state_dim]."""
        config = self._config
        groups = torch.unflatten(x, 1, (config.num_groups, config.state_dim))
        return groups.repeat_interleave(config.num_heads // config.num_groups, dim=1)


class ShortConvMixer(Mixer):
    """A gated short convolution (LFM2), without its projections."""

    def _conv_inputs(self, projected: Tensor) -> Tensor:
        gates, _, inputs = projected.chunk(3, dim=1)
        return gates * inputs

    def _read(
        self, convolved: Tensor, projected: Tensor, state: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        return projected.chunk(3, dim=1)[1] * convolved, state


def to_unit_length(x: Tensor) -> Tensor:
    """Return vectors [..., width] divided by their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def make_mixer(
    config: RecurrentConfig,
    weights: RecurrentWeights,
    activation: Callable[[Tensor], Tensor],
    all_reduce: Sum = lambda tensor: tensor,
    operations: RecurrentOperations = BY_TORCH,
) -> Mixer:
    """Return the mixer of a layer.

    Args:
        config: Configuration of this rank's part of the layer.
        weights: This rank's weights.
        activation: Activation after the convolution; not used by `ShortConv`.
        all_reduce: Sums a tensor over the ranks that share the layer.
        operations: Linear attention and the short convolution.
    """
    if isinstance(config, GatedDelta):
        return GatedDeltaMixer(config, weights, activation, operations)
    if isinstance(config, KimiDelta):
        return KimiDeltaMixer(config, weights, activation, operations)
    if isinstance(config, Mamba2):
        return Mamba2Mixer(config, weights, activation, operations, all_reduce)
    return ShortConvMixer(weights, activation, operations)


def empty_state(config: RecurrentConfig, dtype: torch.dtype, device: torch.device, *leading: int) -> State:
    """Return states of sequences without tokens, which are zero; `leading` are additional first dimensions."""
    conv = torch.zeros(
        (*leading, config.conv_width - 1, total_size(config.conv_sections)), dtype=dtype, device=device
    )
    shape = config.state_shape or (0,)
    return conv, torch.zeros((*leading, *shape), dtype=torch.float32, device=device)
