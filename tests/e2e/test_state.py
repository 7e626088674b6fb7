"""`state` requests: every model returns what the batcher does, if the server allows it."""

from __future__ import annotations

import json

import pytest
from tritonclient.utils import InferenceServerException

from inflight_client import Client, ServerError
from inflight_client.__main__ import main

from .clients import Stream, ask, generate, infer, unary, wait_until

DECOUPLED = ["tensorrt_llm", "ensemble"]
PROMPT = [3, 1, 4]


def state_of(server, model: str) -> dict:
    (answer,) = ask(server.grpc, model, state=True)
    assert answer.error is None and set(answer.outputs) == {"state"}
    assert answer.outputs["state"].shape == (1, 1)
    return json.loads(answer.outputs["state"].item())


@pytest.mark.covers("state")
@pytest.mark.parametrize("model", DECOUPLED)
def test_every_decoupled_model_returns_the_state(narrow_server, model):
    state = state_of(narrow_server, model)
    assert (state["queued_requests"], state["unanswered_requests"]) == (0, 0)
    scheduler = state["batcher"]["state"]
    assert scheduler["waiting"] == scheduler["running"] == []
    assert scheduler["slots"] == scheduler["free_slots"] == 1
    assert scheduler["blocks"]["held"] == 0


@pytest.mark.parametrize("call", [unary, infer])
def test_a_model_that_is_not_decoupled_returns_the_state(narrow_server, call):
    result = call(narrow_server.grpc if call is unary else narrow_server.http, state=True)
    assert "batcher" in json.loads(result.as_numpy("state").item())


@pytest.mark.parametrize("model", [*DECOUPLED, "tensorrt_llm_infer"])
def test_every_model_returns_the_state_over_http_generate(narrow_server, model):
    answer = generate(narrow_server.http, model, state=True)
    assert "batcher" in json.loads(answer["state"])


def test_the_state_lists_running_and_waiting_requests_without_affecting_them(narrow_server):
    with Stream(narrow_server.grpc) as stream:
        stream.send("tensorrt_llm", "runs", input_ids=PROMPT, request_output_len=400, streaming=True)
        stream.receive()
        stream.send("tensorrt_llm", "waits", input_ids=[*PROMPT, 5], request_output_len=7, client_id=9)
        wait_until(lambda: len(state_of(narrow_server, "tensorrt_llm")["batcher"]["state"]["waiting"]) == 1)
        state = state_of(narrow_server, "ensemble")
        stream.send("tensorrt_llm", "waits", stop=True)
        stream.send("tensorrt_llm", "runs", stop=True)
        for _, answer in stream.until_all_final():
            assert answer.error is None
    assert state["unanswered_requests"] == 2
    (running,), (waiting,) = (state["batcher"]["state"][name] for name in ("running", "waiting"))
    assert running["max_new_tokens"] == 400 and running["blocks"] > 0
    assert (waiting["prompt_tokens"], waiting["max_new_tokens"], waiting["client_id"]) == (4, 7, 9)
    assert waiting["why"]


@pytest.mark.parametrize("model", [*DECOUPLED, "tensorrt_llm_infer"])
def test_state_requests_are_refused_unless_the_server_allows_them(fake_server, model):
    if model == "tensorrt_llm_infer":
        with pytest.raises(InferenceServerException) as caught:
            unary(fake_server.grpc, state=True)
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
        assert "enable_state_requests" in caught.value.message()
    else:
        (refused,) = ask(fake_server.grpc, model, state=True)
        assert "enable_state_requests" in str(refused.error)
    with pytest.raises(ServerError, match="enable_state_requests") as refusal:
        Client(fake_server.grpc, model).state()
    assert refusal.value.status == "UNIMPLEMENTED"


def test_the_client_prints_the_state(narrow_server, capsys):
    assert main(["state", "--url", narrow_server.grpc]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("{\n  ") and "batcher" in json.loads(printed)
