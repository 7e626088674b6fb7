"""A JSON file of a checkpoint, read key by key; errors name file, key, what came and what was expected.

A checkpoint's config.json holds dozens of keys that say nothing about what is computed: where it comes from, how
it was trained, how somebody generates with it. They are listed here. A key that is neither read by the model's
family nor listed may change what is computed, so a checkpoint that has one is not loaded, unless the value is one
that means nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from inflight.core.request.sampling_config import CONTROLS
from inflight.errors import ConfigError

_ORIGIN = """
    _name_or_path name_or_path _commit_hash transformers_version transformers.js_config auto_map
    tokenizer_class processor_class is_llama_config unsloth_fixed unsloth_version model_name
"""
_LABELS = "id2label label2id num_labels _num_labels problem_type finetuning_task prefix task_specific_params"
_TRAINING = """
    attention_dropout activation_dropout hidden_dropout dropout attn_pdrop embd_pdrop resid_pdrop
    attention_probs_dropout_prob hidden_dropout_prob classifier_dropout initializer_range init_std layerdrop
    gradient_checkpointing neftune_noise_alpha output_router_logits router_aux_loss_coef router_jitter_noise
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout aux_loss_alpha
    seq_aux
"""
# Which of several ways to the same numbers is taken, and what a forward pass in Python gives back.
_EXECUTION = """
    pretraining_tp chunk_size_feed_forward reorder_and_upcast_attn use_cache torchscript use_bfloat16
    tf_legacy_loss attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    use_flash_attn use_flash_attention_2 experts_implementation output_attentions output_hidden_states output_past
    output_scores output_logits return_dict return_dict_in_generate is_decoder predict_special_tokens n_special
    ep_size
"""
# How long sequences were in training or in a tokenizer; the family's own key says how long they can be.
_LENGTHS = "n_ctx initial_context_length max_sequence_length max_seq_len seq_length seq_len model_max_length"
# Beside what goes by the name of a sampling control.
_GENERATION = """
    max_length max_new_tokens min_new_tokens max_time stop_strings do_sample num_beams num_beam_groups
    penalty_alpha dola_layers top_h typical_p epsilon_cutoff eta_cutoff diversity_penalty
    encoder_repetition_penalty encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits
    constraints remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    forced_decoder_ids sequence_bias token_healing guidance_scale low_memory watermarking_config
    cache_implementation cache_config prompt_lookup_num_tokens max_matching_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold
"""
HARMLESS = frozenset(
    [*" ".join((_ORIGIN, _LABELS, _TRAINING, _EXECUTION, _LENGTHS, _GENERATION)).split(), *CONTROLS]
)  # besides every `…_token_id`

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "is_causal": (True,),
    "rotary_pct": (None, 1),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    # Counts of parts such as experts. A family that does not read the key has none, so 0 means nothing.
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "moe_intermediate_size": (None, 0),
    "num_nextn_predict_layers": (None, 0),
}

_POSITIVE_INT, _POSITIVE = "an integer >= 1", "a number > 0"
_T = TypeVar("_T")
_NOTHING = (None, False, "", [], {})


class ConfigFile:
    """Typed access to the keys of one JSON object. A key that is null counts as absent.

    It remembers which keys were asked for, so that whoever has read all that is understood can look at the rest.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], section: str = "") -> None:
        """Wrap `values`, found in `path` under the key `section` ("" for the whole file)."""
        self.path = path
        self.values = values
        self._section = section
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> ConfigFile:
        """Read `path`. Raises ConfigError if it is missing or no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a Hugging Face checkpoint folder has one") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        return cls(path, values)

    def error(self, key: str, expected: str) -> ConfigError:
        """The error for a value that cannot be used."""
        name = f"{self._section}.{key}" if self._section else key
        if key not in self.values:
            return ConfigError(f"{self.path}: key {name!r} is missing, expected {expected}")
        return ConfigError(f"{self.path}: key {name!r} is {self.values[key]!r}, expected {expected}")

    def value(self, key: str) -> Any:
        """The value of `key`, of any type; None if absent. The key counts as read from now on."""
        self._read.add(key)
        return self.values.get(key)

    def unread(self) -> list[str]:
        """The keys that are there and that nobody has asked for."""
        return [key for key in self.values if key not in self._read]

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.value(key) is not None

    def int_or_none(self, key: str) -> int | None:
        """An integer of at least 1, None if absent."""
        return self._checked(key, lambda value: type(value) is int and value >= 1, _POSITIVE_INT)

    def positive_int(self, key: str) -> int:
        """An integer of at least 1."""
        return self._required(key, self.int_or_none(key), _POSITIVE_INT)

    def number_or_none(self, key: str) -> float | None:
        """A positive number, None if absent."""
        value = self._checked(
            key, lambda value: type(value) in (int, float) and 0 < value < float("inf"), _POSITIVE
        )
        return None if value is None else float(value)

    def number(self, key: str) -> float:
        """A positive number."""
        return self._required(key, self.number_or_none(key), _POSITIVE)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._checked(key, lambda value: type(value) is bool, "true or false")
        return default if value is None else value

    def text_or_none(self, key: str) -> str | None:
        """A string, None if absent."""
        return self._checked(key, lambda value: isinstance(value, str), "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        return tuple(self._checked(key, lambda value: _is_list_of(value, str), "a list of strings") or ())

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(type(item) in (int, float) and item > 0 for item in value)

        expected = "a list of numbers > 0"
        found = self._required(key, self._checked(key, is_valid, expected), expected)
        return tuple(float(item) for item in found)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """A token id or a list of token ids, without those below 0, which no token has; None if absent."""
        value = self._checked(
            key, lambda value: type(value) is int or _is_list_of(value, int), "a token id or a list of them"
        )
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        return tuple(item for item in dict.fromkeys(ids) if item >= 0)

    def _checked(self, key: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """The value of `key`; None if absent. Raises ConfigError if it is not valid."""
        value = self.value(key)
        if value is not None and not is_valid(value):
            raise self.error(key, expected)
        return value

    def _required(self, key: str, value: _T | None, expected: str) -> _T:
        if value is None:
            raise self.error(key, expected)
        return value

    def child(self, key: str) -> ConfigFile:
        """The object under `key`."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object")
        return ConfigFile(self.path, value, key)


def refuse_unread(config: ConfigFile, neutral: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Raise ConfigError for the first key that nobody has read and that may change what is computed.

    null, false, "" and empty lists and objects mean nothing, unless `neutral`, or the list here, has other values
    of the key that do.
    """
    means_nothing = {**_NEUTRAL, **(neutral or {})}
    for key in config.unread():
        if key in HARMLESS or key.endswith("_token_id"):
            continue
        if _is_one_of(config.values[key], means_nothing.get(key, _NOTHING)):
            continue
        raise config.error(
            key,
            "no such key: it is not known here and may change what is computed (if it does not, remove it)",
        )


def _is_list_of(value: Any, kind: type) -> bool:
    """Whether a value is a list of such items; true is no integer."""
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """Whether a value is allowed; true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
