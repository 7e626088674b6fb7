"""Checks an adapter's rows against the model, and converts them to canonical order. Pure except for numpy.

Source: the checks of TensorRT-LLM's `loraValidateRequestTensors`, and its messages, each followed by the
received and the expected value.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.adapters.lora_modules import (
    FUSED_MODULES,
    SAME_MODULES,
    Module,
    ModuleSize,
    module_sizes,
    name_layer,
    split_sizes,
)
from inflight.core.request.adapter import ITEM_SIZES, LoraWeights, Matrix, RawBuffer
from inflight.errors import InvalidArgument
from inflight.models.decoder_config import DecoderConfig

_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that fits the model, in canonical form.

    Attributes:
        rank: The largest low-rank dimension.
        digest: 16-byte hash of the content, independent of the order of rows and of their padding.
        weights: A copy of the weights: rows in the order of layers and modules, four columns of
            configuration, padded only to the longest row.
    """

    rank: int
    digest: bytes
    weights: LoraWeights


@dataclass(frozen=True, slots=True)
class _LoraRow:
    """A row of `lora_config`, and the sizes of its module."""

    index: int
    module: Module
    layer: int
    rank: int
    has_magnitude: bool
    size: ModuleSize

    @property
    def used(self) -> int:
        """Return the number of values in the row, without padding."""
        return self.rank * (self.size.inner + self.size.outer) + self.has_magnitude * self.size.outer


def check_adapter(weights: LoraWeights, decoder: DecoderConfig, max_rank: int) -> CheckedAdapter:
    """Check an adapter's rows against the model, and return it in canonical form.

    Raises:
        InvalidArgument: A row does not fit the model, is a duplicate, or has values that are not finite.
    """
    if not weights.config:
        raise InvalidArgument(
            "lora_config has no rows, expected one for each module of each layer that changes"
        )
    matrix = weights.weights
    rows = [
        _check_row(index, row, decoder, matrix.shape[1], max_rank) for index, row in enumerate(weights.config)
    ]
    _refuse_twice(rows)
    rows.sort(key=lambda row: (row.layer, row.module))
    item = np.dtype(f"u{ITEM_SIZES[matrix.dtype]}")
    numbers = np.frombuffer(memoryview(matrix.buffer.data).cast("B"), item).reshape(matrix.shape)
    kept = np.zeros((len(rows), max(row.used for row in rows)), item)
    config = tuple((int(row.module), row.layer, row.rank, int(row.has_magnitude)) for row in rows)
    digest = hashlib.blake2b(repr((matrix.dtype, config)).encode(), digest_size=16)
    for row, target in zip(rows, kept):
        target[: row.used] = numbers[row.index, : row.used]
        _check_numbers(row, target[: row.used], numbers[row.index, row.used :], matrix.dtype)
        digest.update(target[: row.used])
    buffer = RawBuffer(kept.view(np.uint8).reshape(-1).data)
    canonical = LoraWeights(Matrix((kept.shape[0], kept.shape[1]), matrix.dtype, buffer), config)
    return CheckedAdapter(max(row.rank for row in rows), digest.digest(), canonical)


def largest_adapter_bytes(decoder: DecoderConfig, max_rank: int, item_size: int) -> int:
    """Return the size of the largest adapter in bytes: all layers at full rank, with magnitudes and padding."""
    sizes = [size for layer in range(decoder.num_layers) for size in split_sizes(decoder, layer)]
    width = max(max_rank * (size.inner + size.outer) + size.outer for size in sizes)
    return len(sizes) * width * item_size


def _check_row(
    index: int,
    row: tuple[int, ...],
    decoder: DecoderConfig,
    width: int,
    max_rank: int,
) -> _LoraRow:
    where = f"row {index} of lora_config"
    if len(row) not in (3, 4):
        raise InvalidArgument(
            f"Expected dim2 of lora_keys to have a size in [3, 4]: {where} has {len(row)} numbers"
        )
    module_id, layer, rank, *is_dora = row
    if not 0 <= layer < decoder.num_layers:
        raise InvalidArgument(
            f"Expected layerId to be in the range [0, numModelLayers): {where} has layer {layer}, and the model "
            f"has {decoder.num_layers} layers"
        )
    if rank <= 0:
        raise InvalidArgument(f"Expected adapterSize to be > 0: {where} has adapter_size {rank}")
    module, sizes = _module(module_id), module_sizes(decoder, layer)
    module = module if module is None else SAME_MODULES.get(module, module)
    if module is None or module not in sizes:
        name = f"{module_id}" if module is None else module.text
        enabled = ", ".join(f"{each.text} ({each:d})" for each in sizes) or "those of other layers"
        raise InvalidArgument(
            f"lora module {name} not enabled for {name_layer(decoder, layer)}: {where} has module id "
            f"{module_id}, expected one of {enabled}"
        )
    if is_dora and is_dora[0] not in (0, 1):
        raise InvalidArgument(f"{where} has is_dora {is_dora[0]}, expected 0 or 1")
    found = _LoraRow(index, module, layer, rank, bool(is_dora and is_dora[0]), sizes[module])
    if found.used > width:
        magnitude = f" + {found.size.outer}" if found.has_magnitude else ""
        raise InvalidArgument(
            f"lora_weights has to few values for {module.text}: {where} needs {rank} * ({found.size.inner} + "
            f"{found.size.outer}){magnitude} = {found.used}, and a row of lora_weights has {width}"
        )
    if rank > max_rank:
        raise InvalidArgument(
            f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({max_rank}): {where} has "
            f"adapter_size {rank}, expected at most lora_cache_max_adapter_size, {max_rank}"
        )
    return found


def _module(module_id: int) -> Module | None:
    return Module(module_id) if module_id in Module._value2member_map_ else None


def _refuse_twice(rows: list[_LoraRow]) -> None:
    """Raise InvalidArgument if two rows change the same outputs of a layer."""
    seen: dict[tuple[int, Module], int] = {}
    for row in rows:
        other = seen.setdefault((row.layer, row.module), row.index)
        if other != row.index:
            raise InvalidArgument(
                f"rows {other} and {row.index} of lora_config are both of {row.module.text} of layer {row.layer}, "
                "expected one row for each"
            )
    for row in rows:
        for part in sorted(FUSED_MODULES.get(row.module, ())):
            if (row.layer, part) in seen:
                raise InvalidArgument(
                    f"rows {row.index} and {seen[row.layer, part]} of lora_config are of {row.module.text} and of "
                    f"{part.text}, which is a part of it, of layer {row.layer}: expected one or the other"
                )


def _check_numbers(
    row: _LoraRow,
    used: NDArray[np.unsignedinteger[Any]],
    padding: NDArray[np.unsignedinteger[Any]],
    dtype: str,
) -> None:
    """Raise InvalidArgument unless all values of a row are finite, and its padding is zero."""
    where = f"row {row.index} of lora_weights ({row.module.text} of layer {row.layer})"
    mask = used.dtype.type(_EXPONENTS[dtype])
    if (used & mask == mask).any():
        raise InvalidArgument(f"{where} has numbers that are infinite or NaN, expected finite numbers")
    sign = np.array(1 << (8 * padding.itemsize - 1), padding.dtype)
    if (padding & ~sign).any():
        raise InvalidArgument(
            f"{where} has {row.used} numbers by its adapter_size {row.rank}, followed by numbers other than 0, "
            "expected only zeros: its module or adapter_size may be wrong"
        )
