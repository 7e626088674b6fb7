"""GPT-2: learned positions, LayerNorm, biases everywhere, and weights stored the other way around."""

from __future__ import annotations

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, WeightNames, read_activation

_DEFAULT_POSITIONS = 1024

_NAMES = WeightNames(
    base="transformer.",
    embedding="wte",
    position_embedding="wpe",
    final_norm="ln_f",
    layers="h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),  # the causal mask, saved as a buffer by old versions
)


def _read_config(config: ConfigFile) -> DecoderConfig:
    for key, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.boolean(key, needed) != needed:
            raise config.error(key, str(needed).lower())
    hidden_size = _read_size(config, "n_embd", "hidden_size")
    num_heads = _read_size(config, "n_head", "num_attention_heads")
    num_layers = _read_size(config, "n_layer", "num_hidden_layers")
    return DecoderConfig(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=config.int_or_none("n_inner") or 4 * hidden_size,
        max_positions=_read_size(config, "n_positions", "max_position_embeddings", _DEFAULT_POSITIONS),
        norm="layer",
        norm_eps=config.number_or_none("layer_norm_epsilon") or 1e-5,
        activation=read_activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _read_size(config: ConfigFile, key: str, alias: str, default: int | None = None) -> int:
    """An integer of at least 1, under the family's own key or under the name that other families have for it."""
    own, other = config.int_or_none(key), config.int_or_none(alias)
    if own is not None and other is not None and own != other:
        raise config.error(alias, f"{own}, as {key} says, or no such key")
    return own or other or default or config.positive_int(key)


GPT2 = Family("gpt2", "GPT2LMHeadModel", _read_config, _NAMES)
