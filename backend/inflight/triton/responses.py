"""The way out: outputs to Triton's InferenceResponse, and one client's end of one request.

Owns the shapes and data types of output tensors: exactly those that were asked for, in the types that config.pbtxt
declares. Ragged rows are filled up, ids with the prompt's pad_id (else -1), numbers with 0. An array's first
dimension is the prompts of the response, then come rows: beams, or sequences; texts are one flat list of all rows.
Owns also the moment after which Triton's response sender must not be touched. Does not know who waits for which
response. Responses are made on the sender thread, those with errors on any.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from inflight.additional_outputs import CONTEXT, GENERATION
from inflight.core.request.request import FloatTensor
from inflight.core.request.response import PerfMetrics, TopLogProbs
from inflight.errors import ERROR_CODES, InflightError
from inflight.serving.reply import Output
from inflight.tensors.input_table import OUTPUTS, is_additional
from inflight.tensors.reader import NUMPY_TYPES

_NO_PAD = -1


class ResponseBuilder:
    """Makes responses with the `triton_python_backend_utils` module it is given.

    Args:
        pb_utils: The module, or a fake of it.
        declared: Data types of outputs where they are not those of the table.
        is_batched: Whether outputs have a dimension for the batch.
    """

    def __init__(
        self, pb_utils: Any, declared: Mapping[str, str] | None = None, is_batched: bool = True
    ) -> None:
        self._pb_utils = pb_utils
        self._is_batched = is_batched
        declared = declared or {}
        dtypes = {spec.name: declared.get(spec.name, spec.dtype) for spec in OUTPUTS.specs}
        dtypes |= {name: dtype for name, dtype in declared.items() if is_additional(name)}
        self._types = {name: NUMPY_TYPES[dtype] for name, dtype in dtypes.items()}
        # Clients want the same few sets again and again, in every response.
        self._in_order = lru_cache(maxsize=64)(self._typed)

    def outputs(self, outputs: Sequence[Output]) -> Any:
        """One response: the tensors that its prompts want; what else was named comes without elements."""
        options = outputs[0].prompt.options
        wanted, named = options.outputs, options.named
        if len(outputs) > 1:
            wanted = wanted.union(*(output.prompt.options.outputs for output in outputs[1:]))
        tensors = []
        for name, dtype in self._in_order(wanted | named if named else wanted):
            array = make_array(name, outputs) if name in wanted else _without_elements(name, len(outputs))
            if array is not None:
                if not self._is_batched and (is_additional(name) or OUTPUTS[name].is_batched):
                    array = array[0]  # there is one prompt
                tensors.append(self._pb_utils.Tensor(name, np.ascontiguousarray(array, dtype)))
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def tensor_sizes(self, response: Any) -> Iterator[tuple[str, int]]:
        """Tell (name, bytes) of each tensor of a response."""
        for tensor in response.output_tensors():
            yield tensor.name(), tensor.as_numpy().nbytes

    def _typed(self, wanted: frozenset[str]) -> tuple[tuple[str, type], ...]:
        """(name, data type) of these outputs, in the table's order."""
        return tuple((name, dtype) for name, dtype in self._types.items() if name in wanted)

    def empty(self) -> Any:
        """A response without outputs: the answer to a stop request."""
        return self._pb_utils.InferenceResponse(output_tensors=[])

    def text(self, name: str, text: str) -> Any:
        """A response of one output, `name`: the answer to a state request, or to one about adapters."""
        array = np.array([[text.encode("utf-8")]] if self._is_batched else [text.encode("utf-8")], np.object_)
        return self._pb_utils.InferenceResponse(output_tensors=[self._pb_utils.Tensor(name, array)])

    def error(self, error: InflightError) -> Any:
        """A response that carries an error and its Triton code."""
        return self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error(self._pb_utils, error))

    def with_code(self, response: Any) -> Any:
        """The same response; if it carries an error, the message begins with the code: "INVALID_ARG: …"."""
        if not response.has_error():
            return response
        error, codes = response.error(), self._pb_utils.TritonError
        name = next((name for name in ERROR_CODES if getattr(codes, name) == error.code()), "INTERNAL")
        coded = codes(f"{name}: {error.message()}", error.code())
        return self._pb_utils.InferenceResponse(output_tensors=[], error=coded)


