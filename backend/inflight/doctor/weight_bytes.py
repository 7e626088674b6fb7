"""The least memory that a model's weights take, by the headers of the checkpoint's files. Imports no torch.

A load computes the exact size (`engine/load_decoder.py`). Here only tensors count that every load reads, and each
with the fewest bytes that any layers here need for it, so that no model is refused that would fit. Any thread.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.gguf.header import LEVEL_TYPES, GgufTensor, read_tensors
from inflight.gguf.tensor_names import is_of_keys_and_values, layer_of
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families import bases_in_multimodal
from inflight.models.registry import ModelDescription
from inflight.safetensors_header import StoredTensor, stored_tensors

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NO_LEVELS = ("scale", "zero", "g_idx")  # in names of a quantized matrix's other tensors
_GGUF_EMBEDDING, _GGUF_HEAD = "token_embd.weight", "output.weight"
_GGUF_HALF = re.compile(r"\.attn_[kv]_b\.")
_ADVICE_MARGIN = 1.1  # for scales, vectors, and tensors that are not counted


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The sizes of a model's matrices.

    Attributes:
        dtype: Their dtype in memory; None if they are quantized in the checkpoint.
        layers: Number of values in the layers; of quantized matrices, the least number of bytes.
        embedding: The same of the embedding.
        head: The same of an output projection that is not the embedding.
    """

    dtype: str | None
    layers: int
    embedding: int = 0
    head: int = 0

    @property
    def least(self) -> int:
        """The least number of bytes that the matrices take in memory."""
        each = 1 if self.dtype is None else _BYTES[self.dtype]
        return each * (self.layers + self.embedding + self.head)

    def smaller_dtype(self, available: int) -> str | None:
        """Return the largest smaller dtype with which the weights, with a margin, fit; None if there is none.

        Args:
            available: Bytes of memory.
        """
        if self.dtype is None or _BYTES[self.dtype] == 1:
            return None
        # With int8 the embedding stays in 16 bits, and a tied one is stored a second time.
        sizes = {
            "bfloat16": 2 * (self.layers + self.embedding + self.head),
            "int8": self.layers + 3 * self.embedding + self.head,
        }
        fitting = [dtype for dtype, size in sizes.items() if size * _ADVICE_MARGIN <= available]
        return next((dtype for dtype in fitting if _BYTES[dtype] < _BYTES[self.dtype]), None)


def of_own_layers(model: ModelDescription, files: Iterable[Path], dtype: str | None) -> WeightBytes:
    """Return the sizes for layers of this server.

    Args:
        model: The model.
        files: The safetensors files; damaged ones count as empty.
        dtype: The parameter dtype.
    """
    names, decoder = model.names, model.decoder
    stored = {names.of_family(name): tensor for name, tensor in _read(files).items()}
    base = _base(model, stored)
    layer = re.compile(re.escape(base) + re.escape(names.layers).replace(r"\{\}", r"(\d+)"))
    no_kv = _unused_keys_and_values(model)
    matrices: list[StoredTensor] = []
    for name, tensor in stored.items():
        found = layer.match(name)
        if found is None or int(found[1]) >= decoder.num_layers or len(tensor.shape) < 2:
            continue
        below = name[found.end() :]
        is_unused = name.endswith(names.ignored) or below.startswith(no_kv.get(int(found[1]), ()))
        if not is_unused and not any(part in below.rsplit(".")[-1] for part in _NO_LEVELS):
            matrices.append(tensor)
    embedding, head = stored.get(f"{base}{names.embedding}.weight"), stored.get(f"{names.lm_head}.weight")
    parts = (matrices, _listed(embedding), _listed(None if decoder.tied_embeddings else head))
    if model.quantization is not None:
        return WeightBytes(None, *(sum(map(_kept_bytes, each)) for each in parts))
    kept = decoder.dtype or min(
        (_FLOATS[each.dtype] for each in matrices if each.dtype in _FLOATS),
        key=lambda dtype: _BYTES[dtype],
        default="bfloat16",
    )
    return WeightBytes(dtype or kept, *(sum(map(_values, each)) for each in parts))


