"""The modules that an adapter's rows change: TensorRT-LLM's ids, and their sizes in a model. Pure.

Source: TensorRT-LLM's `LoraModuleType` and its converter of PEFT folders. In a gated MLP, contrary to their
names, `mlp_h_to_4h` is the input of the activation (`gate_proj`), and `mlp_gate` the factor (`up_proj`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from inflight.models.decoder_config import DecoderConfig
from inflight.models.recurrent import RecurrentConfig, total_size


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
    SHARED_EXPERT_H_TO_4H = 19
    SHARED_EXPERT_4H_TO_H = 20
    SHARED_EXPERT_GATE = 21
    MAMBA_IN_PROJ = 22
    MAMBA_OUT_PROJ = 23
    # TensorRT-LLM has no ids for the projections of latent attention, nor for further modules of a recurrent
    # layer's input projection.
    ATTN_Q_A = 100
    ATTN_Q_B = 101
    ATTN_KV_A = 102
    RECURRENT_IN_PROJ_2 = 110
    RECURRENT_IN_PROJ_3 = 111
    RECURRENT_IN_PROJ_4 = 112
    RECURRENT_IN_PROJ_5 = 113
    RECURRENT_IN_PROJ_6 = 114

    @property
    def text(self) -> str:
        """Return the module's name in TensorRT-LLM's form."""
        return self.name.lower()


RECURRENT_INPUTS = (
    Module.MAMBA_IN_PROJ,
    Module.RECURRENT_IN_PROJ_2,
    Module.RECURRENT_IN_PROJ_3,
    Module.RECURRENT_IN_PROJ_4,
    Module.RECURRENT_IN_PROJ_5,
    Module.RECURRENT_IN_PROJ_6,
)
"""The modules of a recurrent layer's input projection, in the order of `DecoderConfig.recurrent_modules`."""

PROJECTIONS = {
    "qkv": (Module.ATTN_Q, Module.ATTN_Q_A, Module.ATTN_K, Module.ATTN_V, Module.ATTN_KV_A),
    "query_up": (Module.ATTN_Q_B,),
    "output": (Module.ATTN_DENSE,),
    "recurrent_input": RECURRENT_INPUTS,
    "recurrent_output": (Module.MAMBA_OUT_PROJ,),
    "up": (Module.MLP_H_TO_4H, Module.MLP_GATE),
    "down": (Module.MLP_4H_TO_H,),
}
"""The modules in each projection that adapters may change, in the order of the outputs; a layer has only some. The
names are fields of `decoder_weights.Layer`, of its `latent`, and its `recurrent_projections`."""

SAME_MODULES = {
    Module.SHARED_EXPERT_H_TO_4H: Module.MLP_H_TO_4H,
    Module.SHARED_EXPERT_4H_TO_H: Module.MLP_4H_TO_H,
    Module.SHARED_EXPERT_GATE: Module.MLP_GATE,
}
"""Other ids for the modules of an MLP: a layer has either an MLP or experts, which may have a shared MLP."""

SPLIT_MODULES = tuple(sorted(chain.from_iterable(PROJECTIONS.values())))
"""The modules of adapters on a device, where a fused module is split into its parts, which share A."""

FUSED_MODULES = {
    Module.ATTN_QKV: (Module.ATTN_Q, Module.ATTN_K, Module.ATTN_V),
    # TensorRT-LLM's converter stores the factor first, then the activation's input.
    Module.MLP_GATE_UP: (Module.MLP_GATE, Module.MLP_H_TO_4H),
}
"""The parts of fused modules, in the order of the rows of B."""


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """Numbers of inputs and outputs of a linear layer."""

    inner: int
    outer: int


def module_sizes(decoder: DecoderConfig, layer: int) -> dict[Module, ModuleSize]:
    """Return the modules of a layer that adapters may change, with their sizes.

    Modules of an MLP are those of the shared MLP in a layer with experts. If attention has gates, they are part of
    the query projection: each head's query is followed by its gates.
    """
    decoder = decoder.at(layer)
    hidden, inner = decoder.hidden_size, mlp_width(decoder, layer)
    sizes = _attention_sizes(decoder, layer) if decoder.has_attention(layer) else {}
    if decoder.recurrent is not None and decoder.has_state(layer):
        sizes |= _recurrent_sizes(decoder, decoder.recurrent)
    if inner:
        sizes[Module.MLP_H_TO_4H] = ModuleSize(hidden, inner)
        sizes[Module.MLP_4H_TO_H] = ModuleSize(inner, hidden)
        if decoder.gated_mlp:
            sizes[Module.MLP_GATE] = ModuleSize(hidden, inner)
    for fused, parts in FUSED_MODULES.items():
        if all(part in sizes for part in parts):
            sizes[fused] = ModuleSize(hidden, sum(sizes[part].outer for part in parts))
    return sizes


def name_layer(decoder: DecoderConfig, layer: int) -> str:
    """Return the words by which an error names a layer that lacks a module, with the reason if it is known."""
    if decoder.is_recurrent(layer):
        return f"layer {layer}, which is recurrent"
    if decoder.has_experts(layer):
        return f"layer {layer}, which has experts"
    if not (decoder.has_attention(layer) and decoder.has_mlp(layer)):
        return f"layer {layer}, which has no {'MLP' if decoder.has_attention(layer) else 'attention'}"
    return "this model"


def mlp_width(decoder: DecoderConfig, layer: int) -> int:
    """Return the inner width of a layer's MLP, or of the shared MLP beside its experts; 0 if there is none."""
    if decoder.experts is not None and decoder.has_experts(layer):
        return decoder.experts.shared_intermediate_size
    return decoder.intermediate_size if decoder.has_mlp(layer) else 0


def _attention_sizes(decoder: DecoderConfig, layer: int) -> dict[Module, ModuleSize]:
    hidden, query, kv = decoder.hidden_size, decoder.query_size, decoder.kv_size
    dense = ModuleSize(decoder.num_heads * decoder.output_head_dim, hidden)
    latent = decoder.latent
    if latent is not None:
        query = decoder.num_heads * latent.query_head_dim
        sizes = {Module.ATTN_KV_A: ModuleSize(hidden, latent.cached_dim), Module.ATTN_DENSE: dense}
        if latent.query_rank is None:
            return {Module.ATTN_Q: ModuleSize(hidden, query), **sizes}
        return {
            Module.ATTN_Q_A: ModuleSize(hidden, latent.query_rank),
            Module.ATTN_Q_B: ModuleSize(latent.query_rank, query),
            **sizes,
        }
    sizes = {Module.ATTN_Q: ModuleSize(hidden, 2 * query if decoder.attention_gate else query)}
    if decoder.has_own_kv(layer):
        sizes[Module.ATTN_K] = ModuleSize(hidden, kv)
        if decoder.has_values(layer):
            sizes[Module.ATTN_V] = ModuleSize(hidden, kv)
    return {**sizes, Module.ATTN_DENSE: dense}


def _recurrent_sizes(decoder: DecoderConfig, recurrent: RecurrentConfig) -> dict[Module, ModuleSize]:
    hidden = decoder.hidden_size
    sizes = {
        module: ModuleSize(hidden, total_size(decoder.recurrent_sections(index)))
        for index, module in enumerate(RECURRENT_INPUTS[: len(decoder.recurrent_modules)])
    }
    return {**sizes, Module.MAMBA_OUT_PROJ: ModuleSize(recurrent.output_width, hidden)}


def projections(decoder: DecoderConfig, layer: int) -> dict[str, tuple[Module, ...]]:
    """Return the `PROJECTIONS` of a layer that adapters may change, with the modules that exist."""
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
