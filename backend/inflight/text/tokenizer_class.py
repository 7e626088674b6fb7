"""The transformers class of a checkpoint's tokenizer, and its changes to tokenizer.json.

Most tokenizers are exactly as tokenizer.json describes them. But a few classes use only the vocabulary and
the merges of tokenizer.json, and define normalization, pre-tokenization and decoding themselves. This module
has a table of the classes of the supported models. Any thread.

Equals transformers' `AutoTokenizer`, in the version that the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.json_values import Json
from inflight.word_patterns import QWEN2_WORDS, QWEN3_5_WORDS

AS_IN_ITS_FILE = ""
"""Name for a class that uses tokenizer.json unchanged."""

# The default class (without "Fast" in its name) by the model_type in config.json.
CLASS_OF_MODEL = {
    model_type: name
    for name, model_types in {
        AS_IN_ITS_FILE: (
            "ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite granitemoe "
            "granitemoehybrid internlm2 internlm3 jamba kimi_k25 kimi_linear llava llava_next minicpm3 minimax_m2 "
            "ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 olmo_hybrid phi3 phimoe stablelm"
        ),
        "CodeLlamaTokenizer": "code_llama",
        "CohereTokenizer": "cohere2",
        "GPT2Tokenizer": "codegen dbrx gpt2 gpt_neo gptj opt phi starcoder2",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma",
        "Qwen2Tokenizer": (
            "internvl qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe"
        ),
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
    }.items()
    for model_type in model_types.split()
}

# Models whose checkpoints name wrong classes so often that transformers ignores these names.
_CLASS_IS_OFTEN_WRONG = frozenset({"qwen2", "qwen3_5_moe_text"})


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A tokenizer class of transformers that changes tokenizer.json.

    Attributes:
        parts: Function that takes the settings in tokenizer_config.json, and returns the class's normalizer,
            pre_tokenizer, decoder and changes of the model, in the form of tokenizer.json.
        special_tokens: Special tokens by name, used if the settings do not have them.
        readds_special_tokens: Whether all special tokens lose their settings in tokenizer.json, such as
            `rstrip`.
        template: Names of the special tokens that precede a text; None: as in tokenizer.json.
    """

    parts: Callable[[Mapping[str, Any]], Json]
    special_tokens: Mapping[str, str]
    readds_special_tokens: bool = False
    template: tuple[str, ...] | None = None


def find_tokenizer_class(
    settings: Mapping[str, Any], model_type: str | None, class_name: str | None, pipeline_text: str
) -> TokenizerClass | None:
    """Return the class that `AutoTokenizer` would choose; None if it uses tokenizer.json unchanged.

    Args:
        settings: The content of tokenizer_config.json.
        model_type: The model_type in config.json.
        class_name: The `tokenizer_class` in config.json, used if the settings do not have one.
        pipeline_text: The text of tokenizer.json.
    """
    declared = settings.get("tokenizer_class") or class_name or ""
    declared = str(declared).removesuffix("Fast")
    of_model = CLASS_OF_MODEL.get(model_type or "")
    if (
        declared == "LlamaTokenizer"
        and model_type not in _CLASS_IS_OFTEN_WRONG
        and '"ByteLevel"' in pipeline_text
    ):
        return None  # Llama 3 and similar models
    if of_model == AS_IN_ITS_FILE:
        return None
    if of_model is not None and (not declared or model_type in _CLASS_IS_OFTEN_WRONG):
        return _CLASSES.get(of_model)
    return _CLASSES.get(declared)


def rebuilt(pipeline: Mapping[str, Any], parts: Json) -> Json:
    """Return a tokenizer.json with the vocabulary and merges of `pipeline`, and everything else from a class.

    The result has no added tokens. The post-processor is that of `pipeline`.
    """
    model = {
        "type": "BPE",
        "vocab": pipeline["model"]["vocab"],
        "merges": pipeline["model"].get("merges", []),
        **parts["model"],
    }
    return {**pipeline, **parts, "added_tokens": [], "model": model}


