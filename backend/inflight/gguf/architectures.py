"""The supported architectures of GGUF files: their families, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.gguf.header import GgufHeader


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp's converter writes a family of models.

    Attributes:
        model_type: The family's `model_type` in config.json.
        class_name: The family's class in `architectures` of config.json.
        modules: Names of a layer's modules in Hugging Face checkpoints, by their names in the GGUF file.
        is_permuted: Whether the file stores the two rows of each rotary pair of a query or key head next to
            each other. Hugging Face checkpoints store all first rows, then all second rows.
        norm_offset: Number that llama.cpp's converter added to norm weights, and that must be subtracted.
    """

    model_type: str
    class_name: str
    modules: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0


_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_READ_ELSEWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values `config.py` writes as keys of config.json."""
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, is_permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_LLAMA, **_HEAD_NORMS}),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", {**_GEMMA2, **_HEAD_NORMS}, norm_offset=1.0),
}


def find_architecture(header: GgufHeader) -> Architecture:
    """Return the architecture of a file; raise ConfigError if it is not supported."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise ConfigError(
            f"{header.path}: key 'general.architecture' is {header.architecture!r}, expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def stored_names(header: GgufHeader) -> dict[str, str]:
    """Return the file's name of each tensor, by the tensor's name in Hugging Face checkpoints.

    An unknown tensor keeps its name, so that the loader reports it as unexpected.
    """
    modules = find_architecture(header).modules
    names: dict[str, str] = {}
    for stored in header.tensors:
        if stored in _READ_ELSEWHERE:
            continue
        module, _, kind = stored.rpartition(".")
        name = f"{_OUTSIDE.get(module, module)}.{kind}"
        if module.startswith("blk."):
            _, index, of_layer = module.split(".", 2)
            name = f"model.layers.{index}.{modules.get(of_layer, of_layer)}.{kind}"
        names[name] = stored
    return names
