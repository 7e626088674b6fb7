"""Read the header of a GGUF file: its keys and values, and the type, shape and offset of each tensor.

The package `gguf` parses the file. It is imported at the first call, because most processes read no GGUF
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError

ARCHITECTURE = "general.architecture"
FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types of tensors that are not quantized."""
QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types of quantized matrices that are read."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The type, shape and location of a tensor in a GGUF file.

    Attributes:
        type: Name of the tensor's type, one of FLOAT_TYPES and QUANTIZED_TYPES.
        shape: Dimensions; a matrix has shape (outputs, inputs).
        offset: Position of the first byte in the file, in bytes.
        num_bytes: Size in the file, in bytes.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        path: The file.
        architecture: llama.cpp's name of the family.
        tensors: Each tensor by its name in the file.
    """

    path: Path
    architecture: str
    tensors: Mapping[str, GgufTensor]

    def numbers(self, name: str) -> list[float] | None:
        """Return the values of a float32 vector; None if the file has no tensor of this name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32":
            raise ConfigError(f"{self.path}: tensor {name!r} has type {tensor.type}, expected F32")
        import numpy

        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            return numpy.frombuffer(file.read(tensor.num_bytes), "<f4").tolist()


def read_header(path: Path) -> tuple[GgufHeader, ConfigFile]:
    """Return a file's header, and its keys and values; raise ConfigError if it cannot be read."""
    reader = _open(path)
    return _header(path, reader), ConfigFile(path, _values(reader))


def read_tensors(path: Path) -> GgufHeader:
    """Return a file's header without keys and values. The last header is cached until its file changes.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: the GGUF file cannot be read: {error}") from error
    return _read_tensors(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_tensors(path: Path, size: int, changed: int) -> GgufHeader:
    return _header(path, _open(path))


def _open(path: Path) -> Any:
    """Return `gguf.GGUFReader` for a file. The type is Any, because the package declares few types."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(f"{path}: reading a GGUF file needs the package gguf (pip install gguf)") from None
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ConfigError(f"{path}: the GGUF file cannot be read: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path} is not a complete GGUF file of version 2 or 3: {error}") from error


def _values(reader: Any) -> dict[str, Any]:
    """Return the keys and values. A 32-bit float becomes the shortest decimal number that rounds to it."""
    from gguf import GGUFValueType
    from numpy import float32

    values: dict[str, Any] = {}
    for key, field in reader.fields.items():
        value = field.contents()
        values[key] = float(str(float32(value))) if field.types == [GGUFValueType.FLOAT32] else value
    return values


def _header(path: Path, reader: Any) -> GgufHeader:
    field = reader.fields.get(ARCHITECTURE)
    architecture = None if field is None else field.contents()
    if not isinstance(architecture, str):
        raise ConfigError(f"{path}: key {ARCHITECTURE!r} is {architecture!r}, expected a string")
    tensors: dict[str, GgufTensor] = {}
    for tensor in reader.tensors:
        kind = str(tensor.tensor_type.name)
        if kind not in FLOAT_TYPES + QUANTIZED_TYPES:
            raise ConfigError(
                f"{path}: tensor {tensor.name!r} has type {kind}, expected one of "
                f"{', '.join(FLOAT_TYPES + QUANTIZED_TYPES)}"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if not shape or 0 in shape:
            raise ConfigError(
                f"{path}: tensor {tensor.name!r} has shape {list(shape)}, expected positive sizes"
            )
        tensors[tensor.name] = GgufTensor(kind, shape, int(tensor.data_offset), int(tensor.n_bytes))
    return GgufHeader(path, architecture, tensors)
