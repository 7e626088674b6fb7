"""Check that a peer loads the same model in the same dtype.

Reads the headers of OpenVINO's exports, GGUF files and checkpoint folders, and compares sizes and kinds of
weights, but not the values of weights. Any thread.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

_OPENVINO_KINDS = {"f16": "bfloat16", "bf16": "bfloat16", "i8": "int8", "u8": "int8"} | dict.fromkeys(
    ("i4", "u4"), "int4"
)
_GGUF_KINDS = {1: "bfloat16", 30: "bfloat16", 8: "int8", 2: "int4", 12: "int4"}  # F16, BF16, Q8_0, Q4_0, Q4_K
_GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model. A size that the file does not state is None."""

    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class Contents:
    """Description of the checkpoint or file that a peer loads.

    Attributes:
        sizes: Sizes of the model.
        kind: Kind of most weights: "bfloat16" (any 16-bit type), "int8", "int4", or the format's own name of
            another kind. None for a checkpoint folder, which can be loaded in any dtype.
    """

    sizes: Sizes
    kind: str | None


def check_peer_model(path: Path, model: Path, dtype: str) -> None:
    """Raise ValueError if the headers show that `path` is not `model` with weights of `dtype`."""
    try:
        found = _read(path)
    except (OSError, ValueError, KeyError, struct.error, ElementTree.ParseError) as error:
        raise ValueError(f"--peer-model {path}: cannot be read: {error!r}") from error
    expected = sizes_of_config(model)
    for name in Sizes.__slots__:
        here, there = getattr(found.sizes, name), getattr(expected, name)
        if here is not None and here != there:
            raise ValueError(f"--peer-model {path}: {name} is {here}, expected {there} as in {model}")
    if found.kind not in (None, dtype):
        raise ValueError(f"--peer-model {path}: most weights are {found.kind}, expected {dtype} (--dtype)")


def sizes_of_config(folder: Path) -> Sizes:
    """Read the sizes from a config.json, by the names that most families use."""
    config = json.loads((folder / "config.json").read_text())
    return Sizes(config.get("hidden_size"), config.get("num_hidden_layers"), config.get("vocab_size"))


def _read(path: Path) -> Contents:
    if path.is_file():
        with path.open("rb") as file:
            return _read_gguf(file)
    graph = path / "openvino_model.xml"
    return Contents(sizes_of_config(path), _openvino_kind(graph) if graph.exists() else None)


def _openvino_kind(graph: Path) -> str:
    sizes: Counter[str] = Counter()
    for _, element in ElementTree.iterparse(graph):
        if element.tag == "data" and "offset" in element.attrib:  # a constant
            sizes[element.attrib["element_type"]] += int(element.attrib["size"])
        elif element.tag == "layer":
            element.clear()
    kind, _ = sizes.most_common(1)[0] if sizes else ("none", 0)
    return _OPENVINO_KINDS.get(kind, kind)


def _read_gguf(file: BinaryIO) -> Contents:
    if file.read(4) != b"GGUF":
        raise ValueError("expected a GGUF file")
    _, num_tensors, num_values = struct.unpack("<IQQ", file.read(20))
    values = dict(_gguf_value(file) for _ in range(num_values))
    sizes: Counter[str] = Counter()
    vocab_size = None
    for _ in range(num_tensors):
        name, shape, kind = _gguf_tensor(file)
        sizes[_GGUF_KINDS.get(kind, f"GGUF type {kind}")] += math.prod(shape)
        vocab_size = shape[-1] if name == "token_embd.weight" else vocab_size
    return Contents(_gguf_sizes(values, vocab_size), sizes.most_common(1)[0][0] if sizes else "none")


def _gguf_sizes(values: Mapping[str, Any], vocab_size: int | None) -> Sizes:
    family = values["general.architecture"]
    return Sizes(values.get(f"{family}.embedding_length"), values.get(f"{family}.block_count"), vocab_size)


def _gguf_value(file: BinaryIO) -> tuple[str, Any]:
    name = _gguf_string(file)
    (kind,) = struct.unpack("<I", file.read(4))
    return name, _gguf_content(file, kind)


def _gguf_content(file: BinaryIO, kind: int) -> Any:
    if kind == _GGUF_STRING:
        return _gguf_string(file)
    if kind == _GGUF_ARRAY:
        kind, count = struct.unpack("<IQ", file.read(12))
        return [_gguf_content(file, kind) for _ in range(count)]
    number = "<" + _GGUF_NUMBERS[kind]
    return struct.unpack(number, file.read(struct.calcsize(number)))[0]


def _gguf_tensor(file: BinaryIO) -> tuple[str, tuple[int, ...], int]:
    """Read the name, the shape (fastest dimension first) and the type of a tensor."""
    name = _gguf_string(file)
    (num_dims,) = struct.unpack("<I", file.read(4))
    *shape, kind, _ = struct.unpack(f"<{num_dims}QIQ", file.read(8 * num_dims + 12))
    return name, tuple(shape), kind


def _gguf_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode(errors="replace")
