"""The folder of Gemma 4's draft head, a checkpoint of its own that transformers calls an assistant.

The head has several layers without keys and values: each reads those of the model's last layer of the same type,
with a window or without, that has its own. It projects the model's embedding of a token, together with the
hidden state before that token, to its own width, and projects its output back to the model's width. If its
embedding is ordered by clusters of tokens, only the tokens of the likeliest clusters get logits.

Only headers of weight files are read here, without torch, so that the checks before a server's start can do it.

Reference: transformers `gemma4_assistant`, and `SinglePositionMultiTokenCandidateGenerator`, which calls it.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import ConfigFile, read_config_file
from inflight.errors import ConfigError
from inflight.models.decoder_config import DecoderConfig, Gemma4HeadConfig
from inflight.models.head_tensors import check_tensors, read_headers
from inflight.models.neutral_keys import ANY, refuse_unread
from inflight.models.registry import ModelDescription, describe

AFTER, BEFORE, CENTROIDS, ORDERING = (
    "post_projection",
    "pre_projection",
    "masked_embedding.centroids",
    "masked_embedding.token_ordering",
)
"""Names of the modules that only these heads have; ORDERING is the whole name of a tensor."""

_KIND = "expected a draft head of Gemma 4 as transformers saves it"
_CLUSTERS = ("num_centroids", "centroid_intermediate_top_k")
_CLASSES = {"gemma4_text": "Gemma4ForCausalLM", "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
_CHECKED = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings", *_CLUSTERS)
"""Keys that are not read, as tensors say the same, or only if another key asks for them."""


def with_gemma4_head(model: ModelDescription, folder: str) -> ModelDescription:
    """Return the description of a Gemma 4 model with the draft head in `folder`.

    Raises:
        ConfigError: The model is not a Gemma 4, or the head has other sizes or layers than this model's head must
            have, or tensors are missing; the message has the file and what was expected.
    """
    config, target = read_config_file(folder), model.decoder
    if not (target.value_norm and target.layer_scales):
        raise ConfigError(
            f"{config.path}: speculative_model_dir has a draft head of Gemma 4, expected a head for "
            f"{model.folder}, which is not a Gemma 4"
        )
    if config.positive_int("backbone_hidden_size") != target.hidden_size:
        raise config.error("backbone_hidden_size", f"{target.hidden_size}, the hidden_size of {model.folder}")
    section = config.child("text_config")
    head = _read_layers(config, section)
    if head.decoder.vocab_size != target.vocab_size:
        raise section.error("vocab_size", f"{target.vocab_size} as in {model.folder}")
    decoder = replace(head.decoder, read_kv=_find_read_layers(section, head.decoder, model))
    count, per_token = _read_clusters(config, decoder.vocab_size)
    refuse_unread(config, dict.fromkeys(_CHECKED, ANY))
    head = replace(head, decoder=decoder)
    _check_tensors(head, target.hidden_size, count)
    found = Gemma4HeadConfig(decoder, count, per_token)
    return replace(model, decoder=replace(target, gemma4_head=found), gemma4_head=head)


def _read_layers(config: ConfigFile, section: ConfigFile) -> ModelDescription:
    """Read the head's layers as those of a Gemma 4 in which every layer has keys and values."""
    kind, num_layers = section.text_or_none("model_type"), section.positive_int("num_hidden_layers")
    if kind not in _CLASSES:
        raise section.error("model_type", " or ".join(_CLASSES))
    if section.has("num_kv_shared_layers") and section.count("num_kv_shared_layers") not in (0, num_layers):
        raise section.error(
            "num_kv_shared_layers", f"{num_layers}: all layers read the model's keys and values"
        )
    for key in ("enable_moe_block", "use_double_wide_mlp"):
        if section.boolean(key, False):
            raise section.error(key, "false, as in all heads of Gemma 4")
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        if section.has(key) and section.count(key):
            raise section.error(key, "0, as in all heads of Gemma 4")
    if config.has("quantization_config") or section.has("quantization_config"):
        raise config.error("quantization_config", "no such key: quantized heads of Gemma 4 are not read")
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": None}
    # Scores are compared with each other only, so that a cap has no effect.
    others = {"architectures": [_CLASSES[kind]], "final_logit_softcapping": None}
    return describe(section.with_values({**own, **others}))


