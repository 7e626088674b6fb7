"""The table of outputs of `tensorrt_llm`, `tensorrt_llm_infer` and `ensemble`; see also `input_table`."""

from __future__ import annotations

from typing import Any

from inflight.additional_outputs import CONTEXT, GENERATION
from inflight.tensors.spec import InStream, TensorSpec, TensorTable, of_other_models

_NEW, _SO_FAR, _SAME = InStream.NEW, InStream.SO_FAR, InStream.SAME


def _output(
    name: str, dtype: str, dims: tuple[int, ...], in_stream: InStream | None, meaning: str, **more: Any
) -> TensorSpec:
    return TensorSpec(name, dtype, dims, meaning, text_names=(name,), in_stream=in_stream, **more)


def _asked(
    name: str,
    dtype: str,
    dims: tuple[int, ...],
    in_stream: InStream,
    meaning: str,
    flag: str = "",
    text_only: bool = False,
) -> TensorSpec:
    """Return an output that is requested by the input `flag`, by default return_NAME."""
    asked_by = flag or f"return_{name}"
    return _output(name, dtype, dims, in_stream, meaning, asked_by=asked_by, text_only=text_only)


def _metric(name: str, meaning: str, dtype: str = "INT32") -> TensorSpec:
    return _asked(name, dtype, (1,), _SO_FAR, meaning, "return_perf_metrics")


OUTPUTS = TensorTable(
    (
        # `ensemble` returns everything except ids and their lengths.
        TensorSpec(
            "output_ids",
            "INT32",
            (-1, -1),
            "[beams, n] token ids; in a stream, only the new ids",
            in_stream=_NEW,
        ),
        TensorSpec(
            "sequence_length",
            "INT32",
            (-1,),
            "[beams] number of each beam's ids in this response",
            in_stream=_NEW,
        ),
        _output(
            "text_output",
            "BYTES",
            (-1,),
            _NEW,
            "text of each beam; in a stream, only the new text",
            is_batched=False,
        ),
        _output(
            "finish_reason",
            "BYTES",
            (-1,),
            _SO_FAR,
            "[beams] why each beam ended: END_ID, LENGTH, …; NOT_FINISHED while it runs",
        ),
        _output(
            "batch_index", "INT32", (1,), _SAME, "index of the prompt in the batch; sent only for batches"
        ),
        _output(
            "sequence_index",
            "INT32",
            (1,),
            _SAME,
            "index of the sequence; sent only if num_return_sequences is above 1",
        ),
        _asked("num_input_tokens", "INT32", (1,), _SAME, "number of prompt tokens"),
        _asked(
            "num_output_tokens",
            "INT32",
            (1,),
            _NEW,
            "number of tokens in this response that were generated for the first beam",
        ),
        _asked(
            "cum_log_probs",
            "FP32",
            (-1,),
            _SO_FAR,
            "[beams] sum of the log probs of all generated tokens so far",
            "return_log_probs",
        ),
        _asked("cumulative_logprob", "FP32", (-1,), _SO_FAR, "equal to cum_log_probs"),
        _asked(
            "output_log_probs",
            "FP32",
            (-1, -1),
            _SO_FAR,
            "[beams, n] log probs of generated tokens",
            "return_log_probs",
        ),
        _asked(
            "top_log_prob_ids",
            "INT32",
            (-1, -1, -1),
            _NEW,
            "[beams, n, k] ids of the likeliest tokens",
            "num_top_log_probs",
        ),
        _asked(
            "top_log_probs",
            "FP32",
            (-1, -1, -1),
            _NEW,
            "[beams, n, k] log probs of the likeliest tokens, likeliest first",
            "num_top_log_probs",
        ),
        _asked(
            "prompt_log_probs",
            "FP32",
            (-1,),
            _SAME,
            "[prompt tokens] log probs of the prompt's tokens; 0 for the first token",
        ),
        _asked(
            "context_logits",
            "FP32",
            (-1, -1),
            _SAME,
            "[prompt tokens, vocab_size] logits of the prompt's tokens",
        ),
        _asked(
            "generation_logits",
            "FP32",
            (-1, -1, -1),
            _NEW,
            "[beams, n, vocab_size] logits of the generated tokens",
        ),
        _metric("kv_cache_alloc_new_blocks", "number of KV blocks that were allocated for the prompt"),
        _metric("kv_cache_reused_blocks", "number of KV blocks that were found in the cache"),
        _metric(
            "kv_cache_missed_blocks",
            "number of full blocks of prompt tokens that were not found in the cache",
        ),
        _metric("kv_cache_alloc_total_blocks", "equal to kv_cache_alloc_new_blocks"),
        _metric("arrival_time_ns", "time when the request was queued, on a monotonic clock", "INT64"),
        _metric("first_scheduled_time_ns", "time when the request's first iteration began", "INT64"),
        _metric("first_token_time_ns", "time when the first token was generated", "INT64"),
        _metric(
            "last_token_time_ns", "time when the last token was generated; 0 until the sequence ends", "INT64"
        ),
        _metric(
            "acceptance_rate",
            "accepted draft tokens divided by verified draft tokens; 0 if there were no draft tokens",
            "FP32",
        ),
        _metric("total_accepted_draft_tokens", "number of accepted draft tokens"),
        _metric("total_draft_tokens", "number of verified draft tokens"),
        _asked(
            "receipt",
            "BYTES",
            (1,),
            InStream.LAST,
            "receipt of the prompt as JSON; `inflight verify` uses it to run the prompt again (receipts.md)",
        ),
        of_other_models(
            "context_phase_params",
            "UINT8",
            (-1,),
            "never returned: this server computes both the context phase and the generation phase",
        ),
        _output(
            "state",
            "BYTES",
            (1,),
            None,
            "state of the server as JSON; sent only if the request has the input `state`",
            asked_by="state",
        ),
        _output(
            "adapters",
            "BYTES",
            (1,),
            None,
            "all adapters as JSON; sent only if the request has the input `lora_command`",
            asked_by="lora_command",
        ),
    )
)


ADDITIONAL_OUTPUTS = (
    _asked(
        f"{CONTEXT}<name>",
        "FP32",
        (-1, -1),
        InStream.FIRST,
        "[prompt tokens, width] values of an additional output (additional-outputs.md)",
        "additional_outputs",
    ),
    _asked(
        f"{GENERATION}<name>",
        "FP32",
        (-1, -1, -1),
        _NEW,
        "[sequences, n, width] values of an additional output",
        "additional_outputs",
    ),
)
"""Rows for docs/tensors.md. The parameter additional_model_outputs determines which additional outputs exist."""


def is_additional(name: str) -> bool:
    """Return whether `name` is an output that the parameter additional_model_outputs adds to the table."""
    return name.startswith((CONTEXT, GENERATION)) and name not in _OUTPUT_NAMES


_OUTPUT_NAMES = frozenset(spec.name for spec in OUTPUTS.specs)
