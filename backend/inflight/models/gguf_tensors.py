"""Presents the tensors of a GGUF file under their names in Hugging Face checkpoints.

Matrices in Q4_0, Q5_0, Q6_K and Q8_0 are read as `Levels`, which represent them exactly. Q4_1, Q4_K and Q5_K have
minimums instead of integer zero points; the package `gguf` dequantizes them to float32.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from inflight.checkpoint_config import DTYPES
from inflight.gguf.architectures import find_architecture, stored_names
from inflight.gguf.folder import GGUF_FILE
from inflight.gguf.header import GgufHeader, GgufTensor, read_tensors
from inflight.models.checkpoint import Checkpoint, LevelsOfFile, TensorInfo
from inflight.models.decoder_config import DecoderConfig
from inflight.models.levels import Levels, MatrixKind

_logger = logging.getLogger(__name__)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def add_gguf_tensors(checkpoint: Checkpoint, decoder: DecoderConfig) -> None:
    """Add the GGUF file's tensors to a checkpoint, which has no tensors yet.

    Rows of queries and keys are reordered as in Hugging Face checkpoints, and the offset that llama.cpp's
    converter has added to norms is subtracted.

    Raises:
        ConfigError: The file is missing or damaged, or has tensors of unsupported types.
    """
    header = read_tensors((checkpoint.folder / GGUF_FILE).resolve())
    architecture = find_architecture(header)
    file = _MappedGguf(header)
    for name, stored in stored_names(header).items():
        tensor = header.tensors[stored]
        rows = None
        if architecture.is_permuted and stored.endswith((".attn_q.weight", ".attn_q.bias")):
            rows = _rows_in_halves(tensor.shape[0], decoder.num_heads)
        elif architecture.is_permuted and stored.endswith((".attn_k.weight", ".attn_k.bias")):
            rows = _rows_in_halves(tensor.shape[0], decoder.num_kv_heads)
        offset = architecture.norm_offset if stored.endswith("norm.weight") else 0.0
        _add(checkpoint, name, file, tensor, rows, offset)


def log_unpacked(checkpoint: Checkpoint) -> None:
    """Log how many quantized matrices are unpacked, if any, because `Levels` cannot represent them exactly."""
    header = read_tensors((checkpoint.folder / GGUF_FILE).resolve())
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
    """A memory-mapped GGUF file. It stays mapped while any of its tensors exists."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        with header.path.open("rb") as file:
            # Private pages, which are writable: torch warns of read-only memory, although nothing writes to it.
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)

    def stored(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's bytes, mapped: uint8 [rows, bytes of a row]."""
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes].view(tensor.shape[0], -1)

    def numbers(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor in its own dtype, mapped, or dequantized to float32."""
        stored = self.stored(tensor)
        if tensor.type in _FLOATS:
            return stored.view(_FLOATS[tensor.type]).view(tensor.shape)
        if tensor.type in _LEVELS:
            return _LEVELS[tensor.type](stored).dequantized()
        import gguf

        untyped: Any = gguf  # neither gguf nor torch declares the types of arrays
        blocks = cast(Any, stored).numpy()
        numbers: Any = untyped.dequantize(blocks, untyped.GGMLQuantizationType[tensor.type])
        return torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]


def _add(
    checkpoint: Checkpoint,
    name: str,
    file: _MappedGguf,
    tensor: GgufTensor,
    rows: Tensor | None,
    offset: float,
) -> None:
    dtype = str(_FLOATS.get(tensor.type, torch.float32)).removeprefix("torch.")
    assert dtype in DTYPES, "every float type of GGUF has a dtype"

    def make() -> Tensor:
        numbers = file.numbers(tensor)
        numbers = numbers if rows is None else numbers[rows]
        return numbers - offset if offset else numbers

    decode = _LEVELS.get(tensor.type)
    levels = None
    if decode is not None and len(tensor.shape) == 2:
        read = partial(_levels, file, tensor, decode, rows)
        release = partial(_release, checkpoint, file, tensor)
        kind = MatrixKind.INT4 if tensor.type == "Q4_0" else MatrixKind.INT8
        levels = LevelsOfFile(kind, read, release)
    size = None if tensor.type in _FLOATS else tensor.num_bytes
    checkpoint.add(name, TensorInfo(GGUF_FILE, tensor.shape, dtype, size), make, levels)


def _levels(
    file: _MappedGguf, tensor: GgufTensor, decode: Callable[[Tensor], Levels], rows: Tensor | None
) -> Levels:
    levels = decode(file.stored(tensor))
    if rows is None:
        return levels
    return Levels(levels.values[rows], levels.scales[rows], levels.zeros, None, levels.bits)


def _release(checkpoint: Checkpoint, file: _MappedGguf, tensor: GgufTensor) -> None:
    checkpoint.release_pages(file.stored(tensor))


def _rows_in_halves(num_rows: int, num_heads: int) -> Tensor:
    """Return the permutation of rows that moves the first rows of neighbouring pairs to the first half of each
    head."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


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


_LEVELS: dict[str, Callable[[Tensor], Levels]] = {
    "Q4_0": _q4_0, "Q5_0": _q5_0, "Q6_K": _q6_k, "Q8_0": _q8_0,
}  # fmt: skip
