"""Presents the tensors of a GGUF file under their names in Hugging Face checkpoints.

Matrices in Q4_0, Q5_0, Q6_K, Q8_0 and MXFP4 are read as `Levels`, which represent them exactly. Q4_1, Q4_K and
Q5_K have minimums instead of integer zero points; the package `gguf` dequantizes them to float32.
"""

from __future__ import annotations

import logging
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from inflight.checkpoint_config import DTYPES
from inflight.gguf.architectures import Architecture, find_architecture
from inflight.gguf.families import XIELU
from inflight.gguf.folder import GGUF_FILE, gguf_files
from inflight.gguf.header import LEVEL_TYPES, GgufHeader, GgufTensor, read_header, read_tensors
from inflight.gguf.keys import ArchitectureKeys
from inflight.gguf.tensor_names import (
    READ_ELSEWHERE,
    StoredPart,
    TensorNames,
    is_of_keys_and_values,
    layer_of,
)
from inflight.models.checkpoint import Checkpoint, LevelsOfFile, TensorInfo
from inflight.models.decoder_config import DecoderConfig
from inflight.models.find_sources import find_sources
from inflight.models.levels import Levels, MatrixKind
from inflight.models.recurrent import GatedDelta
from inflight.models.registry import ModelDescription
from inflight.models.weight_sources import stored_shapes

_logger = logging.getLogger(__name__)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = re.compile(r"blk\.\d+\.")


def add_gguf_tensors(checkpoint: Checkpoint, model: ModelDescription) -> None:
    """Add the GGUF file's tensors to a checkpoint, which has no tensors yet.

    Tensors of draft layers, and of keys and values that no layer uses, are left out. Any other tensor that the
    model does not have keeps its name, so that it is reported as unexpected.

    Raises:
        ConfigError: The file is missing or damaged, or has tensors of unsupported types.
    """
    header = read_tensors(gguf_files(checkpoint.folder))
    file, decoder = _MappedGguf(header), model.decoder
    names, changes = TensorNames(header, decoder.num_layers), _Changes(find_architecture(header), decoder)
    used: set[str] = set()
    for name, shape in stored_shapes(find_sources(model)).items():
        if parts := names.find(name):
            used.update(part.name for part in parts)
            _Source(file, parts, shape, changes).add_to(checkpoint, name)
    if decoder.activation == "xielu":
        _add_xielu(checkpoint, model)
    for stored, tensor in header.tensors.items():
        if not (stored in used or stored in READ_ELSEWHERE or _is_left_out(stored, decoder)):
            _Source(file, (StoredPart(stored),), tensor.shape, changes).add_to(checkpoint, stored)


def _add_xielu(checkpoint: Checkpoint, model: ModelDescription) -> None:
    """Add the tensors of the layers' xIELU, which are keys of the file."""
    section = ArchitectureKeys(*read_header(gguf_files(checkpoint.folder)))
    for key in XIELU:
        parameter = key.removeprefix("xielu.")
        shape = (1,) if parameter.startswith("alpha") else ()
        for layer, number in enumerate(section.numbers(key) or ()):
            prefix = model.names.base + model.names.layers.format(layer) + model.names.activation
            tensor = torch.tensor(number, dtype=torch.float32).view(shape)
            checkpoint.add(prefix + parameter, TensorInfo(GGUF_FILE, shape, "float32"), tensor.clone)


def _is_left_out(stored: str, decoder: DecoderConfig) -> bool:
    """Return whether a tensor is of a draft layer, which follows the model's last one, or of keys and values of a
    layer that reads another layer's."""
    layer = layer_of(stored)
    if layer is None:
        return False
    return layer >= decoder.num_layers or (is_of_keys_and_values(stored) and not decoder.has_own_kv(layer))


def log_unpacked(checkpoint: Checkpoint) -> None:
    """Log how many quantized matrices are unpacked, if any, because `Levels` cannot represent them exactly."""
    header = read_tensors(gguf_files(checkpoint.folder))
    counts = Counter(
        tensor.type
        for tensor in header.tensors.values()
        if tensor.type not in _FLOATS and tensor.type not in _LEVELS
    )
    if counts:
        of_types = ", ".join(f"{count} matrices in {kind}" for kind, count in sorted(counts.items()))
        _logger.info(
            "%s: unpacked, because their formats have no integer zero points: %s",
            header.path,
            of_types,
        )


