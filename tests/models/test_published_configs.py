"""config.json files as published beside weights: read as transformers reads them, or refused by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding

from inflight.errors import ConfigError
from inflight.models.decoder_config import DecoderConfig
from inflight.models.registry import UnknownFamily, read_model_description
from inflight.models.rope_tables import inverse_frequencies

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)
OF_NO_FAMILY = [
    "google/gemma-7b-it",
    "microsoft/phi-2",
    "CohereForAI/c4ai-command-r-v01",
]
"""Models of families that only transformers' code runs."""
MULTIMODAL = [name for name, values in PUBLISHED.items() if "vision_config" in values]
REFUSED = {"facebook/opt-350m": "do_layer_norm_before"}
"""Models of known families with an unsupported feature, and the key of that feature."""
MLP_WIDTHS = {
    "a small Granite hybrid with experts, of the keys of Granite 4": 512,
    "ibm-granite/granite-4.0-h-small": 1536,
    "LiquidAI/LFM2-350M": 4608,
    "LiquidAI/LFM2-VL-450M": 4608,
    "Gemma 4 E2B, its text_config alone": 2 * 6144,
    "a fine-tuned LFM2.5-1.2B-Thinking, without its quantization": 8192,
}
"""Widths of MLPs that `intermediate_size` does not say: `shared_intermediate_size`, `use_double_wide_mlp` or
`block_auto_adjust_ff_dim` does."""
READ = [name for name in PUBLISHED if name not in (*OF_NO_FAMILY, *REFUSED)]


def read(folder: Path, values: dict[str, Any]) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_model_description(folder).decoder


def theirs(values: dict[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration, of a multimodal model that of its text part."""
    own = {key: value for key, value in values.items() if key != "quantization_config"}
    kind = own["model_type"] = "deepseek_v3" if values["model_type"] == "kimi_k2" else values["model_type"]
    whole = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(own)))
    config = whole.get_text_config()
    if config is not whole:
        config.dtype = whole.dtype or config.dtype
        if hasattr(whole, "tie_word_embeddings"):  # not in Voxtral's
            config.tie_word_embeddings = whole.tie_word_embeddings
    return config


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's window according to the family's code in transformers."""
    window = getattr(config, "sliding_window", None)
    if types := getattr(config, "layer_types", None):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if config.model_type not in ("mistral", "ministral3", "mixtral", "phi3", "qwen3_moe", "starcoder2"):
        window = None  # other families do not use the key
    return (window,) * config.num_hidden_layers


@pytest.mark.parametrize("name", READ)
def test_configurations_are_read_as_by_transformers(tmp_path: Path, name: str) -> None:
    ours, config = read(tmp_path, PUBLISHED[name]), theirs(PUBLISHED[name])
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.num_heads) == (
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
    )
    if ours.layer_sizes:
        layers = [config.per_layer_config[layer] for layer in range(ours.num_layers)]
        assert [(each.num_kv_heads, each.head_dim) for each in ours.layer_sizes] == [
            (each.num_key_value_heads, each.head_dim) for each in layers
        ]
    elif ours.latent is None:
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if getattr(config, "multi_query", False):
            kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert (ours.num_kv_heads, ours.head_dim) == (kv_heads, head_dim)
    dense_key = "intermediate_size_mlp" if hasattr(config, "intermediate_size_mlp") else "intermediate_size"
    for key in (dense_key, "ffn_dim", "ffn_hidden_size"):
        width = MLP_WIDTHS.get(name) or getattr(config, key, ours.intermediate_size)
        assert ours.intermediate_size == (max(width) if isinstance(width, list) else width)
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        assert ours.norm_eps == getattr(config, key, ours.norm_eps)
    assert ours.tied_embeddings == config.tie_word_embeddings
    assert ours.dtype == (
        None if config.dtype in (None, "auto") else str(config.dtype).removeprefix("torch.")
    )
    assert ours.sliding_windows == windows_of(config)
    if ours.experts is not None:
        count = next(
            getattr(config, key)
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if hasattr(config, key)
        )
        per_token = config.top_k_experts if ours.layer_sizes else config.num_experts_per_tok
        per_layer = set(per_token if isinstance(per_token, list) else [per_token])
        assert (ours.experts.count, {ours.experts.num_per_token}) == (count, per_layer)


@pytest.mark.parametrize(
    "name", [name for name in READ if hasattr(theirs(PUBLISHED[name]), "rope_parameters")]
)
def test_positions_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    ours, config = read(tmp_path, PUBLISHED[name]), theirs(PUBLISHED[name])
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    of_attention = [(rope, kind) for rope, kind in zip(ours.ropes, types) if rope and kind != "conv"]
    for rope, kind in dict(of_attention).items():
        parameters = config.rope_parameters
        is_by_type = kind in parameters
        parameters = parameters[kind] if is_by_type else parameters
        frequencies, factor = inverse_frequencies(rope, ours.rotary_head_dim, config.max_position_embeddings)
        rotated = 2 * len(frequencies)
        if parameters["rope_type"] == "default":
            base = parameters["rope_theta"]
            expected = 1.0 / base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
            expected_factor = 1.0
        elif parameters.get("alpha"):
            expected, expected_factor = HunYuanMoEV1RotaryEmbedding.compute_ntk_alpha_rope_parameters(config)
        else:
            more = {"layer_type": kind} if is_by_type else {}
            compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            expected, expected_factor = compute(
                config, torch.device("cpu"), seq_len=config.max_position_embeddings, **more
            )
        torch.testing.assert_close(frequencies, expected)
        assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("name", READ)
def test_a_gated_mlp_of_one_module_is_declared_as_fused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    model = read_model_description(tmp_path)
    assert model.names.mlp.fused == (model.decoder.gated_mlp and len(model.names.mlp.up) == 1)


@pytest.mark.parametrize("name", OF_NO_FAMILY)
def test_a_family_without_a_map_is_left_to_transformers(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownFamily):
        read(tmp_path, PUBLISHED[name])
    assert theirs(PUBLISHED[name]).hidden_size


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_features_of_a_known_family_are_refused_by_their_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{REFUSED[name]}'"):
        read(tmp_path, PUBLISHED[name])


@pytest.mark.parametrize("name", READ)
def test_an_unknown_key_in_a_published_config_is_refused(tmp_path: Path, name: str) -> None:
    values = json.loads(json.dumps(PUBLISHED[name]))
    values.get("text_config", values)["attention_of_tomorrow"] = 1
    section = "text_config." if "text_config" in values else ""
    with pytest.raises(ConfigError, match=f"key '{section}attention_of_tomorrow' is 1"):
        read(tmp_path, values)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("LiquidAI/LFM2-2.6B", "block_dim", 1024),
        ("LiquidAI/LFM2-2.6B", "num_heads", 16),
        ("LiquidAI/LFM2-2.6B", "theta", 5e5),
        ("Falcon 2 11B", "ff_factor", 3),
    ],
)
def test_copies_of_keys_that_differ_are_refused(tmp_path: Path, name: str, key: str, value: float) -> None:
    """transformers does not read the copies; the checkpoint's own code would."""
    values = {**PUBLISHED[name], key: value}
    with pytest.raises(ConfigError, match=f"key '{key}' is {value}, expected .*, or nothing"):
        read(tmp_path, values)
