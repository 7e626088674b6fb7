"""Which families there are, and the reading of a checkpoint folder's configuration.

A new family is a file in `families/` and a line in `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from inflight.errors import ConfigError
from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family
from inflight.models.families.gpt2 import GPT2
from inflight.models.families.llama import LLAMA
from inflight.models.families.mistral import MISTRAL
from inflight.models.families.qwen2 import QWEN2
from inflight.models.families.qwen3 import QWEN3
from inflight.models.weight_names import WeightNames

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint whose configuration has been read and whose weights have not.

    Attributes:
        folder: The checkpoint.
        decoder: What the forward pass depends on.
        names: What the tensors are called.
    """

    folder: Path
    decoder: DecoderConfig
    names: WeightNames


def read_model_description(folder: Path | str) -> ModelDescription:
    """Read config.json and, if it is there, generation_config.json of a checkpoint folder.

    Raises:
        ConfigError: The folder, a file or a key is missing, has the wrong type, or asks for something that is not
            supported; the message names file, key, what came and what was expected.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder, expected a Hugging Face checkpoint folder")
    config = ConfigFile.load(folder / "config.json")
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            raise config.error(key, "no such key: quantized checkpoints are not supported")
    family = _family(config)
    decoder = replace(family.read_config(config), eos_token_ids=_eos_token_ids(config), dtype=_dtype(config))
    _check(config, decoder)
    return ModelDescription(folder, decoder, family.names)


def _family(config: ConfigFile) -> Family:
    architectures = config.texts("architectures")
    key = "architectures" if architectures else "model_type"
    for family in FAMILIES:
        if family.architecture in architectures:
            return family
        if not architectures and family.model_type == config.text_or_none("model_type"):
            return family
    known = (family.architecture if architectures else family.model_type for family in FAMILIES)
    raise config.error(key, f"one of {', '.join(known)}")


def _eos_token_ids(config: ConfigFile) -> tuple[int, ...]:
    path = config.path.with_name("generation_config.json")
    from_generation = ConfigFile.load(path).token_ids("eos_token_id") if path.exists() else ()
    return from_generation or config.token_ids("eos_token_id")


def _dtype(config: ConfigFile) -> str | None:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text_or_none(key)
    if name is not None and name not in DTYPES:
        raise config.error(key, f"one of {', '.join(DTYPES)}")
    return name


def _check(config: ConfigFile, decoder: DecoderConfig) -> None:
    if decoder.num_heads % decoder.num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {decoder.num_heads}")
    if decoder.query_size != decoder.hidden_size and not config.has("head_dim") and not decoder.qk_norm:
        raise ConfigError(
            f"{config.path}: hidden size {decoder.hidden_size} is not a multiple of {decoder.num_heads} heads"
        )
    if decoder.rope is not None and decoder.head_dim % 2:
        raise ConfigError(
            f"{config.path}: heads are {decoder.head_dim} wide, rotary positions need an even width"
        )
