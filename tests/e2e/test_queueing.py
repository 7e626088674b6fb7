"""Queueing: priorities, fairness between clients, deadlines, a full queue, and sharing of KV blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tritonclient.utils import InferenceServerException

from .clients import Answer, Stream, ask, completion, generate, infer, unary, wait_until
from .conftest import NARROW_QUEUE, NARROW_STEP_MS

PROMPT = [3, 1, 4]
LONG = 30_000
SHORT = {"input_ids": PROMPT, "request_output_len": 3}


def state_of(server) -> dict:
    (answer,) = ask(server.grpc, state=True)
    return json.loads(answer.outputs["state"].item())


def num_waiting(server) -> int:
    return len(state_of(server)["batcher"]["state"]["waiting"])


def wait_until_idle(server) -> None:
    """Wait until requests that an earlier test has cancelled have left the only slot."""
    wait_until(lambda: state_of(server)["unanswered_requests"] == 0)


@contextmanager
def occupied(server) -> Iterator[Stream]:
    """A stream whose request "occupant" has the only slot until `release`, or is cancelled at the end."""
    wait_until_idle(server)
    with Stream(server.grpc) as stream:
        stream.send(
            "tensorrt_llm",
            "occupant",
            input_ids=PROMPT,
            request_output_len=LONG,
            streaming=True,
            priority=1.0,
        )
        stream.receive()
        try:
            yield stream
        finally:
            stream.cancel()


def release(stream: Stream) -> None:
    stream.send("tensorrt_llm", "occupant", stop=True)


def finals(stream: Stream, count: int) -> list[tuple[str, Answer]]:
    """Return (id, final response) of the next `count` requests except the occupant's."""
    found: list[tuple[str, Answer]] = []
    while len(found) < count:
        name, answer = stream.receive()
        assert answer.error is None, answer.error
        if answer.final and name != "occupant":
            found.append((name, answer))
    return found


# -------------------------------------------------------------------- order


def by_tensor(value: float) -> dict:
    return {"priority": value}


def by_parameter(value: float) -> dict:
    return {"beside": {"parameters": {"request_priority": value}}}


@pytest.mark.covers("priority")
@pytest.mark.parametrize("said", [by_tensor, by_parameter])
def test_higher_priorities_start_first(narrow_server, said):
    order = {"low": 0.125, "low too": 0.125, "high": 0.875}
    with occupied(narrow_server) as stream:
        for name, priority in order.items():
            stream.send("tensorrt_llm", name, **SHORT, **said(priority))
        stream.send("tensorrt_llm", "default", **SHORT, priority=0.5)
        release(stream)
        assert [name for name, _ in finals(stream, 4)] == ["high", "default", "low", "low too"]


def test_ensemble_supports_priorities(narrow_server):
    text = {"text_input": "def f", "max_tokens": 3}
    with occupied(narrow_server) as stream:
        stream.send("ensemble", "low", **text, priority=0.25)
        stream.send("ensemble", "high", **text, priority=0.75)
        wait_until(lambda: num_waiting(narrow_server) == 2)
        release(stream)
        assert [name for name, _ in finals(stream, 2)] == ["high", "low"]


@pytest.mark.covers("client_id")
@pytest.mark.parametrize("largest", [2**64 - 1, "18446744073709551615"], ids=["tensor", "parameter"])
def test_clients_of_one_priority_take_turns(narrow_server, largest):
    other = (
        {"beside": {"parameters": {"client_id": largest}}}
        if isinstance(largest, str)
        else {"client_id": largest}
    )
    with occupied(narrow_server) as stream:
        for number in range(3):
            stream.send("tensorrt_llm", f"greedy {number}", **SHORT, client_id=1)
        stream.send("tensorrt_llm", "modest", **SHORT, **other)
        release(stream)
        names = [name for name, _ in finals(stream, 4)]
    assert names.index("modest") <= 1
    assert [name for name in names if name != "modest"] == ["greedy 0", "greedy 1", "greedy 2"]


# -------------------------------------------------------------------- deadlines

ALLOTTED_MS = 500  # enough for a first step on a busy machine too
MAX_TOKENS = ALLOTTED_MS // NARROW_STEP_MS + 2
"""Most tokens before the deadline: steps take at least their time, and one more is under way."""

