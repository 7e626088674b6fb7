"""The least a user needs to talk to the server with tritonclient: tensors in, answers out."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

DTYPES = {
    "input_ids": np.int32,
    "input_lengths": np.int32,
    "request_output_len": np.int32,
    "end_id": np.int32,
    "pad_id": np.int32,
    "beam_width": np.int32,
    "runtime_top_k": np.int32,
    "runtime_top_p": np.float32,
    "temperature": np.float32,
    "repetition_penalty": np.float32,
    "random_seed": np.uint64,
    "streaming": np.bool_,
    "stop": np.bool_,
    "exclude_input_in_output": np.bool_,
    "return_num_input_tokens": np.bool_,
    "return_num_output_tokens": np.bool_,
    "return_log_probs": np.bool_,
    "bad_words_list": np.int32,
    "text_input": np.object_,
    "max_tokens": np.int32,
    "stream": np.bool_,
}
TIMEOUT_S = 60


@dataclass(frozen=True)
class Answer:
    """One response of a stream."""

    outputs: dict[str, np.ndarray]
    error: InferenceServerException | None
    final: bool

    @property
    def ids(self) -> list[int]:
        return self.outputs["output_ids"].reshape(-1).tolist() if "output_ids" in self.outputs else []

    @property
    def text(self) -> str:
        return self.outputs["text_output"].reshape(-1)[0].decode() if "text_output" in self.outputs else ""

    @property
    def finish_reason(self) -> str:
        return self.outputs["finish_reason"].reshape(-1)[0].decode()


def as_array(name: str, value) -> np.ndarray:
    """[1,1] for a scalar, [1,n] for a list, as is for anything deeper."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        value = value.encode()
    array = np.array(value, dtype=DTYPES[name])
    return array.reshape(1, -1) if array.ndim < 2 else array


def make_inputs(library, **tensors) -> list:
    inputs = []
    for name, value in tensors.items():
        array = as_array(name, value)
        dtype = "BYTES" if array.dtype == np.object_ else np_to_triton_dtype(array.dtype)
        tensor = library.InferInput(name, array.shape, dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class Stream:
    """A gRPC stream on which any number of requests can be open."""

    def __init__(self, url: str) -> None:
        self._answers: queue.Queue = queue.Queue()
        self.client = grpc.InferenceServerClient(url)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        self.client.stop_stream()
        self.client.close()

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def send(self, model: str, request_id: str = "", outputs: list[str] | None = None, **tensors) -> None:
        wanted = [grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
        self.client.async_stream_infer(
            model,
            make_inputs(grpc, **tensors),
            outputs=wanted,
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def receive(self, timeout: float = TIMEOUT_S) -> tuple[str, Answer]:
        """The next answer, with the id of its request ("" where an error does not say)."""
        result, error = self._answers.get(timeout=timeout)
        if error is not None:
            return "", Answer({}, error, True)
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return response.id, Answer(outputs, None, response.parameters["triton_final_response"].bool_param)

    def until_final(self) -> Iterator[Answer]:
        """Answers of the one open request."""
        final = False
        while not final:
            _, answer = self.receive()
            final = answer.final
            yield answer


def ask(url: str, model: str = "tensorrt_llm", **tensors) -> list[Answer]:
    """All answers to one request on a stream of its own."""
    with Stream(url) as stream:
        stream.send(model, **tensors)
        return list(stream.until_final())


def infer(url: str, model: str = "tensorrt_llm_infer", request_id: str = "", **tensors) -> http.InferResult:
    """One HTTP /infer."""
    client = http.InferenceServerClient(url, network_timeout=TIMEOUT_S, connection_timeout=TIMEOUT_S)
    try:
        return client.infer(model, make_inputs(http, **tensors), request_id=request_id)
    finally:
        client.close()


def unary(url: str, model: str = "tensorrt_llm_infer", request_id: str = "", **tensors) -> grpc.InferResult:
    """One unary gRPC call."""
    client = grpc.InferenceServerClient(url)
    try:
        return client.infer(
            model, make_inputs(grpc, **tensors), request_id=request_id, client_timeout=TIMEOUT_S
        )
    finally:
        client.close()


def wait_until(condition, timeout: float = 20.0) -> None:
    """For what the server can only be asked about: its log, its files, its processes."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
