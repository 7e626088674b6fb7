"""Presents the tensors of a quantized matrix as if the checkpoint had the matrix itself.

A module's stored tensors, its parts, are removed from the checkpoint's tensors, and `….weight` is computed from
them at each read: levels and scales, or the numbers that they represent, float32 [outputs, inputs].

A checkpoint's scales of activations, keys and values are ignored, because these are not quantized with them here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint, LevelsOfFile, TensorInfo
from inflight.models.dequantize import (
    FLOAT8,
    awq_levels,
    float4_levels,
    gptq_levels,
    nvfp4_levels,
    packed_levels,
    scaled_levels,
)
from inflight.models.levels import Levels, MatrixKind
from inflight.models.quantization import Quantization

_logger = logging.getLogger(__name__)
_FLOATS = ("float32", "bfloat16", "float16")
_SCALE_DTYPES = (*_FLOATS, "F8_E8M0")
_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "F8_E8M0": 1,
    FLOAT8: 1,
    "I8": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
}
_WORDS = ("I32",)
_HALVES = ("U8",)
_MXFP4_GROUP, _NVFP4_GROUP = 32, 16
_DIVISOR = "weight_global_scale"
_INTEGERS = ("I32", "I64")
_OF_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale",
    ".input_zero_point", ".k_proj.output_scale", ".v_proj.output_scale",
)  # fmt: skip


def unpack_quantized(checkpoint: Checkpoint, quantization: Quantization) -> None:
    """Replace the tensors of every quantized module by one tensor `….weight`.

    Raises:
        ConfigError: No module is quantized, or a part is missing or has another shape or dtype than the other
            parts require.
    """
    for name in [name for name in checkpoint.tensors if name.endswith(_OF_ACTIVATIONS)]:
        del checkpoint.tensors[name]
    before = set(checkpoint.tensors)
    unpack = {"awq": _unpack_awq, "gptq": _unpack_gptq}.get(quantization.method, _unpack_scaled)
    unpack(checkpoint, quantization)
    if before == set(checkpoint.tensors):
        raise ConfigError(
            f"{checkpoint.folder}: by config.json, weights are quantized ({quantization.method}), but there are "
            "no tensors of that format"
        )


class _Parts:
    """The stored tensors of one module, which are removed from the checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint, module: str) -> None:
        self._checkpoint, self._module = checkpoint, module
        self.infos: dict[str, TensorInfo] = {}

    def take(self, kind: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> None:
        """Remove a required part from the checkpoint's tensors; raise ConfigError if it is missing or has
        another dtype or shape.

        None in `shape` allows any size.
        """
        name = f"{self._module}.{kind}"
        info = self._checkpoint.tensors.pop(name, None)
        if info is None:
            raise self.missing(kind)
        self.infos[kind] = info
        if info.dtype not in dtypes:
            raise self._refuse(kind, f"dtype {info.dtype}", " or ".join(dtypes))
        if shape is not None and (
            len(shape) != len(info.shape) or any(b not in (None, a) for a, b in zip(info.shape, shape))
        ):
            expected = ["any" if size is None else size for size in shape]
            raise self.refuse(kind, f"{expected} beside its other parts")

    def stores(self, kind: str, dtypes: tuple[str, ...]) -> bool:
        """Whether the checkpoint has a part of this kind in one of `dtypes`."""
        info = self._checkpoint.tensors.get(f"{self._module}.{kind}")
        return info is not None and info.dtype in dtypes

    def take_if_there(
        self, kind: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None
    ) -> bool:
        """Remove an optional part from the checkpoint's tensors; return whether it exists."""
        if f"{self._module}.{kind}" in self._checkpoint.tensors:
            self.take(kind, dtypes, shape)
        return kind in self.infos

    def missing(self, kind: str) -> ConfigError:
        """Return the error for a required part that is missing."""
        name = f"{self._module}.{kind}"
        return ConfigError(f"{self._checkpoint.folder}: {self._module} is quantized, but there is no {name}")

    def refuse(self, kind: str, expected: str) -> ConfigError:
        """Return the error for a part whose shape is not the expected one."""
        return self._refuse(kind, f"shape {list(self.infos[kind].shape)}", expected)

    def _refuse(self, kind: str, found: str, expected: str) -> ConfigError:
        where = f"{self._checkpoint.folder / self.infos[kind].file}: tensor {f'{self._module}.{kind}'!r}"
        return ConfigError(f"{where} has {found}, expected {expected}")

    def read(self, kind: str) -> Tensor:
        """Return a part as it is stored. `take` must have returned the part before."""
        return self._checkpoint.read_stored(f"{self._module}.{kind}", self.infos[kind])

    def read_if_there(self, kind: str) -> Tensor | None:
        """Return a part as it is stored; None if the checkpoint has no part of this kind."""
        return self.read(kind) if kind in self.infos else None

    def add(
        self,
        shape: tuple[int, int],
        kind: MatrixKind,
        make: Callable[[], Levels],
        num_bytes: int | None = None,
    ) -> None:
        """Add `….weight`, with this shape and kind, which `make` computes from the parts.

        `num_bytes`: the size of its levels and scales; None: the parts' size.
        """
        file = next(iter(self.infos.values())).file
        num_bytes = num_bytes or sum(
            math.prod(info.shape) * _BYTES[info.dtype] for info in self.infos.values()
        )
        info = TensorInfo(file, shape, "float32", num_bytes)

        def release() -> None:
            for kind in self.infos:
                self._checkpoint.release_pages(self.read(kind))

        def made() -> Tensor:
            weight = make().dequantized()
            release()
            return weight

        self._checkpoint.add(f"{self._module}.weight", info, made, LevelsOfFile(kind, make, release))


def _modules(checkpoint: Checkpoint, kind: str) -> list[_Parts]:
    """Return the modules that have a tensor of this kind."""
    suffix = f".{kind}"
    names = [name for name in checkpoint.tensors if name.endswith(suffix)]
    return [_Parts(checkpoint, name[: -len(suffix)]) for name in names]


def _unpack_awq(checkpoint: Checkpoint, quantization: Quantization) -> None:
    for parts in _modules(checkpoint, "qweight"):
        parts.take("qweight", _WORDS, (None, None))
        inputs, words = parts.infos["qweight"].shape
        parts.take("scales", _FLOATS, (None, 8 * words))
        groups = parts.infos["scales"].shape[0]
        of_inputs = _short_last_group(inputs, groups, quantization.group_size)
        if groups == 0 or (inputs % groups and of_inputs is None):
            raise parts.refuse("scales", f"a number of groups that divides the {inputs} inputs")
        parts.take("qzeros", _WORDS, (groups, words))

        def make(parts: _Parts = parts, of_inputs: Tensor | None = of_inputs) -> Levels:
            stored = parts.read("qweight"), parts.read("qzeros"), parts.read("scales")
            return replace(awq_levels(*stored), groups=of_inputs)

        parts.add((8 * words, inputs), MatrixKind.INT4, make)


def _unpack_gptq(checkpoint: Checkpoint, quantization: Quantization) -> None:
    for parts in _modules(checkpoint, "qweight"):
        parts.take("qweight", _WORDS, (None, None))
        rows, outputs = parts.infos["qweight"].shape
        parts.take("scales", _FLOATS, (None, outputs))
        groups = parts.infos["scales"].shape[0]
        parts.take("qzeros", _WORDS, (groups, None))
        words = parts.infos["qzeros"].shape[1]
        bits = next((bits for bits in (4, 8) if 32 * words == bits * outputs), None)
        if bits is None:
            raise parts.refuse("qzeros", f"{outputs / 8:g} or {outputs / 4:g} words for {outputs} outputs")
        inputs = rows * 32 // bits
        has_groups = parts.take_if_there("g_idx", _INTEGERS, (inputs,))
        if quantization.has_order and groups > 1 and not has_groups:
            raise parts.missing("g_idx")
        of_inputs = None if has_groups else _short_last_group(inputs, groups, quantization.group_size)
        if groups == 0 or (inputs % groups and not has_groups and of_inputs is None):
            raise parts.refuse("scales", f"a number of groups that divides the {inputs} inputs")

        def make(parts: _Parts = parts, bits: int = bits, of_inputs: Tensor | None = of_inputs) -> Levels:
            stored = parts.read("qweight"), parts.read("qzeros"), parts.read("scales")
            of_inputs = parts.read_if_there("g_idx") if of_inputs is None else of_inputs
            return gptq_levels(*stored, of_inputs, bits, quantization.zero_offset)

        of_8_bits = _of_int8(groups == 1, not quantization.is_symmetric)
        parts.add((outputs, inputs), MatrixKind.INT4 if bits == 4 else of_8_bits, make)


def _short_last_group(inputs: int, groups: int, size: int | None) -> Tensor | None:
    """Return each input's group [inputs] if the last group of `size` inputs is shorter; otherwise None."""
    if size is None or inputs % size == 0 or groups != -(-inputs // size):
        return None
    return torch.arange(inputs) // size


def _unpack_scaled(checkpoint: Checkpoint, quantization: Quantization) -> None:
    for parts in _modules(checkpoint, "weight_packed"):
        if not parts.stores("weight_packed", _HALVES):
            _unpack_packed(parts)
        elif parts.stores("weight_scale", _HALVES):
            _unpack_mxfp4(parts)
        else:
            _unpack_nvfp4(parts, "weight_packed", _DIVISOR)
    for parts in _modules(checkpoint, "weight_scale_2"):
        _unpack_nvfp4(parts, "weight", "weight_scale_2")
    for kind in ("weight_scale_inv", "weight_scale"):
        for parts in _modules(checkpoint, kind):
            _unpack_levels(parts, kind, quantization.block)


def _unpack_packed(parts: _Parts) -> None:
    """Replace the tensors of a module in compressed-tensors' format `pack-quantized` by one matrix (`Levels`)."""
    parts.take("weight_packed", _WORDS, (None, None))
    outputs, words = parts.infos["weight_packed"].shape
    parts.take("weight_shape", _INTEGERS, (2,))
    rows, inputs = map(int, parts.read("weight_shape"))
    bits = next((bits for bits in (4, 8) if -(-inputs * bits // 32) == words), None)
    if rows != outputs or bits is None:
        raise parts.refuse(
            "weight_packed", f"4 or 8 bits of each of [{rows}, {inputs}], as weight_shape says"
        )
    parts.take("weight_scale", _FLOATS, (None, None))
    scale_rows, groups = parts.infos["weight_scale"].shape
    parts.take_if_there("weight_zero_point", _WORDS, (-(-outputs * bits // 32), groups))
    has_groups = parts.take_if_there("weight_g_idx", _INTEGERS, (inputs,))
    if scale_rows not in (1, outputs) or groups == 0 or (inputs % groups and not has_groups):
        raise parts.refuse("weight_scale", f"{outputs} rows, and a number of groups that divides {inputs}")

    def make() -> Levels:
        zeros, of_inputs = parts.read_if_there("weight_zero_point"), parts.read_if_there("weight_g_idx")
        stored = parts.read("weight_packed"), parts.read("weight_scale")
        return packed_levels(*stored, zeros, of_inputs, bits, inputs)

    has_zeros = "weight_zero_point" in parts.infos
    parts.add((outputs, inputs), MatrixKind.INT4 if bits == 4 else _of_int8(groups == 1, has_zeros), make)


def _of_int8(is_by_row: bool, has_zeros: bool) -> MatrixKind:
    if has_zeros:
        return MatrixKind.INT8_ZEROS
    return MatrixKind.INT8_BY_ROW if is_by_row else MatrixKind.INT8


def _unpack_mxfp4(parts: _Parts) -> None:
    """Replace the tensors of a module in compressed-tensors' `mxfp4-pack-quantized` by one matrix (`Levels`)."""
    parts.take("weight_packed", _HALVES, (None, None))
    outputs, inputs = parts.infos["weight_packed"].shape[0], 2 * parts.infos["weight_packed"].shape[1]
    if inputs % _MXFP4_GROUP:
        raise parts.refuse("weight_packed", f"two inputs in a byte, a multiple of {_MXFP4_GROUP}")
    parts.take("weight_scale", _HALVES, (outputs, inputs // _MXFP4_GROUP))

    def make() -> Levels:
        return float4_levels(parts.read("weight_packed"), parts.read("weight_scale"))

    parts.add((outputs, inputs), MatrixKind.FLOAT4, make)


def _unpack_nvfp4(parts: _Parts, packed: str, factor: str) -> None:
    """Replace the tensors of a module in NVFP4 by one matrix of levels and scales (`Levels`).

    `packed` and `factor` are names of tensors. ModelOpt's factor multiplies scales, compressed-tensors' factor
    divides them.
    """
    parts.take(packed, _HALVES, (None, None))
    outputs, inputs = parts.infos[packed].shape[0], 2 * parts.infos[packed].shape[1]
    if inputs % _NVFP4_GROUP:
        raise parts.refuse(packed, f"two inputs in a byte, a multiple of {_NVFP4_GROUP}")
    parts.take("weight_scale", (FLOAT8,), (outputs, inputs // _NVFP4_GROUP))
    parts.take(factor, ("float32",))
    if parts.infos[factor].shape not in ((), (1,)):
        raise parts.refuse(factor, "one number")

    def make() -> Levels:
        scales, number = parts.read("weight_scale").float(), parts.read(factor)
        return nvfp4_levels(parts.read(packed), scales / number if factor == _DIVISOR else scales * number)

    scale_bytes = 4 * outputs * inputs // _NVFP4_GROUP  # float32
    parts.add((outputs, inputs), MatrixKind.INT8, make, outputs * inputs + scale_bytes)


def _unpack_levels(parts: _Parts, kind: str, block: tuple[int, int] | None) -> None:
    """Replace an int8 or float8 matrix and the tensor of its scales by one matrix of both (`Levels`)."""
    parts.take("weight", (FLOAT8, "I8"), (None, None))
    outputs, inputs = parts.infos["weight"].shape
    parts.take(kind, _SCALE_DTYPES)
    shape = parts.infos[kind].shape
    blocks = [] if block is None else [-(-outputs // block[0]), -(-inputs // block[1])]
    is_grouped = len(shape) == 2 and shape[0] == outputs and shape[1] > 0 and inputs % shape[1] == 0
    # ModelOpt's scales are [rows of blocks, 1, columns of blocks, 1].
    is_block = block is not None and list(shape) in (blocks, [blocks[0], 1, blocks[1], 1])
    if not (is_block or is_grouped or shape in ((), (1,), (1, 1), (outputs,))):
        wanted = [[], [outputs, 1], *([blocks] if blocks else [])]
        raise parts.refuse(kind, f"{' or '.join(map(str, wanted))} for a matrix of {[outputs, inputs]}")
    parts.take_if_there("weight_zero_point", ("I8", "I32", FLOAT8), shape)

    def make() -> Levels:
        levels, scales = parts.read("weight"), parts.read(kind)
        zeros = parts.read_if_there("weight_zero_point")
        of_blocks = block if is_block else None
        scales = scales.view(blocks) if is_block else scales
        return scaled_levels(levels, scales, of_blocks, None if zeros is None else zeros.float())

    is_by_row = not is_block and shape in ((), (1,), (1, 1), (outputs,), (outputs, 1))
    if parts.infos["weight"].dtype == FLOAT8:
        of_levels = MatrixKind.FLOAT8_BY_ROW if is_by_row else MatrixKind.FLOAT8
    else:
        of_levels = _of_int8(is_by_row, "weight_zero_point" in parts.infos)
    parts.add((outputs, inputs), of_levels, make)
