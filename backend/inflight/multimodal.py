"""Multimodal models (classes `…ForConditionalGeneration`), of which the text part is served.

Has the list of these classes, and converts their config.json to that of the text part alone. Imports only
the standard library; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.json_values import is_list, is_object

SECTION = "text_config"
"""Key of config.json whose value has the text part's keys."""

# Keys that apply to the text part even if they are outside of `text_config`.
_OF_WHOLE = ("eos_token_id", "quantization_config", "compression_config", "quantization")
_DTYPES = ("dtype", "torch_dtype")
_TIED = "tie_word_embeddings"
_DEEP_STACK = (8, 16, 24)  # transformers' `deepstack_visual_indexes` of files that have none
_SENSES = ("vision", "audio", "image", "video", "speech")


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A class of multimodal models.

    Attributes:
        model_type: config.json's `model_type`.
        architecture: The class in config.json's `architectures`.
        text_type: `model_type` of the text part if config.json does not state it.
        tied: Default of `tie_word_embeddings`, which is read outside of `text_config`.
        tied_by_text: Whether `tie_word_embeddings: true` inside of `text_config` also applies.
        may_be_flat: Whether files without `text_config` have the text part's keys at the top, such as older
            files of Qwen2-VL.
        has_deep_stack: Whether rows of pictures are also added after the first layers.
        mrope_section: For models with multimodal rotary embedding (mRoPE), transformers' default of this key: the
            numbers of pairs of dimensions for time, height and width.
        bidirectional: Layers in which the rows of a picture attend to each other in both directions: "all"; or
            "sliding", those with a window, if the text part's `use_bidirectional_attention` is vision. "": none.
        inputs: The inputs of the model's other parts, for messages.
        defaults: Values of keys that `text_config` omits, where the class's defaults differ from those of the text
            part's family.
    """

    model_type: str
    architecture: str
    text_type: str
    tied: bool = False
    tied_by_text: bool = False
    may_be_flat: bool = False
    has_deep_stack: bool = False
    mrope_section: tuple[int, ...] = ()
    bidirectional: str = ""
    inputs: str = "pictures"
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


_VOXTRAL_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "head_dim": 128,
}
_VIDEO, _ALL = "pictures and videos", "pictures, videos and sound"
MULTIMODAL = (
    Multimodal("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", tied=True, bidirectional="all"),
    Multimodal("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text", tied=True, inputs=_ALL),
    Multimodal(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        tied=True,
        bidirectional="sliding",
        inputs=_ALL,
    ),
    Multimodal(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        tied=True,
        bidirectional="sliding",
        inputs=_ALL,
    ),
    Multimodal("mistral3", "Mistral3ForConditionalGeneration", "mistral", tied=True),
    Multimodal(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl_text",
        tied_by_text=True,
        may_be_flat=True,
        mrope_section=(16, 24, 24),
        inputs=_VIDEO,
    ),
    Multimodal(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl_text",
        tied_by_text=True,
        may_be_flat=True,
        mrope_section=(16, 24, 24),
        inputs=_VIDEO,
    ),
    Multimodal(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        has_deep_stack=True,
        mrope_section=(24, 20, 20),
        inputs=_VIDEO,
    ),
    Multimodal(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe_text",
        has_deep_stack=True,
        mrope_section=(24, 20, 20),
        inputs=_VIDEO,
    ),
    Multimodal(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5_text",
        mrope_section=(11, 11, 10),
        inputs=_VIDEO,
    ),
    Multimodal(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text",
        mrope_section=(11, 11, 10),
        inputs=_VIDEO,
    ),
    Multimodal("kimi_k25", "Kimi_K25ForConditionalGeneration", "deepseek_v3", tied=True, inputs=_VIDEO),
    Multimodal("kimi_k25", "KimiK25ForConditionalGeneration", "deepseek_v3", tied=True, inputs=_VIDEO),
    Multimodal("llava", "LlavaForConditionalGeneration", "llama", tied_by_text=True),
    Multimodal("llava_next", "LlavaNextForConditionalGeneration", "llama"),
    Multimodal(
        "llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2", tied_by_text=True, inputs=_VIDEO
    ),
    Multimodal("internvl", "InternVLForConditionalGeneration", "qwen2", tied=True, inputs=_VIDEO),
    Multimodal("idefics3", "Idefics3ForConditionalGeneration", "llama"),
    Multimodal("smolvlm", "SmolVLMForConditionalGeneration", "llama"),
    Multimodal("lfm2_vl", "Lfm2VlForConditionalGeneration", "lfm2", tied=True),
    Multimodal(
        "voxtral", "VoxtralForConditionalGeneration", "llama", inputs="sound", defaults=_VOXTRAL_DEFAULTS
    ),
    Multimodal("llama4", "Llama4ForConditionalGeneration", "llama4_text", tied_by_text=True),
)

# Families of text parts whose model_type is not the name of a family.
_FAMILY_OF = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
}
_GEMMA4_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_QWEN_VL_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
# transformers' defaults of keys that config.json of multimodal models may omit, but that the text families
# require or for which they have other defaults.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma3n_text": {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "gemma4_text": _GEMMA4_DEFAULTS,
    "gemma4_unified_text": {**_GEMMA4_DEFAULTS, "use_bidirectional_attention": "vision"},
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "qwen2_vl_text": _QWEN_VL_DEFAULTS,
    "qwen2_5_vl_text": _QWEN_VL_DEFAULTS,
    "qwen3_vl_text": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
    },
    "qwen3_vl_moe_text": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,  # the router always divides by the sum
    },
}


@dataclass(frozen=True, slots=True)
class TextPart:
    """The config.json of a multimodal model's text part.

    Attributes:
        whole_class: The class of the whole model.
        values: Keys and values, as in a config.json of a text model.
        section: Key of the file whose value has the text part's keys; "" if they are at the top.
        outside: Keys of the text part that are outside of this section.
    """

    whole_class: Multimodal
    values: Mapping[str, Any]
    section: str
    outside: frozenset[str]


def find_text_part(values: Mapping[str, Any]) -> TextPart | None:
    """Return the text part of a multimodal model's config.json; None for any other model.

    As in transformers, the text part's keys are in `text_config`; keys outside of it are about other parts,
    except the few that this module lists.
    """
    found = _find_class(values)
    if found is None:
        return None
    section, outside = values.get(SECTION), dict[str, Any]()
    is_flat = found.may_be_flat and not is_object(section)
    if is_flat:
        stated = {key: value for key, value in values.items() if key not in ("model_type", "vision_config")}
    else:
        stated = dict(section) if is_object(section) else {}
        outside = {key: values[key] for key in _OF_WHOLE if values.get(key) is not None}
        if any(values.get(key) is not None for key in _DTYPES):
            outside |= {key: values.get(key) for key in _DTYPES}
    is_tied = values.get(_TIED)
    if found.tied_by_text and stated.get(_TIED) is True:
        is_tied = True
    outside[_TIED] = found.tied if is_tied is None else is_tied
    kind: Any = stated.get("model_type") or found.text_type
    if isinstance(kind, str):
        stated = {
            **({**DEFAULTS.get(kind, {}), **found.defaults} if stated else {}),
            **stated,
            "model_type": _FAMILY_OF.get(kind, kind),
        }
    stated.pop("architectures", None)
    if found.mrope_section:
        stated |= _with_mrope_section(stated, found.mrope_section)
    return TextPart(found, {**stated, **outside}, "" if is_flat else SECTION, frozenset(outside))


def _with_mrope_section(values: Mapping[str, Any], section: tuple[int, ...]) -> dict[str, Any]:
    """Return the objects of rotary positions in `values`, with mrope_section if they have none."""
    stated = {key: values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key)}
    return {
        key: {"mrope_section": list(section), **rope} if is_object(rope) else rope
        for key, rope in (stated or {"rope_parameters": {}}).items()
    }


def other_inputs(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json whose sections show that the model takes more than text."""
    sections = [key for key, value in values.items() if key.endswith("_config") and is_object(value)]
    return [key for key in sections if key.startswith(_SENSES)]


