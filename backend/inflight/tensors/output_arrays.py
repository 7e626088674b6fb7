"""Convert the engine's results to the arrays of output tensors.

Owns the shapes. Ragged rows are padded: ids with the prompt's pad_id (default -1), numbers with 0. The first
dimension of an array is the prompts of the response, the second is rows, which are beams or sequences. Texts
are one flat list of all rows of all prompts. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.additional_outputs import CONTEXT, GENERATION
from inflight.core.request.request import FloatTensor
from inflight.core.request.response import PerfMetrics, TopLogProbs
from inflight.prompt import Output
from inflight.tensors.output_table import OUTPUTS, is_additional

_NO_PAD = -1


def make_array(name: str, outputs: Sequence[Output]) -> NDArray[Any] | None:
    """Return the output tensor `name` of one response, [prompts, …] or flat; None if it has no values.

    The caller converts the array to the declared data type. Raises KeyError for an unknown name.
    """
    return _additional(name, outputs) if is_additional(name) else _MAKERS[name](outputs)


def without_elements(name: str, num_prompts: int) -> NDArray[Any]:
    """Return an empty array for an output that the client named without setting its flag."""
    spec = OUTPUTS[name]
    return np.empty([num_prompts] * spec.is_batched + [0] * len(spec.dims))


_Maker = Callable[[Sequence[Output]], NDArray[Any] | None]
_Rows = Sequence[Sequence[Any]]
"""The rows of each prompt."""


def _scalars(value: Callable[[Output], int]) -> _Maker:
    """Return a function that makes an array [prompts, 1]."""
    return lambda outputs: np.array([[value(output)] for output in outputs])


def _metrics(value: Callable[[PerfMetrics], float]) -> _Maker:
    """Return a function that makes an array [prompts, 1] of a performance metric.

    The element of a prompt without metrics is 0. If no prompt has metrics, the function returns None.
    """

    def make(outputs: Sequence[Output]) -> NDArray[Any] | None:
        metrics = [output.result.perf_metrics for output in outputs]
        return None if _all_missing(metrics) else np.array([[value(one or PerfMetrics())] for one in metrics])

    return make


def _output_ids(outputs: Sequence[Output]) -> NDArray[np.int32]:
    return _stack([output.result.output_token_ids for output in outputs], _pads(outputs), np.int32)


def _sequence_length(outputs: Sequence[Output]) -> NDArray[np.int32]:
    lengths = [[len(ids) for ids in output.result.output_token_ids] for output in outputs]
    return _table(lengths, 0, np.int32)


def _text_output(outputs: Sequence[Output]) -> NDArray[np.object_] | None:
    if any(output.texts is None for output in outputs):
        return None
    texts = [[text.encode("utf-8") for text in output.texts or ()] for output in outputs]
    return _table(texts, b"", np.object_).reshape(-1)


def _finish_reason(outputs: Sequence[Output]) -> NDArray[np.object_]:
    reasons = [[reason.name.encode() for reason in output.result.finish_reasons] for output in outputs]
    return _table(reasons, b"", np.object_)


def _cum_log_probs(outputs: Sequence[Output]) -> NDArray[np.float32] | None:
    rows = [output.result.cum_log_probs for output in outputs]
    return None if _all_missing(rows) else _table([row or () for row in rows], 0.0, np.float32)


def _output_log_probs(outputs: Sequence[Output]) -> NDArray[np.float32] | None:
    rows = [output.result.log_probs for output in outputs]
    return None if _all_missing(rows) else _stack([row or () for row in rows], None, np.float32)


def _top(part: Callable[[TopLogProbs], Sequence[float]], dtype: type[np.generic], is_padded: bool) -> _Maker:
    """Return a function that makes an array [prompts, rows, longest row, largest number of candidates]."""

    def make(outputs: Sequence[Output]) -> NDArray[Any] | None:
        found = [output.result.top_log_probs for output in outputs]
        if _all_missing(found):
            return None
        width = max(output.prompt.request.output.num_top_log_probs for output in outputs)
        rows = [[[part(top) for top in row] for row in of_prompt or ()] for of_prompt in found]
        return _stack(rows, _pads(outputs) if is_padded else None, dtype, (width,))

    return make


def _prompt_log_probs(outputs: Sequence[Output]) -> NDArray[np.float32] | None:
    rows = [output.result.prompt_log_probs for output in outputs]
    return None if _all_missing(rows) else _stack([[row or ()] for row in rows], None, np.float32)[:, 0]


def _context_logits(outputs: Sequence[Output]) -> NDArray[np.float32] | None:
    tensors = [output.result.context_logits for output in outputs]
    if _all_missing(tensors):
        return None
    return _stack_tensors([[tensor] if tensor else [] for tensor in tensors], _vocab_size(outputs))[:, 0]


def _generation_logits(outputs: Sequence[Output]) -> NDArray[np.float32] | None:
    tensors = [output.result.generation_logits for output in outputs]
    if _all_missing(tensors):
        return None
    return _stack_tensors([rows or () for rows in tensors], _vocab_size(outputs))


def _vocab_size(outputs: Sequence[Output]) -> int:
    return outputs[0].prompt.options.vocab_size


def _additional(name: str, outputs: Sequence[Output]) -> NDArray[np.float32] | None:
    """Return an additional output of the context or of the generation phase, even if it covers no tokens.

    The shape is [prompts, prompt tokens, width] for the context, [prompts, rows, longest, width] for
    generation.
    """
    found = [
        next((each.tensors for each in output.result.additional_outputs if each.name == name), None)
        for output in outputs
    ]
    if _all_missing(found):
        return None
    is_context = name.startswith(CONTEXT)
    plain = name.removeprefix(CONTEXT if is_context else GENERATION)
    offered = outputs[0].prompt.options.offered
    stack = _stack_tensors(
        [tensors or () for tensors in found], next(each.width for each in offered if each.name == plain)
    )
    return stack[:, 0] if is_context else stack


def _receipt(outputs: Sequence[Output]) -> NDArray[np.object_] | None:
    found = [output.result.receipt for output in outputs]
    return (
        None if _all_missing(found) else _table([[(text or "").encode()] for text in found], b"", np.object_)
    )


_MAKERS: dict[str, _Maker] = {
    "output_ids": _output_ids,
    "sequence_length": _sequence_length,
    "text_output": _text_output,
    "finish_reason": _finish_reason,
    "batch_index": _scalars(lambda output: output.batch_index),
    "sequence_index": _scalars(lambda output: output.result.sequence_index),
    "num_input_tokens": _scalars(lambda output: output.result.num_input_tokens),
    "num_output_tokens": _scalars(lambda output: output.result.num_output_tokens[0]),
    "cum_log_probs": _cum_log_probs,
    "cumulative_logprob": _cum_log_probs,
    "output_log_probs": _output_log_probs,
    "top_log_prob_ids": _top(lambda top: top.token_ids, np.int32, is_padded=True),
    "top_log_probs": _top(lambda top: top.log_probs, np.float32, is_padded=False),
    "prompt_log_probs": _prompt_log_probs,
    "context_logits": _context_logits,
    "generation_logits": _generation_logits,
    "kv_cache_alloc_new_blocks": _metrics(lambda metrics: metrics.num_new_blocks),
    "kv_cache_reused_blocks": _metrics(lambda metrics: metrics.num_reused_blocks),
    "kv_cache_missed_blocks": _metrics(lambda metrics: metrics.num_missed_blocks),
    "kv_cache_alloc_total_blocks": _metrics(lambda metrics: metrics.num_new_blocks),
    "arrival_time_ns": _metrics(lambda metrics: metrics.arrival_time_ns),
    "first_scheduled_time_ns": _metrics(lambda metrics: metrics.first_scheduled_time_ns),
    "first_token_time_ns": _metrics(lambda metrics: metrics.first_token_time_ns),
    "last_token_time_ns": _metrics(lambda metrics: metrics.last_token_time_ns),
    "acceptance_rate": _metrics(lambda metrics: metrics.acceptance_rate),
    "total_accepted_draft_tokens": _metrics(lambda metrics: metrics.num_accepted_draft_tokens),
    "total_draft_tokens": _metrics(lambda metrics: metrics.num_draft_tokens),
    "receipt": _receipt,
    "state": lambda outputs: None,  # only the response to a state request has it
    "adapters": lambda outputs: None,  # only the response to an adapter command has it
    "context_phase_params": lambda outputs: None,
}


def _pads(outputs: Sequence[Output]) -> list[int]:
    pads = [output.prompt.request.pad_id for output in outputs]
    return [_NO_PAD if pad is None else pad for pad in pads]


def _all_missing(parts: Sequence[object | None]) -> bool:
    return all(part is None for part in parts)


def _table(rows: _Rows, fill: object, dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array [prompts, rows], padded with `fill`."""
    if len(rows) == 1:  # nothing to pad: nearly every response
        return np.array([list(rows[0])], dtype)
    table = np.full((len(rows), max(map(len, rows))), fill, dtype)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _stack(
    rows: _Rows, fills: Sequence[int] | None, dtype: type[np.generic], tail: tuple[int, ...] = ()
) -> NDArray[Any]:
    """Return an array [prompts, rows, longest, *tail], padded with `fills` (one number per prompt) or with 0."""
    if not tail and len(rows) == 1 and len(rows[0]) == 1:
        return np.array([[rows[0][0]]], dtype)
    longest = max((len(row) for of_prompt in rows for row in of_prompt), default=0)
    stack = np.zeros((len(rows), max(map(len, rows)), longest, *tail), dtype)
    for index, of_prompt in enumerate(rows):
        if fills is not None:
            stack[index] = fills[index]
        for number, row in enumerate(of_prompt):
            if len(row):
                values = np.asarray(row, dtype)  # prompts may request different numbers of top log probs
                stack[(index, number, *map(slice, values.shape))] = values
    return stack


def _stack_tensors(rows: Sequence[Sequence[FloatTensor]], width: int) -> NDArray[np.float32]:
    """Return an array [prompts, rows, longest, width]; `longest` may be 0. A single tensor is not copied."""
    arrays = [[_as_array(tensor, width) for tensor in of_prompt] for of_prompt in rows]
    if len(arrays) == 1 and len(arrays[0]) == 1:
        return arrays[0][0][np.newaxis, np.newaxis]
    return _stack(arrays, None, np.float32, (width,))


def _as_array(tensor: FloatTensor, width: int) -> NDArray[np.float32]:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape[0], width)
