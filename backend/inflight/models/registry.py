"""Reads the configuration of a checkpoint folder, according to its family."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.checkpoint_config import (
    MAX_COUNT,
    ConfigFile,
    eos_token_ids,
    read_config_file,
    stated_dtype,
)
from inflight.errors import ConfigError
from inflight.json_values import is_object
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families import FAMILIES, Family, NoMap, WeightNames, names_in_multimodal
from inflight.models.neutral_keys import refuse_unread
from inflight.models.quantization import Quantization, read_quantization
from inflight.models.rope import section_key
from inflight.models.rope_config import LongRopeScaling
from inflight.models.unserved import refuse_unserved
from inflight.multimodal import Multimodal, bidirectional_layers, num_added_layers
from inflight.pooling import CLASSIFICATION_HEAD, classifies, has_pooling

_logger = logging.getLogger(__name__)
_COUNTS = ("num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_WITHOUT_PROJECTION = ("Model", "ForSequenceClassification")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint whose configuration has been read, but not its weights.

    Attributes:
        folder: Folder of the checkpoint.
        decoder: The architecture.
        names: Names of the tensors.
        quantization: Quantization of the weights; None if config.json names none; the names of the
            tensors may show one then.
        multimodal: Class of the multimodal model of which this is the text part; None for a text model.
        eagle: The EAGLE-3 head of `decoder.eagle`, described as a model of one layer; None if there is none.
        gemma4_head: The head of `decoder.gemma4_head`, described as a model; None if there is none.
    """

    folder: Path
    decoder: DecoderConfig
    names: WeightNames
    quantization: Quantization | None = None
    multimodal: Multimodal | None = None
    eagle: ModelDescription | None = None
    gemma4_head: ModelDescription | None = None


def check_draft_head(model: ModelDescription) -> None:
    """Raise ConfigError if the checkpoint's family has no draft head."""
    if model.names.draft_head is None:
        raise ConfigError(
            f"speculative_decoding_mode is mtp, expected a family with a draft head (tensors mtp.* or those of a "
            f"layer after the last one), got {model.folder}"
        )


class UnknownFamily(ConfigError):
    """A checkpoint of a family that this package does not implement, or with a feature that the family's map
    lacks.

    Attributes:
        family: The family's name in config.json.
        known: The names that would be known instead; empty if the name is known, but a feature is not.
    """

    def __init__(self, error: ConfigError, family: str, known: Sequence[str] = ()) -> None:
        super().__init__(str(error))
        self.family = family
        self.known = known


def read_model_description(folder: Path | str) -> ModelDescription:
    """Read config.json of a checkpoint folder, and generation_config.json if present.

    For a multimodal model, the text part is described. A warning is logged if the checkpoint has its own code.

    Raises:
        UnknownFamily: The family is not in `FAMILIES`.
        ConfigError: The folder, a file or a key is missing, has the wrong type, or requires an unsupported
            feature; the message has the file, the key, its value and the expected values.
    """
    config = read_config_file(folder)
    description = describe(config)
    _note_own_code(config, _family(config.text_part()))
    return description


def describe(config: ConfigFile) -> ModelDescription:
    """Describe the model of a config.json, with the errors of `read_model_description`."""
    refuse_unserved(config)
    config = config.text_part()
    family = _family(config)
    _check_counts(config)
    quantization = read_quantization(config, family.quantizations)
    try:
        decoder = family.read_config(config.with_values({"model_type": family.model_type}))
    except NoMap as error:
        raise UnknownFamily(error, f"{family.architecture} with {error.key}") from error
    decoder = replace(
        decoder,
        num_added_layers=num_added_layers(config.whole.values),
        bidirectional_layers=bidirectional_layers(config.whole.values, decoder.sliding_windows),
        eos_token_ids=eos_token_ids(config),
        dtype=stated_dtype(config),
    )
    refuse_unread(config, family.neutral)
    _check(config, decoder)
    is_classifier = any(map(classifies, config.texts("architectures")))
    if is_classifier or has_pooling(config.path.parent):
        # The output projection is not used, and often not stored.
        decoder = replace(decoder, tied_embeddings=True)
    names = family.names
    if is_classifier:  # `inflight.classification` reads the head
        names = replace(names, ignored=(*names.ignored, CLASSIFICATION_HEAD))
    if names.recurrent is not None and decoder.recurrent is not None:
        counts = tuple(count for _, count in names.recurrent.product)
        decoder = replace(
            decoder, recurrent_modules=counts, recurrent_by_key_head=names.recurrent.by_key_head
        )
    if family.read_norms is not None:
        names = replace(names, norms=family.read_norms(config))
    if config.multimodal is not None:
        names = names_in_multimodal(names)
    return ModelDescription(config.path.parent, decoder, names, quantization, config.multimodal)


