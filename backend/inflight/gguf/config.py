"""Convert the keys of a GGUF file to the keys of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.gguf.architectures import find_architecture
from inflight.gguf.header import FLOAT_TYPES, GgufHeader
from inflight.json_values import Json

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_END_TOKENS = ("eos", "eot", "eom")
_HARMLESS = ("vocab_size", "rope.scaling.finetuned")
_NEUTRAL: tuple[Any, ...] = (None, 0, 0.0, False, "", [])
_BIGGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose attention scale is computed from hidden_size / heads."""


def make_config(header: GgufHeader, keys: ConfigFile) -> Json:
    """Return the content of config.json. `keys` are the GGUF file's keys.

    Raises:
        ConfigError: A key or tensor is missing or has an unsupported value, or the architecture has an
            unknown key that may have an effect. The message has the file, the key, its value and the
            expected value.
    """
    architecture = find_architecture(header)
    _refuse_other_files(keys)
    section = _ArchitectureKeys(header, keys)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "tie_word_embeddings": _HEAD not in header.tensors,
        **_common(header, section),
        **_READERS.get(header.architecture, _nothing)(header, section),
        **_token_ids(keys),
    }
    types = {tensor.type for tensor in header.tensors.values()}
    if quantized := sorted(types.difference(FLOAT_TYPES)):
        config["quantization_config"] = {"quant_method": "gguf", "types": quantized}
    _refuse_unread(header.architecture, keys)
    return config


class _ArchitectureKeys:
    """Typed access to the architecture's keys, named without the prefix "<architecture>."."""

    def __init__(self, header: GgufHeader, keys: ConfigFile) -> None:
        self.keys, self._prefix = keys, f"{header.architecture}."

    def name(self, key: str) -> str:
        """Return a key with the architecture's prefix, such as llama.context_length."""
        return self._prefix + key

    def size(self, key: str) -> int:
        """Return an integer of at least 1."""
        return self.keys.positive_int(self.name(key))

    def size_or_none(self, key: str) -> int | None:
        """Return an integer of at least 1; None if the key is absent or 0."""
        return self.keys.int_or_none(self.name(key)) if self.keys.value(self.name(key)) else None

    def number(self, key: str) -> float:
        """Return a required positive number."""
        return self.keys.number(self.name(key))

    def number_or_none(self, key: str) -> float | None:
        """Return a positive number; None if the key is absent or 0."""
        return self.keys.number_or_none(self.name(key)) if self.keys.value(self.name(key)) else None


def _common(header: GgufHeader, section: _ArchitectureKeys) -> Json:
    """Return the keys that all architectures have."""
    hidden_size, num_heads = section.size("embedding_length"), section.size("attention.head_count")
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{header.path}: tensor {_EMBEDDING!r} is missing or not a matrix")
    rotated = section.size_or_none("rope.dimension_count")
    key_length = section.size_or_none("attention.key_length")
    of_model = rotated if header.architecture == "llama" and rotated else hidden_size // num_heads
    head_dim = key_length or of_model
    if section.size_or_none("attention.value_length") not in (None, head_dim):
        raise section.keys.error(section.name("attention.value_length"), f"the key length, {head_dim}")
    max_positions = section.size("context_length")
    config: Json = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": section.size("feed_forward_length"),
        "num_hidden_layers": section.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": section.size_or_none("attention.head_count_kv") or num_heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": section.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": section.number_or_none("rope.freq_base") or 10000.0,
    }
    if head_dim * num_heads != hidden_size or key_length:
        config["head_dim"] = head_dim
    if rotated not in (None, head_dim):
        if header.architecture != "phi3":
            raise section.keys.error(section.name("rope.dimension_count"), f"the head size, {head_dim}")
        config["partial_rotary_factor"] = rotated / head_dim
    if scaling := _scaling(header, section, max_positions):
        config["rope_scaling"] = scaling
    return config


