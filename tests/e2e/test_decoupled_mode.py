"""With `decoupled_mode` false, `tensorrt_llm` and `ensemble` give one response, over every protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from inflight.server.launch import TritonServer
from inflight.testing.fake_model import expected_tokens
from inflight.testing.fake_server import serve_fake

from .clients import ask, generate, infer, unary, wait_until
from .conftest import DEMO_MODEL, FAKE_VOCABULARY

PROMPT = [5, 6, 7]
LONG = 2000


@pytest.fixture(scope="module")
def answering_server(elsewhere: Path) -> Iterator[TritonServer]:
    """The server that `scripts/serve --set decoupled_mode=false` starts, with a fake engine."""
    settings = {
        "fake_engine": f"vocab={FAKE_VOCABULARY},step_us=2000",
        "max_sequence_length": "2048",
        "tokenizer_dir": str(DEMO_MODEL),
        "decoupled_mode": "false",
        "enable_state_requests": "true",
    }
    with serve_fake(settings=settings) as server:
        yield server


def alone(count: int) -> list[int]:
    return expected_tokens(PROMPT, count, FAKE_VOCABULARY, None, attend_to_all=False)


@pytest.mark.parametrize("call", [unary, infer])
def test_token_ids_are_answered_by_unary_grpc_and_http_infer(answering_server, call):
    url = answering_server.grpc if call is unary else answering_server.http
    result = call(url, "tensorrt_llm", input_ids=PROMPT, input_lengths=3, request_output_len=8)
    assert result.as_numpy("output_ids").tolist() == [[[*PROMPT, *alone(8)]]]
    assert result.as_numpy("sequence_length").tolist() == [[11]]


@pytest.mark.parametrize("call", [unary, infer])
def test_text_is_answered_by_unary_grpc_and_http_infer(answering_server, call):
    url = answering_server.grpc if call is unary else answering_server.http
    result = call(url, "ensemble", text_input="def f", max_tokens=8, exclude_input_in_output=False)
    assert result.as_numpy("text_output").shape == (1,)
    assert result.as_numpy("text_output")[0].decode().startswith("def f")


def test_http_generate_is_answered_by_a_model_that_is_not_decoupled(answering_server):
    assert generate(answering_server.http, text_input="def f", max_tokens=8)["text_output"].startswith(
        "def f"
    )


def test_sequences_and_batches_come_in_one_response(answering_server):
    result = unary(
        answering_server.grpc,
        "tensorrt_llm",
        input_ids=[PROMPT, PROMPT],
        request_output_len=[[4], [4]],
        num_return_sequences=[[3], [3]],
        runtime_top_k=[[5], [5]],
    )
    assert result.as_numpy("output_ids").shape == (2, 3, 7)
    assert result.as_numpy("text_output").shape == (6,)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_infer"])
@pytest.mark.parametrize("call", [unary, infer])
def test_streaming_is_refused_with_advice(answering_server, call, model):
    url = answering_server.grpc if call is unary else answering_server.http
    if model == "ensemble":
        request, name = {"text_input": "a", "max_tokens": 4, "stream": True}, "stream"
    else:
        request, name = {"input_ids": PROMPT, "request_output_len": 4, "streaming": True}, "streaming"
    with pytest.raises(InferenceServerException, match=f"{name} is true.*decoupled_mode false"):
        call(url, model, **request)


def test_requests_on_a_grpc_stream_get_one_response_each(answering_server):
    answers = [
        answer
        for _ in range(2)
        for answer in ask(answering_server.grpc, "tensorrt_llm", input_ids=PROMPT, request_output_len=4)
    ]
    assert [answer.ids for answer in answers] == [PROMPT + alone(4)] * 2


def test_a_stop_by_unary_grpc_returns_the_tokens_so_far(answering_server):
    results = []

    def run() -> None:
        results.append(
            unary(
                answering_server.grpc,
                "tensorrt_llm",
                request_id="long",
                input_ids=PROMPT,
                request_output_len=LONG,
                exclude_input_in_output=True,
            )
        )

    caller = threading.Thread(target=run)
    caller.start()
    wait_until(lambda: num_generated(answering_server) > 20)
    empty = unary(answering_server.grpc, "tensorrt_llm", request_id="long", stop=True)
    caller.join(30)
    assert not empty.get_response().outputs
    (result,) = results
    ids = result.as_numpy("output_ids").ravel().tolist()
    assert 20 < len(ids) < LONG and ids == alone(len(ids))
    assert result.as_numpy("finish_reason").ravel().tolist() == [b"CANCELLED"]


def num_generated(server: TritonServer) -> int:
    result = unary(server.grpc, "tensorrt_llm", state=True)
    running = json.loads(result.as_numpy("state").item())["batcher"]["state"]["running"]
    return sum(sequence["generated_tokens"] for sequence in running)
