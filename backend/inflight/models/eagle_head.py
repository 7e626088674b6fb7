"""The folder of an EAGLE-3 head in the layout that SpecForge and SafeAILab publish: its config.json and tensors.

The head has one layer, `midlayer`. Its attention reads the normed embedding of a token beside the normed hidden
state before that token. This hidden state is a projection (`fc`) of the hidden states after three of the model's
layers. The head may know fewer tokens than the model: for each of them, `d2t` has the difference between the
model's token id and the head's.

Only headers of weight files are read here, without torch, so that the checks before a server's start can do it.

References: vLLM `llama_eagle3.py`, SGLang `llama_eagle3.py`, SpecForge `specforge/modeling/draft/llama3_eagle.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile, read_config_file
from inflight.errors import ConfigError
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig, Eagle3Config
from inflight.models.families.family import NormNames
from inflight.models.head_tensors import check_tensors, read_headers
from inflight.models.registry import ModelDescription, describe

EMBEDDING, EMBEDDING_NORM, FUSION, HIDDEN_NORM, TARGETS = (
    "embed_tokens",
    "midlayer.input_layernorm",
    "fc",
    "midlayer.hidden_norm",
    "d2t",
)
"""Names of the head's modules that ordinary models do not have; TARGETS and "t2d" are whole names of tensors."""

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_READ_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OWN_KEYS = ("draft_vocab_size", "eagle_config", "target_hidden_size", "target_model_type", _READ_LAYERS)
_OTHER_FORMS = ("additional_fc", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
"""Keys of heads that compute something else if they are true."""

_SECTION: Mapping[str, tuple[Any, ...]] = {
    "next_layer_regular": (True,),
    "parallel_draft_heads_num_layers": (None, 0, 1),
    "parallel_draft_step": (None, 1),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (None, False),
}
"""Keys of `eagle_config` beside the numbers of layers, as ModelOpt and SpecForge write them, and their values in
this layout."""

_NOT_READ = ("t2d",)
_EXPECTED = "expected an EAGLE-3 head as SpecForge and SafeAILab publish it"


def with_eagle_head(model: ModelDescription, folder: str) -> ModelDescription:
    """Return the description of a model with the EAGLE-3 head in `folder`.

    Raises:
        ConfigError: The folder has no EAGLE-3 head, or one of another model's sizes; the message has the file and
            what was expected.
    """
    config = read_config_file(folder)
    target, layer = model.decoder, _read_layer(config)
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.positive_int(key) != expected:
            raise config.error(key, f"{expected} as in {model.folder}, because the head must fit this model")
    if config.has("target_hidden_size") and config.positive_int("target_hidden_size") != target.hidden_size:
        raise config.error("target_hidden_size", f"{target.hidden_size} as in {model.folder}")
    draft_size = config.int_or_none("draft_vocab_size") or target.vocab_size
    if draft_size > target.vocab_size:
        raise config.error("draft_vocab_size", f"at most vocab_size, which is {target.vocab_size}")
    decoder = replace(layer.decoder, vocab_size=draft_size, tied_embeddings=False)
    names = replace(
        layer.names,
        base="",
        layers="midlayer.",
        norms=NormNames(mlp="post_attention_layernorm"),
    )
    head = replace(layer, decoder=decoder, names=names)
    _check_tensors(head, target.vocab_size)
    eagle = Eagle3Config(decoder, _find_read_layers(config, target.num_layers))
    return replace(model, decoder=replace(target, eagle=eagle), eagle=head)


def _read_layer(config: ConfigFile) -> ModelDescription:
    """Read the head's layer, which is Llama's."""
    names = config.texts("architectures")
    has_medusa = any(key.startswith("medusa") for key in config.values)
    is_llama = "LlamaForCausalLM" in names and config.has("draft_vocab_size")
    if has_medusa or not (is_llama or set(names).intersection(_ARCHITECTURES)):
        found = f"architectures {list(names)}"
        if has_medusa:
            found = "a Medusa head"
        elif "LlamaForCausalLM" in names:
            found += " without draft_vocab_size, as a whole model or an EAGLE-1 head"
        elif any("eagle" in name.lower() for name in names):
            found += ", an EAGLE head of another version or family"
        raise ConfigError(
            f"{config.path}: speculative_model_dir has {found}, {_EXPECTED}: architectures "
            f"[{_ARCHITECTURES[0]!r}], or ['LlamaForCausalLM'] with draft_vocab_size"
        )
    if config.positive_int("num_hidden_layers") != 1:
        raise config.error("num_hidden_layers", "1, as EAGLE-3 heads have")
    for key in _OTHER_FORMS:
        if config.boolean(key, False):
            raise config.error(key, "false: heads of this form are not read")
    without_own = dict.fromkeys((*_OWN_KEYS, *_OTHER_FORMS))
    layer = describe(
        config.with_values({**without_own, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    if layer.quantization is not None:
        raise config.error("quantization_config", "no such key: quantized EAGLE-3 heads are not read")
    return layer


def _find_read_layers(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """Return after how many of the model's layers the head reads hidden states.

    At the top of config.json, the numbers are vLLM's, which count layers as here. In `eagle_config` they are
    SGLang's and SpecForge's, where i means the output of layer i, the first of which is 0.
    """
    section = _read_section(config)
    where, added = config, 0
    if not config.has(_READ_LAYERS) and section is not None and section.values.get(_READ_LAYERS):
        where, added = section, 1
    expected = f"three numbers of layers of the model, which has {num_layers}"
    given: Any = where.value(_READ_LAYERS)
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
        expected += f"; without the key they are {given}"
    if not is_list(given) or len(given) != 3 or any(type(each) is not int for each in given):
        raise where.error(_READ_LAYERS, expected)
    layers = tuple(int(each) + added for each in given)
    if not all(0 <= layer <= num_layers for layer in layers):
        raise where.error(_READ_LAYERS, expected)
    return layers


def _read_section(config: ConfigFile) -> ConfigFile | None:
    """Return `eagle_config`; None without it. Raises ConfigError for a key of another kind of head."""
    if not config.has("eagle_config"):
        return None
    section = config.child("eagle_config")
    for key, value in section.values.items():
        if key == _READ_LAYERS:
            continue
        if key not in _SECTION:
            raise section.error(key, "no such key: its effect is unknown (if it has none, remove it)")
        if not any(type(value) is type(known) and value == known for known in _SECTION[key]):
            expected = json.dumps(_SECTION[key][-1])
            raise section.error(key, f"{expected}, as EAGLE-3 heads have")
    return section


def _check_tensors(head: ModelDescription, vocab_size: int) -> None:
    """Raise ConfigError unless the folder has the head's tensors in their shapes, and no others."""
    stored, hidden = read_headers(head.folder), head.decoder.hidden_size
    fusion = stored.get(f"{FUSION}.weight")
    if fusion is not None and fusion.shape == (hidden, 2 * hidden):
        raise ConfigError(
            f"{head.folder}: speculative_model_dir has an EAGLE-1 or EAGLE-2 head (fc.weight has shape "
            f"{[hidden, 2 * hidden]}), {_EXPECTED}: fc.weight of {[hidden, 3 * hidden]}"
        )
    shapes = _shapes(head.decoder, vocab_size, stored)
    check_tensors(head.folder, stored, shapes, TARGETS, _EXPECTED, _NOT_READ)


def _shapes(decoder: DecoderConfig, vocab_size: int, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the head's tensors; of optional ones, if they are stored."""
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    matrices = {
        FUSION: (hidden, 3 * hidden),
        f"{attention}q_proj": (decoder.query_size, 2 * hidden),
        f"{attention}k_proj": (decoder.kv_size, 2 * hidden),
        f"{attention}v_proj": (decoder.kv_size, 2 * hidden),
        f"{attention}o_proj": (hidden, decoder.query_size),
        f"{mlp}gate_proj": (inner, hidden),
        f"{mlp}up_proj": (inner, hidden),
        f"{mlp}down_proj": (hidden, inner),
        "lm_head": (decoder.vocab_size, hidden),
    }
    vectors = (EMBEDDING_NORM, HIDDEN_NORM, "midlayer.post_attention_layernorm", "norm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.weight": (hidden,) for name in vectors}
    for name, (rows, _) in matrices.items():
        has_bias = (
            decoder.mlp_bias
            if name.startswith(mlp)
            else name.startswith(attention)
            and (decoder.output_bias if name.endswith("o_proj") else decoder.qkv_bias)
        )
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if decoder.vocab_size < vocab_size or TARGETS in stored:
        shapes[TARGETS] = (decoder.vocab_size,)
    if f"{EMBEDDING}.weight" in stored:
        shapes[f"{EMBEDDING}.weight"] = (vocab_size, hidden)
    return shapes
