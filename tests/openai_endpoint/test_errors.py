"""Errors in OpenAI's form, and disconnected clients; by raw HTTP, on the fake engine."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from tritonclient.utils import InferenceServerException

from inflight.core.ports import EngineClient
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import CONTROLS
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import BadAdapter, InvalidArgument, Unavailable, Unreachable, error_from_kind
from inflight.openai.errors import ApiError, describe_error
from inflight.openai.kserve_client import KServeEngineClient
from inflight.openai.options import OpenAiOptions
from inflight.openai.prepared_body import check_number_of_sequences
from inflight.openai.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from inflight.openai.serving_model import ServingModel
from tests.endpoint.conftest import path  # noqa: F401 - a folder that is short enough for a socket
from tests.openai_endpoint.serving import PATIENCE_S, fake_engine, served

ASKED: dict[str, Any] = {"model": "demo", "prompt": "def f():", "max_tokens": 4}


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"tempratur": 1}, "tempratur", "unknown_parameter"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [9999]}, "prompt", "invalid_value"),
        ({"prompt": [[1], []]}, "prompt", "invalid_value"),
        ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [1] * 5000}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "unsupported_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown_parameter"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "invalid_value",
        ),
        ({"min_tokens": 5}, "min_tokens", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_value"),
        ({"logprobs": 5000}, "logprobs", "invalid_value"),
        ({"prompt": [1 << 40], "echo": True}, "prompt", "invalid_value"),
        ({"top_k": 1 << 63}, "top_k", "invalid_value"),
        ({"min_tokens": 1 << 63}, "min_tokens", "invalid_value"),
        ({"no_repeat_ngram_size": 1 << 63}, "no_repeat_ngram_size", "invalid_value"),
        ({"stop_token_ids": [1 << 63]}, "stop_token_ids", "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"n": 8, "use_beam_search": True}, "n", "invalid_value"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
        ({"logits_post_processor_name": "nix"}, "logits_post_processor_name", "invalid_value"),
        ({"frequency_penalty": 1e300}, "frequency_penalty", "invalid_value"),
        ({"presence_penalty": -1e300}, "presence_penalty", "invalid_value"),
        ({"repetition_penalty": 1e300}, "repetition_penalty", "invalid_value"),
        ({"temperature": 1e-300}, "temperature", "invalid_value"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "invalid_value"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ],
)
def test_an_invalid_field_is_named(
    fake_url: str, changes: dict[str, Any], param: str | None, code: str
) -> None:
    body = {name: value for name, value in {**ASKED, **changes}.items() if value is not None}
    answer = httpx.post(f"{fake_url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert (param or next(iter(changes))) in error["message"]


@pytest.mark.parametrize("priority", [10**400, -(10**400)])
def test_a_priority_may_be_any_number(fake_url: str, priority: int) -> None:
    answer = httpx.post(f"{fake_url}/v1/completions", json={**ASKED, "priority": priority})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"prompt": {}},
            "prompt: expected a text or a list of texts or a list of token ids or a list of such lists",
        ),
        ({"prompt": ["a", 3]}, 'or a list of such lists, got ["a", 3]'),
        ({"stop": 3, "guided_json": 5}, "stop: expected a text or a list of texts, got 3"),
        ({"early_stopping": "x"}, 'early_stopping: expected true or false or "never", got "x"'),
        (
            {"structured_outputs": {"json": 3}},
            "structured_outputs.json: expected a text or an object or true or",
        ),
    ],
)
def test_an_error_about_a_field_of_several_types_names_all(
    fake_url: str, changes: dict[str, Any], said: str
) -> None:
    answer = httpx.post(f"{fake_url}/v1/completions", json={**ASKED, **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"]
    assert error["param"] == next(iter(changes))


def test_an_engine_without_guides_is_an_error_about_the_bodys_field(fake_url: str) -> None:
    asked = {**ASKED, "response_format": {"type": "json_object"}}
    answer = httpx.post(f"{fake_url}/v1/completions", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert error["code"] == "unsupported_parameter"
    assert error["message"].startswith("response_format: there is no tokenizer to follow guides with")


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ({"type": "json_object", "schema": {"type": "object"}}, "'schema', which would be ignored"),
        ({"type": "text", "regex": "a"}, "'regex', which would be ignored"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "shema": {}}},
            "'shema', which would be ignored",
        ),
        ({"type": "structural_tag", "format": {}}, "'format', which would be ignored"),
    ],
)
def test_unknown_keys_of_a_response_format_are_refused(
    fake_url: str, format: dict[str, Any], said: str
) -> None:
    answer = httpx.post(f"{fake_url}/v1/completions", json={**ASKED, "response_format": format})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format"), answer.text
    assert said in answer.json()["error"]["message"]


def test_token_ids_outside_the_vocabulary_are_refused(fake_url: str) -> None:
    for token in (1 << 40, 1 << 20):
        answer = httpx.post(f"{fake_url}/detokenize", json={"tokens": [1, token]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens"), answer.text
    assert "got 1048576 at position 1" in answer.json()["error"]["message"]


def test_compressed_bodies_are_refused_by_their_header(fake_url: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = httpx.post(f"{fake_url}/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding is 'gzip', expected no such header" in answer.json()["error"]["message"]
    headers["Content-Encoding"] = "identity"
    assert httpx.post(f"{fake_url}/v1/completions", json=ASKED, headers=headers).status_code == 200


def test_an_unknown_model_is_answered_with_those_that_are_there(fake_url: str) -> None:
    (known,) = httpx.get(f"{fake_url}/v1/models").json()["data"]
    answer = httpx.get(f"{fake_url}/v1/models/gpt-4")
    assert (
        answer.json()["error"]["message"]
        == f"the model 'gpt-4' does not exist; this server has {known['id']}"
    )
    misspelled = {**ASKED, "model": known["id"][:-1]}
    answer = httpx.post(f"{fake_url}/v1/completions", json=misspelled)
    assert answer.json()["error"]["message"].endswith(f"; did you mean {known['id']!r}?")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1.5] * 2000}),
        (CompletionBody, {"prompt": [[1.5] * 2000] * 2}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 2000}),
        (CompletionBody, {"prompt": "x", "bad_words": [1] * 2000}),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(each): "1" for each in range(2000)}}),
        (ChatBody, {"messages": ["x"] * 2000}),
        (ChatBody, {"messages": [{}], "tools": ["x"] * 2000}),
        (TokenizeBody, {"messages": ["x"] * 2000}),
        (DetokenizeBody, {"tokens": [1.5] * 2000}),
    ],
)
def test_an_invalid_list_gets_few_errors_however_long_it_is(kind: type[Body], body: dict[str, Any]) -> None:
    """An error for every item would take long on the event loop and delay all requests."""
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4


def test_a_missing_content_type_is_named(fake_url: str) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl -d sends this type without -H
    answer = httpx.post(f"{fake_url}/v1/completions", content=json.dumps(ASKED), headers=form)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (
        error["message"] == f"the header Content-Type must be application/json, got {form['content-type']!r}"
    )


def test_neutral_values_of_unserved_fields_are_accepted(fake_url: str) -> None:
    neutral = {"suffix": None, "best_of": 1, "store": False, "service_tier": "auto", "user": "me", "stop": []}
    answer = httpx.post(f"{fake_url}/v1/completions", json={**ASKED, **neutral})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [("POST", "/v1/files", 501), ("POST", "/v1/nothing", 404), ("GET", "/v1/completions", 405)],
)
def test_unserved_routes_are_refused(fake_url: str, method: str, route: str, status: int) -> None:
    answer = httpx.request(method, fake_url + route, json={"input": "x"} if method == "POST" else None)
    assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "route", "hint"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/completion", "did you mean /v1/completions?"),
        ("GET", "/v1/completions", "send POST"),
        ("GET", "/v1", "this is the base URL for clients; GET /v1/models lists the models"),
        ("POST", "/v2/models/ensemble/generate", "Triton's protocol is served at another port"),
    ],
)
def test_a_wrong_route_is_answered_with_the_nearest(
    fake_url: str, method: str, route: str, hint: str
) -> None:
    message = httpx.request(method, fake_url + route).json()["error"]["message"]
    assert message.startswith(f"{method} {route}: ") and hint in message


@pytest.mark.parametrize(
    ("route", "field", "hint"),
    [
        ("/v1/completions", "messages", "/v1/chat/completions takes messages"),
        ("/v1/chat/completions", "prompt", "/v1/completions takes a prompt"),
        ("/v1/responses", "max_tokens", "did you mean max_output_tokens?"),
        ("/v1/completions", "max_new_tokens", "did you mean max_tokens?"),
        ("/v1/chat/completions", "stop_sequences", "did you mean stop?"),
        ("/tokenize", "text", "did you mean prompt?"),
        ("/v1/completions", "lora_name", "send the adapter's name in model"),
        ("/v1/chat/completions", "lora_task_id", "send the adapter's name in model"),
        ("/v1/embeddings", "lora_name", "send the adapter's name in model"),
        ("/v1/completions", "input_ids", "did you mean prompt?"),
        ("/v1/chat/completions", "input_ids", "/v1/completions takes token ids as prompt"),
        ("/v1/completions", "request_output_len", "did you mean max_tokens?"),
        ("/v1/responses", "output_len", "did you mean max_output_tokens?"),
        ("/v1/completions", "beam_width", "send use_beam_search true, and the number of beams in n"),
        ("/v1/completions", "bad_words_list", "did you mean bad_words?"),
        ("/v1/completions", "end_id", "did you mean stop_token_ids?"),
        ("/v1/chat/completions", "num_top_log_probs", "did you mean top_logprobs?"),
        ("/v1/chat/completions", "image_url_input", "takes pictures in messages"),
        ("/v1/completions", "draft_input_ids", "leave it out"),
    ],
)
def test_a_field_of_another_route_or_server_is_answered_with_what_to_send(
    fake_url: str, route: str, field: str, hint: str
) -> None:
    error = httpx.post(fake_url + route, json={field: []}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter") and hint in error["message"]


def test_an_input_of_a_sampling_control_is_answered_with_the_field(fake_url: str) -> None:
    num = 0
    for control in (each for each in CONTROLS.values() if each.body is not None and each.body.name != "n"):
        for name in {control.tensor, *control.aliases, *control.text_names} - {control.body.name}:
            answer = httpx.post(f"{fake_url}/v1/completions", json={**ASKED, name: 1})
            if answer.status_code == 400:
                assert f"; did you mean {control.body.name}?" in answer.json()["error"]["message"], name
                num += 1
    assert num >= 10


def test_a_body_that_is_not_json_is_refused(fake_url: str) -> None:
    answer = httpx.post(
        f"{fake_url}/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["prompt", "stop", "bad_words", "guided_regex", "user", "cache_salt"])
def test_half_a_surrogate_pair_is_refused(fake_url: str, field: str) -> None:
    half = '["\\ud800"]' if field == "bad_words" else '"\\ud800"'
    body = f'{{"prompt": "x", "{field}": {half}}}'
    answer = httpx.post(
        f"{fake_url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found" and "demo" in caught.value.message


def test_health_version_and_metrics_are_answered(fake_url: str) -> None:
    assert httpx.get(f"{fake_url}/health").status_code == 200
    assert httpx.get(f"{fake_url}/version").json()["version"]
    with fake_engine() as engine, served(engine, metrics_url=f"{fake_url}/version") as url:
        page = httpx.get(f"{url}/metrics").text
        assert page.startswith(f"{httpx.get(f'{fake_url}/version').text}\n# HELP http_requests_total")


def test_the_metrics_page_is_fetched_without_a_proxy(fake_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # no server listens on this port
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies from its first use
    with fake_engine() as engine, served(engine, metrics_url=f"{fake_url}/version") as url:
        assert "version" in httpx.get(f"{url}/metrics", trust_env=False).text


def test_without_an_engine_requests_are_answered_503(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = SocketEngineClient(str(tmp_path / "nobody.sock"))
    with caplog.at_level(logging.INFO), served(client) as url:
        for answer in (httpx.get(f"{url}/health"), httpx.post(f"{url}/v1/completions", json=ASKED)):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"
            assert "nobody.sock" not in answer.text and str(tmp_path) not in answer.text
        assert "nobody.sock" in caplog.text  # the operator reads the path in the log
    client.close()


def test_a_full_queue_is_answered_429_with_retry_after() -> None:
    """One request runs until its client disconnects, and another fills the queue."""
    long = {**ASKED, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with (
        fake_engine(step_us=20_000, max_batch_size="1", max_beam_width="1", max_queue_size="1") as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()  # closes the stream when garbage-collected
            next(lines)
            waiting = pool.submit(client.post, "/v1/completions", json=ASKED)
            wait_until(lambda: num_unanswered(engine) == 2)
            refused = client.post("/v1/completions", json=ASKED)
        assert waiting.result().status_code == 200
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["retry-after"]


def num_unanswered(engine: EngineClient) -> int:
    return json.loads(engine.state(PATIENCE_S))["unanswered_requests"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def test_a_disconnected_client_ends_its_requests() -> None:
    asked = {**ASKED, "prompt": ["a", "b"], "max_tokens": 3000, "ignore_eos": True}
    with fake_engine(step_us=2000) as engine, served(engine) as url, httpx.Client(base_url=url) as client:
        with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as stream:
            lines = stream.iter_lines()  # closes the stream when garbage-collected
            next(lines)
            assert num_unanswered(engine) == 2
        wait_until(lambda: num_unanswered(engine) == 0)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=asked, timeout=0.3)
        wait_until(lambda: num_unanswered(engine) == 0)
        assert client.post("/v1/completions", json=ASKED, timeout=PATIENCE_S).status_code == 200


def test_an_engine_lost_during_a_stream_is_an_error_event() -> None:
    with fake_engine(step_us=2000) as engine, served(engine) as url:
        asked = {**ASKED, "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine.close()
            events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "service_unavailable_error"


def test_the_engine_may_be_in_another_process(path: str) -> None:  # noqa: F811 - the fixture
    with fake_engine() as engine:
        assert isinstance(engine, LocalEngineClient)
        server, far = EndpointServer(engine, path), SocketEngineClient(path)
        with served(engine) as near_url, served(far) as far_url:
            asked = {**ASKED, "temperature": 0, "max_tokens": 50, "stop": ["no such text"]}
            here, there = (
                httpx.post(f"{url}/v1/completions", json=asked).json() for url in (near_url, far_url)
            )
            assert here["choices"] == there["choices"] and here["usage"] == there["usage"]
        far.close()
        server.close()


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("v1/completions", {"prompt": "word " * 60_000}, "prompt"),
        ("v1/completions", {"prompt": ["x", "word " * 60_000]}, "prompt"),
        ("v1/completions", {"prompt": "x y " * 4000}, "prompt"),
        ("v1/completions", {"prompt": [[1], [1] * 5000]}, "prompt"),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 60_000}]}, "messages"),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "x y " * 4000}]}, "messages"),
        ("tokenize", {"prompt": "word " * 60_000}, "prompt"),
        ("tokenize", {"messages": [{"role": "user", "content": "word " * 60_000}]}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code(
    fake_url: str, route: str, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{fake_url}/{route}", json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param), (
        error
    )


def test_the_engines_refusal_of_a_long_prompt_has_openais_code() -> None:
    """An engine behind another server has limits that this process may not know."""
    limits = ModelLimits(100, 20, 10, num_blocks=4, tokens_per_block=4)
    for length, count in ((11, 1), (10, 11), (10, 9)):
        with pytest.raises(InvalidArgument) as caught:
            Request(0, (1,) * length, count).validate(limits)
        for error in (caught.value, error_from_kind(caught.value.kind, caught.value.marked)):
            status, body = describe_error(error)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), error


def test_an_engine_that_has_not_started_is_not_one_that_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SocketEngineClient(str(tmp_path / "engine.sock"))
    with contextlib.closing(engine), pytest.raises(Unavailable) as caught:
        engine.describe()
    for error, state in (
        (caught.value, "the model is still loading"),
        (Unreachable("it has gone"), "the engine cannot be reached now"),
    ):
        status, body = describe_error(error)
        assert (status, body["error"]["message"]) == (503, f"{state}; a later attempt may succeed")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["it has gone"]  # a server that loads its model is in order


def test_errors_of_an_adapter_name_the_parameter_model() -> None:
    """The body has the adapter's name in `model`."""
    status, body = describe_error(BadAdapter("LoRA adapter sql: it has no weights"))
    assert (status, body["error"]["param"]) == (400, "model")


