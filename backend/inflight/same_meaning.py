"""Names of a request's fields that mean the same in OpenAI's protocol, Triton's tensors and other servers.

For errors about unknown names.
"""

from __future__ import annotations

from collections.abc import Collection

from inflight.core.request.sampling_config import CONTROLS

_GROUPS = (
    (
        *("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "n_predict"),
        *("request_output_len", "output_len", "sampling_param_max_tokens"),
    ),
    ("n", "num_return_sequences", "num_sequences", "sampling_param_best_of"),
    ("prompt", "text", "text_input", "input_ids"),
    # Triton's models also have an input `stop`, which ends a request.
    ("stop_words", "stop_words_list", "stop", "stop_sequences", "stop_strings", "sampling_param_stop"),
    ("bad_words", "bad_words_list"),
    ("stop_token_ids", "end_ids", "end_id"),
    ("use_beam_search", "beam_width", "num_beams"),
    ("stream", "streaming"),
    ("logprobs", "return_log_probs"),
    ("top_logprobs", "logprobs", "num_top_log_probs"),
    ("prompt_logprobs", "return_prompt_log_probs"),
    ("logit_bias", "logit_bias_ids", "embedding_bias", "embedding_bias_words", "embedding_bias_weights"),
    ("structured_outputs", "response_format", "guided_decoding_guide_type", "guided_decoding_guide"),
    ("priority", "request_priority"),
    ("cache_salt", "cache_salt_id"),
    *(
        (each.body.name, each.tensor, *each.aliases, *each.text_names)
        for each in CONTROLS.values()
        if each.body is not None
    ),
)


def same_meaning(name: str, known: Collection[str]) -> str | None:
    """Return the first of the `known` names that means the same as `name`; None if there is none."""
    return next((other for names in _GROUPS if name in names for other in names if other in known), None)