def num_added_layers(values: Mapping[str, Any]) -> int:
    """Return the number of first layers after which the model adds rows of pictures (DeepStack), by the
    config.json of the whole model."""
    found, vision = _find_class(values), values.get("vision_config")
    if found is None or not found.has_deep_stack or not is_object(vision):
        return 0
    indexes = vision.get("deepstack_visual_indexes")
    return len(indexes) if is_list(indexes) else len(_DEEP_STACK)


def bidirectional_layers(
    values: Mapping[str, Any], sliding_windows: Sequence[int | None]
) -> tuple[bool, ...]:
    """Return for each layer whether the rows of a picture attend to each other in both directions; empty: in none.

    Args:
        values: The config.json of the whole model.
        sliding_windows: The window of each layer of the text part; None for a layer without one.
    """
    text = find_text_part(values)
    if text is None or not text.whole_class.bidirectional:
        return ()
    if text.whole_class.bidirectional == "all":
        return (True,) * len(sliding_windows)
    if text.values.get("use_bidirectional_attention") != "vision":
        return ()
    return tuple(window is not None for window in sliding_windows)


def _find_class(values: Mapping[str, Any]) -> Multimodal | None:
    names: Any = values.get("architectures")
    for each in MULTIMODAL:
        if each.model_type == values.get("model_type") and (
            not names or (isinstance(names, list) and each.architecture in names)
        ):
            return each
    return None
