"""Finishers keep a model's projections as they are read, or pack or quantize them.

A load hands each over before the next is read (`weight_reader.py`): a model never takes the memory of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain
from typing import Generic

import torch
from torch import Tensor

from inflight.models.decoder_weights import Layer, LayerT, LayerWeights, Linear, LinearT
from inflight.models.levels import GroupedMatrix


class Finisher(ABC, Generic[LayerT, LinearT]):
    """Says what is kept of a model's projections and layers once they are read.

    Attributes:
        keeps_tied_embedding: Whether an embedding is kept that is the output projection's matrix too.
        keeps_levels: Whether what is quantized in the checkpoint is offered as it is, to `keep_levels`.
    """

    keeps_tied_embedding = True
    keeps_levels = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor of a layer, not initialized."""
        return torch.empty(shape, dtype=dtype, device=device)

    @abstractmethod
    def linear(self, linear: Linear, is_gated: bool = False) -> LinearT:
        """Return what is kept of a layer's projection or the output projection, before the next one is read.

        `is_gated`: it is gate above up of a gated MLP.
        """

    @abstractmethod
    def stack(
        self, matrices: Iterator[Tensor], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> LinearT:
        """Return what is kept of the matrices of a layer's experts, each of which is read when iterated to.

        Args:
            matrices: [outputs, inputs] of one expert after the other.
            shape: [experts, outputs, inputs].
            bias: [experts, outputs], or None.
            is_gated: They are gate above up.
        """

    def head(self, linear: Linear) -> LinearT:
        """Return what is kept of the output projection."""
        return self.linear(linear)

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        """The reason why a quantized matrix is dequantized; empty: `keep_levels` keeps it, or its stack is kept.

        `is_stack`: it is that of an expert.
        """
        return "it is not kept as it is"

    def keep_levels(self, matrix: GroupedMatrix, bias: Tensor | None, is_gated: bool) -> LinearT:
        """Return what is kept of a projection that the checkpoint has quantized; called only if `keeps_levels`."""
        raise NotImplementedError

    def keep_stacked_levels(
        self, matrices: Iterator[GroupedMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> LinearT:
        """Likewise of a layer's experts, as `stack`. The iterator may end the call with an exception."""
        raise NotImplementedError

    def note_unpacked(self, name: str, reason: str) -> None:
        """A quantized projection, its first matrix being `name`, is read like any other, for this reason."""

    @abstractmethod
    def layer(self, layer: Layer[LinearT]) -> LayerT:
        """Return what is kept of a layer, whose projections are those that the methods above returned."""


class AsRead(Finisher[LayerWeights, Linear]):
    """Keeps what is read."""

    def linear(self, linear: Linear, is_gated: bool = False) -> Linear:
        return linear

    def stack(
        self, matrices: Iterator[Tensor], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Linear:
        first = next(matrices)
        stacked = first.new_empty(shape)
        for target, matrix in zip(stacked, chain((first,), matrices), strict=True):
            target.copy_(matrix)
        return Linear(stacked, bias)

    def layer(self, layer: LayerWeights) -> LayerWeights:
        return layer