class _MappedGguf:
    """A model's GGUF files, memory-mapped. A file stays mapped while any of its tensors exists."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._bytes = {path: _map(path) for path in {tensor.file for tensor in header.tensors.values()}}

    def kind(self, part: StoredPart) -> str:
        """Return the name of a part's type."""
        return self.header.tensors[part.name].type

    def shape(self, part: StoredPart) -> tuple[int, ...]:
        """Return the dimensions of a part, such as (rows, columns), in the order of Hugging Face checkpoints."""
        shape = self.header.tensors[part.name].shape
        shape = shape if part.index is None else shape[1:]
        return shape if part.half is None else (shape[0] // 2, *shape[1:])

    def stored(self, part: StoredPart) -> Tensor:
        """Return a part's bytes, mapped: uint8 [rows, bytes of a row]."""
        tensor = self.header.tensors[part.name]
        stored = self._bytes[tensor.file][tensor.offset : tensor.offset + tensor.num_bytes]
        if part.index is not None:
            stored = stored.view(tensor.shape[0], -1)[part.index]
        rows = math.prod(self.shape(part)[:-1]) if len(self.shape(part)) > 1 else 1
        if part.half is not None:
            stored = stored.view(2, -1)[part.half]
        return stored.view(rows, -1)

    def numbers(self, part: StoredPart) -> Tensor:
        """Return a part in its own dtype, mapped, or dequantized to float32."""
        stored, kind = self.stored(part), self.kind(part)
        if kind in _FLOATS:
            return stored.view(_FLOATS[kind]).view(self.shape(part))
        if kind in _LEVELS:
            return _LEVELS[kind](stored).dequantized().view(self.shape(part))
        import gguf

        untyped: Any = gguf  # neither gguf nor torch declares the types of arrays
        blocks = cast(Any, stored).numpy()
        numbers: Any = untyped.dequantize(blocks, untyped.GGMLQuantizationType[kind])
        found: Tensor = torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]
        return found.view(self.shape(part))


def _map(path: Path) -> Tensor:
    with path.open("rb") as file:
        # Private pages, which are writable: torch warns of read-only memory, although nothing writes to it.
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


class _Changes:
    """The changes of llama.cpp's converter to the tensors of an architecture, and their inverses."""

    def __init__(self, architecture: Architecture, decoder: DecoderConfig) -> None:
        self._architecture, self._decoder = architecture, decoder

    def rows(self, module: str, count: int, num_parts: int) -> Tensor | None:
        """Return the file's row of each row of the checkpoint's tensor; None: the same.

        Args:
            module: The name of a layer's tensor without its ending; of the first one, if there are several parts.
            count: Number of rows of all parts.
            num_parts: Number of tensors of the file.
        """
        recurrent = self._decoder.recurrent
        if module == "attn_qkv" and num_parts == 2 and isinstance(recurrent, GatedDelta):
            return _by_key_head(recurrent)
        if self._architecture.is_permuted and module in ("attn_q", "attn_k"):
            num_heads = self._decoder.num_heads if module == "attn_q" else self._decoder.num_kv_heads
            return torch.arange(count).view(num_heads, -1, 2).transpose(1, 2).flatten()
        delta = self._delta()
        if delta is None or module not in ("attn_qkv", "attn_gate", *_BY_VALUE_HEAD):
            return None
        width = 1 if module in _BY_HEAD else delta.value_dim
        values = self._value_heads(delta, width)
        before = torch.arange(count - len(values))  # queries and keys
        return torch.cat((before, values + len(before)))

    def columns(self, module: str) -> tuple[Tensor, int] | None:
        """Return the file's column of each column, which moves in groups of a size; None: the same."""
        delta = self._delta()
        if delta is None or module != "ssm_out":
            return None
        return self._value_heads(delta, delta.value_dim), delta.value_dim

    def numbers(self, module: str, numbers: Tensor) -> Tensor:
        """Return the checkpoint's numbers for those of the file."""
        if module == "ssm_a":
            return (-numbers).log()
        if self._architecture.norm_offset and module.endswith("norm") and module != "ssm_norm":
            return numbers - self._architecture.norm_offset
        return numbers

    def _delta(self) -> GatedDelta | None:
        """Return the sizes of recurrent layers whose value heads have another order in the file."""
        delta = self._decoder.recurrent
        return delta if self._architecture.has_tiled_values and isinstance(delta, GatedDelta) else None

    def _value_heads(self, delta: GatedDelta, width: int) -> Tensor:
        """Return the place in the file of each row or column of the value heads, which have `width` of them
        each."""
        places = torch.arange(delta.num_value_heads * width)
        return places.view(-1, delta.num_key_heads, width).transpose(0, 1).flatten()