def _family(config: ConfigFile) -> Family:
    """Return the family given by `architectures`, which `model_type` must match, or by `model_type` alone.

    An unknown `model_type` means an unknown family, whatever `architectures` says, because some types of
    transformers use another family's class.
    """
    architectures = [bare_decoder(name) or name for name in config.texts("architectures")]
    model_type = config.text_or_none("model_type")
    if not architectures:
        for family in FAMILIES:
            if model_type in (family.model_type, *family.other_types):
                return family
        types = [family.model_type for family in FAMILIES]
        error = config.error("model_type", f"one of {', '.join(types)}")
        raise UnknownFamily(error, model_type or "a model without model_type", types)
    for family in FAMILIES:
        if family.architecture in architectures:
            if model_type in (None, family.model_type, *family.other_types):
                return family
            error = config.error(
                "model_type", f"{family.model_type!r}, as architectures has {family.architecture}"
            )
            if any(other.model_type == model_type for other in FAMILIES):
                raise error
            raise UnknownFamily(error, f"model_type {model_type}")
    names = [family.architecture for family in FAMILIES]
    error = config.error("architectures", f"one of {', '.join(names)}")
    raise UnknownFamily(error, ", ".join(architectures), names)


def bare_decoder(architecture: str) -> str | None:
    """Return the class of a family whose decoder without output projection is `architecture`.

    Such are Qwen3Model, and Qwen3ForSequenceClassification, which has another head. None if it is not such a
    decoder.
    """
    kind = next((kind for kind in _WITHOUT_PROJECTION if architecture.endswith(kind)), None)
    if kind is None:
        return None
    whole = [architecture.removesuffix(kind) + head for head in ("ForCausalLM", "LMHeadModel")]
    return next((family.architecture for family in FAMILIES if family.architecture in whole), None)


def _check_counts(config: ConfigFile) -> None:
    """Refuse numbers of layers and heads for which a list of all of them would not fit into memory."""
    for key in _COUNTS:
        number = config.values.get(key)
        if isinstance(number, int) and number > MAX_COUNT:
            raise config.error(key, f"at most {MAX_COUNT}")


def _note_own_code(config: ConfigFile, family: Family) -> None:
    """Log that a checkpoint has its own code, which is not run; transformers does not run it by default either."""
    own = config.values.get("auto_map")
    classes = [name for name in own if name.startswith("AutoModel")] if is_object(own) else []
    if classes:
        _logger.warning(
            "%s: auto_map names the checkpoint's own code for %s, which is not run: the model is computed as %s",
            config.path,
            ", ".join(sorted(classes)),
            family.architecture,
        )


def _check(config: ConfigFile, decoder: DecoderConfig) -> None:
    if decoder.num_heads % decoder.num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {decoder.num_heads}")
    derived = decoder.head_dim == decoder.hidden_size // decoder.num_heads and not config.has("head_dim")
    if decoder.latent is None and derived and decoder.query_size != decoder.hidden_size:
        raise ConfigError(
            f"{config.path}: hidden size {decoder.hidden_size} is not a multiple of {decoder.num_heads} heads"
        )
    experts = decoder.experts
    if experts is not None and experts.num_per_token > experts.count:
        raise config.error(
            next(filter(config.has, _EXPERTS_PER_TOKEN), " or ".join(_EXPERTS_PER_TOKEN)),
            f"at most num_experts (or num_local_experts), which is {experts.count}",
        )
    for rope in dict.fromkeys(decoder.ropes):
        if rope is None:
            continue
        rotary_dim = rope.rotary_dim(decoder.rotary_head_dim)
        if rotary_dim % 2:
            raise ConfigError(
                f"{config.path}: with hidden_size {decoder.hidden_size}, num_attention_heads {decoder.num_heads}, "
                f"head_dim {decoder.head_dim} and partial_rotary_factor {rope.partial_factor:g}, {rotary_dim} "
                "dimensions of a head are rotated, expected an even number"
            )
        if isinstance(rope.scaling, LongRopeScaling):
            _check_factors(config, rope.scaling, rotary_dim // 2)


def _check_factors(config: ConfigFile, scaling: LongRopeScaling, num_pairs: int) -> None:
    """Raise ConfigError unless LongRoPE has a factor for each pair of a head's rotated dimensions."""
    key = section_key(config)
    for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
        if len(factors) != num_pairs:
            raise ConfigError(
                f"{config.path}: {name!r} of {key!r} has {len(factors)} numbers, expected {num_pairs}: one for "
                "each pair of a head's rotated dimensions"
            )
