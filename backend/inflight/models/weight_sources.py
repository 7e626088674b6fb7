"""The source of each tensor of a part of a model: rows and columns of a checkpoint's tensors.

Sources have the structure of `DecoderWeights` and follow from the description of the model alone: no file is
opened. `find_sources.py` makes them, and `weight_reader.py` reads the tensors that they describe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from inflight.models.sharding import Range

Rows = tuple[int, int] | tuple[int, int, int]
"""Arguments of `range`: the first row, the row after the last, and the step if it is not 1."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor of the checkpoint with `rows` rows, and the `ranges` of rows to read."""

    name: str
    rows: int
    ranges: tuple[Rows, ...]

    @property
    def num_read(self) -> int:
        """Number of rows to read."""
        return sum(len(range(*rows)) for rows in self.ranges)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor of a model: rows of checkpoint tensors, stacked.

    Attributes:
        parts: The checkpoint's tensors, and the rows to read of each.
        columns: Number of columns of the checkpoint's tensors; None for vectors.
        kept: Range of the columns to read.
        transposed: Whether the checkpoint stores the transposed matrix.
        is_conv: Whether the checkpoint stores the shape [rows, 1, columns] of a depthwise convolution.
        stored_as: Shape of a vector in the checkpoint, if it is stored with several dimensions; None: with one.
        dtype: Dtype of the loaded tensor; None: the model's dtype.
    """

    parts: tuple[StoredRows, ...]
    columns: int | None = None
    kept: Range = (0, 0)
    transposed: bool = False
    is_conv: bool = False
    stored_as: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the loaded tensor, with only the selected rows and columns."""
        rows = sum(part.num_read for part in self.parts)
        return (rows,) if self.columns is None else (rows, self.kept[1] - self.kept[0])

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the loaded tensor in bytes, in a model of this dtype."""
        return torch.Size(self.shape).numel() * (self.dtype or dtype).itemsize

    def share_read(self, part: StoredRows) -> float:
        """Return the fraction of a stored matrix that is read."""
        assert self.columns is not None, "it is a matrix"
        return part.num_read * (self.kept[1] - self.kept[0]) / (part.rows * self.columns)

    def stored_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape that a part with this number of rows has in the file."""
        if self.stored_as is not None:
            return self.stored_as
        if self.columns is None:
            return (rows,)
        if self.is_conv:
            return (rows, 1, self.columns)
        return (self.columns, rows) if self.transposed else (rows, self.columns)

    def wanted(self, stored: Tensor, rows: Rows) -> Tensor:
        """Return the given rows and the selected columns of a stored tensor."""
        if self.columns is None:
            return stored.flatten()[slice(*rows)]
        if self.is_conv:
            return stored[slice(*rows), 0, slice(*self.kept)]
        return (stored.T if self.transposed else stored)[slice(*rows), slice(*self.kept)]


@dataclass(frozen=True, slots=True)
class LinearSource:
    """Stored weight and bias of a linear layer.

    `is_gated`: whether the rows are the fused projections of a gated MLP, first the gate's, then those of up.
    """

    weight: TensorSource
    bias: TensorSource | None
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class StackSource:
    """Stored matrices of one projection of a layer's experts, one per expert.

    Attributes:
        bias: The biases of all experts, one after the other; None if there are none.
        matrices: One matrix [outputs, inputs] for each expert.
        is_gated: Whether each matrix is gate above up.
    """

    bias: TensorSource | None
    matrices: tuple[TensorSource, ...]
    is_gated: bool


@dataclass(frozen=True, slots=True)
class NormSource:
    """Stored parameters of a norm.

    Attributes:
        weight: The weight.
        bias: The bias of a LayerNorm, if it is stored.
        offset: Added to the weight, which is then float32; 0: nothing is added.
        has_zero_bias: Whether this is a LayerNorm without a stored bias.
    """

    weight: TensorSource
    bias: TensorSource | None
    offset: float
    has_zero_bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentSources:
    """Stored weights of a layer's latent attention (DeepSeek's MLA), other than `LayerSources.qkv`."""

    query_norm: NormSource | None
    query_up: LinearSource | None
    kv_norm: NormSource
    kv_up: LinearSource


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """Stored weights of a layer's router and of its experts, or of this rank's part of the experts."""

    router: LinearSource
    up: StackSource
    down: StackSource
    shared_gate: LinearSource | None
    choice_bias: TensorSource | None
    norms: ExpertNormSources | None
    scales: TensorSource | None
    latent: tuple[LinearSource, LinearSource] | None


