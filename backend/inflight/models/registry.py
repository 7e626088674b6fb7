"""Reads the configuration of a checkpoint folder, by the family that it names."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.errors import ConfigError
from inflight.file_names import native
from inflight.models.config_file import ConfigFile, refuse_unread
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families import FAMILIES, Family, WeightNames

_logger = logging.getLogger(__name__)

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
    folder = Path(native(folder))
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder, expected a Hugging Face checkpoint folder")
    config = ConfigFile.load(folder / "config.json")
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.has(key):
            raise config.error(key, "no such key: quantized checkpoints are not supported")
    family = _family(config)
    decoder = replace(family.read_config(config), eos_token_ids=_eos_token_ids(config), dtype=_dtype(config))
    refuse_unread(config, family.neutral)
    _check(config, decoder)
    _note_own_code(config, family)
    return ModelDescription(folder, decoder, family.names)


def _family(config: ConfigFile) -> Family:
    """The family of `architectures`, with which `model_type` has to agree, or of `model_type` alone."""
    architectures, model_type = config.texts("architectures"), config.text_or_none("model_type")
    if not architectures:
        for family in FAMILIES:
            if family.model_type == model_type:
                return family
        raise config.error("model_type", f"one of {', '.join(family.model_type for family in FAMILIES)}")
    for family in FAMILIES:
        if family.architecture in architectures:
            if model_type not in (None, family.model_type):
                raise config.error(
                    "model_type", f"{family.model_type!r}, as architectures has {family.architecture}"
                )
            return family
    raise config.error("architectures", f"one of {', '.join(family.architecture for family in FAMILIES)}")


def _eos_token_ids(config: ConfigFile) -> tuple[int, ...]:
    of_config = config.token_ids("eos_token_id")
    path = config.path.with_name("generation_config.json")
    of_generation = ConfigFile.load(path).token_ids("eos_token_id") if path.exists() else None
    return (of_config if of_generation is None else of_generation) or ()


def _note_own_code(config: ConfigFile, family: Family) -> None:
    """Say so if a checkpoint brings code of its own, which transformers would not run unasked either."""
    own = config.values.get("auto_map")
    classes = [name for name in own if name.startswith("AutoModel")] if isinstance(own, dict) else []
    if classes:
        _logger.warning(
            "%s: auto_map names code of the checkpoint's own for %s, which is not run: what is computed is %s",
            config.path,
            ", ".join(sorted(classes)),
            family.architecture,
        )


def _dtype(config: ConfigFile) -> str | None:
    old, new = config.text_or_none("torch_dtype"), config.text_or_none("dtype")
    key, name = ("torch_dtype", old) if new is None else ("dtype", new)
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