def _scaling(header: GgufHeader, section: _ArchitectureKeys, max_positions: int) -> Json | None:
    """Return `rope_scaling` of config.json; None without scaling.

    A GGUF file stores Llama 3's scaling as a factor for each frequency. This equals LongRoPE with the same
    factors at all lengths.
    """
    key = section.name("rope.scaling.type")
    kind = section.keys.text_or_none(key) or "none"
    original = section.size_or_none("rope.scaling.original_context_length") or max_positions
    attention_factor = section.number_or_none("rope.scaling.attn_factor")
    of_frequencies = header.numbers("rope_freqs.weight")
    short, long = (header.numbers(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if of_frequencies is not None:
        if kind != "none":
            raise section.keys.error(key, "none beside the tensor rope_freqs.weight")
        short = long = of_frequencies
        original, attention_factor = max_positions, 1.0
    if short is not None and long is not None:
        if kind not in ("none", "longrope"):
            raise section.keys.error(
                key, "longrope beside the tensors rope_factors_short and rope_factors_long"
            )
        factors = {"short_factor": short, "long_factor": long, "attention_factor": attention_factor}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise section.keys.error(key, "none, linear or yarn, or longrope with its tensors")
    if attention_factor is not None:
        raise section.keys.error(section.name("rope.scaling.attn_factor"), f"no such key beside {kind}")
    of_yarn = {"original_max_position_embeddings": original} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": section.number("rope.scaling.factor"), **of_yarn}


def _read_llama(header: GgufHeader, section: _ArchitectureKeys) -> Json:
    return {"attention_bias": "blk.0.attn_q.bias" in header.tensors}


def _read_phi3(header: GgufHeader, section: _ArchitectureKeys) -> Json:
    original = section.size_or_none("rope.scaling.original_context_length")
    window = section.size_or_none("attention.sliding_window")
    return {
        "sliding_window": window,
        "original_max_position_embeddings": original or section.size("context_length"),
    }


def _read_gemma(header: GgufHeader, section: _ArchitectureKeys) -> Json:
    """Return the keys of Gemma 2 and 3. The scale of attention is derived, because the file does not state it."""
    head_dim, num_heads = section.size("attention.key_length"), section.size("attention.head_count")
    is_biggest = section.size("block_count") == _BIGGEST_GEMMA[header.architecture]
    config: Json = {
        "head_dim": head_dim,
        "query_pre_attn_scalar": section.size("embedding_length") // num_heads if is_biggest else head_dim,
        "sliding_window": section.size("attention.sliding_window"),
        "attn_logit_softcapping": section.number_or_none("attn_logit_softcapping"),
        "final_logit_softcapping": section.number_or_none("final_logit_softcapping"),
    }
    if header.architecture == "gemma3":
        config["rope_local_base_freq"] = section.number_or_none("rope.freq_base_swa") or 10000.0
        config["rope_theta"] = section.number_or_none("rope.freq_base") or 1e6
    return config


def _nothing(header: GgufHeader, section: _ArchitectureKeys) -> Json:
    return {}


_READERS: Mapping[str, Callable[[GgufHeader, _ArchitectureKeys], Json]] = {
    "llama": _read_llama,
    "phi3": _read_phi3,
    "gemma2": _read_gemma,
    "gemma3": _read_gemma,
}


def _dtype(header: GgufHeader) -> str:
    """Return the dtype of unquantized matrices; bfloat16 in a quantized file."""
    types = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _token_ids(keys: ConfigFile) -> Json:
    ends = [keys.value(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS]
    found = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    begin = keys.value("tokenizer.ggml.bos_token_id")
    return ({"eos_token_id": found} if found else {}) | ({} if begin is None else {"bos_token_id": begin})


def _refuse_other_files(keys: ConfigFile) -> None:
    """Raise ConfigError unless the file contains one whole model."""
    if keys.text_or_none("general.type") not in (None, "model"):
        raise keys.error("general.type", "'model'")
    if keys.value("split.count") not in (None, 0, 1):
        raise keys.error("split.count", "1: join the parts first (llama-gguf-split --merge)")


def _refuse_unread(architecture: str, keys: ConfigFile) -> None:
    """Raise ConfigError for the first key of the architecture that was not read and may have an effect."""
    for key in keys.unread():
        section, _, rest = key.partition(".")
        if section == architecture and rest not in _HARMLESS and keys.values[key] not in _NEUTRAL:
            raise keys.error(key, "no such key: its effect is unknown")
