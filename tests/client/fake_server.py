"""A gRPC server that answers like Triton, as far as the client can tell, and stores the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

PATIENCE_S = 60.0

Response = service_pb2.ModelStreamInferResponse


@dataclass(frozen=True)
class Asked:
    """One request as received by the server."""

    model: str
    request_id: str
    inputs: dict[str, list]
    dtypes: dict[str, str]
    shapes: dict[str, list[int]]
    outputs: list[str]


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A fake server. `answer` makes the responses to a request; by default "a", "b", "c" and then the end.

    Attributes:
        asked: The requests so far.
        cancelled: Set when a client disconnects before its answer is complete.
        stopped: Set by a `stop` request.
        num_streams: Number of streams opened so far.
        ended: Released by each stream that ends.
    """

    def __init__(self, port: int = 0) -> None:
        self.num_streams = 0
        self.ended = threading.Semaphore(0)
        self.asked: list[Asked] = []
        self.answer: Callable[[Asked], Iterable[Response]] = lambda asked: answer_with(asked, ["a", "b", "c"])
        self.cancelled = threading.Event()
        self.stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.url = f"127.0.0.1:{self.port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(grace=None).wait(PATIENCE_S)

    def ModelStreamInfer(
        self, request_iterator: Iterator, context: grpc.ServicerContext
    ) -> Iterator[Response]:
        assert "triton_grpc_error" not in dict(context.invocation_metadata())
        self.num_streams += 1
        complete = True
        context.add_callback(lambda: None if complete else self.cancelled.set())
        context.add_callback(lambda: self.ended.release())
        for request in request_iterator:
            assert request.parameters["triton_enable_empty_final_response"].bool_param
            assert request.parameters["structured_errors"].bool_param
            asked = _asked(request)
            self.asked.append(asked)
            if "stop" in asked.inputs:
                self.stopped.set()
                yield response(asked, final=True)
                continue
            complete = False
            try:
                for one in self.answer(asked):
                    complete = one.infer_response.parameters["triton_final_response"].bool_param
                    yield one
            except Refusal as refusal:
                complete = True
                yield Response(error_message=f"{refusal.code}: {refusal}")
            except HangUp:
                return


class HangUp(Exception):
    """Raised by an `answer` to end the stream."""


class Refusal(Exception):
    """Raised by an `answer` to send an error; `code` is Triton's name for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def answer_with(
    asked: Asked, parts: list, reason: str = "LENGTH", empty_final: bool = True
) -> Iterator[Response]:
    """Yield one response for each part (a text, or a list of ids), the last with `reason`."""
    for part in parts:
        is_last = part is parts[-1]
        yield response(asked, part, reason if is_last else "NOT_FINISHED", final=is_last and not empty_final)
    if empty_final:
        yield response(asked, final=True)


def response(
    asked: Asked, part: str | list[int] | None = None, reason: str = "", final: bool = False
) -> Response:
    """Return one response of a stream; without `part` it has no outputs."""
    message = service_pb2.ModelInferResponse(model_name=asked.model, id=asked.request_id)
    message.parameters["triton_final_response"].bool_param = final
    if isinstance(part, str):
        _add(message, "text_output", "BYTES", np.array([part.encode()], dtype=np.object_))
    elif part is not None:
        padded = [*part, -1]  # values after sequence_length are padding
        _add(message, "output_ids", "INT32", np.array([[padded]], dtype=np.int32))
        _add(message, "sequence_length", "INT32", np.array([[len(part)]], dtype=np.int32))
    if part is not None:
        _add(message, "finish_reason", "BYTES", np.array([[reason.encode()]], dtype=np.object_))
    return Response(infer_response=message)


def response_of(asked: Asked, final: bool = False, **outputs: np.ndarray) -> Response:
    """Return one response with these outputs, which have the batch dimension."""
    message = service_pb2.ModelInferResponse(model_name=asked.model, id=asked.request_id)
    message.parameters["triton_final_response"].bool_param = final
    for name, array in outputs.items():
        is_text = array.dtype == np.object_
        _add(message, name, "BYTES" if is_text else np_to_triton_dtype(array.dtype), array)
    return Response(infer_response=message)


def as_texts(*texts: str) -> np.ndarray:
    """Return a BYTES tensor [1, n]."""
    return np.array([[text.encode() for text in texts]], dtype=np.object_)


def _add(message: service_pb2.ModelInferResponse, name: str, datatype: str, array: np.ndarray) -> None:
    message.outputs.add(name=name, datatype=datatype, shape=array.shape)
    raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
    message.raw_output_contents.append(raw)


def _asked(request: service_pb2.ModelInferRequest) -> Asked:
    values = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents):
        if tensor.datatype == "BYTES":
            values[tensor.name] = [text.decode() for text in deserialize_bytes_tensor(raw)]
        else:
            values[tensor.name] = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).tolist()
    return Asked(
        request.model_name,
        request.id,
        values,
        {tensor.name: tensor.datatype for tensor in request.inputs},
        {tensor.name: list(tensor.shape) for tensor in request.inputs},
        [output.name for output in request.outputs],
    )
