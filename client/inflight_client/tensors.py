"""Convert requests to tensors, and the tensors of responses to deltas.

Also chooses the model of a request. Any thread.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import np_to_triton_dtype

from inflight_client import results
from inflight_client.keywords import CONTEXT_OUTPUT, GENERATION_OUTPUT, PERF_OUTPUTS
from inflight_client.options import BFLOAT16, Options, as_tensor, read_options
from inflight_client.results import Adapter, Delta, PerfMetrics, TopLogProb

TEXT_MODEL = "ensemble"
IDS_MODEL = "tensorrt_llm"
# Models whose tensors have TensorRT-LLM's names, such as input_ids; both take text too.
_ENGINE_MODELS = (IDS_MODEL, "tensorrt_llm_infer")
PARAMETERS = {"structured_errors": True}
"""Parameters of every request. With them, error messages begin with the error's kind, because Triton's
streams do not transmit the error code, and mark names of tensors, so that this client can replace them by
its options' names. The header `triton_grpc_error` would also transmit the code, but can crash tritonserver
2.51."""
NUM_OUTPUT_TOKENS = "num_output_tokens"
_PER_TOKEN_OUTPUTS = frozenset({"output_log_probs", "top_log_probs", "generation_logits"})

Prompt = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class Call:
    """A request that is ready to be sent. Two calls are never equal.

    Attributes:
        model: The model that serves the request.
        request_id: The request's id, unique among requests in flight.
        inputs: The request's tensors.
        outputs: The outputs to return.
        is_cumulative: Whether each response has everything so far.
        additional_outputs: The outputs from the server's parameter additional_model_outputs.
    """

    model: str
    request_id: str
    inputs: list[InferInput]
    outputs: list[InferRequestedOutput]
    is_cumulative: bool = False
    additional_outputs: tuple[str, ...] = ()


def generate_call(
    prompt: Prompt,
    streaming: bool,
    options: Mapping[str, Any],
    model: str | None = None,
    request_id: str | None = None,
) -> Call:
    """Return the request for a completion of `prompt`.

    Raises:
        TypeError: An option is unknown.
        ValueError: A value does not fit its tensor, or `model` has no tensor for an option.
    """
    is_text = isinstance(prompt, str)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise TypeError(f"the prompt must be a text or a sequence of token ids, got {prompt!r}")
    read = read_options(options)
    model = model or _model_for(is_text, read)
    by_text_names = is_text and model not in _ENGINE_MODELS
    if by_text_names and read.only_ids:
        raise ValueError(f"{model} does not take {read.only_ids[0]}: {IDS_MODEL} does, and also takes text")
    if by_text_names and _has_ragged_outputs(read):
        raise ValueError(
            f"{model} does not return the length of each beam: {IDS_MODEL} does, and also takes text"
        )
    ids_outputs = (
        () if by_text_names else ("sequence_length",) if is_text else ("output_ids", "sequence_length")
    )
    if by_text_names and "output_log_probs" in read.outputs:
        ids_outputs = (NUM_OUTPUT_TOKENS,)  # a stream's responses repeat earlier log probs
    outputs = (*(("text_output",) if is_text else ()), *ids_outputs, "finish_reason", *read.outputs)
    tensors = {
        **_prompt_tensor(prompt),
        "stream" if by_text_names else "streaming": as_tensor("streaming", [streaming], np.bool_, 1),
        "exclude_input_in_output": as_tensor("exclude_input_in_output", [True], np.bool_, 1),
        **(read.text if by_text_names else read.ids),
    }
    if NUM_OUTPUT_TOKENS in outputs:
        tensors[f"return_{NUM_OUTPUT_TOKENS}"] = as_tensor(NUM_OUTPUT_TOKENS, [True], np.bool_, 1)
    return Call(
        model,
        request_id or str(uuid.uuid4()),
        [_input(name, array) for name, array in tensors.items()],
        [InferRequestedOutput(name) for name in outputs],
        is_cumulative=streaming and read.has_beams,
        additional_outputs=read.additional_outputs,
    )


def stop_call(model: str, request_id: str) -> Call:
    """Return the request that stops the request with this id."""
    stop = _input("stop", as_tensor("stop", [True], np.bool_, 1))
    return Call(model, request_id, [stop], [InferRequestedOutput("finish_reason")])


def state_call(model: str) -> Call:
    """Return the request for the state of the server's batcher."""
    state = _input("state", as_tensor("state", [True], np.bool_, 1))
    return Call(model, str(uuid.uuid4()), [state], [InferRequestedOutput("state")])


def read_state(result: InferResult) -> dict[str, Any] | None:
    """Read the response to `state_call`; return None if it has only the final flag."""
    array = result.as_numpy("state")
    return None if array is None else json.loads(array.ravel()[0])


def adapters_call(model: str, **command: Any) -> Call:
    """Return the request that lists, loads or unloads adapters. Arguments that are None are left out."""
    text = json.dumps({key: value for key, value in command.items() if value is not None})
    array = np.array([[text.encode()]], dtype=np.object_)
    return Call(model, str(uuid.uuid4()), [_input("lora_command", array)], [InferRequestedOutput("adapters")])


def name_or_id(adapter: str | int) -> dict[str, str | int]:
    """Return the JSON key and value of an adapter: a name if it is text, a task id if it is a number."""
    return {"name": adapter} if isinstance(adapter, str) else {"task_id": adapter}


