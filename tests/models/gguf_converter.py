"""GGUF files of small random models of many families, in the layout of llama.cpp's convert_hf_to_gguf.py.

Names come from the table of the package `gguf`. The changes to tensors, and the keys (`gguf_keys.py`), are
those of the classes in llama.cpp's folder `conversion`; `test_gguf_architectures.py` compares the files with the
converter's.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.numpy import load_file

from tests.models.gguf_keys import full_sizes, keys_of, llama3_factors
from tests.models.zoo import ZooModel, make_model
from tests.models.zoo_configs import DEEPSEEK

_TIED = {"tie_word_embeddings": True}
_YARN = {**DEEPSEEK["rope_parameters"], "mscale": 0.9, "mscale_all_dim": 0.9}
_GEMMA4 = {**_TIED, "bos_token_id": 3}
_DELTA = {"initializer_range": 0.1, "linear_key_head_dim": 16}

_STEPS = {"time_step_min": 0.001}
_OF_LLAMA4 = {"no_rope_layers": None, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
_MIXED = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]

CONVERTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", {}),
    "llama4": ("llama4", "llama4", {**_OF_LLAMA4, "num_hidden_layers": 5, "moe_layers": None}),
    "llama4-maverick": (
        "llama4",
        "llama4-no-norms",
        {
            **_OF_LLAMA4,
            "num_hidden_layers": 4,
            "num_local_experts": 128,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
        },
    ),
    "qwen2-moe": ("qwen2moe", "qwen2-moe", {"mlp_only_layers": []}),
    "qwen3-moe": ("qwen3moe", "qwen3-moe", {"decoder_sparse_step": 1}),
    "qwen3-next": ("qwen3next", "qwen3-next", _DELTA),
    "qwen3.5": ("qwen35", "qwen3.5", {**_DELTA, "head_dim": 64}),
    "qwen3.5-moe": ("qwen35moe", "qwen3.5-moe", {**_DELTA, "head_dim": 64}),
    "gpt-oss": ("gpt-oss", "gpt-oss", {"swiglu_limit": 7.0, "initializer_range": 0.2}),
    "gemma3n": ("gemma3n", "gemma3n", {**_GEMMA4, "altup_num_inputs": 4}),
    "gemma4": ("gemma4", "gemma4", _GEMMA4),
    "gemma4-shared": ("gemma4", "gemma4-shared", _GEMMA4),
    "gemma4-moe": ("gemma4", "gemma4-moe", _GEMMA4),
    "lfm2": ("lfm2", "lfm2", {}),
    "lfm2-moe": ("lfm2moe", "lfm2-moe", {**_TIED, "routed_scaling_factor": 1.0}),
    "granite": ("granite", "granite", {}),
    "granite-hybrid": (
        "granitehybrid",
        "granite-hybrid",
        {"num_experts_per_tok": 0, "shared_intermediate_size": 96},
    ),
    "granite-hybrid-moe": ("granitehybrid", "granite-hybrid-moe", {}),
    "nemotron-h": ("nemotron_h_moe", "nemotron-h", {**_STEPS, "layers_block_type": _MIXED}),
    "nemotron-h-dense": ("nemotron_h", "nemotron-h-dense", {**_STEPS, "use_bias": False, "mlp_bias": False}),
    "ministral3": ("mistral3", "ministral3", {}),
    "mistral-small": ("mistral3", "mistral-no-window", {"head_dim": 12}),
    "olmo2": ("olmo2", "olmo2", {}),
    "olmo3": ("olmo2", "olmo3", {}),
    "olmoe": ("olmoe", "olmoe", {"num_key_value_heads": 8}),
    "cohere2": ("cohere2", "cohere2", {**_TIED, "num_hidden_layers": 5, "layer_types": None}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "no_rope_layers": None}),
    "exaone4": ("exaone4", "exaone4", {}),
    "exaone4-no-window": ("exaone4", "exaone4-no-window", {}),
    "glm4": ("glm4", "glm4", {}),
    "glm4-moe": ("glm4moe", "glm4-moe", {}),
    "glm4-moe-lite": ("deepseek2", "glm4-moe-lite", {}),
    "deepseek-v2": ("deepseek2", "deepseek-v2", {"rope_parameters": _YARN}),
    "deepseek-v3": ("deepseek2", "deepseek-v3", {"rope_parameters": _YARN}),
    "kimi-linear": (
        "kimi-linear",
        "kimi-linear",
        {"linear_num_heads": 8, "num_expert_group": 1, "topk_group": 1},
    ),
    "qwen2.5-vl": ("qwen2vl", "qwen2.5-vl", {}),
    "qwen3-vl": ("qwen3vl", "qwen3-vl", {}),
    "qwen3-vl-moe": ("qwen3vlmoe", "qwen3-vl-moe", {"mlp_only_layers": []}),
    "hunyuan-moe": ("hunyuan-moe", "hunyuan-moe", {}),
    "apertus": ("apertus", "apertus", {}),
    "falcon-h1": ("falcon-h1", "falcon-h1", {}),
    "falcon-h1-norm": ("falcon-h1", "falcon-h1-norm", {"mamba_d_ssm": 96, "mamba_d_head": 12}),
    "hunyuan": (
        "hunyuan-dense",
        "hunyuan",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 11e6}},
    ),
    "seed-oss": ("seed_oss", "seed-oss", {"attention_out_bias": False}),
    "arcee": ("arcee", "arcee", {"mlp_bias": False}),
    "ernie4.5": ("ernie4_5", "ernie4.5", {"use_bias": False}),
    "ernie4.5-moe": ("ernie4_5-moe", "ernie4.5-moe", {"intermediate_size": 160}),
    "minimax-m2": ("minimax-m2", "minimax-m2", {}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}),
    "stablelm": ("stablelm", "stablelm", {}),
}
"""By name: llama.cpp's name of the architecture, the model of the zoo, and what the file's model has instead."""

_PERMUTED = (
    *("llama", "granite", "granitehybrid", "nemotron_h", "nemotron_h_moe", "mistral3", "smollm3", "arcee"),
)
_PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe")
_Tensors = Iterator[tuple[str, np.ndarray]]


def convert(
    path: Path,
    case: str,
    kind: str = "F32",
    further: Mapping[str, Any] | None = None,
    more_keys: Mapping[str, Any] | None = None,
    **changes: Any,
) -> ZooModel:
    """Write the GGUF file of a case; return its path, as the model's folder, and the model that it is made of.

    Args:
        path: The file.
        case: A key of `CONVERTED`.
        kind: Type of matrices whose rows are whole blocks of it. The model keeps its own weights.
        further: Further tensors of the file.
        more_keys: Further or other values of the architecture's keys.
        changes: Keys of the model's configuration.
    """
    architecture, base, of_case = CONVERTED[case]
    with tempfile.TemporaryDirectory() as folder:
        oracle = make_model(Path(folder) / case, base, changes={**of_case, **changes}).oracle
        tensors = _stacked(load_file(Path(folder) / case / "model.safetensors"))
    of_text = oracle.config.get_text_config()
    beside = {
        "num_hidden_layers": of_text.num_hidden_layers,
        "vision_config": getattr(oracle.config, "vision_config", None),
    }
    config = SimpleNamespace(**beside | of_text.to_dict())
    writer = GGUFWriter(path, architecture)
    own_keys = {**keys_of(architecture, config), **(more_keys or {})}
    for key, value in own_keys.items():
        _add_key(writer, f"{architecture}.{key}", value)
    for key, value in _xielu_keys(tensors).items():
        _add_key(writer, key, value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_eos_token_id(config.eos_token_id)
    for name, numbers in {**_converted(architecture, config, tensors), **(further or {})}.items():
        wanted = GGMLQuantizationType[kind]
        if numbers.ndim < 2 or "norm" in name or kind == "F32" or numbers.shape[-1] % 32:
            writer.add_tensor(name, np.ascontiguousarray(numbers))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(numbers), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ZooModel(path, oracle)


def _xielu_keys(tensors: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return the keys with the parameters of xIELU, if the model has it."""
    found: dict[str, dict[int, float]] = {}
    for name, tensor in tensors.items():
        if parameter := re.search(r"layers\.(\d+)\.mlp\.act_fn\.(\w+)$", name):
            found.setdefault(f"xielu.{parameter[2]}", {})[int(parameter[1])] = tensor.item()
    return {key: [of_layers[layer] for layer in sorted(of_layers)] for key, of_layers in found.items()}


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    of_list = value[0] if isinstance(value, list) else value
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(of_list, bool):
        writer.add_bool(key, value)
    elif isinstance(of_list, int):
        writer.add_uint32(key, value)
    elif isinstance(of_list, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint's text part with those of all experts of a layer in one."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if "visual." in name:
            continue
        name = name.replace("language_model.", "")
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            found.setdefault(name.replace(expert[0], ".experts."), {})[int(expert[1])] = tensor
        else:
            found[name] = tensor
    return {
        name: np.stack([each[index] for index in sorted(each)]) if isinstance(each, dict) else each
        for name, each in found.items()
    }


def _converted(architecture: str, config: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the file's tensors by name."""
    arch = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, config.num_hidden_layers)
    change = _CHANGES.get(architecture, _unchanged)
    for streams in ("altup_projections", "altup_unembed_projections"):
        if names := [name for name in tensors if name.startswith(f"model.{streams}.")]:
            tensors[f"model.{streams}.weight"] = np.stack([tensors.pop(name) for name in sorted(names)])
    found: dict[str, np.ndarray] = {}
    for hf_name, tensor in tensors.items():
        for name, numbers in change(config, hf_name, tensor):
            if architecture in _PERMUTED and (side := re.search(r"(?:self_attn|mixer)\.([qk])_proj", name)):
                heads = config.num_attention_heads if side[1] == "q" else config.num_key_value_heads
                numbers = (
                    numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
                )
            if architecture in _PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
                numbers = numbers + np.float32(1)
            name = re.sub(r"\.(e_score_correction|dt)_bias$", _before_bias, name)
            if ".conv1d.weight" in name or ".conv.conv.weight" in name:
                numbers = numbers.squeeze(1)
            if name.endswith(".A_log"):
                numbers = -np.exp(numbers)
            stored = (
                name if name.startswith("blk.") else table.get_name(name, try_suffixes=(".weight", ".bias"))
            )
            stored = stored or table.get_name(name.removeprefix("model."), try_suffixes=(".weight",))
            assert stored is not None, name
            found[stored] = numbers
    return found | _extra_tensors(architecture, config)


def _before_bias(found: re.Match[str]) -> str:
    return ".dt_proj.bias" if found[1] == "dt" else f".{found[1]}.bias"


def _extra_tensors(architecture: str, config: Any) -> dict[str, np.ndarray]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": llama3_factors(config)}
    if architecture != "gemma4":
        return {}
    half = full_sizes(config)["head_dim"] // 2
    rotated = int(half * rope["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)}


def _unchanged(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    yield name, tensor


def _qwen3_next(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    layer = re.search(r"layers\.(\d+)\.linear_attn\.in_proj_qkvz", name)
    if layer is None:
        yield name, tensor
        return
    keys, ratio = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
    values = ratio * config.linear_value_head_dim
    by_head = tensor.reshape(config.linear_num_key_heads, -1, tensor.shape[1])
    parts = np.split(by_head, np.cumsum([keys, keys, values]), axis=1)
    *qkv, gate = (part.reshape(-1, tensor.shape[1]) for part in parts)
    yield f"blk.{layer[1]}.attn_qkv.weight", np.concatenate(qkv)
    yield f"blk.{layer[1]}.attn_gate.weight", gate


def _qwen35(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        yield name, tensor
        return
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    is_wide = re.search(r"in_proj_(qkv|z)|conv1d|out_proj", name)
    width = config.linear_value_head_dim if is_wide else 1

    def tiled(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(num_keys, num_values // num_keys, width, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if "out_proj" in name:
        yield name, tiled(tensor.T).T
        return
    num_before = 2 * num_keys * config.linear_key_head_dim if re.search("in_proj_qkv|conv1d", name) else 0
    yield name, np.concatenate((tensor[:num_before], tiled(tensor[num_before:])))


def _gpt_oss(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    stack = re.search(r"experts\.(gate_up|down)_proj(_bias)?$", name)
    if stack is None:
        yield f"{name}.weight" if name.endswith("sinks") else name, tensor
        return
    suffix, tensor = (".bias", tensor) if stack[2] else (".weight", tensor.swapaxes(1, 2))
    before = name[: stack.start()]
    if stack[1] == "down":
        yield f"{before}experts.down_proj{suffix}", tensor
        return
    yield f"{before}experts.gate_proj{suffix}", tensor[:, ::2]
    yield f"{before}experts.up_proj{suffix}", tensor[:, 1::2]


def _llama4(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    stack = re.search(r"experts\.(gate_up|down)_proj$", name)
    if stack is None:
        yield name, tensor
        return
    before, tensor = name[: stack.start()], tensor.swapaxes(1, 2)
    parts = {"down": tensor} if stack[1] == "down" else dict(zip(("gate", "up"), np.split(tensor, 2, axis=1)))
    for part, numbers in parts.items():
        yield f"{before}experts.{part}_proj.weight", numbers


def _qwen3_vl_moe(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    stack = re.search(r"experts\.(gate_up|down)_proj$", name)
    if stack is None:
        yield name, tensor
        return
    before = name[: stack.start()]
    parts = {"down": tensor} if stack[1] == "down" else dict(zip(("gate", "up"), np.split(tensor, 2, axis=1)))
    for part, numbers in parts.items():
        yield f"{before}experts.{part}_proj.weight", numbers


def _apertus(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    if ".act_fn." not in name:  # whose parameters are keys
        yield name, tensor


def _falcon_h1(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    """Yield a tensor with the factors of its inputs or outputs multiplied into it."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    factors: dict[str, Any] = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier
        * np.repeat(config.ssm_multipliers, [inner, inner, state, state, config.mamba_n_heads])[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    factor = factors.get(name.split(".")[-2], 1.0)
    yield from _mamba2(config.mamba_n_groups, name, (tensor * factor).astype(np.float32))


def _gemma4(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    layer = re.search(r"layers\.(\d+)\.(.*)", name)
    ending = layer[2] if layer else ""
    if ending == "router.scale":
        yield f"blk.{layer[1] if layer else 0}.ffn_gate_inp.scale", tensor
    elif ending == "router.per_expert_scale":
        yield f"blk.{layer[1] if layer else 0}.ffn_down_exps.scale", tensor
    else:
        yield f"{name}.weight" if ending == "layer_scalar" or ".experts." in name else name, tensor


def _gemma3n(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    yield f"{name}.weight" if name.endswith("correct_output_scale") else name, tensor


def _lfm2_moe(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    yield (
        (name.replace(".expert_bias", ".expert_bias.bias") if name.endswith(".expert_bias") else name),
        tensor,
    )


def _granite_hybrid(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    layer, prefix = re.search(r"layers\.(\d+)\.", name), ""
    if layer is not None:
        prefix = f"blk.{layer[1]}."
    shared = "_shexp" if config.num_local_experts else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(tensor, 2)
        yield f"{prefix}ffn_gate{shared}.weight", gate
        yield f"{prefix}ffn_up{shared}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{prefix}ffn_down{shared}.weight", tensor
    elif name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = np.split(tensor, 2, axis=1)
        yield f"{prefix}ffn_gate_exps.weight", gate
        yield f"{prefix}ffn_up_exps.weight", up
    else:
        yield from _mamba2(config.mamba_n_groups, name, tensor)


def _mamba2(num_groups: int, name: str, tensor: np.ndarray) -> _Tensors:
    if name.endswith((".A_log", ".D")):
        yield name, tensor.reshape(-1, 1)
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        yield name, tensor.reshape(num_groups, -1)
    else:
        yield name, tensor


def _nemotron_h(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    name = re.sub(r"^backbone\.(layers\.\d+)\.mixer\.experts\.", r"model.\1.mlp.experts.", name)
    yield from _mamba2(config.n_groups, name, tensor)


def _deepseek2(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    layer = re.search(r"layers\.(\d+)\.self_attn\.kv_b_proj", name)
    if layer is None:
        yield name, tensor
        return
    by_head = tensor.reshape(config.num_attention_heads, -1, tensor.shape[1])
    keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
    yield f"blk.{layer[1]}.attn_k_b.weight", keys.swapaxes(1, 2)
    yield f"blk.{layer[1]}.attn_v_b.weight", values


def _kimi_linear(config: Any, name: str, tensor: np.ndarray) -> _Tensors:
    if name.endswith("_conv1d.weight"):
        yield name, tensor.reshape(1, -1, 1, config.linear_conv_kernel_dim)
        return
    yield from _deepseek2(config, as_published(name), tensor)


def as_published(name: str) -> str:
    """Return a tensor's name in published models of Kimi Linear. transformers writes the MLP of a layer without
    experts below the name of experts."""
    return re.sub(r"block_sparse_moe\.((?:gate|up|down)_proj)", r"mlp.\1", name)


_CHANGES: dict[str, Callable[[Any, str, np.ndarray], _Tensors]] = {
    "llama4": _llama4,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3vlmoe": _qwen3_vl_moe,
    "apertus": _apertus,
    "falcon-h1": _falcon_h1,
    "gpt-oss": _gpt_oss,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "lfm2moe": _lfm2_moe,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "deepseek2": _deepseek2,
    "kimi-linear": _kimi_linear,
}