@dataclass(frozen=True, slots=True)
class ExpertNormSources:
    """Stored weights of the norms of a layer with both experts and an MLP."""

    router: NormSource
    before: NormSource
    after: NormSource
    shared_after: NormSource


@dataclass(frozen=True, slots=True)
class LayerInputSources:
    """Stored weights with which a layer adds per-layer embeddings."""

    gate: LinearSource
    output: LinearSource
    norm: NormSource


@dataclass(frozen=True, slots=True)
class TokenInputSources:
    """Stored weights with which per-layer embeddings of a stage's layers are made from tokens."""

    embedding: TensorSource
    projection: LinearSource
    norm: NormSource


@dataclass(frozen=True, slots=True)
class AltUpSources:
    """Stored weights of a layer for several residual streams."""

    router: LinearSource
    router_norm: NormSource
    prediction: LinearSource
    correction: LinearSource
    output_scale: TensorSource


@dataclass(frozen=True, slots=True)
class LaurelSources:
    """Stored weights of a low-rank branch beside attention."""

    down: LinearSource
    up: LinearSource
    norm: NormSource


@dataclass(frozen=True, slots=True)
class StreamSources:
    """Stored weights outside of layers for several residual streams."""

    split: LinearSource | None
    join: LinearSource | None


@dataclass(frozen=True, slots=True)
class XieluSources:
    """Stored parameters of the activation xIELU."""

    learned: TensorSource
    constants: TensorSource


@dataclass(frozen=True, slots=True)
class RecurrentSources:
    """Stored weights of a recurrent layer other than its projections; `decay` is stored as log(-decay)."""

    conv: TensorSource
    conv_bias: TensorSource | None
    decay: TensorSource | None
    step_bias: TensorSource | None
    skip: TensorSource | None
    norm: TensorSource | None
    step_up: TensorSource | None
    gate_up: TensorSource | None


@dataclass(frozen=True, slots=True)
class LayerSources:
    """Stored tensors of a decoder layer, in the order in which they are read."""

    qkv: LinearSource | None
    latent: LatentSources | None
    up: LinearSource | None
    down: LinearSource | None
    experts: ExpertSources | None
    attention_norm: NormSource | None
    query_norm: NormSource | None
    key_norm: NormSource | None
    output: LinearSource | None
    attention_post_norm: NormSource | None
    mlp_norm: NormSource | None
    mlp_post_norm: NormSource | None
    sinks: TensorSource | None
    head_gates: LinearSource | None
    recurrent: RecurrentSources | None
    recurrent_projections: tuple[LinearSource, LinearSource] | None
    inputs: LayerInputSources | None
    activation: XieluSources | None
    scale: TensorSource | None
    altup: AltUpSources | None
    laurel: LaurelSources | None


@dataclass(frozen=True, slots=True)
class DraftHeadSources:
    """Stored weights of a draft head."""

    embedding_norm: NormSource
    hidden_norm: NormSource
    projection: LinearSource
    layer: LayerSources
    final_norm: NormSource


@dataclass(frozen=True, slots=True)
class DecoderSources:
    """Stored tensors of a model, or of a rank's part of it, in the order in which they are read.

    The output projection is read before the layers, so that its matrix is not in memory twice together with all
    layers.

    Attributes:
        lm_head: The output projection; None before the last stage, and if the loaded embedding is also the output
            projection.
    """

    embedding: TensorSource | None
    position_embedding: TensorSource | None
    embedding_norm: NormSource | None
    lm_head: TensorSource | None
    final_norm: NormSource | None
    token_inputs: TokenInputSources | None
    streams: StreamSources | None
    layers: tuple[LayerSources, ...]
    draft_head: DraftHeadSources | None = None


def tensors(sources: object) -> Iterator[TensorSource]:
    """Yield each tensor of sources of any structure, in the order in which they are read."""
    if isinstance(sources, TensorSource):
        yield sources
    elif isinstance(sources, tuple):
        for each in sources:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors(each)  # pyright: ignore[reportUnknownArgumentType]
    elif is_dataclass(sources):
        for field in fields(sources):
            yield from tensors(getattr(sources, field.name))


def stored_shapes(sources: DecoderSources) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint tensors that are read, in the order in which they are read."""
    return {part.name: each.stored_shape(part.rows) for each in tensors(sources) for part in each.parts}