def triton_error(pb_utils: Any, error: InflightError) -> Any:
    """The TritonError of an error of this package."""
    return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))


class TritonStream:
    """Triton's response sender of one request, which gets the final flag exactly once. Any thread.

    Triton frees what `is_cancelled` looks at when it gets the final flag, so asking and finishing exclude each
    other. `send` and `finish` belong to one thread at a time.

    Args:
        sender: `InferenceRequest.get_response_sender()`.
        final_flag: `TRITONSERVER_RESPONSE_COMPLETE_FINAL` of the module.
        with_code: Puts an error's code in front of its message, for a client that wants it there; None: leave it.
    """

    def __init__(self, sender: Any, final_flag: int, with_code: Callable[[Any], Any] | None = None) -> None:
        self._sender = sender
        self._final_flag = final_flag
        self._with_code = with_code
        self._lock = threading.Lock()
        self._finished = False

    def send(self, response: Any) -> None:
        """Send one response of several."""
        self._sender.send(response)

    def finish(self, response: Any = None) -> None:
        """Send the last response, or none, with the final flag. Only the first call does anything."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            try:
                if response is not None and self._with_code is not None:
                    response = self._with_code(response)
                self._send_final(response)
            except Exception:  # Triton may raise anything, and the client must not wait for ever all the same
                with contextlib.suppress(Exception):  # the first error is the one to be told
                    self._send_final(None)
                raise

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or went away; false once the request is finished."""
        with self._lock:
            return not self._finished and self._sender.is_cancelled()

    def _send_final(self, response: Any) -> None:
        if response is None:
            self._sender.send(flags=self._final_flag)
        else:
            self._sender.send(response, flags=self._final_flag)


def make_array(name: str, outputs: Sequence[Output]) -> np.ndarray | None:
    """The output tensor `name` of one response, [prompts, …] or flat; None if there is nothing to say.

    Types are numpy's choice; KeyError for a name that no table knows.
    """
    return _additional(name, outputs) if is_additional(name) else _MAKERS[name](outputs)


def _without_elements(name: str, num_prompts: int) -> np.ndarray:
    """An output that was named and not asked for; those that are in no table are asked for by their names."""
    spec = OUTPUTS[name]
    return np.empty([num_prompts] * spec.is_batched + [0] * len(spec.dims))


_Maker = Callable[[Sequence[Output]], np.ndarray | None]
_Rows = Sequence[Sequence[Any]]
"""The rows of each prompt."""


def _scalars(value: Callable[[Output], int]) -> _Maker:
    """A maker of [prompts, 1]."""
    return lambda outputs: np.array([[value(output)] for output in outputs])


def _metrics(value: Callable[[PerfMetrics], float]) -> _Maker:
    """A maker of [prompts, 1] from performance metrics, 0 for a prompt without any; None if none has any."""

    def make(outputs: Sequence[Output]) -> np.ndarray | None:
        metrics = [output.result.perf_metrics for output in outputs]
        return None if _all_missing(metrics) else np.array([[value(one or PerfMetrics())] for one in metrics])

    return make


def _output_ids(outputs: Sequence[Output]) -> np.ndarray:
    return _stack([output.result.output_token_ids for output in outputs], _pads(outputs), np.int32)


def _sequence_length(outputs: Sequence[Output]) -> np.ndarray:
    lengths = [[len(ids) for ids in output.result.output_token_ids] for output in outputs]
    return _table(lengths, 0, np.int32)


def _text_output(outputs: Sequence[Output]) -> np.ndarray | None:
    if any(output.texts is None for output in outputs):
        return None
    texts = [[text.encode("utf-8") for text in output.texts or ()] for output in outputs]
    return _table(texts, b"", np.object_).reshape(-1)


def _finish_reason(outputs: Sequence[Output]) -> np.ndarray:
    reasons = [[reason.name.encode() for reason in output.result.finish_reasons] for output in outputs]
    return _table(reasons, b"", np.object_)


def _cum_log_probs(outputs: Sequence[Output]) -> np.ndarray | None:
    rows = [output.result.cum_log_probs for output in outputs]
    return None if _all_missing(rows) else _table([row or () for row in rows], 0.0, np.float32)