def _find_read_layers(section: ConfigFile, head: DecoderConfig, model: ModelDescription) -> tuple[int, ...]:
    """Return, for each of the head's layers, the place of the layer whose keys and values it reads among the
    model's layers that have their own."""
    target, found = model.decoder, list[int]()
    cached = target.cached_layers
    for layer, window in enumerate(head.sliding_windows):
        kind = "full_attention" if window is None else "sliding_attention"
        same = [each for each in cached if (target.sliding_windows[each] is None) == (window is None)]
        if not same:
            raise section.error("layer_types", f"types of {model.folder}, which has no {kind} with keys")
        read, own = target.at(same[-1]), head.at(layer)
        expected = {
            "sliding_window": (target.sliding_windows[same[-1]], window),
            "num_key_value_heads": (read.num_kv_heads, own.num_kv_heads),
            "head_dim": (read.head_dim, own.head_dim),
            "rope_parameters": (target.ropes[same[-1]], head.ropes[layer]),
        }
        for key, (of_model, of_head) in expected.items():
            if of_model != of_head:
                raise ConfigError(
                    f"{section.path}: {key} of {kind} layers is {of_head}, expected {of_model} as in "
                    f"{model.folder}, whose keys and values they read"
                )
        found.append(cached.index(same[-1]))
    return tuple(found)


def _read_clusters(config: ConfigFile, vocab_size: int) -> tuple[int, int]:
    """Return the number of clusters of tokens, and how many of them are compared token by token; 0 and 0 if all
    tokens get logits."""
    if not config.boolean("use_ordered_embeddings", False):
        return 0, 0
    count, per_token = (config.positive_int(key) for key in _CLUSTERS)
    if vocab_size % count:
        raise config.error(_CLUSTERS[0], f"a divisor of vocab_size, {vocab_size}")
    if per_token > count:
        raise config.error(_CLUSTERS[1], f"at most num_centroids, {count}")
    return count, per_token


def _check_tensors(head: ModelDescription, model_width: int, num_clusters: int) -> None:
    """Raise ConfigError unless the folder has the head's tensors in their shapes, and no others."""
    stored, decoder, names = read_headers(head.folder), head.decoder, head.names
    width, vocab_size = decoder.hidden_size, decoder.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{BEFORE}.weight": (width, 2 * model_width),
        f"{AFTER}.weight": (model_width, width),
        f"{names.base}{names.embedding}.weight": (vocab_size, width),
        f"{names.base}{names.final_norm}.weight": (width,),
    }
    if f"{names.lm_head}.weight" in stored:
        shapes[f"{names.lm_head}.weight"] = (vocab_size, width)
    if num_clusters:
        shapes |= {f"{CENTROIDS}.weight": (num_clusters, width), ORDERING: (vocab_size,)}
    for layer in range(decoder.num_layers):
        sizes, prefix = decoder.at(layer), names.base + names.layers.format(layer)
        matrices = {
            names.attention.qkv[0]: (sizes.query_size, width),
            names.attention.output: (width, sizes.query_size),
            **dict.fromkeys(names.mlp.up, (sizes.intermediate_size, width)),
            names.mlp.down: (width, sizes.intermediate_size),
        }
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
        norms = names.norms.attention, names.norms.attention_post, names.norms.mlp, names.norms.mlp_post
        shapes |= {f"{prefix}{name}.weight": (width,) for name in norms}
        shapes |= {
            f"{prefix}{names.attention.query_norm}.weight": (sizes.head_dim,),
            prefix + names.layer_scale: (1,),
        }
        if decoder.qkv_bias:
            shapes[f"{prefix}{names.attention.qkv[0]}.bias"] = (sizes.query_size,)
            shapes[f"{prefix}{names.attention.output}.bias"] = (width,)
    check_tensors(head.folder, stored, shapes, ORDERING, _KIND)
