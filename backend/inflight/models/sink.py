"""Sinks convert a model's matrices, as they are read, to the format that an engine stores.

A matrix is passed to a sink as numbers, or, if `KeptLevels` requests it and the sink supports it, as the
quantization levels of the checkpoint. A load converts each matrix before it reads the next one
(`weight_reader.py`), so a model never takes the memory of both formats.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from inflight.models.decoder_weights import Layer, LayerT, LinearT
from inflight.models.levels import GroupedMatrix, MatrixKind

StoredMatrix = Tensor | GroupedMatrix
"""A matrix [outputs, inputs]: numbers, or the quantization levels that represent them."""


class Sink(ABC, Generic[LayerT, LinearT]):
    """Converts a model's projections and layers to the format that an engine stores."""

    @property
    def keeps_tied_embedding(self) -> bool:
        """Whether a tied embedding is stored in addition to the converted output projection."""
        return True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an uninitialized tensor of a layer."""
        return torch.empty(shape, dtype=dtype, device=device)

    @abstractmethod
    def linear(self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False) -> LinearT:
        """Convert a layer's projection, before the next one is read.

        Args:
            matrix: The matrix. It is given as levels only if `why_unpacked` returns "" for it.
            bias: [outputs], or None.
            is_gated: Whether the matrix has the rows of the gate and then those of up, of a gated MLP.
        """

    @abstractmethod
    def stack(
        self, matrices: Iterator[StoredMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> LinearT:
        """Convert the matrices of a layer's experts; each is read when the iterator reaches it.

        Args:
            matrices: [outputs, inputs] of each expert in turn: all are numbers, or all are levels of one form.
                With levels, the iterator may raise an exception, which the method must not catch.
            shape: [experts, outputs, inputs].
            bias: [experts, outputs], or None.
            is_gated: Whether each matrix is gate above up.
        """

    def head(self, matrix: StoredMatrix) -> LinearT:
        """Convert the output projection. It is given as levels only if `keeps_head`."""
        return self.linear(matrix)

    @property
    def keeps_head(self) -> bool:
        """Whether the output projection is accepted as levels if `is_small_head`; a tied embedding is then looked
        up in it."""
        return False

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        """Return the reason why this sink needs a quantized matrix as numbers; "" if it accepts levels.

        `is_stack`: whether the matrix belongs to an expert.
        """
        return "this engine does not keep it quantized"

    @abstractmethod
    def layer(self, layer: Layer[LinearT]) -> LayerT:
        """Convert a layer, whose projections are results of the methods above."""


def is_small_head(kind: MatrixKind, num_bytes: int, num_weights: int) -> bool:
    """Whether a quantized output projection takes at most an eighth more memory than int8 with a scale per row."""
    return kind is MatrixKind.INT8 and 8 * num_bytes <= 9 * num_weights


@dataclass(frozen=True, slots=True)
class KeptLevels:
    """Requests that a load keep matrices quantized, and records which matrices were kept.

    Attributes:
        counts: Number of projections, or stacks of experts' projections, kept in each format.
        heads: Number of output projections, at most 1, kept in each format.
        unpacked: By reason, the first matrix of each quantized projection that was not kept.
    """

    counts: Counter[MatrixKind] = field(default_factory=Counter[MatrixKind])
    heads: Counter[MatrixKind] = field(default_factory=Counter[MatrixKind])
    unpacked: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def note_unpacked(self, name: str, reason: str) -> None:
        """Record that a quantized projection, whose first matrix is `name`, is read as floating-point numbers."""
        self.unpacked.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        return " and ".join(f"{count} in {kind.value}" for kind, count in self.counts.items()) or "none"

    def warn(self, log: logging.Logger, target: str = "") -> None:
        """Log which projections are unpacked. `target`: what follows these words, such as " to bfloat16"."""
        for reason, names in self.unpacked.items():
            log.warning(
                "%d quantized projections are unpacked%s (%s): %s", len(names), target, names[0], reason
            )
