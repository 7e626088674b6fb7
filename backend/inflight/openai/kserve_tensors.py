"""Convert core requests to tensors of a remote `tensorrt_llm`, and its responses to core results.

docs/tensors.md describes these tensors from the server's side. A request is refused if a part of it has no
tensor, or is never used by this endpoint. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.core.kv.retention import RetentionConfig
from inflight.core.request.request import Request
from inflight.core.request.response import PerfMetrics, SequenceResult, TopLogProbs
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.errors import Unsupported
from inflight.tensors.input_table import INPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.request_parameters import END_IDS, STRUCTURED_ERRORS
from inflight.tensors.sampling import as_float_tensor
from inflight.tensors.word_lists import pack_words

_NEUTRAL = SamplingConfig()
_METRICS = {
    "arrival_time_ns": "arrival_time_ns",
    "first_scheduled_time_ns": "first_scheduled_time_ns",
    "first_token_time_ns": "first_token_time_ns",
    "last_token_time_ns": "last_token_time_ns",
    "num_new_blocks": "kv_cache_alloc_new_blocks",
    "num_reused_blocks": "kv_cache_reused_blocks",
    "num_missed_blocks": "kv_cache_missed_blocks",
    "num_draft_tokens": "total_draft_tokens",
    "num_accepted_draft_tokens": "total_accepted_draft_tokens",
}
"""Output tensor of each field of PerfMetrics."""


def input_tensors(request: Request) -> dict[str, NDArray[Any]]:
    """Return a request's input tensors by name, with the batch dimension.

    Raises Unsupported if a part of the request has no tensor.
    """
    _refuse_uncarried(request)
    bias, draft = request.embedding_bias, request.draft
    values: dict[str, Any] = {
        "input_ids": request.input_token_ids,
        "request_output_len": request.max_new_tokens,
        "streaming": request.streaming,
        "exclude_input_in_output": request.output.exclude_input_from_output,
        "end_id": _one_end_id(request.end_ids),
        "pad_id": request.pad_id,
        "stop_words_list": request.stop_words or None,
        "bad_words_list": request.bad_words or None,
        "embedding_bias": None if bias is None else np.frombuffer(bias.data, np.float32),
        "draft_input_ids": None if draft is None else draft.token_ids,
        "draft_acceptance_threshold": None if draft is None else draft.acceptance_threshold,
        "prompt_lookup_num_tokens": request.prompt_lookup_num_tokens or None,
        "logits_post_processor_name": request.logits_post_processor_name or None,
        "return_num_input_tokens": True,
        "return_log_probs": request.output.return_log_probs or None,
        "num_top_log_probs": request.output.num_top_log_probs or None,
        "return_prompt_log_probs": request.output.return_prompt_log_probs or None,
        "return_context_logits": request.output.return_context_logits or None,
        "return_perf_metrics": request.output.return_perf_metrics or None,
        "cache_salt_id": request.identity.cache_salt_id or None,
        "priority": request.priority,
        "client_id": request.client_id or None,
        "allotted_time_ms": request.allotted_time_ms or None,
        **_sampling(request.sampling),
        **_guide(request),
        **_lora(request),
        **_retention(request.retention),
    }
    return {name: _array(name, value) for name, value in values.items() if value is not None}


def request_parameters(request: Request) -> dict[str, str | bool]:
    """Return the request parameters (Triton's custom parameters) to send beside a request's tensors."""
    several = {END_IDS: ",".join(map(str, request.end_ids))} if len(request.end_ids) > 1 else {}
    return {STRUCTURED_ERRORS: True, **several}


def output_names(request: Request) -> list[str]:
    """Return the names of the outputs that `read_result` needs for a request."""
    wanted = request.output
    return [
        *("output_ids", "sequence_length", "finish_reason", "num_input_tokens"),
        *(("sequence_index",) if request.sampling.num_sequences > 1 else ()),
        *(("cum_log_probs", "output_log_probs") if wanted.return_log_probs else ()),
        *(("top_log_prob_ids", "top_log_probs") if wanted.num_top_log_probs else ()),
        *(("prompt_log_probs",) if wanted.return_prompt_log_probs else ()),
        *(("context_logits",) if wanted.return_context_logits else ()),
        *(_METRICS.values() if wanted.return_perf_metrics else ()),
    ]


def read_result(
    request: Request, outputs: Mapping[str, NDArray[Any]], is_final: bool, is_first: bool
) -> SequenceResult:
    """Convert one response of the server to a result.

    Args:
        request: The request.
        outputs: Output tensors by name, with the batch dimension.
        is_final: Whether the response is the request's last.
        is_first: Whether the response is its sequence's first.
    """
    rows = {name: array[0] for name, array in outputs.items()}
    lengths, reasons = rows["sequence_length"].tolist(), rows["finish_reason"].tolist()
    finish_reasons = tuple(FinishReason[reason.decode()] for reason in reasons)
    has_prompt = not (request.streaming or request.output.exclude_input_from_output)
    num_generated = [length - (request.prompt_length if has_prompt else 0) for length in lengths]
    uses_beams = request.sampling.uses_beams
    # While a beam search runs, better beams may still replace ended ones.
    is_last = is_final if uses_beams else finish_reasons[0] is not FinishReason.NOT_FINISHED
    # Every response of a sequence repeats its prompt's log probs.
    prompt_log_probs = rows.get("prompt_log_probs") if is_first else None
    context_logits = rows.get("context_logits") if is_first else None
    return SequenceResult(
        output_token_ids=tuple(
            tuple(ids[:length].tolist()) for ids, length in zip(rows["output_ids"], lengths, strict=True)
        ),
        num_input_tokens=int(rows["num_input_tokens"][0]),
        num_output_tokens=tuple(num_generated),
        finish_reasons=finish_reasons,
        sequence_index=int(rows["sequence_index"][0]) if "sequence_index" in rows else 0,
        is_sequence_final=is_last,
        is_cumulative=uses_beams and request.streaming,
        log_probs=_log_probs(rows.get("output_log_probs"), num_generated),
        cum_log_probs=tuple(rows["cum_log_probs"].tolist()) if "cum_log_probs" in rows else None,
        top_log_probs=_top_log_probs(rows, num_generated),
        prompt_log_probs=None if prompt_log_probs is None else tuple(prompt_log_probs.tolist()),
        context_logits=None if context_logits is None else as_float_tensor(context_logits),
        perf_metrics=_perf_metrics(rows),
    )


def ended_result(
    request: Request, last: SequenceResult | None, sequence_index: int, reason: FinishReason
) -> SequenceResult:
    """Return the last result of a sequence that this client stopped.

    It has no new tokens; that of a beam search repeats the beams' tokens so far.

    Args:
        request: The request.
        last: The sequence's previous result; None if there was none.
        sequence_index: Index of the sequence.
        reason: Finish reason.
    """
    num_rows = request.sampling.num_outputs
    if last is not None and last.is_cumulative:
        return replace(
            last,
            finish_reasons=(reason,) * num_rows,
            is_sequence_final=True,
            prompt_log_probs=None,
            context_logits=None,
        )
    has_prompt = not (request.streaming or request.output.exclude_input_from_output)
    none = ((),) * num_rows
    cum_log_probs = None if last is None else last.cum_log_probs
    return SequenceResult(
        output_token_ids=(request.input_token_ids if has_prompt else (),) * num_rows,
        num_input_tokens=request.prompt_length,
        num_output_tokens=(0,) * num_rows,
        finish_reasons=(reason,) * num_rows,
        sequence_index=sequence_index,
        is_sequence_final=True,
        is_cumulative=request.sampling.uses_beams and request.streaming,
        log_probs=none if request.output.return_log_probs else None,
        cum_log_probs=(cum_log_probs or (0.0,) * num_rows) if request.output.return_log_probs else None,
        top_log_probs=none if request.output.num_top_log_probs else None,
        perf_metrics=None if last is None else last.perf_metrics,
    )


# ---------------------------------------------------------------- inputs


def _refuse_uncarried(request: Request) -> None:
    wanted = request.output
    uncarried = {
        "draft logits": request.draft is not None and request.draft.logits is not None,
        "a prompt table": request.prompt_table is not None,
        "a rotary table": request.rotary_table is not None,
        "extra ids of a prompt": bool(request.identity.extra_ids),
        "the weights of an adapter": request.lora is not None and request.lora.weights is not None,
        "an adapter's folder": request.lora is not None and bool(request.lora.path),
        "min_tokens together with stop in a beam search": bool(
            request.stop_words and request.stop_words_after
        ),
        "generation logits": wanted.return_generation_logits,
        "additional outputs": bool(wanted.additional_outputs),
        "a request for a receipt": wanted.return_receipt,
    }
    for what, is_asked in uncarried.items():
        if is_asked:
            raise Unsupported(
                f"/v1 cannot send {what} to a Triton server on another host: use Triton's own protocol"
            )


def _one_end_id(end_ids: Sequence[int]) -> int | None:
    """Return the end id, or -1 for none.

    Returns None if there are several, which are sent as a request parameter.
    """
    if len(end_ids) > 1:
        return None
    return end_ids[0] if end_ids else -1


def _sampling(config: SamplingConfig) -> dict[str, Any]:
    values = {control.tensor: getattr(config, name) for name, control in CONTROLS.items()}
    neutral = {control.tensor: getattr(_NEUTRAL, name) for name, control in CONTROLS.items()}
    return {tensor: value for tensor, value in values.items() if value != neutral[tensor]}


def _guide(request: Request) -> dict[str, str | None]:
    guide = request.guide
    if guide is None:
        return {}
    return {"guided_decoding_guide_type": guide.type.value, "guided_decoding_guide": guide.text or None}


def _lora(request: Request) -> dict[str, Any]:
    lora = request.lora
    return {} if lora is None else {"lora_task_id": lora.task_id, "lora_name": lora.name or None}


def _retention(config: RetentionConfig) -> dict[str, Any]:
    ranges, decode = config.ranges, config.decode
    values: dict[str, Any] = {}
    if ranges:
        values["retention_token_range_starts"] = [each.token_start for each in ranges]
        values["retention_token_range_ends"] = [_or_open(each.token_end) for each in ranges]
        values["retention_token_range_priorities"] = [each.retention.priority for each in ranges]
        values["retention_token_range_durations_ms"] = [
            _or_open(each.retention.duration_ms) for each in ranges
        ]
    if decode is not None:
        values["retention_decode_priority"] = decode.priority
        values["retention_decode_duration_ms"] = _or_open(decode.duration_ms)
    return values


def _or_open(value: int | None) -> int:
    return -1 if value is None else value


def _array(name: str, value: Any) -> NDArray[Any]:
    """Return a value as the tensor `name`, with batch dimension: [1, 1], [1, n], or [1, 2, n] for words."""
    spec = INPUTS[name]
    dtype = NUMPY_TYPES[spec.dtype]
    if name.endswith("words_list"):
        return pack_words(value)[np.newaxis].astype(dtype)
    values = [value] if spec.scalar else value
    if dtype is np.object_:
        return np.array([[text.encode() for text in values]], np.object_)
    return np.asarray(values, dtype)[np.newaxis]


# ---------------------------------------------------------------- outputs


def _log_probs(array: NDArray[Any] | None, num_generated: list[int]) -> tuple[tuple[float, ...], ...] | None:
    if array is None:
        return None
    if len(array) == 1:  # a single row has no padding, but may also repeat log probs of previous tokens
        return (tuple(array[0][len(array[0]) - num_generated[0] :].tolist()),)
    return tuple(tuple(row[:count].tolist()) for row, count in zip(array, num_generated, strict=True))


def _top_log_probs(
    rows: Mapping[str, NDArray[Any]], num_generated: list[int]
) -> tuple[tuple[TopLogProbs, ...], ...] | None:
    if "top_log_probs" not in rows:
        return None
    ids, log_probs = rows["top_log_prob_ids"].tolist(), rows["top_log_probs"].tolist()
    return tuple(
        tuple(TopLogProbs(tuple(tokens), tuple(values)) for tokens, values in zip(ids[row], log_probs[row]))[
            :count
        ]
        for row, count in enumerate(num_generated)
    )


def _perf_metrics(rows: Mapping[str, NDArray[Any]]) -> PerfMetrics | None:
    if "arrival_time_ns" not in rows:
        return None
    return PerfMetrics(**{field: int(rows[output][0]) for field, output in _METRICS.items()})