def _by_key_head(delta: GatedDelta) -> Tensor:
    """Return the order of rows in which those of a key head are together: its query, key, values and gates."""
    sections = delta.sections[:4]
    starts = accumulate((section.size for section in sections), initial=0)
    rows = [
        torch.arange(start, start + section.size).view(delta.num_key_heads, -1)
        for start, section in zip(starts, sections)
    ]
    return torch.cat(rows, 1).flatten()


def _latent_up(parts: list[Tensor]) -> Tensor:
    """Return the projection of latents to keys and values, in which those of a head are together.

    The parts are [heads, latent, key] and [heads, value, latent].
    """
    keys, values = parts
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


_BY_HEAD = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
_BY_VALUE_HEAD = (*_BY_HEAD, "ssm_conv1d")


class _Source:
    """Reads a tensor of the checkpoint from one or several parts of the file."""

    def __init__(
        self, file: _MappedGguf, parts: tuple[StoredPart, ...], shape: tuple[int, ...], changes: _Changes
    ) -> None:
        self._file, self._parts, self._changes = file, parts, changes
        of_layer = _BLOCK.sub("", parts[0].name)
        self._module = of_layer.rpartition(".")[0] or of_layer
        shapes = [file.shape(part) for part in parts]
        found = (sum(each[0] for each in shapes), *shapes[0][1:])
        self._rows = changes.rows(self._module, found[0], len(parts))
        # llama.cpp drops dimensions of size 1, and adds some.
        is_same = _without_ones(found) == _without_ones(shape) or shape == (math.prod(found),)
        self._is_latent_up = len(parts) == 2 and len(found) == 3
        self._shape = shape if is_same or self._is_latent_up else found

    def add_to(self, checkpoint: Checkpoint, name: str) -> None:
        """Add the tensor to a checkpoint."""
        tensors = [self._file.header.tensors[part.name] for part in self._parts]
        kinds = {tensor.type for tensor in tensors}
        dtype = str(_FLOATS.get(tensors[0].type, torch.float32)).removeprefix("torch.")
        dtype = dtype if len(kinds) == 1 else "float32"
        assert dtype in DTYPES, "every float type of GGUF has a dtype"
        size = None
        if not kinds <= set(_FLOATS):
            size = sum(self._level_bytes(part, tensor) for part, tensor in zip(self._parts, tensors))
        checkpoint.add(
            name, TensorInfo(GGUF_FILE, self._shape, dtype, size), self.numbers, self._of_levels(checkpoint)
        )

    def _level_bytes(self, part: StoredPart, tensor: GgufTensor) -> int:
        """Return the size of a part's levels and scales: as stored, or as 8 bits with a float32 scale for each
        group."""
        count = math.prod(self._file.shape(part))
        if tensor.type in _OF_8_BITS:
            return count + 4 * count // _OF_8_BITS[tensor.type]
        return tensor.num_bytes * count // math.prod(tensor.shape)

    def numbers(self) -> Tensor:
        """Return the tensor as a Hugging Face checkpoint has it; float32 if the file's tensors are quantized or of
        several dtypes."""
        parts = [self._file.numbers(part) for part in self._parts]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.float() for part in parts]
        if self._is_latent_up:
            return _latent_up(parts)
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts)
        numbers = numbers if self._rows is None else numbers[self._rows]
        if (columns := self._changes.columns(self._module)) is not None:
            numbers = numbers[:, columns[0]]
        return self._changes.numbers(self._module, numbers).reshape(self._shape)

    def _of_levels(self, checkpoint: Checkpoint) -> LevelsOfFile | None:
        """Return the access to the levels of a matrix whose type `Levels` can represent; None for all others."""
        (kind, *others) = {self._file.kind(part) for part in self._parts}
        if others or kind not in _LEVELS or len(self._shape) != 2 or self._is_latent_up:
            return None
        stored = self._file.stored(self._parts[0])
        columns = self._changes.columns(self._module)
        if columns is not None and columns[1] % (_LEVELS[kind](stored[:1]).group_size):
            return None

        def release() -> None:
            for part in self._parts:
                checkpoint.release_pages(self._file.stored(part))

        return LevelsOfFile(_MATRIX_KINDS.get(kind, MatrixKind.INT8), partial(self._levels, kind), release)

    def _levels(self, kind: str) -> Levels:
        decoded = [_LEVELS[kind](self._file.stored(part)) for part in self._parts]
        first = decoded[0]
        values, scales = first.values, first.scales
        if len(decoded) > 1:
            values = torch.cat([each.values for each in decoded])
            scales = torch.cat([each.scales for each in decoded])
        if self._rows is not None:
            values, scales = values[self._rows], scales[self._rows]
        if (columns := self._changes.columns(self._module)) is not None:
            group_size = first.group_size
            values, scales = values[:, columns[0]], scales[:, columns[0][::group_size] // group_size]
        return replace(first, values=values, scales=scales)


_MATRIX_KINDS = {"Q4_0": MatrixKind.INT4, "MXFP4": MatrixKind.FLOAT4}
_OF_8_BITS = {"Q5_0": 32, "Q8_0": 32, "Q6_K": 16}  # inputs of a group


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _blocks(stored: Tensor, num_bytes: int) -> Tensor:
    """Return the blocks of a matrix: [rows, blocks, bytes of a block]."""
    return stored.view(len(stored), -1, num_bytes)


def _scales(stored: Tensor) -> Tensor:
    """Return float16 scales [rows, blocks, 2 bytes] as float32 [rows, blocks]."""
    return stored.contiguous().view(torch.float16)[..., 0].float()


def _halves(stored: Tensor) -> Tensor:
    """Return the 4-bit numbers of each group's bytes: all lower halves first, then all upper halves."""
    return torch.cat((stored & 15, stored >> 4), -1)


def _q4_0(stored: Tensor) -> Levels:
    """Decode blocks of a float16 scale and 32 numbers of 4 bits, whose zero point is 8."""
    blocks = _blocks(stored, 18)
    levels = _halves(blocks[..., 2:]).flatten(1)
    return Levels(levels, _scales(blocks[..., :2]), torch.full((1, 1), 8, dtype=torch.uint8), None, 4)


def _q5_0(stored: Tensor) -> Levels:
    """Decode blocks of a float16 scale, the fifth bits of 32 numbers, and their lower 4 bits; zero point 16."""
    blocks = _blocks(stored, 22)
    fifth = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    levels = (_halves(blocks[..., 6:]) | fifth.flatten(-2) << 4).view(torch.int8) - 16
    return Levels(levels.flatten(1), _scales(blocks[..., :2]), None, None, 8)


def _q8_0(stored: Tensor) -> Levels:
    """Decode blocks of a float16 scale and 32 int8 numbers."""
    blocks = _blocks(stored, 34)
    levels = blocks[..., 2:].reshape(len(stored), -1).view(torch.int8)
    return Levels(levels, _scales(blocks[..., :2]), None, None, 8)


def _q6_k(stored: Tensor) -> Levels:
    """Decode blocks of 256 numbers of 6 bits (zero point 32): lower 4 bits, upper 2 bits, 16 int8 scales of
    groups of 16 numbers, and a float16 factor of these scales."""
    blocks = _blocks(stored, 210)
    lower = torch.unflatten(blocks[..., :128], -1, (2, 64))
    lower = torch.stack((lower & 15, lower >> 4), -2)
    upper = (
        torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
        >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    )
    levels = (lower.flatten(-3) | (upper & 3).flatten(-3) << 4).view(torch.int8) - 32
    of_groups = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = of_groups * _scales(blocks[..., 208:])[..., None]
    return Levels(levels.flatten(1), scales.flatten(1), None, None, 8)


def _mxfp4(stored: Tensor) -> Levels:
    """Decode blocks of a power of two as scale and 32 numbers of 4 bits, which are floats."""
    blocks = _blocks(stored, 17)
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu).float()
    return Levels(_halves(blocks[..., 1:]).flatten(1), scales, None, None, 4, is_float4=True)


_LEVELS: dict[str, Callable[[Tensor], Levels]] = {
    "Q4_0": _q4_0, "Q5_0": _q5_0, "Q6_K": _q6_k, "Q8_0": _q8_0, "MXFP4": _mxfp4,
}  # fmt: skip
assert _LEVELS.keys() == LEVEL_TYPES
