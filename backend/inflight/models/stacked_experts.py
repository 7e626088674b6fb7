"""Presents checkpoints that store all experts of a layer in one tensor as if each expert had its own tensors.

The stacked tensor may be packed as MXFP4 (Open Compute Project, Microscaling Formats 1.0): two 4-bit floats
per byte, and a power of two as the scale of every 32 floats. An expert's matrix is read as levels and scales, or
as the numbers that they represent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inflight.checkpoint_config import DTYPES
from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint, LevelsOfFile, TensorInfo
from inflight.models.families.family import ExpertNames, ExpertStacks
from inflight.models.levels import Levels, MatrixKind, float4_pairs
from inflight.models.registry import ModelDescription

_BLOCK = 32  # values that share a scale
_SCALE_BIAS = 127  # bias of a scale's exponent, of which the scale consists


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stacked tensor of a layer: matrices [rows, columns] of each expert, and their biases.

    Attributes:
        name: Name of the tensor; the suffix `_bias` gives the biases, `_blocks` and `_scales` packed matrices.
        rows: Number of outputs.
        columns: Number of inputs.
        modules: Modules of one expert, below its prefix, and the rows of each.
        transposed: Whether matrices are stored [columns, rows]; None: decided by their shape. Packed matrices are
            always stored [rows, columns].
    """

    name: str
    rows: int
    columns: int
    modules: tuple[tuple[str, slice], ...]
    transposed: bool | None


def unstack_experts(checkpoint: Checkpoint, model: ModelDescription) -> None:
    """Replace a checkpoint's stacked tensors, if it has any, by one tensor per expert and module.

    Matrices are stored [experts, out, in] or [experts, in, out] under the stack's name, or packed as
    [experts, out, in / 32, 16] under `…_blocks` and [experts, out, in / 32] under `…_scales`; biases are
    [experts, out].

    Raises:
        ConfigError: A stacked tensor is missing, or has another shape or dtype.
    """
    experts, names = model.decoder.experts, model.names.experts
    stacks = None if names is None else names.stacks
    if experts is None or names is None or stacks is None:
        return
    of_layers = (model.names.base + model.names.layers).split("{}")[0]
    if not any(name.startswith(of_layers) and stacks.up in name for name in checkpoint.tensors):
        return
    if stacks.router:
        _rename_routers(checkpoint, model, stacks.router, names.router)
    for prefix, stack in _stacks(model, names, stacks):
        if f"{stack.name}_blocks" in checkpoint.tensors or f"{stack.name}_scales" in checkpoint.tensors:
            matrices = _PackedMatrices(checkpoint, stack, experts.count)
        else:
            matrices = _PlainMatrices(checkpoint, stack, experts.count)
        biases = None
        if experts.has_bias:
            biases = _take(checkpoint, f"{stack.name}_bias", (experts.count, stack.rows), DTYPES)
        num_rows = stack.rows // len(stack.modules)
        for index in range(experts.count):
            for module, rows in stack.modules:
                name = prefix.format(index) + module
                matrices.add(f"{name}.weight", (num_rows, stack.columns), index, rows)
                if biases is not None:
                    bias = TensorInfo(biases.info.file, (num_rows,), biases.info.dtype)
                    checkpoint.add(f"{name}.bias", bias, partial(biases.read, index, rows))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that MXFP4 blocks represent, [..., n * 32] bfloat16, which is exact.

    Args:
        blocks: [..., n, 16] uint8.
        scales: [..., n] uint8; a scale is 2 ** (value - 127).
    """
    values = float4_pairs(blocks)
    return torch.ldexp(values, scales.int()[..., None] - _SCALE_BIAS, out=values).flatten(-2)


def _rename_routers(checkpoint: Checkpoint, model: ModelDescription, stored: str, name: str) -> None:
    for layer in range(model.decoder.num_layers):
        prefix = model.names.base + model.names.layers.format(layer)
        if f"{prefix}{stored}.weight" in checkpoint.tensors:
            checkpoint.rename(f"{prefix}{stored}.weight", f"{prefix}{name}.weight")


def _stacks(
    model: ModelDescription, names: ExpertNames, stacks: ExpertStacks
) -> Iterator[tuple[str, _Stack]]:
    """Yield the prefix of a layer's experts, in which `{}` stands for the index, with each stack of the layer."""
    decoder = model.decoder
    assert decoder.experts is not None, "a model with stacks has experts"
    hidden = decoder.experts.latent_size or decoder.hidden_size
    inner, num_up = decoder.experts.intermediate_size, len(names.each.up)
    parts = [slice(inner), slice(inner, None)]
    if stacks.interleaved:
        parts = [slice(0, None, 2), slice(1, None, 2)]
    for layer in range(decoder.num_layers):
        if decoder.has_experts(layer):
            prefix = model.names.base + model.names.layers.format(layer)
            up = _Stack(
                prefix + stacks.up, num_up * inner, hidden, (*zip(names.each.up, parts),), stacks.transposed
            )
            all_rows = ((names.each.down, slice(hidden)),)
            down = _Stack(prefix + stacks.down, hidden, inner, all_rows, stacks.transposed)
            yield from ((prefix + names.prefix, up), (prefix + names.prefix, down))


