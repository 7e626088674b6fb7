"""Large checkpoints as sparse files: headers, and holes in place of weights."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING

from inflight.models.loader import tensor_shapes
from inflight.models.registry import read_model_description
from inflight.testing.quantize import FORMATS

MAX_READ = 16 << 20
"""Bytes of a file that may be in memory: the header, and the kernel's read-ahead."""
GROUP = 128
"""Number of inputs in a group of 4-bit weights."""
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


@dataclass(frozen=True)
class SparseTensor:
    """A tensor whose data is a hole, except for `content`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes = b""


def write_sparse(folder: Path, tensors: Iterable[SparseTensor], num_files: int = 3) -> list[Path]:
    """Write an index and safetensors files with these tensors; return the files' paths."""
    stored = list(tensors)
    weight_map: dict[str, str] = {}
    paths = []
    for number in range(num_files):
        path = folder / f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        own, header, size = stored[number::num_files], {}, 0
        for each in own:
            end = size + _SIZES[each.dtype] * math.prod(each.shape)
            header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [size, end]}
            size = end
            weight_map[each.name] = path.name
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for each in own:
                if each.content:
                    file.seek(8 + len(text) + header[each.name]["data_offsets"][0])
                    file.write(each.content)
            file.truncate(8 + len(text) + size)
        paths.append(path)
    index = {"metadata": {"total_size": sum(path.stat().st_size for path in paths)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def write_35b_mixture(folder: Path, format: str | None) -> list[Path]:
    """Write a checkpoint of the shape of Qwen3.5-35B-A3B and Qwen3.6-35B-A3B; return its files.

    `format`: gptq, awq or int4, the experts' format; None: all weights are in bfloat16.
    """
    published = Path(__file__).with_name("published_configs.json")
    config = json.loads(published.read_text(encoding="utf-8"))["Qwen3.5 35B-A3B"]
    if format is not None:
        config = config | {"quantization_config": FORMATS[format][1](GROUP)}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(read_model_description(folder))
    tensors: list[SparseTensor] = []
    for name, shape in shapes.items():
        if format is not None and ".experts." in name:
            tensors += _four_bits(format, name.removesuffix("weight"), *shape)
        else:
            tensors.append(SparseTensor(name, "BF16", shape))
    return write_sparse(folder, sorted(tensors, key=lambda each: each.dtype != "I64"))


def write_for_transformers(folder: Path, name: str) -> list[Path]:
    """Write a published model that transformers' own code runs, in bfloat16; return its files."""
    published = Path(__file__).with_name("published_configs.json")
    config = json.loads(published.read_text(encoding="utf-8"))[name]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(
            CONFIG_MAPPING[config["model_type"]](**config)
        )
    tied = model.all_tied_weights_keys
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key not in tied}
    return write_sparse(
        folder, (SparseTensor(key, "BF16", each) for key, each in shapes.items()), num_files=15
    )


def _four_bits(format: str, module: str, outputs: int, inputs: int) -> Iterator[SparseTensor]:
    """Yield the tensors of a matrix [outputs, inputs]."""
    groups = inputs // GROUP
    if format == "int4":
        yield SparseTensor(f"{module}weight_shape", "I64", (2,), struct.pack("<qq", outputs, inputs))
        yield SparseTensor(f"{module}weight_packed", "I32", (outputs, inputs // 8))
        yield SparseTensor(f"{module}weight_scale", "BF16", (outputs, groups))
        return
    is_awq = format == "awq"
    yield SparseTensor(
        f"{module}qweight", "I32", (inputs, outputs // 8) if is_awq else (inputs // 8, outputs)
    )
    yield SparseTensor(f"{module}qzeros", "I32", (groups, outputs // 8))
    yield SparseTensor(f"{module}scales", "F16", (groups, outputs))


def bytes_in_memory(path: Path) -> int:
    """Return how many bytes of a file are in memory, in whole pages; pages of a hole that were read are."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.addressof(first), len(mapped), pages) == 0
        del first
        return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
