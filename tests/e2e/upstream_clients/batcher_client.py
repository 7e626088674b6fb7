"""Token ids to `tensorrt_llm`, as inflight_batcher_llm_client.py sends them: its flags, requests and checks.

With `streaming` or `num_return_sequences` it opens a gRPC stream, which needs a decoupled model. Otherwise it
sends unary gRPC requests, which need a model that is not decoupled.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.server.launch import TritonServer
from tests.e2e.clients import wait_until
from tests.e2e.test_metrics import active, page_of

from .wire import (
    TENSORS_OF_PERF_METRICS,
    TIMEOUT_S,
    connect,
    flag,
    integer,
    real,
    requested,
    tensors,
)

CANCELLED = "StatusCode.CANCELLED"


@dataclass(frozen=True)
class Flags:
    """Command line options with their defaults; end id and padding are the tokenizer's."""

    request_output_len: int = 16
    streaming: bool = False
    beam_width: int = 1
    num_return_sequences: int | None = None
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    draft_tokens: tuple[int, ...] = ()
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_perf_metrics: bool = False
    exclude_input_in_output: bool = False
    requested_outputs: tuple[str, ...] = ()
    stop_after_ms: int = 0
    stop_via_request_cancel: bool = False
    request_id: str = ""
    end_id: int = 0
    pad_id: int = 0
    model_name: str = "tensorrt_llm"

    @property
    def num_generations(self) -> int:
        return self.num_return_sequences or self.beam_width

    @property
    def sends_stop(self) -> bool:
        return self.stop_after_ms > 0 and not self.stop_via_request_cancel


@dataclass
class Outcome:
    """The collected responses of a request.

    Attributes:
        prompt: Ids of the prompt, if they are part of the sequences.
        sequences: Ids of each sequence or beam.
        outputs: The optional outputs of each sequence's last response, without the batch dimension.
        num_responses: Number of responses without an error.
        is_cancelled: Whether the server reported that the request was cancelled.
    """

    prompt: list[int]
    sequences: list[list[int]]
    outputs: list[dict[str, np.ndarray]]
    num_responses: int = 0
    is_cancelled: bool = False

    @property
    def generated(self) -> list[list[int]]:
        """Return the sequences without the prompt."""
        return [ids[len(self.prompt) :] for ids in self.sequences]


def inputs_of(prompt: list[int], flags: Flags) -> dict[str, np.ndarray]:
    """Return the request's tensors: ten that are always sent, then those that flags request."""
    arrays = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": integer(len(prompt)),
        "request_output_len": integer(flags.request_output_len),
        "beam_width": integer(flags.beam_width),
        "temperature": real(flags.temperature),
        "streaming": flag(flags.streaming),
        "end_id": integer(flags.end_id),
        "pad_id": integer(flags.pad_id),
        "runtime_top_k": integer(flags.top_k),
        "runtime_top_p": real(flags.top_p),
    }
    for name in ("return_num_input_tokens", "return_num_output_tokens"):
        if getattr(flags, name):
            arrays[name] = flag(True)
    if flags.num_return_sequences is not None:
        arrays["num_return_sequences"] = integer(flags.num_return_sequences)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(flags, name) is not None:
            arrays[name] = real(getattr(flags, name))
    if flags.draft_tokens:
        arrays["draft_input_ids"] = np.array([flags.draft_tokens], np.int32)
    for name in ("return_log_probs", "return_context_logits", "return_generation_logits"):
        if getattr(flags, name):
            arrays[name] = flag(True)
    for name in ("exclude_input_in_output", "return_perf_metrics"):
        if getattr(flags, name):
            arrays[name] = flag(True)
    return arrays


def stop_inputs() -> dict[str, np.ndarray]:
    """Return a request that stops the request with the same id."""
    return {
        "input_ids": integer(0),
        "input_lengths": integer(0),
        "request_output_len": integer(0),
        "stop": flag(True),
    }