def read_adapters(result: InferResult) -> tuple[Adapter, ...] | None:
    """Read the response to `adapters_call`; return None if it has only the final flag."""
    array = result.as_numpy("adapters")
    return (
        None if array is None else tuple(Adapter(**each) for each in json.loads(array.ravel()[0])["adapters"])
    )


def read_delta(result: InferResult, call: Call) -> Delta | None:
    """Read a response; return None if it has only the final flag."""
    outputs = _Outputs(result, call.additional_outputs)
    reasons = outputs.rows("finish_reason")
    if reasons is None:
        return None
    index, prompt_log_probs = outputs.rows("sequence_index"), outputs.rows("prompt_log_probs")
    return Delta(
        sequences=tuple(outputs.sequence(row) for row in range(len(reasons))),
        sequence_index=0 if index is None else int(index[0]),
        is_cumulative=call.is_cumulative,
        prompt_log_probs=() if prompt_log_probs is None else tuple(prompt_log_probs.tolist()),
        context_logits=outputs.rows("context_logits"),
        context_outputs=outputs.additional(CONTEXT_OUTPUT),
        receipt="" if (receipt := outputs.rows("receipt")) is None else receipt[0].decode(),
    )


def is_final(result: InferResult) -> bool:
    """Return whether the response is the last of its request."""
    return result.get_response().parameters["triton_final_response"].bool_param


class _Outputs:
    """The tensors of one response, without the batch dimension: one row per sequence."""

    def __init__(self, result: InferResult, additional: tuple[str, ...] = ()) -> None:
        self._result = result
        self._additional = additional
        self._read: dict[str, np.ndarray | None] = {}

    def rows(self, name: str) -> np.ndarray | None:
        if name not in self._read:
            array = self._result.as_numpy(name)
            self._read[name] = None if array is None else array[0]
        return self._read[name]

    def sequence(self, row: int) -> results.Sequence:
        sums = self.rows("cum_log_probs")
        length = self._length(row)
        texts, ids = self._result.as_numpy("text_output"), self._part(row, "output_ids", length)
        log_probs = self._log_probs(row, length)
        return results.Sequence(
            text=""
            if texts is None
            else texts.reshape(-1)[row].decode(),  # this tensor has no batch dimension
            token_ids=() if ids is None else tuple(ids.tolist()),
            finish_reason=self._part(row, "finish_reason").decode(),
            log_probs=() if log_probs is None else tuple(log_probs.tolist()),
            cum_log_prob=None if sums is None else float(sums[row]),
            top_log_probs=self._top(row, length),
            generation_logits=self._part(row, "generation_logits", length),
            perf_metrics=self._perf_metrics(),
            additional_outputs={
                name: rows[row] if length is None else rows[row][:length]
                for name, rows in self.additional(GENERATION_OUTPUT).items()
            },
        )

    def additional(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the additional outputs whose names begin with `prefix`, by name."""
        found = {name: self.rows(name) for name in self._additional if name.startswith(prefix)}
        return {name: rows for name, rows in found.items() if rows is not None}

    def _length(self, row: int) -> int | None:
        """Return the number of tokens of a row without padding; None if there is only one row, which has none."""
        lengths = self.rows("sequence_length")
        if lengths is None:
            lengths = self.rows(NUM_OUTPUT_TOKENS)
        return None if lengths is None else int(lengths[row])

    def _part(self, row: int, name: str, length: int | None = None) -> Any:
        rows = self.rows(name)
        if rows is None:
            return None
        return rows[row] if length is None else rows[row][:length]

    def _log_probs(self, row: int, length: int | None) -> np.ndarray | None:
        """Return the log probs of this response's tokens, without repeated ones of earlier tokens."""
        rows = self.rows("output_log_probs")
        if rows is None or length is None or len(rows) > 1:
            return self._part(row, "output_log_probs", length)
        return rows[0][len(rows[0]) - length :]

    def _top(self, row: int, length: int | None) -> tuple[tuple[TopLogProb, ...], ...]:
        ids, log_probs = self._part(row, "top_log_prob_ids", length), self._part(row, "top_log_probs", length)
        if ids is None or log_probs is None:
            return ()
        pairs = zip(ids.tolist(), log_probs.tolist())
        return tuple(tuple(TopLogProb(*pair) for pair in zip(*of_token)) for of_token in pairs)

    def _perf_metrics(self) -> PerfMetrics | None:
        values = {name: rows[0].item() for name in PERF_OUTPUTS if (rows := self.rows(name)) is not None}
        return PerfMetrics(**values) if values else None


def _model_for(is_text: bool, options: Options) -> str:
    return TEXT_MODEL if is_text and not options.only_ids and not _has_ragged_outputs(options) else IDS_MODEL


def _has_ragged_outputs(options: Options) -> bool:
    """Return whether the beams' lengths, which text models do not return, are needed to remove padding."""
    return options.has_beams and not _PER_TOKEN_OUTPUTS.isdisjoint(options.outputs)


def _prompt_tensor(prompt: Prompt) -> dict[str, np.ndarray]:
    if isinstance(prompt, str):
        return {"text_input": np.array([[prompt.encode()]], dtype=np.object_)}
    ids = prompt if isinstance(prompt, np.ndarray) else list(prompt)
    return {"input_ids": as_tensor("input_ids", ids, np.int32, 1)}


def _input(name: str, array: np.ndarray) -> InferInput:
    if array.dtype == BFLOAT16:
        tensor = InferInput(name, array.shape, "BF16")
        # set_data_from_numpy converts float32 to bfloat16 one value at a time, which takes seconds for an
        # image's rows.
        tensor._raw_content = array.tobytes()
        return tensor
    tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor
