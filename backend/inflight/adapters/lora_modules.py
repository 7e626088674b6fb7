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
        """Return the module's name in TensorRT-LLM's form."""
        return self.name.lower()


PROJECTIONS = {
    "qkv": (Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V),
    "output": (Module.ATTN_DENSE,),
    "up": (Module.MLP_H_TO_4H, Module.MLP_GATE),
    "down": (Module.MLP_4H_TO_H,),
}
"""The modules in each projection of `decoder_weights.Layer`, by name of the field, in the order of the outputs."""

SPLIT_MODULES = tuple(sorted(chain.from_iterable(PROJECTIONS.values())))
"""The modules of adapters on a device, where a fused module is split into its parts, which share A."""

FUSED_MODULES = {
    Module.ATTN_QKV: PROJECTIONS["qkv"],
    # TensorRT-LLM's converter stores the factor first, then the activation's input.
    Module.MLP_GATE_UP: tuple(reversed(PROJECTIONS["up"])),
}
"""The parts of fused modules, in the order of the rows of B."""


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """Numbers of inputs and outputs of a linear layer."""

    inner: int
    outer: int


def module_sizes(decoder: DecoderConfig, layer: int | None = None) -> dict[Module, ModuleSize]:
    """Return the modules of a decoder, or of one of its layers, that adapters may change, with their sizes.

    In a layer with experts, only attention has such modules; in a layer without attention, only the MLP. With
    latent attention there are none: projections of recurrent layers and of latent attention have no ids. If
    attention has gates, they are part of the query projection: each head's query is followed by its gates. If
    layers differ in their sizes, a decoder's sizes are the largest.
    """
    if decoder.latent is not None:
        return {}
    if layer is not None:
        decoder = decoder.at(layer)
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    query, kv = decoder.query_size, decoder.kv_size
    sizes: dict[Module, ModuleSize] = {}
    if layer is None or decoder.has_attention(layer):
        sizes[Module.ATTN_Q] = ModuleSize(hidden, 2 * query if decoder.attention_gate else query)
        if layer is None or decoder.has_own_kv(layer):
            sizes[Module.ATTN_K] = ModuleSize(hidden, kv)
            if layer is None or decoder.has_values(layer):
                sizes[Module.ATTN_V] = ModuleSize(hidden, kv)
        sizes[Module.ATTN_DENSE] = ModuleSize(query, hidden)
    if decoder.experts is None and (layer is None or decoder.has_mlp(layer)):
        sizes[Module.MLP_H_TO_4H] = ModuleSize(hidden, inner)
        sizes[Module.MLP_4H_TO_H] = ModuleSize(inner, hidden)
        if decoder.gated_mlp:
            sizes[Module.MLP_GATE] = ModuleSize(hidden, inner)
    for fused, parts in FUSED_MODULES.items():
        if all(part in sizes for part in parts):
            sizes[fused] = ModuleSize(hidden, sum(sizes[part].outer for part in parts))
    return sizes


def projections(decoder: DecoderConfig, layer: int | None = None) -> dict[str, tuple[Module, ...]]:
    """Return the `PROJECTIONS` of a decoder, or of one of its layers, that adapters may change, with the modules
    that exist."""
    sizes = module_sizes(decoder, layer)
    found = {name: tuple(each for each in modules if each in sizes) for name, modules in PROJECTIONS.items()}
    return {name: modules for name, modules in found.items() if modules}


def rank_bytes(decoder: DecoderConfig, item_size: int) -> int:
    """Return the size of one low-rank dimension of all modules and layers, in bytes."""
    sizes = [size for layer in range(decoder.num_layers) for size in split_sizes(decoder, layer)]
    return sum(size.inner + size.outer for size in sizes) * item_size


def split_sizes(decoder: DecoderConfig, layer: int) -> list[ModuleSize]:
    """Return the sizes of the `SPLIT_MODULES` of a layer."""
    return [size for module, size in module_sizes(decoder, layer).items() if module in SPLIT_MODULES]
