from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.core.request.adapter import ITEM_SIZES, LoraRequest, LoraWeights, Matrix, RawBuffer
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.stop import StopReason
from inflight.endpoint import frames
from inflight.endpoint.frames import (
    BadFrame,
    EngineResponse,
    FromEngine,
    FromFrontEnd,
    FrontEndFrames,
    Hello,
    ReadState,
    State,
    Stop,
    Submit,
    decode_from_engine,
    encode,
    encode_response,
    encode_submit,
    read_frame,
    read_response,
)
from inflight.errors import (
    Cancelled,
    InflightError,
    InvalidArgument,
    StepFailed,
    Unavailable,
    Unsupported,
)
from tests.endpoint.factories import make_result
from tests.tiers import examples

IDS = st.integers(0, 2**64 - 1)
TABLE = PromptTable(Matrix((2, 4), "float32", RawBuffer(bytes(32))), b"digest")
# Built from the annotations, so that fields added to the core are covered.
st.register_type_strategy(int, IDS)
st.register_type_strategy(float, st.floats(allow_nan=False, width=64))


def received(sent: bytes) -> Iterator[bytes]:
    """Return the bodies of the frames that one side has sent before it closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        while (body := read_frame(theirs)) is not None:
            yield body


@st.composite
def float_tensors(draw: st.DrawFn) -> FloatTensor:
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    size = 4 * prod(shape)
    return FloatTensor(shape, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    shape = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    size = ITEM_SIZES[dtype] * prod(shape)
    return Matrix(shape, dtype, RawBuffer(draw(st.binary(min_size=size, max_size=size))))


st.register_type_strategy(FloatTensor, float_tensors())
st.register_type_strategy(Matrix, matrices())


def response_travelled(response: Response) -> Response:
    """Send a response over a socket that transfers a few bytes at a time."""
    ours, theirs = socket.socketpair()
    parts = encode_response(response)
    sender = threading.Thread(target=lambda: [ours.sendall(part) for part in parts])
    with ours, theirs:
        sender.start()
        body = read_frame(theirs)
        assert body is not None
        answer = decode_from_engine(body)
        assert isinstance(answer, EngineResponse)
        back = read_response(theirs, answer)
        sender.join()
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(1) == b""  # all of it was taken
    return back


def decode_from_front_end(body: bytes) -> FromFrontEnd:
    with socket.socket() as unused:
        return FrontEndFrames(unused).decode(body)[0]


def submit_travelled(request: Request) -> Request:
    """Send a request with its buffers through a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [ours.sendall(part) for part in encode_submit(request)])
        sender.start()
        frame = FrontEndFrames(theirs).read()
        sender.join()
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(1) == b""  # all of it was taken
    assert isinstance(frame, Submit)
    return frame.request


def travelled(frame: FromEngine | FromFrontEnd) -> Any:
    (body,) = received(encode(frame))
    decode = decode_from_engine if isinstance(frame, FromEngine) else decode_from_front_end
    return decode(body)


@settings(max_examples=examples(50, all=100))
@given(st.from_type(Request))
def test_a_request_is_decoded_with_all_its_fields(request: Request) -> None:
    back = submit_travelled(request)
    assert dataclasses.asdict(back) == dataclasses.asdict(request)
    assert type(back.input_token_ids) is tuple


@given(st.from_type(EngineDescription))
def test_a_description_is_decoded_as_it_was_encoded(description: EngineDescription) -> None:
    assert travelled(Hello(description)) == Hello(description)


@given(IDS, st.sampled_from(StopReason))
def test_a_stop_is_decoded_as_it_was_encoded(request_id: int, reason: StopReason) -> None:
    assert travelled(Stop(request_id, reason)) == Stop(request_id, reason)


@given(IDS, st.floats(0, 1e6), st.text(), st.text(), st.text())
def test_a_question_for_the_state_and_its_answer_are_decoded_as_encoded(
    query_id: int, timeout_s: float, text: str, code: str, message: str
) -> None:
    assert travelled(ReadState(query_id, timeout_s)) == ReadState(query_id, timeout_s)
    state = State(query_id, text, code, message)
    assert travelled(state) == state


@settings(max_examples=examples(50, all=100))
@given(IDS, st.from_type(SequenceResult), st.booleans())
def test_a_response_is_decoded_as_it_was_encoded(
    request_id: int, result: SequenceResult, is_final: bool
) -> None:
    response = Response(request_id, result, is_final=is_final)
    assert response_travelled(response) == response


@pytest.mark.parametrize("kind", [InvalidArgument, Unavailable, Cancelled, Unsupported, StepFailed])
def test_an_error_is_decoded_as_its_class(kind: type[InflightError]) -> None:
    back = response_travelled(Response(7, error=kind("what happened"), is_final=True))
    assert (type(back.error), str(back.error), back.is_final) == (kind, "what happened", True)


def test_logits_larger_than_a_sockets_buffer_are_sent() -> None:
    logits = FloatTensor((3, 1 << 20), bytes(range(256)) * (3 << 14))
    response = Response(1, make_result(5, context_logits=logits, generation_logits=(logits, logits)))
    assert response_travelled(response) == response