WAYS = {
    "tensor": {"allotted_time_ms": ALLOTTED_MS},
    "parameter": {"beside": {"parameters": {"allotted_time_ms": ALLOTTED_MS}}},
    "timeout": {"beside": {"timeout": ALLOTTED_MS * 1000}},
}


@pytest.mark.covers("finish_reason")
@pytest.mark.parametrize(
    "way", [pytest.param("tensor", marks=pytest.mark.covers("allotted_time_ms")), "parameter", "timeout"]
)
def test_a_deadline_ends_a_stream(narrow_server, way):
    wait_until_idle(narrow_server)
    *deltas, last = ask(
        narrow_server.grpc, input_ids=PROMPT, request_output_len=LONG, streaming=True, **WAYS[way]
    )
    assert last.error is None and last.finish_reason == "TIMED_OUT"
    assert 0 < sum(len(answer.ids) for answer in (*deltas, last)) <= MAX_TOKENS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [unary, infer])
def test_a_deadline_ends_a_request_of_one_response(narrow_server, call, way):
    wait_until_idle(narrow_server)
    url = narrow_server.grpc if call is unary else narrow_server.http
    result = call(url, input_ids=PROMPT, request_output_len=LONG, **WAYS[way])
    assert result.as_numpy("finish_reason").item() == b"TIMED_OUT"
    num_ids = result.as_numpy("sequence_length").item()
    assert len(PROMPT) < num_ids <= len(PROMPT) + MAX_TOKENS
    ids = result.as_numpy("output_ids").ravel().tolist()
    assert len(ids) == num_ids and ids[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("key", ["timeout", "allotted_time_ms"])
def test_a_deadline_can_be_given_over_http_generate(narrow_server, key):
    wait_until_idle(narrow_server)
    value = ALLOTTED_MS * 1000 if key == "timeout" else ALLOTTED_MS
    answer = generate(narrow_server.http, text_input="def f", max_tokens=LONG, **{key: value})
    assert answer["finish_reason"] == "TIMED_OUT"
    assert answer["text_output"].startswith("def f") and len(answer["text_output"]) > len("def f")


def test_a_deadline_can_pass_in_the_queue(narrow_server):
    """The occupant would keep the slot for minutes."""
    with occupied(narrow_server) as stream:
        stream.send("tensorrt_llm", "late", **SHORT, allotted_time_ms=ALLOTTED_MS)
        ((name, answer),) = finals(stream, 1)
        assert (name, answer.finish_reason, answer.ids) == ("late", "TIMED_OUT", SHORT["input_ids"])
        _, still_running = stream.receive()
        assert not still_running.final


def test_a_deadline_tensor_overrides_the_timeout(narrow_server):
    answer = completion(narrow_server.grpc, **SHORT, allotted_time_ms=0, beside={"timeout": 1})
    assert answer.finish_reason == "LENGTH"


def test_tritons_own_priority_has_no_effect(narrow_server):
    """The server does not pass it on, on either protocol."""
    for call, url in ((unary, narrow_server.grpc), (infer, narrow_server.http)):
        assert call(url, **SHORT, beside={"priority": 1}).as_numpy("finish_reason").item() == b"LENGTH"


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"parameters": {"request_priority": "urgent"}}, ["request_priority", "'urgent'"]),
        ({"parameters": {"client_id": -1}}, ["client_id", "-1"]),
        ({"parameters": {"allotted_time_ms": "1 s"}}, ["allotted_time_ms", "'1 s'"]),
    ],
)
@pytest.mark.parametrize("call", [unary, infer])
def test_an_invalid_parameter_is_refused_by_name_on_the_server(narrow_server, call, beside, words):
    url = narrow_server.grpc if call is unary else narrow_server.http
    with pytest.raises(InferenceServerException) as caught:
        call(url, **SHORT, beside=beside)
    assert caught.value.status() in ("StatusCode.INVALID_ARGUMENT", "400")
    assert all(word in caught.value.message() for word in words), caught.value