def test_a_grpc_error_that_contains_a_kinds_name_is_not_a_server_error() -> None:
    client = object.__new__(KServeEngineClient)
    client._url = "far:1"
    said = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:1: Socket closed"
    error = client._error(InferenceServerException(said, "StatusCode.UNAVAILABLE"))
    assert str(error) == f"the tritonserver at far:1 cannot be reached: {said}"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "route",
    [
        *(
            "v1/responses/compact",
            "v1/responses/input_tokens",
        ),
        *("v1/audio/speech", "v1/images/generations", "v1/videos", "v1/realtime/sessions", "v1/moderations"),
        *("v1/files", "v1/files/f1/content", "v1/uploads/u1/parts", "v1/batches", "v1/batches/b1/cancel"),
        *(
            "v1/assistants",
            "v1/threads/t1/runs",
            "v1/vector_stores",
            "v1/conversations",
            "v1/fine_tuning/jobs",
        ),
        *(
            "v1/evals",
            "pooling",
        ),
        "v1/containers",
    ],
)
def test_unserved_apis_are_refused_with_an_explanation(fake_url: str, method: str, route: str) -> None:
    answer = httpx.request(method, f"{fake_url}/{route}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (501, "not_implemented")
    assert len(error["message"].split()) >= 4


def test_stored_completions_and_deletion_are_refused(fake_url: str) -> None:
    for method, route in (
        ("GET", "chat/completions"),
        ("DELETE", "chat/completions/c1"),
        ("DELETE", "models/demo"),
    ):
        answer = httpx.request(method, f"{fake_url}/v1/{route}")
        assert answer.status_code == 501, answer.text
    assert httpx.get(f"{fake_url}/v1/models/demo").status_code == 200


@pytest.mark.parametrize(
    "fields",
    [{"store": True}, {"store": False}, {"metadata": {"user": "me"}}, {"metadata": {}}, {"verbosity": "low"}],
)
def test_fields_without_an_effect_are_accepted(fake_url: str, fields: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    answer = httpx.post(f"{fake_url}/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    if "verbosity" not in fields:
        answer = httpx.post(f"{fake_url}/v1/completions", json={**ASKED, **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields", [{"store": "yes"}, {"metadata": [1]}, {"metadata": {"a": 1}}, {"verbosity": "loud"}]
)
def test_fields_without_an_effect_are_type_checked(fake_url: str, fields: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    answer = httpx.post(f"{fake_url}/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


def test_sequences_are_counted_before_anything_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any, **more: Any) -> Any:
        raise AssertionError("was tokenized")

    monkeypatch.setattr(ServingModel, "encode", encode)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 5}
    with fake_engine(max_sequences_per_request="4") as client, served(client, chat_template=template) as url:
        for route, body, param in (
            ("completions", {"prompt": ["x"] * 5}, "prompt"),
            ("completions", {"prompt": [[5]] * 5}, "prompt"),
            ("completions", {"prompt": ["x", "y"], "n": 3}, "n"),
            ("chat/completions", chat, "n"),
        ):
            answer = httpx.post(f"{url}/v1/{route}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert "expected at most 4 (max_sequences_per_request)" in error["message"]
        allowed = {"prompt": [[5]] * 2, "n": 2, "max_tokens": 1}
        assert len(httpx.post(f"{url}/v1/completions", json=allowed).json()["choices"]) == 4


def test_max_sequences_per_request_bounds_the_sequences_of_a_body() -> None:
    with fake_engine(max_sequences_per_request="5000") as client:
        model = ServingModel(client, OpenAiOptions())
        check_number_of_sequences(model, 5000, 1)
        with pytest.raises(ApiError, match="5001 sequences"):
            check_number_of_sequences(model, 5001, 1)