def of_gguf(model: ModelDescription, files: Sequence[Path], dtype: str | None) -> WeightBytes:
    """Return the sizes for layers of this server, of a model in GGUF files.

    Args:
        model: The model.
        files: The files.
        dtype: The parameter dtype.

    Raises:
        ConfigError: A file cannot be read.
    """
    stored, decoder = read_tensors(files).tensors, model.decoder
    matrices = [each for name, each in stored.items() if _is_layer_matrix(name, each, stored, decoder)]
    embedding = stored[_GGUF_EMBEDDING]
    head = None if decoder.tied_embeddings else stored.get(_GGUF_HEAD)
    parts = (matrices, [embedding], [] if head is None else [head])
    own_dtype = decoder.dtype or "bfloat16"
    if dtype is not None or own_dtype == "float32" or model.quantization is None:
        return WeightBytes(
            dtype or own_dtype, *(sum(math.prod(each.shape) for each in part) for part in parts)
        )
    # A tied embedding, and an output projection, may be kept quantized or be rounded to 8 bits.
    return WeightBytes(
        None,
        sum(_level_bytes(each, 2) for each in matrices),
        _level_bytes(embedding, 1) if decoder.tied_embeddings else 2 * math.prod(embedding.shape),
        0 if head is None else _level_bytes(head, 1),
    )


def _is_layer_matrix(
    name: str, tensor: GgufTensor, stored: Mapping[str, GgufTensor], decoder: DecoderConfig
) -> bool:
    """Return whether a tensor of a GGUF file is a matrix of a layer, and every load reads it."""
    layer = layer_of(name)
    if layer is None or layer >= decoder.num_layers or len(tensor.shape) < 2:
        return False
    if is_of_keys_and_values(name):
        return decoder.has_own_kv(layer)
    # A file may have the same matrix whole and in two parts.
    return not (_GGUF_HALF.search(name) and f"blk.{layer}.attn_kv_b.weight" in stored)


def _level_bytes(tensor: GgufTensor, otherwise: int) -> int:
    """Return the least bytes of a matrix that may be kept quantized.

    Args:
        tensor: The matrix.
        otherwise: Bytes of each value if it is not kept quantized.
    """
    num_values = math.prod(tensor.shape)
    if tensor.type in LEVEL_TYPES:
        return min(num_values, tensor.num_bytes)
    return otherwise * num_values


def of_transformers(files: Iterable[Path], dtype: str | None) -> WeightBytes:
    """Return the sizes for transformers' own code, which reads every tensor.

    Args:
        files: The safetensors files; damaged ones count as empty.
        dtype: The parameter dtype, or the dtype in config.json; None: the tensors' own.
    """
    stored = _read(files).values()
    if dtype in _FLOATS.values():
        return WeightBytes(dtype, sum(map(_values, stored)))
    return WeightBytes(None, sum(each.end - each.begin for each in stored))


def _read(files: Iterable[Path]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in files:
        with contextlib.suppress(OSError):
            found |= stored_tensors(file)
    return found


def _base(model: ModelDescription, stored: Mapping[str, StoredTensor]) -> str:
    """Return the prefix of the names of a model's tensors in this checkpoint."""
    names = model.names
    bases = (names.base, "") if model.multimodal is None else bases_in_multimodal(names)
    first = (base for base in bases if any(name.startswith(base + names.layers.format(0)) for name in stored))
    return next(first, names.base)


def _unused_keys_and_values(model: ModelDescription) -> dict[int, tuple[str, ...]]:
    """Return the names of unused projections, for each layer that reads another layer's keys and values."""
    modules = tuple(f"{module}." for module in model.names.attention.qkv[1:])
    return {each: modules for each in range(model.decoder.num_layers) if not model.decoder.has_own_kv(each)}


def _listed(tensor: StoredTensor | None) -> list[StoredTensor]:
    return [] if tensor is None else [tensor]


def _values(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def _kept_bytes(tensor: StoredTensor) -> int:
    """Return the least bytes of a quantized checkpoint's matrix: an unquantized one may be rounded to int8."""
    return _values(tensor) if tensor.dtype in _FLOATS else tensor.end - tensor.begin