def test_a_negative_timeout_is_refused_by_name(narrow_server):
    with pytest.raises(InferenceServerException, match=r"timeout must be an integer .*, got -5"):
        unary(narrow_server.grpc, **SHORT, beside={"timeout": -5})


# -------------------------------------------------------------------- the queue's bound

FULL = (
    "Exceeds maximum queue size. "
    f"Maximum queue size of {NARROW_QUEUE} has been reached, please try again later"
)


@contextmanager
def full(server) -> Iterator[Stream]:
    with occupied(server) as stream:
        for number in range(NARROW_QUEUE):
            stream.send("tensorrt_llm", f"waiting {number}", **SHORT)
        wait_until(lambda: num_waiting(server) == NARROW_QUEUE)
        yield stream


@pytest.mark.parametrize("call", [unary, infer])
def test_a_full_queue_refuses_requests(narrow_server, call):
    url = narrow_server.grpc if call is unary else narrow_server.http
    with full(narrow_server) as stream:
        with pytest.raises(InferenceServerException, match=FULL) as caught:
            call(url, **SHORT)
        release(stream)
        assert len(finals(stream, NARROW_QUEUE)) == NARROW_QUEUE
    assert caught.value.status() in ("StatusCode.UNAVAILABLE", "503")
    assert completion(narrow_server.grpc, **SHORT).finish_reason == "LENGTH"


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_a_full_queue_refuses_streamed_requests(narrow_server, model):
    text = {"text_input": "def f", "max_tokens": 3}
    with full(narrow_server):
        (refused,) = ask(narrow_server.grpc, model, **(SHORT if model == "tensorrt_llm" else text))
    assert FULL in str(refused.error)


def test_a_full_queue_accepts_a_higher_priority(narrow_server):
    with full(narrow_server) as stream:
        stream.send("tensorrt_llm", "urgent", **SHORT, priority=0.75)
        release(stream)
        assert finals(stream, NARROW_QUEUE + 1)[0][0] == "urgent"


# -------------------------------------------------------------------- sharing of KV blocks


def reused_and_missed(server, first: int, **tensors) -> tuple[int, int]:
    """Return how many KV blocks of a prompt of 129 tokens, with 4 full blocks, were found and not found."""
    answer = completion(
        server.grpc,
        input_ids=list(range(first, first + 129)),
        request_output_len=2,
        return_perf_metrics=True,
        **tensors,
    )
    return tuple(answer.outputs[f"kv_cache_{name}_blocks"].item() for name in ("reused", "missed"))


@pytest.mark.covers("cache_salt_id", "kv_cache_missed_blocks", "kv_cache_reused_blocks")
def test_requests_share_blocks_only_with_the_same_salt(fake_server):
    salts = [2**64 - 1, 7, 0, 2**64 - 1, 7, 0]
    counts = [reused_and_missed(fake_server, 300, cache_salt_id=salt) for salt in salts]
    assert counts == [(0, 4)] * 3 + [(4, 0)] * 3
    assert reused_and_missed(fake_server, 300) == (4, 0), "no salt is salt 0"


RETENTION = {
    "retention_token_range_starts": [0, 64],
    "retention_token_range_ends": [64, -1],
    "retention_token_range_priorities": [100, 0],
    "retention_token_range_durations_ms": [-1, 5000],
    "retention_decode_priority": 50,
    "retention_decode_duration_ms": 1000,
}


@pytest.mark.covers(*RETENTION)
def test_retention_is_accepted_and_blocks_are_still_reused(fake_server):
    assert [reused_and_missed(fake_server, 600, **RETENTION) for _ in range(2)] == [(0, 4), (4, 0)]
    (answer,) = ask(fake_server.grpc, "ensemble", text_input="def f", max_tokens=3, **RETENTION)
    assert answer.error is None
    assert unary(fake_server.grpc, **SHORT, **RETENTION).as_numpy("finish_reason").item() == b"LENGTH"


def test_ranges_of_different_lengths_are_refused(fake_server):
    with pytest.raises(InferenceServerException) as caught:
        unary(fake_server.grpc, **SHORT, **RETENTION | {"retention_token_range_ends": [64]})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "Invalid retention_token_range_ends length. Expected length 2" in caught.value.message()
