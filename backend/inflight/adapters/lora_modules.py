"""The modules that an adapter's rows change: TensorRT-LLM's ids, and their sizes in a model. Pure.

Source: TensorRT-LLM's `LoraModuleType` and its converter of PEFT folders. In a gated MLP, contrary to their
names, `mlp_h_to_4h` is the input of the activation (`gate_proj`), and `mlp_gate` the factor (`up_proj`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from inflight.models.decoder_config import DecoderConfig


class Module(IntEnum):
    """Module ids in the first column of `lora_config`."""

    ATTN_QKV = 0
    ATTN_Q = 1
    ATTN_K = 2
    ATTN_V = 3
    ATTN_DENSE = 4
    MLP_H_TO_4H = 5
    MLP_4H_TO_H = 6
    MLP_GATE = 7
    CROSS_ATTN_QKV = 8
    CROSS_ATTN_Q = 9
    CROSS_ATTN_K = 10
    CROSS_ATTN_V = 11
    CROSS_ATTN_DENSE = 12
    MOE_H_TO_4H = 13
    MOE_4H_TO_H = 14
    MOE_GATE = 15
    MOE_ROUTER = 16
    MLP_ROUTER = 17
    MLP_GATE_UP = 18

    @property
    def text(self) -> str:
        """Return its name in TensorRT-LLM's form."""
        return self.name.lower()


PROJECTIONS = {
    "qkv": (Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V),
    "output": (Module.ATTN_DENSE,),
    "up": (Module.MLP_H_TO_4H, Module.MLP_GATE),
    "down": (Module.MLP_4H_TO_H,),
}
"""The modules of each projection of `inflight.models.Layer`, by its field, in the order of the outputs."""

SPLIT_MODULES = tuple(sorted(chain.from_iterable(PROJECTIONS.values())))
"""The modules of adapters on a device: a fused module is split into its parts, each with the same A."""

FUSED_MODULES = {
    Module.ATTN_QKV: PROJECTIONS["qkv"],
    # TensorRT-LLM's converter stores the factor first, then the activation's input.
    Module.MLP_GATE_UP: (Module.MLP_GATE, Module.MLP_H_TO_4H),
}
"""The parts of fused modules, in the order of the rows of B."""


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """Numbers of inputs and outputs of a linear layer."""

    inner: int
    outer: int


def module_sizes(decoder: DecoderConfig) -> dict[Module, ModuleSize]:
    """Return the modules of a decoder that adapters may change, with their sizes.

    With experts, these are the modules of its attention. With latent attention or recurrent layers there are
    none: their projections have no ids.
    """
    if decoder.latent is not None or decoder.recurrent is not None:
        return {}
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    query, kv = decoder.query_size, decoder.kv_size
    sizes = {
        Module.ATTN_Q: ModuleSize(hidden, query),
        Module.ATTN_K: ModuleSize(hidden, kv),
        Module.ATTN_V: ModuleSize(hidden, kv),
        Module.ATTN_DENSE: ModuleSize(query, hidden),
    }
    if decoder.experts is None:
        sizes[Module.MLP_H_TO_4H] = ModuleSize(hidden, inner)
        sizes[Module.MLP_4H_TO_H] = ModuleSize(inner, hidden)
        if decoder.gated_mlp:
            sizes[Module.MLP_GATE] = ModuleSize(hidden, inner)
    for fused, parts in FUSED_MODULES.items():
        if all(part in sizes for part in parts):
            sizes[fused] = ModuleSize(hidden, sum(sizes[part].outer for part in parts))
    return sizes


def projections(decoder: DecoderConfig) -> dict[str, tuple[Module, ...]]:
    """Return the `PROJECTIONS` of a decoder that adapters may change, with the modules that exist."""
    sizes = module_sizes(decoder)
    found = {name: tuple(each for each in modules if each in sizes) for name, modules in PROJECTIONS.items()}
    return {name: modules for name, modules in found.items() if modules}


def rank_bytes(decoder: DecoderConfig, item_size: int) -> int:
    """Return the size of one low-rank dimension of all modules and layers, in bytes."""
    sizes = module_sizes(decoder)
    widths = sum(sizes[module].inner + sizes[module].outer for module in SPLIT_MODULES if module in sizes)
    return decoder.num_layers * widths * item_size
