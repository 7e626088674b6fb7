"""Neutral keys of a config.json, which have no effect on the computation, and the check that every other key
was read.

Most keys of a checkpoint's config.json do not affect the computation: they concern the model's origin, its
training, or how text is generated with it. This module lists the neutral keys of all families; `Family.neutral`
has the keys that are neutral in one family only. Any other key that the family does not read may have an effect,
so a checkpoint with such a key is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from inflight.checkpoint_config import ConfigFile
from inflight.core.request.sampling_config import CONTROLS


class AnyValue(Enum):
    """A type with the one value `ANY`, so that type checkers can tell it from a tuple of values."""

    ANY = "any value"


ANY: Final = AnyValue.ANY
"""In `NeutralKeys`: the key has no effect, whatever its value is."""
NeutralKeys = Mapping[str, tuple[Any, ...] | AnyValue]
"""Keys, with the values that have no effect if the family does not read the key."""

_ORIGIN = """
    _name_or_path name_or_path _commit_hash transformers_version transformers.js_config auto_map
    tokenizer_class processor_class is_llama_config is_composition unsloth_fixed unsloth_version model_name
"""
_LABELS = "id2label label2id num_labels _num_labels problem_type finetuning_task prefix task_specific_params"
_TRAINING = """
    attention_dropout activation_dropout hidden_dropout dropout attn_pdrop embd_pdrop resid_pdrop
    attention_probs_dropout_prob hidden_dropout_prob classifier_dropout embedding_dropout residual_dropout
    initializer_range init_std layerdrop gradient_checkpointing neftune_noise_alpha output_router_logits
    router_aux_loss_coef router_jitter_noise summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout aux_loss_alpha seq_aux
"""
# The choice among equivalent implementations, and the outputs of a forward pass in Python.
_EXECUTION = """
    pretraining_tp chunk_size_feed_forward reorder_and_upcast_attn use_cache torchscript use_bfloat16
    tf_legacy_loss attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    use_flash_attn use_flash_attention_2 experts_implementation output_attentions output_hidden_states output_past
    output_scores output_logits return_dict return_dict_in_generate is_decoder predict_special_tokens n_special
    ep_size
"""
# Length of sequences in training or in a tokenizer; the family's own key gives the maximum length.
_LENGTHS = "n_ctx initial_context_length max_sequence_length max_seq_len seq_length seq_len model_max_length"
# Keys of the vision part that text_config of SmolVLM has too.
_VISION = "perceiver_config pixel_shuffle_factor"
# Keys of generation; keys with the name of a sampling control are neutral too.
_GENERATION = """
    max_length max_new_tokens min_new_tokens max_time stop_strings do_sample num_beams num_beam_groups
    penalty_alpha dola_layers top_h typical_p epsilon_cutoff eta_cutoff diversity_penalty
    encoder_repetition_penalty encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits
    constraints remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    forced_decoder_ids sequence_bias token_healing guidance_scale low_memory watermarking_config
    cache_implementation cache_config prompt_lookup_num_tokens max_matching_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold
"""
_LISTS = _ORIGIN, _LABELS, _TRAINING, _EXECUTION, _LENGTHS, _VISION, _GENERATION
# The neutral keys of every family; each `…_token_id` is neutral too.
_NEUTRAL: NeutralKeys = {
    **dict.fromkeys(" ".join(_LISTS).split(), ANY),
    **dict.fromkeys(CONTROLS, ANY),
    "is_causal": (True,),
    "rotary_pct": (None, 1),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    # Counts of parts such as experts. A family that does not read the key has no such parts, so only 0 is neutral.
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "moe_intermediate_size": (None, 0),
    "num_nextn_predict_layers": (None, 0),
}

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def refuse_unread(config: ConfigFile, neutral: NeutralKeys | None = None) -> None:
    """Raise ConfigError for the first key that was not read and may have an effect.

    `neutral` has the neutral keys of this file or section, and takes precedence over the list of all families. For
    keys in neither, null, false, "" and empty lists and objects are neutral.
    """
    means_nothing = {**_NEUTRAL, **(neutral or {})}
    for key in config.unread():
        if key.endswith("_token_id") or _is_one_of(config.values[key], means_nothing.get(key, _NOTHING)):
            continue
        raise config.error(
            key,
            "no such key: its effect is unknown (if it has none, remove it)",
        )


def _is_one_of(value: Any, allowed: tuple[Any, ...] | AnyValue) -> bool:
    """Return whether a value is allowed; true does not equal 1."""
    if allowed is ANY:
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
