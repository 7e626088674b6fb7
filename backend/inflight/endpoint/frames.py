"""The messages of the engine endpoint: msgpack, preceded by a four-byte length.

This module owns the message types and their encoding. The engine's side sends the first message, a Hello.
The connecting side chooses the ids of its requests, which are valid on this connection only. Errors are sent
as code and message.

Logits and additional outputs are not encoded in a message: they follow their EngineResponse as raw bytes,
whose sizes are known from the shapes in the message, so that gigabytes are not copied needlessly. The
adapter and the prompt table of a request follow its Submit in the same way (`raw_buffers.py`).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TypeVar

import msgspec

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.response import Response, ReturnedOutput, SequenceResult
from inflight.core.request.sleep import SleepAction
from inflight.core.request.stop import StopReason
from inflight.errors import InflightError, RequestError, error_from_kind
from inflight.raw_buffers import BufferedDecoder, BufferedEncoder

MAX_FRAME_BYTES = 1 << 30
LENGTH_BYTES = 4

_Shape = tuple[int, ...]
_T = TypeVar("_T")


class BadFrame(InflightError):
    """The peer sent bytes that are not a message of this protocol."""


class EngineProcesses(msgspec.Struct, frozen=True):
    """The processes of an engine, for a supervisor that may have to end them.

    Attributes:
        launcher: The process whose end makes all others end, `ProcessId` as text.
        folder: The processes' folder in shared memory, to be removed after they have ended.
        pause_s: Seconds by which the start of the processes was delayed because earlier ones were lost.
    """

    launcher: str
    folder: str
    pause_s: float = 0.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end: the first message, sent once.

    Attributes:
        description: The engine's description.
        server: The engine's tritonserver, if it is not the parent process of the engine: `ProcessId` as text.
        job: The command that the engine was started with, if a process of this tritonserver is to take it
            over; otherwise "".
    """

    description: EngineDescription
    server: str = ""
    job: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: a request. Its request_id is valid on this connection only. Its raw buffers follow."""

    request: Request


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: stop a request, or one of its sequences."""

    request_id: int
    reason: StopReason
    sequence_index: int | None = None