def test_logits_are_sent_unencoded() -> None:
    logits = FloatTensor((2, 3), bytes(24))
    _, *tensors = encode_response(Response(1, make_result(5, context_logits=logits)))
    assert tensors[0] is logits.data


def test_an_adapter_is_sent_unencoded_after_its_request() -> None:
    data = bytes(range(256)) * (1 << 14)
    weights = LoraWeights(Matrix((1, len(data) // 2), "float16", RawBuffer(data)), ((1, 0, 8),))
    request = Request(1, (5,), 1, lora=LoraRequest(task_id=3, weights=weights))
    frame, buffer = encode_submit(request)
    assert len(frame) < 2000 and memoryview(buffer).obj is data
    assert submit_travelled(request) == request


def test_a_buffer_cut_short_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame, buffer = encode_submit(Request(1, (5,), 1, prompt_table=TABLE))
        ours.sendall(frame + bytes(buffer)[:-1])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(BadFrame, match="inside a buffer, 1 bytes"):
            FrontEndFrames(theirs).read()


def test_logits_cut_short_are_an_error() -> None:
    frame, data = encode_response(Response(1, make_result(context_logits=FloatTensor((2, 3), bytes(24)))))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame + data[:-1])
        ours.shutdown(socket.SHUT_WR)
        answer = decode_from_engine(read_frame(theirs) or b"")
        with pytest.raises(BadFrame, match="inside a frame, 23 of 24 bytes"):
            read_response(theirs, answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int4"),
        ("shape", [-2, -4]),
        ("shape", [2]),
        ("buffer", 2**63),
        ("buffer", 2**62),
        ("buffer", -1),
    ],
)
def test_a_buffer_of_an_impossible_type_shape_or_length_is_refused(field: str, value: object) -> None:
    message = msgspec.msgpack.decode(bytes(encode_submit(Request(1, (5,), 1, prompt_table=TABLE))[0][4:]))
    message["request"]["prompt_table"]["rows"][field] = value
    with pytest.raises(BadFrame):
        decode_from_front_end(msgspec.msgpack.encode(message))


def test_a_buffer_that_no_front_end_sends_is_refused() -> None:
    message = msgspec.msgpack.decode(bytes(encode_submit(Request(1, (5,), 1, prompt_table=TABLE))[0][4:]))
    message["request"]["prompt_table"]["rows"] |= {
        "dtype": "float32",
        "shape": [1, 2**28 + 1],
        "buffer": 2**30 + 4,
    }
    with pytest.raises(BadFrame, match="a buffer of 1073741828 bytes; at most 1073741824 are taken"):
        decode_from_front_end(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "answer",
    [
        EngineResponse(1, make_result(), context_logits=(-2, 4)),
        EngineResponse(1, make_result(), context_logits=(-2, -4)),
        EngineResponse(1, make_result(), generation_logits=((2**62, 2**62),)),
        EngineResponse(1, make_result(), additional_outputs=(("x", ((-1,),)),)),
        EngineResponse(1, error_kind="Unavailable", error_message="an open {brace"),
    ],
)
def test_a_response_with_impossible_shapes_or_a_malformed_error_is_refused(answer: EngineResponse) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(bytes(64))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(BadFrame):
            read_response(theirs, answer)


@given(st.lists(st.builds(Stop, IDS, st.sampled_from(StopReason)), max_size=5))
def test_frames_follow_each_other(stops: list[Stop]) -> None:
    bodies = received(b"".join(encode(stop) for stop in stops))
    assert [decode_from_front_end(body) for body in bodies] == stops


@given(st.binary(max_size=64))
@example(b"\x91" * 100_000)
def test_malformed_frames_are_refused(noise: bytes) -> None:
    for decode in (decode_from_engine, decode_from_front_end):
        with pytest.raises(BadFrame):
            decode(noise)


def test_a_frame_in_the_wrong_direction_is_refused() -> None:
    stop, answer = encode(Stop(1, StopReason.CANCELLED)), encode_response(Response(1))[0]
    for decode, sent in ((decode_from_engine, stop), (decode_from_front_end, answer)):
        with pytest.raises(BadFrame):
            decode(*received(sent))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "Stop", "request_id": "1", "reason": "cancelled"},
        {"type": "Stop", "request_id": 1, "reason": "boredom"},
        {"type": "Stop", "request_id": 1},
        {"type": "Unknown"},
        ["Stop"],
        None,
    ],
)
def test_unknown_and_incomplete_messages_are_refused(content: object) -> None:
    with pytest.raises(BadFrame):
        decode_from_front_end(msgspec.msgpack.encode(content))


def test_a_frame_cut_short_is_an_error_and_not_an_end() -> None:
    whole = encode(Stop(1, StopReason.CANCELLED))
    for length in range(1, len(whole)):
        with pytest.raises(BadFrame):
            list(received(whole[:length]))


def test_frames_have_a_size_limit_when_sent_and_when_received(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Submit(Request(1, tuple(range(200)), 1))
    sent = encode(submit)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 200)
    with pytest.raises(BadFrame, match="at most 200"):
        encode(submit)
    with pytest.raises(BadFrame, match="at most 200"):
        list(received(sent))
