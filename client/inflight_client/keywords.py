"""The keywords of `generate` and `stream`, and the tensors that they set. Standard library only.

Owns the names: the server's text models and id models have different names for the same things, and a text model
lacks some. `options.py` converts values.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight_client.controls import CONTROLS, ENDING_CONTROLS


@dataclass(frozen=True)
class Option:
    """A keyword and its tensor.

    Attributes:
        text_name: The tensor's name in a text model; "" if it has none.
        ids_name: Its name in an id model.
        dtype: The name of its type in numpy; object for text.
        ndim: Number of dimensions of its value; 0 for a number.
        outputs: The outputs that it requests, if it is set and not 0 or False.
        help: Its description on the command line; "" if it is not an option there, or has another name.
    """

    text_name: str
    ids_name: str
    dtype: str
    ndim: int = 0
    outputs: tuple[str, ...] = ()
    help: str = ""


def _number(name: str, dtype: str, ids_name: str = "", help: str = "") -> Option:
    return Option(name, ids_name or name, dtype, help=help)


def _wanted(name: str, *outputs: str, dtype: str = "bool") -> Option:
    return Option(name, name, dtype, outputs=outputs)


PERF_OUTPUTS = (
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_missed_blocks",
    "kv_cache_alloc_total_blocks",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "acceptance_rate",
)

_INT, _FLOAT, _UINT64, _TEXT = "int32", "float32", "uint64", "object"
_CONTROLS = {
    name: Option(text_name, ids_name, dtype, ndim, help=help)
    for name, (text_name, ids_name, dtype, ndim, help) in CONTROLS.items()
}
"""The server's sampling controls."""
CHOOSING = {
    **{name: option for name, option in _CONTROLS.items() if name not in ENDING_CONTROLS},
    "prompt_lookup_num_tokens": _number("prompt_lookup_num_tokens", _INT),
    "draft_input_ids": Option("", "draft_input_ids", _INT, ndim=1),
    "draft_logits": Option("", "draft_logits", _FLOAT, ndim=2),
    "draft_acceptance_threshold": Option("", "draft_acceptance_threshold", _FLOAT),
    "embedding_bias": Option("", "embedding_bias", _FLOAT, ndim=1),
    "logits_post_processor_name": _number(
        "logits_post_processor_name",
        _TEXT,
        help="the logits post-processor to apply, one of those that the server was started with",
    ),
}
"""Options of sampling."""
ENDING = {
    "end_id": _number("end_id", _INT, help="token id that ends the answer; -1 for none"),
    "pad_id": _number("pad_id", _INT),
    **{name: _CONTROLS[name] for name in ENDING_CONTROLS},
}
"""Options that end the answer."""
QUEUEING = {
    "priority": _number("priority", _FLOAT, help="0 to 1, 0.5 by default; higher ones start first"),
    "client_id": _number("client_id", _UINT64, help="clients of one priority take turns"),
    "allotted_time_ms": _number(
        "allotted_time_ms", _INT, help="end with TIMED_OUT after this many milliseconds"
    ),
    "cache_salt_id": _number(
        "cache_salt_id", _UINT64, help="reuse cached prompts only of requests with the same number"
    ),
    "retention_decode_priority": _number("retention_decode_priority", _INT),
    "retention_decode_duration_ms": _number("retention_decode_duration_ms", _INT),
}
"""Options of scheduling."""
_PROMPT = {"prompt_table_extra_ids": Option("", "prompt_table_extra_ids", _UINT64, ndim=1)}
_WANTED = {
    "return_log_probs": _wanted("return_log_probs", "output_log_probs", "cum_log_probs"),
    "num_top_log_probs": _wanted("num_top_log_probs", "top_log_prob_ids", "top_log_probs", dtype=_INT),
    "return_prompt_log_probs": _wanted("return_prompt_log_probs", "prompt_log_probs"),
    "return_context_logits": _wanted("return_context_logits", "context_logits"),
    "return_generation_logits": _wanted("return_generation_logits", "generation_logits"),
    "return_perf_metrics": _wanted("return_perf_metrics", *PERF_OUTPUTS),
    "return_receipt": _wanted("return_receipt", "receipt"),
}
OPTIONS = {
    "max_tokens": _number("max_tokens", _INT, "request_output_len"),
    **CHOOSING,
    **ENDING,
    **QUEUEING,
    **_PROMPT,
    **_WANTED,
}
WORDS = ("stop_words", "bad_words")
ADDITIONAL = "additional_outputs"
CONTEXT_OUTPUT, GENERATION_OUTPUT = "context_", "generation_"
"""The prefixes of the names of additional outputs."""
RETENTION = "retention_token_ranges"
GUIDE = "guide"
GUIDED = "guided_decoding_guide"
LOGIT_BIAS = "logit_bias"
LORA, LORA_WEIGHTS = "lora", "lora_weights"
TABLE, TABLE_TENSOR = "prompt_table", "prompt_embedding_table"
NAMES = (*OPTIONS, *WORDS, RETENTION, LOGIT_BIAS, ADDITIONAL, GUIDE, LORA, LORA_WEIGHTS, TABLE)

_OPTION_OF_TENSOR = {
    **{name: option for option, of in OPTIONS.items() for name in (of.ids_name, of.text_name)},
    **{f"{word}_list": word for word in WORDS},
    **{
        f"retention_token_range_{part}": RETENTION
        for part in ("starts", "ends", "priorities", "durations_ms")
    },
    **{f"{LOGIT_BIAS}_{part}": LOGIT_BIAS for part in ("ids", "values")},
    **{f"embedding_bias_{part}": "embedding_bias" for part in ("words", "weights")},
    **dict.fromkeys((GUIDED, f"{GUIDED}_type"), GUIDE),
    **dict.fromkeys(("lora_name", "lora_task_id"), LORA),
    "lora_config": LORA_WEIGHTS,
    **dict.fromkeys((TABLE_TENSOR, "prompt_vocab_size"), TABLE),
}


def shown_name(tensor: str) -> str:
    """Return the option that sets a tensor; the tensor's own name if there is none, such as the prompt's."""
    return _OPTION_OF_TENSOR.get(tensor, tensor)
