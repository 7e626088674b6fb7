"""Requests with token ids to `tensorrt_llm`, as benchmark_core_model.py sends them, unary or on one stream.

The warm-up uses the ids "0" to "9", and the measured requests use them again right afterwards.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass

import numpy as np

from inflight.server.launch import TritonServer

from .wire import LIBRARIES, TIMEOUT_S, connect, integer, tensors

NUM_WARM_UP = 10
WARM_UP_TOKENS = 100  # on a stream that is stopped meanwhile


@dataclass(frozen=True)
class Load:
    """Prompts, and the number of tokens for each; without a tokenizer `end_id` is 1 and `pad_id` 0."""

    prompts: list[list[int]]
    output_lens: list[int]
    pad_id: int = 0
    end_id: int = 1

    def inputs(self, number: int, output_len: int) -> dict[str, np.ndarray]:
        """Return five tensors; the request has no list of outputs, so the server chooses them."""
        return {
            "input_ids": np.array([self.prompts[number]], np.int32),
            "input_lengths": integer(len(self.prompts[number])),
            "request_output_len": integer(output_len),
            "pad_id": integer(self.pad_id),
            "end_id": integer(self.end_id),
        }


def run_plain(server: TritonServer, load: Load, protocol: str) -> dict[str, int]:
    """Send unary requests; return the number of generated tokens for each request id."""
    library = LIBRARIES[protocol]
    answers: queue.Queue = queue.Queue()
    with connect(server, protocol, concurrency=128) as client:
        for number in range(NUM_WARM_UP):  # each waits for its end, so that its length decides nothing
            inputs = tensors(library, load.inputs(0, 10))
            client.infer("tensorrt_llm", inputs, request_id=str(number))
        calls = []
        for number, length in enumerate(load.output_lens):
            inputs = tensors(library, load.inputs(number, length))
            more = {"callback": _into(answers)} if protocol == "grpc" else {}
            calls.append(client.async_infer("tensorrt_llm", inputs, request_id=str(number), **more))
        if protocol == "http":
            return _lengths([call.get_result().get_response() for call in calls], load)
        return _lengths(_taken(answers, len(calls)), load)


def run_decoupled(server: TritonServer, load: Load) -> dict[str, int]:
    """Use one stream for the warm-up, whose responses are not read, and one for the other requests."""
    library = LIBRARIES["grpc"]
    answers: queue.Queue = queue.Queue()
    with connect(server, "grpc") as client:
        client.start_stream(callback=lambda result, error: None, stream_timeout=None)
        for number in range(NUM_WARM_UP):
            inputs = tensors(library, load.inputs(0, WARM_UP_TOKENS))
            client.async_stream_infer("tensorrt_llm", inputs, request_id=str(number))
        client.stop_stream()
        client.start_stream(callback=_into(answers), stream_timeout=None)
        for number, length in enumerate(load.output_lens):
            inputs = tensors(library, load.inputs(number, length))
            client.async_stream_infer("tensorrt_llm", inputs, request_id=str(number))
        client.stop_stream()
    assert answers.qsize() == len(load.prompts), "one answer for each request, and nothing else"
    return _lengths(_taken(answers, len(load.prompts)), load)


def _into(answers: queue.Queue):
    return lambda result, error: answers.put((result, error))


def _taken(answers: queue.Queue, count: int) -> list[dict]:
    """Return the responses in JSON form; raises the first error among them."""
    responses = []
    for _ in range(count):
        result, error = answers.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error
        responses.append(result.get_response(as_json=True))
    return responses


def _lengths(responses: list[dict], load: Load) -> dict[str, int]:
    """Return lengths; the first output must be `output_ids` [1, beams, n], with the prompt."""
    lengths = {}
    for response in responses:
        shape = [int(size) for size in response["outputs"][0]["shape"]]
        assert response["outputs"][0]["name"] == "output_ids" and len(shape) == 3
        assert response["id"] not in lengths, "an id that was answered twice"
        lengths[response["id"]] = shape[2] - len(load.prompts[int(response["id"])])
    return lengths
