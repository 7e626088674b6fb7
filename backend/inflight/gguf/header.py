"""Read the header of a GGUF file: its keys and values, and the type, shape and offset of each tensor.

A model may be split into several files. The first one has the keys and values, and all of them have tensors.

The package `gguf` parses the file. It is imported at the first call, because most processes read no GGUF
file.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.gguf.layout import check_layout

ARCHITECTURE = "general.architecture"
_PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types of tensors that are not quantized."""
QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types of quantized matrices that are read."""
LEVEL_TYPES = frozenset({"Q4_0", "Q5_0", "Q6_K", "Q8_0", "MXFP4"})
"""The quantized types whose numbers are levels times a scale; others have minimums, and are unpacked."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The type, shape and location of a tensor in a GGUF file.

    Attributes:
        file: The file.
        type: Name of the tensor's type, one of FLOAT_TYPES and QUANTIZED_TYPES.
        shape: Dimensions; a matrix has shape (outputs, inputs).
        offset: Position of the first byte in the file, in bytes.
        num_bytes: Size in the file, in bytes.
    """

    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The headers of a model's GGUF files.

    Attributes:
        path: The first file.
        architecture: llama.cpp's name of the family.
        tensors: Each tensor of all files by its name there.
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
            raise ConfigError(f"{tensor.file}: tensor {name!r} has type {tensor.type}, expected F32")
        import numpy

        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            return numpy.frombuffer(file.read(tensor.num_bytes), "<f4").tolist()


def find_parts(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that `path`, a file or one of its parts, belongs to, by their names."""
    name = _PART.fullmatch(path.name)
    if name is None:
        return (path,)
    count = int(name["count"])
    return tuple(path.with_name(f"{name['model']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))


def model_name(path: Path) -> str:
    """Return the name of a file without its ending, and without the number of its part."""
    name = _PART.fullmatch(path.name)
    return path.stem if name is None else name["model"]


def read_header(paths: Sequence[Path]) -> tuple[GgufHeader, ConfigFile]:
    """Return the header of a model's files, and the first one's keys and values.

    Raises:
        ConfigError: A file cannot be read, or the files are not the parts of one model.
    """
    readers = [_open(path) for path in paths]
    with _utf8_texts(paths[0]):
        for number, (path, reader) in enumerate(zip(paths, readers)):
            _check_part(path, reader, number, len(paths))
        return _header(paths, readers), ConfigFile(paths[0], _values(readers[0]))


def read_tensors(paths: Sequence[Path]) -> GgufHeader:
    """Return the header of a model's files without keys and values.

    The last header is cached until a file changes.

    Raises:
        ConfigError: A file cannot be read.
    """
    states: list[tuple[Path, int, int]] = []
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: the GGUF file cannot be read: {error}") from error
        states.append((path, found.st_size, found.st_mtime_ns))
    return _read_tensors(tuple(states))


@lru_cache(maxsize=1)
def _read_tensors(states: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    paths = [path for path, _, _ in states]
    with _utf8_texts(paths[0]):
        return _header(paths, [_open(path) for path in paths])


@contextmanager
def _utf8_texts(path: Path) -> Generator[None]:
    """Raise ConfigError if the package gguf finds a text that is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a key or value is not text in UTF-8: {error}") from error


def _open(path: Path) -> Any:
    """Return `gguf.GGUFReader` for a file. The type is Any, because the package declares few types."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(f"{path}: reading a GGUF file needs the package gguf (pip install gguf)") from None
    try:
        check_layout(path)
        return GGUFReader(path)
    except OSError as error:
        raise ConfigError(f"{path}: the GGUF file cannot be read: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{path} is not a complete GGUF file of version 2 or 3: download it again ({error})"
        ) from error


def _values(reader: Any) -> dict[str, Any]:
    """Return the keys and values. A 32-bit float becomes the shortest decimal number that rounds to it."""
    from gguf import GGUFValueType
    from numpy import float32

    values: dict[str, Any] = {}
    for key, field in reader.fields.items():
        value = field.contents()
        values[key] = float(str(float32(value))) if field.types == [GGUFValueType.FLOAT32] else value
    return values


def _check_part(path: Path, reader: Any, number: int, count: int) -> None:
    """Raise ConfigError unless a file is the part with this number, from 0 on, of a model in `count` files."""
    found = _value(reader, "split.count") or 1
    if found != count:
        expected = (
            f"{count}, as in its name" if count > 1 else "1, or a name such as MODEL-00001-of-00003.gguf"
        )
        raise ConfigError(f"{path}: key 'split.count' is {found}, expected {expected}")
    if count > 1 and (of_file := _value(reader, "split.no")) != number:
        raise ConfigError(f"{path}: key 'split.no' is {of_file}, expected {number}, by its name")


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _header(paths: Sequence[Path], readers: Sequence[Any]) -> GgufHeader:
    architecture = _value(readers[0], ARCHITECTURE)
    if not isinstance(architecture, str):
        raise ConfigError(f"{paths[0]}: key {ARCHITECTURE!r} is {architecture!r}, expected a string")
    tensors: dict[str, GgufTensor] = {}
    for path, reader in zip(paths, readers):
        tensors |= _tensors(path, reader)
    return GgufHeader(paths[0], architecture, tensors)


def _tensors(path: Path, reader: Any) -> dict[str, GgufTensor]:
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
        tensors[tensor.name] = GgufTensor(path, kind, shape, int(tensor.data_offset), int(tensor.n_bytes))
    return tensors
