"""A small tritonclient wrapper: tensors in, responses out."""

from __future__ import annotations

import json
import queue
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from inflight.server.client_apis import CONTROL_KEY_HEADER, ClientApis
from inflight.tensors.input_table import INPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.spec import Vocabulary

# All names of all vocabularies; a name has the same type everywhere.
DTYPES = {
    name: NUMPY_TYPES[spec.dtype] for vocabulary in Vocabulary for name, spec in INPUTS.declared(vocabulary)
}
TIMEOUT_S = 60
CONTROLLED = ClientApis(key="key-of-the-tests")
"""For a server whose models are loaded and unloaded by request, over gRPC with the metadata of `CONTROL`."""
CONTROL = {f"triton-grpc-protocol-{CONTROL_KEY_HEADER}": "key-of-the-tests"}


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
    def beams(self) -> list[list[int]]:
        """Return the ids of every beam, without padding."""
        lengths = self.outputs["sequence_length"][0]
        return [ids[:n].tolist() for ids, n in zip(self.outputs["output_ids"][0], lengths, strict=True)]

    @property
    def text(self) -> str:
        return self.outputs["text_output"].reshape(-1)[0].decode() if "text_output" in self.outputs else ""

    @property
    def finish_reason(self) -> str:
        return self.outputs["finish_reason"].reshape(-1)[0].decode()


class Traffic:
    """Names of the tensors sent to servers and received from them since the last `clear`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def clear(self) -> None:
        self.names.clear()


TRAFFIC = Traffic()


def as_array(name: str, value) -> np.ndarray:
    """Return an array [1, 1] for a scalar, [1, n] for a list; anything deeper keeps its shape."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, list) and value and isinstance(value[0], str):
        value = [text.encode() for text in value]
    array = np.array(value, dtype=DTYPES[name])
    return array.reshape(1, -1) if array.ndim < 2 else array


def word_list(*words: list[int]) -> np.ndarray:
    """Return an array [1, 2, n] for stop_words_list and bad_words_list."""
    ids = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([[ids, ends + [-1] * (len(ids) - len(ends))]], np.int32)


def make_inputs(library, **tensors) -> list:
    inputs = []
    for name, value in tensors.items():
        array = as_array(name, value)
        dtype = "BYTES" if array.dtype == np.object_ else np_to_triton_dtype(array.dtype)
        tensor = library.InferInput(name, array.shape, dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    TRAFFIC.names.update(tensors)
    return inputs


class Stream:
    """A gRPC stream with any number of open requests."""

    def __init__(self, url: str) -> None:
        self._answers: queue.Queue = queue.Queue()
        self.num_open = 0
        """Number of requests without a final response."""
        self.client = grpc.InferenceServerClient(url)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        self.client.stop_stream()
        self.client.close()

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def send(
        self,
        model: str,
        request_id: str = "",
        outputs: list[str] | None = None,
        beside: dict | None = None,
        **tensors,
    ) -> None:
        """Send a request; `beside` is for tritonclient's other arguments (timeout, priority, parameters)."""
        wanted = [grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
        self.num_open += 1
        self.client.async_stream_infer(
            model,
            make_inputs(grpc, **tensors),
            outputs=wanted,
            request_id=request_id,
            enable_empty_final_response=True,
            **(beside or {}),
        )

    def receive(self, timeout: float = TIMEOUT_S) -> tuple[str, Answer]:
        """Return the next response with the id of its request ("" if an error lacks it)."""
        result, error = self._answers.get(timeout=timeout)
        if error is not None:
            self.num_open -= 1
            return "", Answer({}, error, True)
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        TRAFFIC.names.update(outputs)
        is_final = response.parameters["triton_final_response"].bool_param
        self.num_open -= is_final
        return response.id, Answer(outputs, None, is_final)

    def until_final(self) -> Iterator[Answer]:
        """Yield the responses to the one open request."""
        assert self.num_open == 1, f"{self.num_open} requests are open"
        for _, answer in self.until_all_final():
            yield answer

    def until_all_final(self) -> Iterator[tuple[str, Answer]]:
        """Yield responses until every request has its final one.

        Tokens are merged when a client reads slowly, so a request may have any number of responses. Final
        responses that were received before count too.
        """
        while self.num_open:
            yield self.receive()


def ask(
    url: str,
    model: str = "tensorrt_llm",
    outputs: list[str] | None = None,
    beside: dict | None = None,
    **tensors,
) -> list[Answer]:
    """Return all responses to one request on a stream of its own."""
    with Stream(url) as stream:
        stream.send(model, outputs=outputs, beside=beside, **tensors)
        return list(stream.until_final())


def completion(url: str, **tensors) -> Answer:
    """Return the only response to a request without streaming or prompt; it must not be an error."""
    (answer,) = ask(url, exclude_input_in_output=True, **tensors)
    assert answer.error is None, answer.error
    return answer


def infer(
    url: str,
    model: str = "tensorrt_llm_infer",
    request_id: str = "",
    outputs: list[str] | None = None,
    beside: dict | None = None,
    **tensors,
) -> http.InferResult:
    """Send one HTTP /infer."""
    client = http.InferenceServerClient(url, network_timeout=TIMEOUT_S, connection_timeout=TIMEOUT_S)
    wanted = [http.InferRequestedOutput(name) for name in outputs] if outputs else None
    try:
        result = client.infer(
            model, make_inputs(http, **tensors), request_id=request_id, outputs=wanted, **(beside or {})
        )
    finally:
        client.close()
    TRAFFIC.names.update(output["name"] for output in result.get_response()["outputs"])
    return result


def unary(
    url: str,
    model: str = "tensorrt_llm_infer",
    request_id: str = "",
    outputs: list[str] | None = None,
    beside: dict | None = None,
    **tensors,
) -> grpc.InferResult:
    """Send one unary gRPC call."""
    client = grpc.InferenceServerClient(url)
    wanted = [grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
    try:
        result = client.infer(
            model,
            make_inputs(grpc, **tensors),
            request_id=request_id,
            outputs=wanted,
            client_timeout=TIMEOUT_S,
            **(beside or {}),
        )
    finally:
        client.close()
    TRAFFIC.names.update(output.name for output in result.get_response().outputs)
    return result


def generate(url: str, model: str = "ensemble", **body) -> dict:
    """Send one HTTP /generate; keys that are not inputs of the model become request parameters."""
    request = urllib.request.Request(f"http://{url}/v2/models/{model}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def wait_for_several(responses_of_a_stream, timeout: float = 60.0) -> None:
    """Repeat a streamed request until it has several responses: a slow sender may merge all into one."""
    wait_until(lambda: len(responses_of_a_stream()) > 1, timeout)


def wait_until(condition, timeout: float = 60.0) -> None:
    """Poll until the condition holds, for example on the server's log, files or processes."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