class ReadState(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: answer with a State of the same `query_id` within `timeout_s` seconds.

    `request_id` is that of the client's request, for log lines; "": no client has asked. This is the same in other
    queries.
    """

    query_id: int
    timeout_s: float
    request_id: str = ""


class State(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end: the batcher's state as JSON, or an error."""

    query_id: int
    text: str = ""
    error_kind: str = ""
    error_message: str = ""


class CommandAdapters(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: execute `command`, and answer with AdapterStates of the same `query_id`.

    `timeout_s` is how long the front end waits, in seconds.
    """

    query_id: int
    command: AdapterCommand
    timeout_s: float
    request_id: str = ""


class AdapterStates(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end: all adapters after a command, or the command's error."""

    query_id: int
    adapters: tuple[AdapterState, ...] = ()
    error_kind: str = ""
    error_message: str = ""


class CommandSleep(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: carry out `action`, and answer with a SleepState of the same `query_id`.

    `timeout_s` is how long the engine waits for requests in flight, in seconds. `only_weights` keeps the KV cache.
    """

    query_id: int
    action: SleepAction
    timeout_s: float
    only_weights: bool = False
    request_id: str = ""


class SleepState(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end: whether the engine sleeps after a command, or the command's error."""

    query_id: int
    is_asleep: bool = False
    error_kind: str = ""
    error_message: str = ""


class ReadReports(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: answer with a Reported of the same `query_id`.

    `timeout_s` is how long to wait for KV events, in seconds; None: until there are some.
    """

    query_id: int
    kind: ReportKind
    timeout_s: float | None


class Reported(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end: the reports since the last ReadReports."""

    query_id: int
    reports: Reports


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Supervisor → engine: refuse new requests, finish others within `timeout_s` seconds, then send Drained."""

    timeout_s: float


class Retire(msgspec.Struct, frozen=True, tag=True):
    """Successor → engine: shut down within about `timeout_s` seconds, then close the connection."""

    timeout_s: float


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Engine → supervisor: every request has its final response."""


class Supervise(msgspec.Struct, frozen=True, tag=True):
    """Supervisor → engine: answer with Supervised, then send Beat regularly.

    The engine must end when no supervisor is connected.
    """


class Supervised(msgspec.Struct, frozen=True, tag=True):
    """Engine → supervisor: the engine's processes, which the supervisor must end if they do not end themselves."""

    processes: EngineProcesses


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Engine → supervisor: the engine's process is alive."""


class Statistics(msgspec.Struct, frozen=True, tag=True):
    """Engine → supervisor: statistics and metrics, the time of both, and the memory of the engine's process."""

    stats: IterationCounts
    metrics: MetricsSnapshot
    wall_clock_s: float
    memory: MemoryUsage


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Engine → supervisor: the engine was asked to end, so that its end is not a failure."""


class EngineResponse(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Engine → front end: one response, without its logits and additional outputs.

    Attributes:
        context_logits: The shape of the context logits; None if there are none.
        generation_logits: Per beam, the shape of the generation logits; None if there are none.
        additional_outputs: Name and tensor shapes of each additional output.
    """

    request_id: int
    result: SequenceResult | None = None
    error_kind: str = ""
    error_message: str = ""
    is_final: bool = False
    context_logits: _Shape | None = None
    generation_logits: tuple[_Shape, ...] | None = None
    additional_outputs: tuple[tuple[str, tuple[_Shape, ...]], ...] = ()


FromEngine = (
    Hello
    | EngineResponse
    | State
    | AdapterStates
    | SleepState
    | Reported
    | Drained
    | Supervised
    | Beat
    | Statistics
    | Leaving
)
FromFrontEnd = (
    Submit | Stop | ReadState | CommandAdapters | CommandSleep | ReadReports | Drain | Retire | Supervise
)

_ENCODER = msgspec.msgpack.Encoder()
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: FromEngine | FromFrontEnd) -> bytes:
    """Return a message as a frame: its length and its body. Raises BadFrame if it is too long."""
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def encode_submit(request: Request) -> list[bytes | memoryview]:
    """Return the frame and the raw buffers of a Submit; raises BadFrame if any of them is too long."""
    return encode_with_buffers(Submit(request))


def encode_with_buffers(message: msgspec.Struct) -> list[bytes | memoryview]:
    """Return the frame and the raw buffers of a message; raises BadFrame if any of them is too long."""
    body, buffers = BufferedEncoder().encode(message)
    longest = max([len(body), *map(len, buffers)])
    if longest > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {longest} bytes; at most {MAX_FRAME_BYTES} are sent")
    return [len(body).to_bytes(LENGTH_BYTES, "big") + body, *buffers]


def encode_response(response: Response) -> list[bytes]:
    """Return the frame of an EngineResponse and its tensors as raw bytes.

    Raises BadFrame if the frame is too long.
    """
    result, error = response.result, response.error
    if error is not None:
        answer = EngineResponse(response.request_id, None, error.kind, error.marked, response.is_final)
    elif result is not None and _has_tensors(result):
        return _encode_with_tensors(response, result)
    else:
        answer = EngineResponse(response.request_id, result, is_final=response.is_final)
    return [encode(answer)]


def _has_tensors(result: SequenceResult) -> bool:
    has_logits = result.context_logits is not None or result.generation_logits is not None
    return has_logits or bool(result.additional_outputs)


def _encode_with_tensors(response: Response, result: SequenceResult) -> list[bytes]:
    context, generation, additional = (
        result.context_logits,
        result.generation_logits,
        result.additional_outputs,
    )
    answer = EngineResponse(
        response.request_id,
        replace(result, context_logits=None, generation_logits=None, additional_outputs=()),
        is_final=response.is_final,
        context_logits=None if context is None else context.shape,
        generation_logits=None if generation is None else tuple(tensor.shape for tensor in generation),
        additional_outputs=tuple(
            (each.name, tuple(tensor.shape for tensor in each.tensors)) for each in additional
        ),
    )
    tensors = (
        *(() if context is None else (context,)),
        *(generation or ()),
        *(tensor for each in additional for tensor in each.tensors),
    )
    return [encode(answer), *(tensor.data for tensor in tensors)]


def decode_from_engine(body: bytes) -> FromEngine:
    """Decode a message of the engine; raises BadFrame if the body is not one."""
    return decode_by(_FROM_ENGINE.decode, body)


class FrontEndFrames:
    """Reader of a front end's messages on one connection. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder: BufferedDecoder[FromFrontEnd] = BufferedDecoder(FromFrontEnd)

    def read(self) -> FromFrontEnd | None:
        """Return the next message, with its buffers; None at the end of the connection. Raises BadFrame."""
        body = read_frame(self._connection)
        if body is None:
            return None
        frame, buffers = self.decode(body)
        for buffer in buffers:
            _fill(self._connection, buffer)
        return frame

    def decode(self, body: bytes) -> tuple[FromFrontEnd, list[memoryview]]:
        """Return a frame's message, and empty buffers to fill with the bytes that follow it; raises BadFrame."""
        frame, buffers = decode_by(self._decoder.decode, body)
        longest = max(map(len, buffers), default=0)
        if longest > MAX_FRAME_BYTES:
            raise BadFrame(f"a buffer of {longest} bytes; at most {MAX_FRAME_BYTES} are taken")
        return frame, buffers


def decode_by(decode: Callable[[bytes], _T], body: bytes) -> _T:
    """Return `decode(body)`; raises BadFrame if the body is not a message."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, RecursionError, MemoryError) as error:
        raise BadFrame(f"not a message of this protocol: {error}") from error


def read_frame(connection: socket.socket) -> bytes | None:
    """Read the body of the next frame; None at the end of the connection.

    Raises BadFrame if the frame is too long or incomplete.
    """
    header = _read(connection, LENGTH_BYTES)
    return _read_all(connection, frame_length(header)) if header else None


def frame_length(header: bytes) -> int:
    """Return the length of the body after this header; raises BadFrame if it is too long or the header is cut."""
    length = int.from_bytes(header, "big")
    if len(header) < LENGTH_BYTES or length > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
    return length


def read_response(connection: socket.socket, answer: EngineResponse) -> Response:
    """Read the tensors of an EngineResponse; return the response.

    Raises BadFrame if the tensors are incomplete or have impossible shapes, or if the error's text is malformed.
    """
    error = _error_of(answer) if answer.error_kind else None
    result, context, generation = answer.result, answer.context_logits, answer.generation_logits
    if result is not None and (context is not None or generation is not None or answer.additional_outputs):
        result = replace(
            result,
            context_logits=None if context is None else _read_tensor(connection, context),
            generation_logits=(
                None if generation is None else tuple(_read_tensor(connection, shape) for shape in generation)
            ),
            additional_outputs=tuple(
                ReturnedOutput(name, tuple(_read_tensor(connection, shape) for shape in shapes))
                for name, shapes in answer.additional_outputs
            ),
        )
    return Response(answer.request_id, result, error, answer.is_final)


def _error_of(answer: EngineResponse) -> RequestError:
    try:
        return error_from_kind(answer.error_kind, answer.error_message)
    except ValueError as error:
        raise BadFrame(f"not the text of an error: {error}") from error


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise BadFrame(f"the connection ended inside a buffer, {len(buffer)} bytes to come")
        buffer = buffer[count:]


def _read_tensor(connection: socket.socket, shape: _Shape) -> FloatTensor:
    size = 4 * prod(shape)
    if min(shape, default=0) < 0 or size > sys.maxsize:
        raise BadFrame(f"a tensor of shape {list(shape)}")
    return FloatTensor(shape, _read_all(connection, size))


def _read_all(connection: socket.socket, length: int) -> bytes:
    body = _read(connection, length)
    if len(body) < length:
        raise BadFrame(f"the connection ended inside a frame, {len(body)} of {length} bytes")
    return body


def _read(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer at the end of the connection."""
    parts: list[bytes] = []
    try:
        while count and (part := connection.recv(count, socket.MSG_WAITALL)):
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    except MemoryError:
        raise BadFrame(f"a frame with {count} bytes to come, for which there is no memory") from None
