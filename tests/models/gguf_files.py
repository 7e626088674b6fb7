"""Small GGUF files of random models, written with the package `gguf`, and transformers' models with their weights.

Names come from the package's own table, and the changes to tensors are those of llama.cpp's converter: pairs of
rows in Llama's queries and keys, norms of Gemma plus 1, factors of Llama 3's frequencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import quant_shape_to_byte_shape
from gguf.tensor_mapping import get_tensor_name_map

from tests.models.zoo import ZooModel
from tests.models.zoo_configs import MAX_POSITIONS, VOCAB_SIZE

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256}
_LONGROPE |= {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 19}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", "Llama", {"head_dim": 12}),
    "llama-3": ("llama", "Llama", {"rope_parameters": _LLAMA3}),
    "llama-wide": (
        "llama",
        "Llama",
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "initializer_range": 0.1},
    ),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 12}),
    "phi3": ("phi3", "Phi3", {"sliding_window": 19}),
    "phi3-longrope": ("phi3", "Phi3", {"rope_parameters": _LONGROPE}),
    "gemma2": ("gemma2", "Gemma2", {**_GEMMA, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", "Gemma3", {**_GEMMA, "num_hidden_layers": 7}),
}
"""By name: llama.cpp's name of the architecture, transformers' name, and changes to its config."""


def make_oracle(case: str) -> Any:
    """Return transformers' model of a case, with random weights."""
    _, family, changes = CASES[case]
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**{**_COMMON, **changes})
    torch.manual_seed(0)
    oracle = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return oracle.eval()


def write(path: Path, case: str, *kinds: str, **keys: Any) -> ZooModel:
    """Write a GGUF file of a case, as `write_model` does."""
    return write_model(path, CASES[case][0], make_oracle(case), *kinds, **keys)


def write_model(
    path: Path, architecture: str, oracle: Any, *kinds: str, most_tensors: int = 0, **keys: Any
) -> ZooModel:
    """Write a GGUF file; return its path, as the model's folder, and an oracle with the dequantized weights.

    Args:
        path: The file.
        architecture: llama.cpp's name of the model's family.
        oracle: transformers' model, whose weights change to the dequantized ones.
        kinds: Types of matrices, which take turns.
        most_tensors: Write several files with at most this many tensors each, named like `path` and a number.
        keys: Further integers, by keys of the architecture in which "__" stands for "_" and "_" for ".".
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=most_tensors)
    _add_keys(writer, architecture, oracle.config)
    for key, value in keys.items():
        name = f"{architecture}.{key.replace('__', '-').replace('_', '.').replace('-', '_')}"
        writer.kv_data[0].pop(name, None)  # it may be there with the model's own value
        writer.add_uint32(name, value)
    arch = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, oracle.config.num_hidden_layers)
    is_tied, index = oracle.config.tie_word_embeddings, 0
    for name, parameter in oracle.named_parameters(remove_duplicate=True):
        module, _, suffix = name.rpartition(".")
        stored = names.get_name(module)
        assert stored is not None, name
        assert not (is_tied and stored == "output")
        numbers = parameter.detach().numpy()
        if "norm" in name and architecture.startswith("gemma"):
            numbers = numbers + np.float32(1)
        kind = GGMLQuantizationType.F32
        if numbers.ndim == 2:
            kind, index = GGMLQuantizationType[kinds[index % len(kinds)]], index + 1
        data = numbers if kind == GGMLQuantizationType.F32 else _quantized(numbers, kind, index)
        if kind != GGMLQuantizationType.F32:
            parameter.data = torch.from_numpy(dequantize(data, kind).reshape(numbers.shape))
        if architecture == "llama" and stored.endswith((".attn_q", ".attn_k")):
            is_query = stored.endswith("q")
            heads = oracle.config.num_attention_heads if is_query else oracle.config.num_key_value_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(f"{stored}.{suffix}", np.ascontiguousarray(data), raw_dtype=kind)
    _add_frequencies(writer, oracle)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ZooModel(path, oracle)


def _quantized(numbers: np.ndarray, kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    """Return quantized numbers, or random blocks of a type that the package does not write."""
    try:
        return quantize(numbers, kind)
    except NotImplementedError:
        shape = quant_shape_to_byte_shape(numbers.shape, kind)
        draw = np.random.default_rng(seed)
        blocks = draw.integers(0, 256, shape, dtype=np.uint8)
        block_bytes = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind.name]
        of_blocks = blocks.reshape(shape[0], -1, block_bytes)
        if kind.name == "Q6_K":
            of_blocks[..., -2:] = np.array([0.0001], np.float16).view(np.uint8)
        else:
            of_blocks[..., :4] = np.array([0.0005, 0.004], np.float16).view(np.uint8)
        return blocks


def _add_keys(writer: GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in ("phi3", "gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", MAX_POSITIONS))
    writer.add_eos_token_id(config.eos_token_id)


def _add_frequencies(writer: GGUFWriter, oracle: Any) -> None:
    rope = oracle.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        head_dim = oracle.config.hidden_size // oracle.config.num_attention_heads
        plain = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / oracle.model.rotary_emb.inv_freq).numpy())
    if rope.get("rope_type") == "longrope":
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