def _output_log_probs(outputs: Sequence[Output]) -> np.ndarray | None:
    rows = [output.result.log_probs for output in outputs]
    return None if _all_missing(rows) else _stack([row or () for row in rows], None, np.float32)


def _top(part: Callable[[TopLogProbs], Sequence[float]], dtype: type, is_padded: bool) -> _Maker:
    """A maker of [prompts, rows, longest, most candidates]."""

    def make(outputs: Sequence[Output]) -> np.ndarray | None:
        found = [output.result.top_log_probs for output in outputs]
        if _all_missing(found):
            return None
        width = max(output.prompt.request.output.num_top_log_probs for output in outputs)
        rows = [[[part(top) for top in row] for row in of_prompt or ()] for of_prompt in found]
        return _stack(rows, _pads(outputs) if is_padded else None, dtype, (width,))

    return make


def _prompt_log_probs(outputs: Sequence[Output]) -> np.ndarray | None:
    rows = [output.result.prompt_log_probs for output in outputs]
    return None if _all_missing(rows) else _stack([[row or ()] for row in rows], None, np.float32)[:, 0]


def _context_logits(outputs: Sequence[Output]) -> np.ndarray | None:
    tensors = [output.result.context_logits for output in outputs]
    if _all_missing(tensors):
        return None
    return _stack_tensors([[tensor] if tensor else [] for tensor in tensors], _vocab_size(outputs))[:, 0]


def _generation_logits(outputs: Sequence[Output]) -> np.ndarray | None:
    tensors = [output.result.generation_logits for output in outputs]
    if _all_missing(tensors):
        return None
    return _stack_tensors([rows or () for rows in tensors], _vocab_size(outputs))


def _vocab_size(outputs: Sequence[Output]) -> int:
    return outputs[0].prompt.options.vocab_size


def _additional(name: str, outputs: Sequence[Output]) -> np.ndarray | None:
    """[prompts, prompt tokens, width] or [prompts, rows, longest, width], also of no tokens."""
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
    "state": lambda outputs: None,  # only the answer to a state request has one
    "adapters": lambda outputs: None,  # likewise
    "context_phase_params": lambda outputs: None,
}


def _pads(outputs: Sequence[Output]) -> list[int]:
    pads = [output.prompt.request.pad_id for output in outputs]
    return [_NO_PAD if pad is None else pad for pad in pads]


def _all_missing(parts: Sequence[object | None]) -> bool:
    return all(part is None for part in parts)


def _table(rows: _Rows, fill: object, dtype: type) -> np.ndarray:
    """An array [prompts, rows], filled up with `fill`."""
    if len(rows) == 1:  # nothing to fill up: nearly every response
        return np.array([list(rows[0])], dtype)
    table = np.full((len(rows), max(map(len, rows))), fill, dtype)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _stack(rows: _Rows, fills: Sequence[int] | None, dtype: type, tail: tuple[int, ...] = ()) -> np.ndarray:
    """An array [prompts, rows, longest, *tail], filled up with the prompts' numbers in `fills`, else with 0."""
    if not tail and len(rows) == 1 and len(rows[0]) == 1:
        return np.array([[rows[0][0]]], dtype)
    longest = max((len(row) for of_prompt in rows for row in of_prompt), default=0)
    stack = np.zeros((len(rows), max(map(len, rows)), longest, *tail), dtype)
    for index, of_prompt in enumerate(rows):
        if fills is not None:
            stack[index] = fills[index]
        for number, row in enumerate(of_prompt):
            if len(row):
                values = np.asarray(row, dtype)  # of top log probs, prompts may want more or fewer
                stack[(index, number, *map(slice, values.shape))] = values
    return stack


def _stack_tensors(rows: Sequence[Sequence[FloatTensor]], width: int) -> np.ndarray:
    """An array [prompts, rows, longest, width], also of no tokens; a single tensor is not copied."""
    arrays = [[_as_array(tensor, width) for tensor in of_prompt] for of_prompt in rows]
    if len(arrays) == 1 and len(arrays[0]) == 1:
        return arrays[0][0][np.newaxis, np.newaxis]
    return _stack(arrays, None, np.float32, (width,))


def _as_array(tensor: FloatTensor, width: int) -> np.ndarray:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape[0], width)
