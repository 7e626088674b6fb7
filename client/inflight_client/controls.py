"""Options that are sampling controls.

Written by scripts/write_configs from inflight/core/request/sampling_config.py: change that.
"""

from __future__ import annotations

CONTROLS: dict[str, tuple[str, str, str, int, str]] = {
    "beam_width": (
        "beam_width",
        "beam_width",
        "int32",
        0,
        "number of beams of a beam search; 1: no beam search",
    ),
    "num_return_sequences": (
        "num_return_sequences",
        "num_return_sequences",
        "int32",
        0,
        "",
    ),
    "temperature": (
        "temperature",
        "temperature",
        "float32",
        0,
        "number by which the logits are divided; 0: greedy decoding; 1 by default",
    ),
    "top_n_sigma": (
        "top_n_sigma",
        "top_n_sigma",
        "float32",
        0,
        "keep tokens whose logit is at most this many standard deviations below the highest logit; 0: keep all tokens",
    ),
    "top_k": (
        "top_k",
        "runtime_top_k",
        "int32",
        0,
        "number of likeliest tokens to keep; 0: keep all tokens",
    ),
    "top_p": (
        "top_p",
        "runtime_top_p",
        "float32",
        0,
        "keep the likeliest tokens, in order, until their total probability reaches this number in (0, 1]; <= 0: unset",
    ),
    "top_p_min": (
        "top_p_min",
        "runtime_top_p_min",
        "float32",
        0,
        "",
    ),
    "top_p_decay": (
        "top_p_decay",
        "runtime_top_p_decay",
        "float32",
        0,
        "",
    ),
    "top_p_reset_id": (
        "top_p_reset_ids",
        "runtime_top_p_reset_ids",
        "int32",
        0,
        "",
    ),
    "min_p": (
        "min_p",
        "min_p",
        "float32",
        0,
        "keep tokens whose probability is at least this number times the largest probability; 0: keep all tokens",
    ),
    "seed": (
        "seed",
        "random_seed",
        "uint64",
        0,
        "seed of the random numbers; identical requests with the same seed get the same tokens; 0 by default",
    ),
    "allowed_token_ids": (
        "allowed_token_ids",
        "allowed_token_ids",
        "int32",
        1,
        "",
    ),
    "repetition_penalty": (
        "repetition_penalty",
        "repetition_penalty",
        "float32",
        0,
        "number for tokens that the prompt or the output already has; their positive logits are divided by it, and their negative logits are multiplied by it; 1: no penalty",
    ),
    "presence_penalty": (
        "presence_penalty",
        "presence_penalty",
        "float32",
        0,
        "number subtracted once from the logit of each token that the prompt or the output already has; 0: no penalty",
    ),
    "frequency_penalty": (
        "frequency_penalty",
        "frequency_penalty",
        "float32",
        0,
        "number subtracted from a token's logit for each occurrence of the token in the prompt and in the output so far; 0: no penalty",
    ),
    "min_length": (
        "min_length",
        "min_length",
        "int32",
        0,
        "number of tokens that must be generated before an end id can be generated; 0 by default",
    ),
    "no_repeat_ngram_size": (
        "no_repeat_ngram_size",
        "no_repeat_ngram_size",
        "int32",
        0,
        "length n of n-grams; an n-gram that the prompt or the output already has is not generated again; 0 or 2**30: off",
    ),
    "length_penalty": (
        "length_penalty",
        "len_penalty",
        "float32",
        0,
        "a beam's length is raised to this power, and the beam's score is its log probability divided by the result; 0 by default",
    ),
    "early_stopping": (
        "early_stopping",
        "early_stopping",
        "int32",
        0,
        "",
    ),
    "beam_search_diversity_rate": (
        "beam_search_diversity_rate",
        "beam_search_diversity_rate",
        "float32",
        0,
        "",
    ),
}
"""For each option: its tensor in text models and in id models, type, dimensions and help."""

ENDING_CONTROLS = ["min_length"]
"""Options that end the answer."""

ALIASES = {"min_tokens": "min_length", "len_penalty": "length_penalty"}
"""Further names of options."""