def run(server: TritonServer, prompt: list[int], flags: Flags) -> Outcome:
    """Send one request and read its responses; raises the original's errors.

    It also raises if a request that was to be stopped or cancelled has all the requested tokens.
    """
    answers: queue.Queue = queue.Queue()
    echoed = [] if flags.exclude_input_in_output else prompt
    begun = echoed if flags.streaming else []  # a stream does not have the prompt
    sequences = [list(begun) for _ in range(flags.num_generations)]
    outcome = Outcome(echoed, sequences, [{} for _ in sequences])
    with connect(server, "grpc") as client:
        if flags.streaming or flags.num_return_sequences is not None:
            _send_on_stream(client, answers, prompt, flags)
            while not answers.empty():
                _read(outcome, flags, answers.get())
        else:
            for _ in range(_send_unary(server, client, answers, prompt, flags)):
                _read(outcome, flags, answers.get(timeout=TIMEOUT_S))
    if flags.stop_after_ms:
        for ids in outcome.generated:
            assert len(ids) < flags.request_output_len, "it was not stopped"
    return outcome


def _send_on_stream(client, answers: queue.Queue, prompt: list[int], flags: Flags) -> None:
    """Send the request, and wait for all responses, as closing the stream does."""
    client.start_stream(callback=lambda result, error: answers.put(error or result), stream_timeout=None)
    client.async_stream_infer(
        flags.model_name,
        tensors(grpc, inputs_of(prompt, flags)),
        outputs=requested(grpc, flags.requested_outputs),
        request_id=flags.request_id,
    )
    time.sleep(flags.stop_after_ms / 1000)
    if flags.sends_stop:
        client.async_stream_infer(
            flags.model_name,
            tensors(grpc, stop_inputs()),
            request_id=flags.request_id,
            parameters={"Streaming": flags.streaming},
        )
    client.stop_stream(cancel_requests=flags.stop_after_ms > 0 and flags.stop_via_request_cancel)


def _send_unary(server: TritonServer, client, answers: queue.Queue, prompt: list[int], flags: Flags) -> int:
    """Send the request; return the expected number of responses.

    Unary requests may overtake each other, so a stop waits until the request is active.
    """
    common = {
        "request_id": flags.request_id,
        "callback": lambda result, error: answers.put(error or result),
        "parameters": {"Streaming": flags.streaming},
    }
    outputs = requested(grpc, flags.requested_outputs)
    call = client.async_infer(
        flags.model_name, tensors(grpc, inputs_of(prompt, flags)), outputs=outputs, **common
    )
    time.sleep(flags.stop_after_ms / 1000)
    if flags.sends_stop:
        wait_until(lambda: active(page_of(server)) == 1)
        client.async_infer(flags.model_name, tensors(grpc, stop_inputs()), **common)
    elif flags.stop_after_ms:
        call.cancel()
    return 2 if flags.sends_stop else 1


def _read(outcome: Outcome, flags: Flags, result) -> None:
    """Read a response: ids are appended to their sequence, other outputs replace earlier ones."""
    if isinstance(result, InferenceServerException):
        if result.status() != CANCELLED:
            raise result
        outcome.is_cancelled = True
        return
    outcome.num_responses += 1
    names = {output.name for output in result.get_response().outputs}
    if flags.requested_outputs:
        assert names == set(flags.requested_outputs), names
    if "output_ids" not in names:  # the response to a stop request, or to the stopped request
        return
    index = result.as_numpy("sequence_index")
    sequence = 0 if index is None else index[0][0]
    _read_optional(outcome, flags, result, sequence)
    ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    assert ids.shape[:2] == (1, flags.beam_width) and lengths.shape == (1, flags.beam_width)
    if flags.beam_width > 1:
        for beam in range(flags.beam_width):
            outcome.sequences[beam] += ids[0][beam][: lengths[0][beam]].tolist()
    elif lengths[0][0] > 0:
        outcome.sequences[sequence] += ids[0][0].tolist()


def _read_optional(outcome: Outcome, flags: Flags, result, sequence: int) -> None:
    """Read the optional outputs. Every response with ids must have them: the original does not check."""

    def keep(name: str, per_beam: bool) -> None:
        values = result.as_numpy(name)[0]
        if flags.beam_width > 1 and per_beam:
            for beam in range(flags.beam_width):
                outcome.outputs[beam][name] = values[beam]
        else:
            outcome.outputs[sequence][name] = values

    if flags.return_log_probs:
        keep("cum_log_probs", True)
        keep("output_log_probs", True)
    if flags.return_context_logits:
        keep("context_logits", False)
    if flags.return_generation_logits:
        keep("generation_logits", True)
    for name in ("num_input_tokens", "num_output_tokens"):
        if getattr(flags, f"return_{name}"):
            keep(name, False)
    if flags.return_perf_metrics:
        for name in TENSORS_OF_PERF_METRICS:
            assert result.as_numpy(name).shape == (1, 1), name
            keep(name, False)
