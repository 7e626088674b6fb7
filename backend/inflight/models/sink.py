"""Sinks: what an engine keeps of a model's matrices, each of which it is given as it is read.

A matrix comes in one of two formats: as numbers, or, where `KeptLevels` asks for that and the sink keeps it, as
the levels that the checkpoint has quantized it to. A load hands each over before the next is read
(`weight_reader.py`): a model never takes the memory of both.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic

import torch
from torch import Tensor

from inflight.models.decoder_weights import Layer, LayerT, LayerWeights, Linear, LinearT
from inflight.models.levels import GroupedMatrix, MatrixKind

StoredMatrix = Tensor | GroupedMatrix
"""[outputs, inputs]: numbers, or the levels that stand for them."""


class Sink(ABC, Generic[LayerT, LinearT]):
    """Says what is kept of a model's projections and layers once they are read."""

    @property
    def keeps_tied_embedding(self) -> bool:
        """Whether an embedding is kept that is the output projection's matrix too."""
        return True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor of a layer, not initialized."""
        return torch.empty(shape, dtype=dtype, device=device)

    @abstractmethod
    def linear(self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False) -> LinearT:
        """Return what is kept of a layer's projection, before the next one is read.

        Args:
            matrix: Levels only if `why_unpacked` says nothing about them.
            bias: [outputs], or None.
            is_gated: It is gate above up of a gated MLP.
        """

    @abstractmethod
    def stack(
        self, matrices: Iterator[StoredMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> LinearT:
        """Return what is kept of the matrices of a layer's experts, each of which is read when iterated to.

        Args:
            matrices: [outputs, inputs] of one expert after the other: all numbers, or all levels of one form. With
                levels the iterator may end the call with an exception.
            shape: [experts, outputs, inputs].
            bias: [experts, outputs], or None.
            is_gated: They are gate above up.
        """

    def head(self, matrix: Tensor) -> LinearT:
        """Return what is kept of the output projection."""
        return self.linear(matrix)

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        """Return the reason why levels are not kept, and come as numbers; empty if they are kept.

        `is_stack`: they are those of an expert.
        """
        return "it is not kept as it is"

    @abstractmethod
    def layer(self, layer: Layer[LinearT]) -> LayerT:
        """Return what is kept of a layer, whose projections are those that the methods above returned."""


class PlainSink(Sink[LayerWeights, Linear]):
    """Keeps numbers as they are."""

    def linear(self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False) -> Linear:
        assert isinstance(matrix, Tensor), "levels come only where they are kept"
        return Linear(matrix, bias)

    def stack(
        self, matrices: Iterator[StoredMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Linear:
        first = next(matrices)
        assert isinstance(first, Tensor), "likewise"
        stacked = first.new_empty(shape)
        for target, matrix in zip(stacked, chain((first,), matrices), strict=True):
            assert isinstance(matrix, Tensor), "all are numbers if the first is"
            target.copy_(matrix)
        return Linear(stacked, bias)

    def layer(self, layer: LayerWeights) -> LayerWeights:
        return layer


@dataclass(frozen=True, slots=True)
class KeptLevels:
    """Asks a load to keep what the checkpoint has quantized, and records what became of it.

    Attributes:
        counts: How many projections, or stacks of them, are kept in each format.
        unpacked: The first matrices of the projections that are not kept, by the reason.
    """

    counts: Counter[MatrixKind] = field(default_factory=Counter)
    unpacked: dict[str, list[str]] = field(default_factory=dict)

    def note_unpacked(self, name: str, reason: str) -> None:
        """A quantized projection, its first matrix being `name`, is read as numbers, for this reason."""
        self.unpacked.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        return " and ".join(f"{count} in {kind.value}" for kind, count in self.counts.items()) or "none"

    def warn(self, log: logging.Logger, target: str = "") -> None:
        """Log what is unpacked, and to what."""
        for reason, names in self.unpacked.items():
            log.warning(
                "%d quantized projections are unpacked%s (%s): %s", len(names), target, names[0], reason
            )
