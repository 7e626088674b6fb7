from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inflight_client import Client, Completion, Delta, Sequence, ServerError
from tests.client.fake_server import (
    PATIENCE_S,
    Asked,
    FakeServer,
    Refusal,
    Response,
    answer_with,
    response,
)

OPTIONS = {"temperature": 0.5, "top_k": 40, "top_p": 0.75, "seed": 2**64 - 1, "end_id": -1}


@pytest.fixture
def client(server: FakeServer) -> Client:
    return Client(server.url)


def delta(text: str = "", ids: tuple[int, ...] = (), reason: str = "NOT_FINISHED") -> Delta:
    return Delta((Sequence(text, ids, reason),))


def until_stopped(server: FakeServer, asked: Asked) -> Iterator[Response]:
    """Yield a first token, then nothing until the request is stopped."""
    yield response(asked, "a", "NOT_FINISHED")
    while not server.stopped.is_set() and not server.cancelled.is_set():
        server.stopped.wait(0.05)
    yield from answer_with(asked, [""], "CANCELLED")


# -------------------------------------------------------------------- requests


def test_text_is_sent_to_the_ensemble_under_its_names(server, client) -> None:
    client.generate("déjà vu 🎉", max_tokens=7, **OPTIONS)
    (asked,) = server.asked
    assert asked.model == "ensemble"
    assert asked.outputs == ["text_output", "finish_reason"]
    assert asked.inputs == {
        "text_input": ["déjà vu 🎉"],
        "stream": [False],
        "exclude_input_in_output": [True],
        "max_tokens": [7],
        "temperature": [0.5],
        "top_k": [40],
        "top_p": [0.75],
        "seed": [2**64 - 1],
        "end_id": [-1],
    }


def test_ids_are_sent_to_the_engine_s_model_under_its_names(server, client) -> None:
    list(client.stream([5, 6, 7], max_tokens=7, **OPTIONS))
    (asked,) = server.asked
    assert asked.model == "tensorrt_llm"
    assert asked.outputs == ["output_ids", "sequence_length", "finish_reason"]
    assert asked.inputs["input_ids"] == [5, 6, 7]
    assert asked.inputs["streaming"] == [True]
    assert asked.inputs["request_output_len"] == [7]
    assert (asked.inputs["runtime_top_k"], asked.inputs["runtime_top_p"]) == ([40], [0.75])
    assert asked.inputs["random_seed"] == [2**64 - 1]


def test_tensors_have_the_server_s_types_and_a_batch_of_one(server, client) -> None:
    client.generate("x", **OPTIONS)
    client.generate(range(3), **OPTIONS)
    text, ids = server.asked
    assert all(shape == [1, 1] for shape in text.shapes.values())
    assert ids.shapes["input_ids"] == [1, 3]
    assert text.dtypes == {
        "text_input": "BYTES",
        "stream": "BOOL",
        "exclude_input_in_output": "BOOL",
        "max_tokens": "INT32",
        "temperature": "FP32",
        "top_k": "INT32",
        "top_p": "FP32",
        "seed": "UINT64",
        "end_id": "INT32",
    }


def test_options_that_are_left_out_are_not_sent(server, client) -> None:
    client.generate("x", temperature=None)
    assert set(server.asked[0].inputs) == {"text_input", "stream", "exclude_input_in_output", "max_tokens"}


def test_requests_go_to_the_given_model(server) -> None:
    Client(server.url, model="other").generate("x")
    assert server.asked[0].model == "other"


