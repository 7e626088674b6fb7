"""The places of the tensors in a safetensors file, by its header. Standard library only."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file, without its values.

    Attributes:
        dtype: The safetensors format's name of its type, such as BF16.
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorHeader):
    """A tensor in a safetensors file.

    Attributes:
        begin: Position of its first byte in the file.
        end: Position of the byte after its last one.
    """

    begin: int
    end: int


def tensor_ranges(file: int) -> list[tuple[int, int]] | None:
    """Return the positions of each tensor's first byte and of the byte after its last one, in order.

    Args:
        file: The descriptor of an open file.

    Returns:
        None if the file has no such header. The file may be shorter than the header says.
    """
    tensors = _tensors(file)
    return None if tensors is None else sorted((each.begin, each.end) for each in tensors.values())


def stored_tensor(file: int, name: str) -> StoredTensor | None:
    """Return where the tensor `name` is; None if the file has no header, or no such tensor.

    Args:
        file: The descriptor of an open file.
        name: The tensor's name.
    """
    return (_tensors(file) or {}).get(name)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; empty if the file has no such header. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _tensors(file) or {}
    finally:
        os.close(file)


def _tensors(file: int) -> dict[str, StoredTensor] | None:
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > os.fstat(file).st_size:
        return None
    try:
        header = cast(dict[str, Any], json.loads(os.pread(file, length, 8)))
        return {name: _stored(each, 8 + length) for name, each in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _stored(described: dict[str, Any], start: int) -> StoredTensor:
    begin, end = described["data_offsets"]
    shape = tuple(int(size) for size in described["shape"])
    return StoredTensor(str(described["dtype"]), shape, start + int(begin), start + int(end))
