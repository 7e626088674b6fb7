"""Finds the tensors of a GGUF file for the tensors of a Hugging Face checkpoint, by the package `gguf`'s table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.gguf.header import GgufHeader

READ_ELSEWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values `config.py` writes as keys of config.json."""

_RENAMED = (
    (re.compile(r"\.dt_bias$"), ".dt_proj.bias"),
    (re.compile(r"\.(e_score_correction|expert)_bias$"), r".\1.bias"),
    (re.compile(r"\.expert\.bias$"), ".expert_bias.bias"),
    (re.compile(r"^backbone\.(layers\.\d+)\.mixer\.experts\."), r"model.\1.mlp.experts."),
    (re.compile(r"\.router\.per_expert_scale$"), ".experts.down_proj.scale"),
    (re.compile(r"\.router\.scale$"), ".router.proj.scale"),
)
"""Changes that llama.cpp's converter makes to names before it looks them up."""
_SPLIT: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "linear_attn.in_proj_qkvz": (("attn_qkv", "attn_gate"),),
    "self_attn.kv_b_proj": (("attn_kv_b",), ("attn_k_b", "attn_v_b")),
    "shared_mlp.input_linear": (("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": (("ffn_down_shexp",), ("ffn_down",)),
}
"""Modules of a layer that the converter splits or names in several ways; rows of parts are put together."""
_BLOCK = re.compile(r"blk\.(\d+)\.")
_KEYS_AND_VALUES = re.compile(r"blk\.\d+\.(attn_k|attn_k_norm|attn_v)\.")
_OF_LAYER = re.compile(r"\.layers\.(\d+)\.(.+)\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_STREAM = re.compile(r"^model\.(altup_projections|altup_unembed_projections)\.(\d+)\.weight$")
_STREAMS = {"altup_projections": "altup_proj.weight", "altup_unembed_projections": "altup_unembd_proj.weight"}
"""Gemma 3n's projections for all residual streams but the first, which are in one tensor."""


def layer_of(stored: str) -> int | None:
    """Return the number of the layer that a tensor of the file belongs to; None if it belongs to none."""
    block = _BLOCK.match(stored)
    return None if block is None else int(block[1])


def is_of_keys_and_values(stored: str) -> bool:
    """Return whether a tensor of the file computes a layer's keys or values."""
    return _KEYS_AND_VALUES.match(stored) is not None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the file, or a part of it.

    Attributes:
        name: The tensor's name in the file.
        index: Index along the first dimension, for an expert; None: the whole tensor.
        half: 0 or 1 for the first or second half of the rows; None: all rows.
    """

    name: str
    index: int | None = None
    half: int | None = None


class TensorNames:
    """Finds the names of a file's tensors."""

    def __init__(self, header: GgufHeader, num_layers: int) -> None:
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        self._stored = header.tensors
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
        self._table: Any = get_tensor_name_map(architecture, num_layers)

    def find(self, name: str) -> tuple[StoredPart, ...]:
        """Return the parts of the file whose rows make up the tensor `name` of a Hugging Face checkpoint.

        The result is empty if the file does not have the tensor.
        """
        if stream := _STREAM.match(name):
            return (
                (StoredPart(_STREAMS[stream[1]], int(stream[2])),)
                if _STREAMS[stream[1]] in self._stored
                else ()
            )
        found = _OF_LAYER.search(name)
        for parts in _SPLIT.get(found[2], ()) if found else ():
            stored = [f"blk.{found[1]}.{part}.weight" for part in parts] if found else []
            if all(each in self._stored for each in stored):
                return tuple(map(StoredPart, stored))
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
        expert = _EXPERT.search(name)
        part = self._part(_EXPERT.sub(".experts.", name), None if expert is None else int(expert[1]))
        return () if part is None else (part,)

    def _part(self, name: str, index: int | None) -> StoredPart | None:
        module, _, kind = name.rpartition(".")
        modules = (name, module, module.removeprefix("model."))
        found = [each for each in map(self._table.get_name, modules) if each is not None]
        for stored in found:
            for each in (stored, f"{stored}.{kind}", f"{stored}.weight"):
                if each in self._stored:
                    return StoredPart(each, index)
        for half, ending in enumerate((".gate_proj", ".up_proj")):
            if module.endswith(f".experts{ending}"):
                found = self._table.get_name(f"{module.removesuffix(ending)}.gate_up_proj")
                if f"{found}.{kind}" in self._stored:
                    return StoredPart(f"{found}.{kind}", index, half)
        return None