def can_be_rebuilt(pipeline: Mapping[str, Any]) -> bool:
    """Return whether the pipeline has a vocabulary and merges."""
    model = pipeline.get("model", {})
    return isinstance(model.get("vocab"), dict) and "merges" in model


def _sequence(kind: str, *parts: Json) -> Json:
    return {"type": "Sequence", kind: list(parts)}


def _byte_level(add_prefix_space: bool, use_regex: bool = True) -> Json:
    settings = {"add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **settings}


def _bytes_joined(*stripped: Json) -> Json:
    """Return the decoder of SentencePiece-style vocabularies."""
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return _sequence("decoders", spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped)


_BYTE_FALLBACK: Json = {"fuse_unk": True, "byte_fallback": True}
_STRIP_ONE_SPACE: Json = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _metaspace(scheme: str) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


def _llama(settings: Mapping[str, Any]) -> Json:
    prefixed = _true_unless_said(settings, "add_prefix_space")
    scheme = ("always" if settings.get("legacy", False) else "first") if prefixed else "never"
    return {
        "model": _BYTE_FALLBACK,
        "normalizer": None,
        "pre_tokenizer": _metaspace(scheme),
        "decoder": _bytes_joined(*([_STRIP_ONE_SPACE] if prefixed else [])),
    }


def _code_llama(settings: Mapping[str, Any]) -> Json:
    scheme = "first" if _true_unless_said(settings, "add_prefix_space") else "never"
    return {
        "model": {**_BYTE_FALLBACK, "unk_token": _content(settings.get("unk_token")) or "<unk>"},
        "normalizer": None,
        "pre_tokenizer": _metaspace(scheme),
        "decoder": _bytes_joined(_STRIP_ONE_SPACE),
    }


def _gemma(settings: Mapping[str, Any]) -> Json:
    return {
        "model": {**_BYTE_FALLBACK, "unk_token": _content(settings.get("unk_token")) or "<unk>"},
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": _bytes_joined(),
    }


def _gpt2(settings: Mapping[str, Any]) -> Json:
    return {
        "model": {},
        "normalizer": None,
        "pre_tokenizer": _byte_level(bool(settings.get("add_prefix_space", False))),
        "decoder": _byte_level(True),
    }


def _gpt_neox(settings: Mapping[str, Any]) -> Json:
    return {**_gpt2(settings), "normalizer": {"type": "NFC"}}


def _qwen2(settings: Mapping[str, Any]) -> Json:
    return _qwen(settings, QWEN2_WORDS)


def _qwen3_5(settings: Mapping[str, Any]) -> Json:
    return _qwen(settings, QWEN3_5_WORDS)


def _qwen(settings: Mapping[str, Any], pattern: str) -> Json:
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    prefixed = bool(settings.get("add_prefix_space") or False)
    return {
        "model": {},
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _sequence("pretokenizers", words, _byte_level(prefixed, use_regex=False)),
        "decoder": _byte_level(True),
    }


def _true_unless_said(settings: Mapping[str, Any], key: str) -> bool:
    value = settings.get(key)
    return True if value is None else bool(value)


def _content(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


_END_OF_TEXT = "<|endoftext|>"
_GPT = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
_QWEN = {"eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT}
_SENTENCE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

_CLASSES: Mapping[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(_llama, _SENTENCE),
    "CodeLlamaTokenizer": TokenizerClass(
        _code_llama,
        {
            **_SENTENCE,
            "prefix_token": "▁<PRE>",
            "middle_token": "▁<MID>",
            "suffix_token": "▁<SUF>",
            "eot_token": "▁<EOT>",
            "fill_token": "<FILL_ME>",
        },
        template=("bos_token",),
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "GPT2Tokenizer": TokenizerClass(_gpt2, _GPT),
    "GPTNeoXTokenizer": TokenizerClass(_gpt_neox, {**_GPT, "pad_token": "<|padding|>"}, template=()),
    "Qwen2Tokenizer": TokenizerClass(_qwen2, _QWEN, readds_special_tokens=True),
    "Qwen3_5Tokenizer": TokenizerClass(_qwen3_5, _QWEN),
}