def test_ids_are_the_caller_s_or_unique(server, client) -> None:
    for request_id in ("mine", None, None):
        client.generate("x", request_id=request_id)
    ids = [asked.request_id for asked in server.asked]
    assert ids[0] == "mine"
    assert len({*ids, ""}) == 4


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"seed": -1}, r"seed must be in \[0, 18446744073709551615\], got -1"),
        ("x", {"max_tokens": 2**31}, "max_tokens must be in"),
        ([2**31], {}, "input_ids must be in"),
    ],
)
def test_an_invalid_value_is_not_sent(server, client, prompt, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client.generate(prompt, **options)
    assert not server.asked


def test_an_unknown_option_is_an_error(client) -> None:
    with pytest.raises(TypeError, match=r"unknown option 'topk'; did you mean top_k\?"):
        client.generate("x", topk=5)
    with pytest.raises(TypeError, match=r"unknown option 'xyz'; there are max_tokens, .*temperature, "):
        client.generate("x", xyz=5)


# -------------------------------------------------------------------- responses


@pytest.mark.parametrize("empty_final", [True, False])
def test_streamed_texts_are_returned_as_they_were_sent(server, client, empty_final: bool) -> None:
    server.answer = lambda asked: answer_with(asked, ["Hé", "", "🎉"], "END_ID", empty_final)
    assert list(client.stream("x")) == [
        delta("Hé"),
        delta(""),
        delta("🎉", reason="END_ID"),
    ]


def test_streamed_ids_are_returned_as_they_were_sent(server, client) -> None:
    server.answer = lambda asked: answer_with(asked, [[5, 6], [7]])
    assert list(client.stream([1])) == [delta(ids=(5, 6)), delta(ids=(7,), reason="LENGTH")]


def test_generate_joins_the_deltas(server, client) -> None:
    assert client.generate("x") == Completion((Sequence("abc", (), "LENGTH"),))
    server.answer = lambda asked: answer_with(asked, [[5, 6], [7]], "END_ID")
    assert client.generate([1]) == Completion((Sequence("", (5, 6, 7), "END_ID"),))


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_has_the_server_s_status_and_message(server, client, stream: bool) -> None:
    def refuse(asked: Asked) -> Iterator[Response]:
        raise Refusal("INVALID_ARG", "request_output_len must be at least 1, got 0")
        yield

    server.answer = refuse
    with pytest.raises(ServerError, match="must be at least 1, got 0") as caught:
        list(client.stream("x") if stream else [client.generate("x")])
    assert caught.value.status == "INVALID_ARGUMENT"


def test_an_error_after_some_deltas_is_raised_after_them(server, client) -> None:
    def break_off(asked: Asked) -> Iterator[Response]:
        yield response(asked, "a", "NOT_FINISHED")
        raise Refusal("UNAVAILABLE", "the generation loop died")

    server.answer = break_off
    deltas = client.stream("x")
    assert next(deltas).text == "a"
    with pytest.raises(ServerError, match="the generation loop died") as caught:
        next(deltas)
    assert caught.value.status == "UNAVAILABLE"


@pytest.mark.parametrize("attempt", range(5))  # the refusal races with the sending of the request
def test_an_unreachable_server_is_an_error_with_the_remedy(attempt: int) -> None:
    with pytest.raises(
        ServerError,
        match=r"no gRPC server answers at localhost:9; .* scripts/serve \(or inflight serve\) starts a server",
    ) as caught:
        Client("localhost:9").generate("x")
    assert caught.value.status == "UNAVAILABLE"


def test_the_port_of_an_http_server_is_an_error_that_names_the_right_port() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        url = f"127.0.0.1:{http_server.server_port}"
        with pytest.raises(
            ServerError,
            match=f"no gRPC server answers at {url}; url is the address of Triton's gRPC port, not of /v1",
        ):
            Client(url).generate("x")
        http_server.shutdown()


# -------------------------------------------------------------------- ending early


@pytest.mark.parametrize("how", ["close", "break"])
def test_leaving_a_stream_cancels_the_request(server, client, how: str) -> None:
    server.answer = lambda asked: until_stopped(server, asked)
    if how == "close":
        deltas = client.stream("x")
        next(deltas)
        deltas.close()
    else:
        for _ in client.stream("x"):
            break
    assert server.cancelled.wait(PATIENCE_S)


def test_a_complete_stream_is_not_cancelled(server, client) -> None:
    list(client.stream("x"))
    server.close()
    assert not server.cancelled.is_set()


@pytest.mark.parametrize(("prompt", "model"), [("x", "ensemble"), ([5], "tensorrt_llm")])
def test_cancel_ends_a_request_by_its_id(server, client, prompt, model: str) -> None:
    server.answer = lambda asked: until_stopped(server, asked)
    deltas = client.stream(prompt, request_id="mine")
    next(deltas)
    client.cancel("mine")
    assert [delta.finish_reason for delta in deltas] == ["CANCELLED"]
    stop = server.asked[-1]
    assert (stop.model, stop.request_id, stop.inputs) == (model, "mine", {"stop": [True]})


def test_cancel_of_another_client_s_request_asks_the_given_model(server, client) -> None:
    client.cancel("theirs")
    client.cancel("theirs", model="tensorrt_llm")
    assert [asked.model for asked in server.asked] == ["ensemble", "tensorrt_llm"]


def test_one_client_serves_many_threads(server, client) -> None:
    barrier = threading.Barrier(8)
    server.answer = lambda asked: answer_with(asked, [asked.inputs["text_input"][0], "!"])
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        barrier.wait(PATIENCE_S)
        texts[number] = client.generate(str(number)).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert texts == {number: f"{number}!" for number in range(8)}


# -------------------------------------------------------------------- streams


def refuse_texts(asked: Asked) -> Iterator[Response]:
    """Answer a prompt of ids; refuse any other."""
    if "text_input" in asked.inputs:
        raise Refusal("UNAVAILABLE", "Exceeds maximum queue size")
    yield from answer_with(asked, [[5], [6, 7]])


def test_a_stream_serves_one_request_after_another(server, client) -> None:
    server.answer = refuse_texts
    for _ in range(20):
        assert client.generate([1]).token_ids == (5, 6, 7)
        with pytest.raises(ServerError, match="maximum queue size"):
            client.generate("x")
        assert [delta.token_ids for delta in client.stream([1])] == [(5,), (6, 7)]
        client.cancel("nobody")
    assert len(server.asked) == 80 and server.num_streams == 1


def test_there_are_as_many_streams_as_requests_at_a_time(server, client) -> None:
    for _ in range(2):
        streams = [client.stream([number]) for number in range(5)]
        server.answer = lambda asked: answer_with(asked, [asked.inputs["input_ids"], [9]])
        for step in zip(*streams, strict=True):
            assert [one.token_ids for one in step] in ([(each,) for each in range(5)], [(9,)] * 5)
    assert server.num_streams == 5


def test_leaving_a_request_ends_only_its_stream(server, client) -> None:
    server.answer = lambda asked: until_stopped(server, asked)
    left, kept = client.stream("left"), client.stream("kept")
    next(left), next(kept)
    left.close()
    assert server.cancelled.wait(PATIENCE_S) and server.ended.acquire(timeout=PATIENCE_S)
    assert [delta.finish_reason for delta in kept] == ["CANCELLED"]
    server.answer = lambda asked: answer_with(asked, ["a", "b"])
    assert client.generate("x").text == "ab" and server.num_streams == 2


def test_a_restarted_server_gets_a_new_stream(server, client) -> None:
    client.generate("x")
    server.close()
    with pytest.raises(ServerError) as caught:
        client.generate("x")
    assert caught.value.status == "UNAVAILABLE"
    again = FakeServer(server.port)
    deadline = time.monotonic() + PATIENCE_S  # gRPC reconnects after a time of its own choice
    while True:
        try:
            assert client.generate("x").text == client.generate("y").text == "abc"
            break
        except ServerError as error:
            assert error.status == "UNAVAILABLE" and time.monotonic() < deadline
            time.sleep(0.1)
    assert again.num_streams == 1
    again.close()


@pytest.mark.parametrize("how", ["close", "with", "del"])
def test_streams_end_with_their_client(server, how: str) -> None:
    made = Client(server.url)
    made.generate("x")
    if how == "with":
        with made:
            made.generate("x")
    elif how == "close":
        made.close()
        made.close()
    else:
        del made
        gc.collect()
    assert server.ended.acquire(timeout=PATIENCE_S) and server.num_streams == 1
    if how == "close":
        assert made.generate("x").text == "abc" and server.num_streams == 2


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_infer"])
def test_a_text_is_sent_to_the_engine_s_models_under_their_names(server, model: str) -> None:
    assert Client(server.url, model).generate("x", max_tokens=7, top_k=2).text == "abc"
    (asked,) = server.asked
    assert (asked.model, asked.outputs) == (model, ["text_output", "sequence_length", "finish_reason"])
    assert set(asked.inputs) == {
        "text_input", "streaming", "exclude_input_in_output", "request_output_len", "runtime_top_k"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (b"x", {}, TypeError),
        (7, {}, TypeError),
        ([1.5], {}, ValueError),
        (["a"], {}, ValueError),
        ("x", {"seed": 1.5}, ValueError),
    ],
)
def test_prompts_and_integers_of_wrong_types_are_refused(client, prompt, options, error) -> None:
    with pytest.raises(error, match=r"must be"):
        client.generate(prompt, **options)


def test_an_exception_in_a_loop_over_a_stream_ends_the_program(server) -> None:
    """The program does not wait for the thread that reads the stream."""
    server.answer = lambda asked: until_stopped(server, asked)
    program = f"from inflight_client import Client\nfor _ in Client({server.url!r}).stream('x'): 1 / 0"
    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, capture_output=True)
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr
    assert server.cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("left", ["client.generate('x')", "deltas = client.stream('x'); next(deltas)"])
def test_a_program_can_end_with_an_open_client(server, left: str) -> None:
    server.answer = lambda asked: answer_with(asked, ["a", "b"])
    program = f"from inflight_client import Client; client = Client({server.url!r}); {left}"
    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert server.ended.acquire(timeout=PATIENCE_S)


def test_importing_the_client_imports_no_server_code() -> None:
    program = "import sys, inflight_client; sys.exit('inflight' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