@dataclass(frozen=True, slots=True)
class _Taken:
    """A stacked tensor that was removed from the checkpoint's tensors."""

    checkpoint: Checkpoint
    name: str
    info: TensorInfo

    def read(self, index: int, rows: slice = slice(None)) -> Tensor:
        """Return the given rows of an expert's part of the tensor, mapped from the file."""
        return self.checkpoint.read_stored(self.name, self.info)[index][rows]


class _PlainMatrices:
    """The matrices of all experts in one tensor: [experts, rows, columns], or [experts, columns, rows]."""

    def __init__(self, checkpoint: Checkpoint, stack: _Stack, count: int) -> None:
        self._checkpoint = checkpoint
        straight, turned = (count, stack.rows, stack.columns), (count, stack.columns, stack.rows)
        self._is_transposed = stack.transposed
        if self._is_transposed is None:
            stored = checkpoint.tensors.get(stack.name)
            self._is_transposed = stored is not None and stored.shape == turned and turned != straight
        self._taken = _take(checkpoint, stack.name, turned if self._is_transposed else straight, DTYPES)

    def add(self, name: str, shape: tuple[int, int], index: int, rows: slice) -> None:
        """Add some rows of an expert's matrix, of the given shape, as a tensor of the checkpoint."""
        info = TensorInfo(self._taken.info.file, shape, self._taken.info.dtype)
        self._checkpoint.add(name, info, partial(self._read, index, rows))

    def _read(self, index: int, rows: slice) -> Tensor:
        matrix = self._taken.read(index)
        return (matrix.T if self._is_transposed else matrix)[rows]


class _PackedMatrices:
    """The matrices of all experts in one tensor with MXFP4 blocks along the columns, and another with scales."""

    def __init__(self, checkpoint: Checkpoint, stack: _Stack, count: int) -> None:
        if stack.columns % _BLOCK:
            raise ConfigError(
                f"{checkpoint.folder}: {stack.name}_blocks is MXFP4, blocks of {_BLOCK} values, "
                f"expected matrices of a multiple of {_BLOCK} columns instead of {stack.columns}"
            )
        shape = (count, stack.rows, stack.columns // _BLOCK)
        self._checkpoint = checkpoint
        self._blocks = _take(checkpoint, f"{stack.name}_blocks", (*shape, _BLOCK // 2), ("U8",))
        self._scales = _take(checkpoint, f"{stack.name}_scales", shape, ("U8",))

    def add(self, name: str, shape: tuple[int, int], index: int, rows: slice) -> None:
        """Add some rows of an expert's matrix, of the given shape, as a quantized tensor of the checkpoint."""
        num_bytes = shape[0] * shape[1] // _BLOCK * (_BLOCK // 2 + 1)
        info = TensorInfo(self._blocks.info.file, shape, "bfloat16", num_bytes)
        own = index, rows
        levels = LevelsOfFile(MatrixKind.FLOAT4, partial(self._levels, *own), partial(self._release, *own))
        self._checkpoint.add(name, info, partial(self._read, *own), levels)

    def _read(self, index: int, rows: slice) -> Tensor:
        matrix = dequantize(self._blocks.read(index, rows), self._scales.read(index, rows))
        self._release(index, rows)
        return matrix

    def _levels(self, index: int, rows: slice) -> Levels:
        blocks, scales = self._blocks.read(index, rows), self._scales.read(index, rows)
        values = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        powers = scales.view(torch.float8_e8m0fnu)
        return Levels(values, powers.float(), None, None, 4, is_float4=True)

    def _release(self, index: int, rows: slice) -> None:
        self._checkpoint.release_pages(self._blocks.read(index, rows))
        self._checkpoint.release_pages(self._scales.read(index, rows))


def _take(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> _Taken:
    """Remove a stored tensor from the checkpoint; raise ConfigError if it is missing or its shape or dtype is
    wrong."""
    info = checkpoint.tensors.pop(name, None)
    if info is None:
        raise ConfigError(f"{checkpoint.folder}: the weights do not fit config.json: missing {name}")
    where = f"{checkpoint.folder / info.file}: tensor {name!r}"
    if info.shape != shape:
        raise ConfigError(f"{where} has shape {list(info.shape)}, expected {list(shape)} from config.json")
    if info.dtype not in dtypes:
        raise ConfigError(f"{where} has dtype {info.dtype}, expected {' or '.join(dtypes)}")
    return _Taken(checkpoint, name, info)
