"""Many requests at once, to fill the queue, as test_max_queue_size.py sends them."""

from __future__ import annotations

import queue

import numpy as np

from inflight.server.launch import TritonServer

from .wire import LIBRARIES, connect, flag, integer, real, tensors


def inputs_of(prompt: list[int], output_len: int, streaming: bool) -> dict[str, np.ndarray]:
    """Return eleven tensors, the same for all requests."""
    return {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": integer(len(prompt)),
        "request_output_len": integer(output_len),
        "beam_width": integer(1),
        "temperature": real(1.0),
        "streaming": flag(streaming),
        "end_id": integer(-1),
        "pad_id": integer(0),
        "return_log_probs": flag(False),
        "runtime_top_k": integer(1),
        "runtime_top_p": real(0.0),
    }


def run_http(server: TritonServer, prompt: list[int], output_len: int, count: int) -> list:
    """Send unary requests without an id; return a response or an exception for each."""
    inputs = tensors(LIBRARIES["http"], inputs_of(prompt, output_len, False))
    outcomes = []
    with connect(server, "http", concurrency=count) as client:
        calls = [client.async_infer("tensorrt_llm", inputs, request_id="") for _ in range(count)]
        for call in calls:
            try:
                outcomes.append(call.get_result())
            except Exception as error:  # any error of the library is an outcome
                outcomes.append(error)
    return outcomes


def run_grpc(server: TritonServer, prompt: list[int], output_len: int, count: int) -> list:
    """Send all requests on one stream; return every response and error in the order of arrival."""
    inputs = tensors(LIBRARIES["grpc"], inputs_of(prompt, output_len, True))
    outcomes: queue.Queue = queue.Queue()
    with connect(server, "grpc") as client:
        client.start_stream(callback=lambda result, error: outcomes.put(error or result))
        for _ in range(count):
            client.async_stream_infer("tensorrt_llm", inputs, request_id="")
        client.stop_stream(cancel_requests=False)
    return [outcomes.get() for _ in range(outcomes.qsize())]
