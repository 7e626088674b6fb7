from __future__ import annotations

import dataclasses
import io
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.description import EngineDescription
from inflight.core.request import Request
from inflight.core.response import Response, Result
from inflight.core.stop import StopReason
from inflight.endpoint import frames
from inflight.endpoint.frames import Answer, FrameError, Hello, Stop, Submit, encode_frame, read_frame
from inflight.errors import (
    Cancelled,
    InflightError,
    InvalidArgument,
    StepFailed,
    Unavailable,
    Unsupported,
)

IDS = st.integers(0, 2**64 - 1)
# Built from the annotations, so that a field added to the core is covered without anybody thinking of it.
st.register_type_strategy(int, IDS)
st.register_type_strategy(float, st.floats(allow_nan=False, width=64))


def travelled(frame: frames.Frame) -> frames.Frame | None:
    return read_frame(io.BytesIO(encode_frame(frame)))


@given(st.from_type(Request))
def test_every_field_of_a_request_survives(request: Request) -> None:
    back = travelled(Submit(request)).request
    assert dataclasses.asdict(back) == dataclasses.asdict(request)
    assert type(back.input_token_ids) is tuple


@given(st.from_type(EngineDescription))
def test_a_description_survives(description: EngineDescription) -> None:
    assert travelled(Hello(description)) == Hello(description)


@given(IDS, st.sampled_from(StopReason))
def test_a_stop_survives(request_id: int, reason: StopReason) -> None:
    assert travelled(Stop(request_id, reason)) == Stop(request_id, reason)


@given(IDS, st.from_type(Result), st.booleans())
def test_a_response_survives(request_id: int, result: Result, is_final: bool) -> None:
    response = Response(request_id, result, is_final=is_final)
    assert travelled(Answer.of(response)).response() == response


@pytest.mark.parametrize("kind", [InvalidArgument, Unavailable, Cancelled, Unsupported, StepFailed])
def test_an_error_comes_back_as_what_it_was(kind: type[InflightError]) -> None:
    response = Response(7, error=kind("what happened"), is_final=True)
    back = travelled(Answer.of(response)).response()
    assert (type(back.error), str(back.error), back.is_final) == (kind, "what happened", True)


@given(st.lists(st.builds(Stop, IDS, st.sampled_from(StopReason)), max_size=5))
def test_frames_follow_each_other(stops: list[Stop]) -> None:
    stream = io.BytesIO(b"".join(encode_frame(stop) for stop in stops))
    assert [read_frame(stream) for _ in stops] == stops
    assert read_frame(stream) is None


@given(st.binary(max_size=64))
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(FrameError):
        read_frame(io.BytesIO(struct.pack(">I", len(noise)) + noise))


@pytest.mark.parametrize(
    "content",
    [
        ["stop", "1", "cancelled"],
        ["stop", 1, "boredom"],
        ["stop", 1],
        ["unknown", 1],
        {"type": "stop"},
        5,
        None,
    ],
)
def test_a_message_must_be_a_known_one(content: object) -> None:
    encoded = msgspec.msgpack.encode(content)
    stream = io.BytesIO(struct.pack(">I", len(encoded)) + encoded)
    with pytest.raises(FrameError, match="not a known message"):
        read_frame(stream)


def test_a_frame_cut_short_is_an_error_and_not_an_end() -> None:
    whole = encode_frame(Stop(1, StopReason.CANCELLED))
    for length in range(1, len(whole)):
        with pytest.raises(FrameError, match="ends within"):
            read_frame(io.BytesIO(whole[:length]))


def test_size_is_limited_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode_frame(Submit(Request(1, tuple(range(100)), 1)))
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError, match="can have 100"):
        encode_frame(Submit(Request(1, tuple(range(100)), 1)))
    with pytest.raises(FrameError, match="can have 100"):
        read_frame(io.BytesIO(frame))
