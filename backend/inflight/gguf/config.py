"""Convert the keys of a GGUF file to the keys of config.json."""

from __future__ import annotations

from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.gguf.architectures import find_architecture
from inflight.gguf.families import OWN_HEADS, PARTLY_ROTATED, READERS
from inflight.gguf.header import FLOAT_TYPES, GgufHeader
from inflight.gguf.keys import ArchitectureKeys
from inflight.gguf.rope import read_scaling
from inflight.json_values import Json

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_END_TOKENS = ("eos", "eot", "eom")
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "rope.dimension_sections", "n_deepstack_layers")
"""Ends of keys without effect on texts. Texts have one position for each token, and no features of pictures."""
_NEUTRAL: tuple[Any, ...] = (None, 0, 0.0, False, "", [])


def make_config(header: GgufHeader, keys: ConfigFile) -> Json:
    """Return the content of config.json. `keys` are the GGUF file's keys.

    Raises:
        ConfigError: A key or tensor is missing or has an unsupported value, or the architecture has an
            unknown key that may have an effect. The message has the file, the key, its value and the
            expected value.
    """
    architecture = find_architecture(header)
    _refuse_other_files(keys)
    section = ArchitectureKeys(header, keys)
    read = READERS.get(header.architecture)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "tie_word_embeddings": _HEAD not in header.tensors,
        **_common(section),
        **({} if header.architecture in OWN_HEADS else _heads(section)),
        **({} if read is None else read(section)),
        **_token_ids(keys),
    }
    types = {tensor.type for tensor in header.tensors.values()}
    if quantized := sorted(types.difference(FLOAT_TYPES)):
        config["quantization_config"] = {"quant_method": "gguf", "types": quantized}
    _refuse_unread(header.architecture, keys)
    return config


def _common(section: ArchitectureKeys) -> Json:
    """Return the keys that all architectures have."""
    header, hidden_size = section.header, section.size("embedding_length")
    num_heads = section.size("attention.head_count")
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{header.path}: tensor {_EMBEDDING!r} is missing or not a matrix")
    max_positions = section.size("context_length")
    config: Json = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": section.largest("feed_forward_length"),
        "num_hidden_layers": section.num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": max_positions,
        "rope_theta": section.number_or_none("rope.freq_base") or 10000.0,
    }
    has_own_count = section.keys.has(section.name("attention.head_count_kv"))
    config["num_key_value_heads"] = section.largest("attention.head_count_kv") if has_own_count else num_heads
    if not section.keys.has(section.name("attention.layer_norm_epsilon")):
        config["rms_norm_eps"] = section.number("attention.layer_norm_rms_epsilon")
    if scaling := read_scaling(section):
        config["rope_scaling"] = scaling
    return config


def _heads(section: ArchitectureKeys) -> Json:
    """Return the keys about the width of heads, and of their rotated part, if it is not the default."""
    hidden_size, num_heads = section.size("embedding_length"), section.size("attention.head_count")
    rotated = section.size_or_none("rope.dimension_count")
    key_length = section.size_or_none("attention.key_length")
    of_model = rotated if section.header.architecture == "llama" and rotated else hidden_size // num_heads
    head_dim = key_length or of_model
    if section.size_or_none("attention.value_length") not in (None, head_dim):
        raise section.keys.error(section.name("attention.value_length"), f"the key length, {head_dim}")
    config: Json = {}
    if head_dim * num_heads != hidden_size or key_length:
        config["head_dim"] = head_dim
    if rotated not in (None, head_dim):
        if section.header.architecture not in PARTLY_ROTATED:
            raise section.keys.error(section.name("rope.dimension_count"), f"the head size, {head_dim}")
        config["partial_rotary_factor"] = rotated / head_dim
    return config


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
    """Raise ConfigError unless the file is a model's."""
    if keys.text_or_none("general.type") not in (None, "model"):
        raise keys.error("general.type", "'model'")


def _refuse_unread(architecture: str, keys: ConfigFile) -> None:
    """Raise ConfigError for the first key of the architecture that was not read and may have an effect."""
    for key in keys.unread():
        section, _, rest = key.partition(".")
        if section == architecture and rest not in _HARMLESS and keys.values[key] not in _NEUTRAL:
            raise keys.error(key, "no such key: its effect is unknown")
