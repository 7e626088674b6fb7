"""The engine client over KServe's protocol gives the same responses as over the engine's socket."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc.aio as triton

from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.ports import EngineClient
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.path import endpoint_path
from inflight.errors import InvalidArgument, NotFound, RequestError, TooLong, Unavailable, Unsupported
from inflight.openai import kserve_client, serving_model
from inflight.openai.__main__ import main
from inflight.openai.kserve_client import KServeEngineClient
from inflight.openai.kserve_description import describe
from inflight.server.launch import TritonServer
from inflight.testing.fake_server import make_fake_repository, serve_fake
from tests.commands import command, eventually, read_line
from tests.openai_endpoint.conftest import TEMPLATE
from tests.openai_endpoint.serving import served

from .clients import generate
from .conftest import DEMO_MODEL

PROMPT = tuple(range(40, 60))
PATIENCE_S = 30.0
LONG = 30_000
ALL = OutputOptions(
    exclude_input_from_output=True,
    return_log_probs=True,
    num_top_log_probs=3,
    return_prompt_log_probs=True,
)


@pytest.fixture(scope="module")
def remote(exact_server) -> Iterator[KServeEngineClient]:
    client = KServeEngineClient(exact_server.grpc, str(DEMO_MODEL))
    yield client
    client.close()


@pytest.fixture(scope="module")
def local(exact_server) -> Iterator[SocketEngineClient]:
    client = local_client(exact_server)
    yield client
    client.close()


def local_client(server: TritonServer) -> SocketEngineClient:
    """Make a client on the engine's socket."""
    folder = server.repository.path.parent
    return SocketEngineClient(endpoint_path(server.pid, "tensorrt_llm", str(folder)))


@pytest.fixture(scope="module")
def slow_server(elsewhere) -> Iterator[TritonServer]:
    """A fake engine that takes at least a minute for `LONG` tokens, so that requests stay in flight."""
    settings = {
        "fake_engine": "vocab=3072,step_us=2000",
        "max_sequence_length": "32768",
        "max_tokens_in_paged_kv_cache": "131072",
        "tokenizer_dir": str(DEMO_MODEL),
    }
    with serve_fake(settings=settings) as server:
        yield server


class Asked:
    """A request in flight, and its responses as they arrive."""

    def __init__(self, client: EngineClient, request: Request) -> None:
        self._responses: queue.Queue[Response] = queue.Queue()
        self.client = client
        self.handle = client.submit(request, self._responses.put)

    def next(self) -> Response:
        return self._responses.get(timeout=PATIENCE_S)

    def all(self) -> list[Response]:
        found = [self.next()]
        while not found[-1].is_final:
            found.append(self.next())
        assert {response.request_id for response in found} == {self.handle.request_id}
        return found


def make_request(new: int = 8, **fields) -> Request:
    return Request(0, PROMPT, new, **fields)


def comparable(results: list[SequenceResult]) -> dict[int, list]:
    """Return the merged contents of results by sequence, rounded, as timing decides where deltas are cut.

    The number of iterations is left out because it has no tensor. Times are left out because they differ in
    every run.
    """
    found: dict[int, list] = {}
    for result in results:
        say = found.setdefault(result.sequence_index, [[], [], [], None, None, None])
        deltas = (result.output_token_ids, result.log_probs, result.top_log_probs)
        for place, rows in enumerate(deltas):
            if result.is_cumulative or not say[place]:
                say[place] = [list(row) for row in rows or ()]
            else:
                say[place] = [[*before, *row] for before, row in zip(say[place], rows or (), strict=True)]
        say[3] = (result.num_input_tokens, result.finish_reasons, result.is_sequence_final)
        say[4] = pytest.approx(result.cum_log_probs, abs=1e-4) if result.cum_log_probs else None
        if result.prompt_log_probs is not None:
            assert say[5] is None, "it is said once"
            say[5] = pytest.approx(result.prompt_log_probs, abs=1e-4)
    for say in found.values():
        say[1] = [pytest.approx(row, abs=1e-4) for row in say[1]]
        say[2] = [[(top.token_ids, pytest.approx(top.log_probs, abs=1e-4)) for top in row] for row in say[2]]
    return found


def as_numbers(found: dict[int, list]) -> dict[int, list]:
    """Return the expected values themselves in place of pytest's approximations."""

    def plain(value):
        if hasattr(value, "expected"):
            return type(value.expected)(value.expected)
        if isinstance(value, list | tuple):
            return type(value)(plain(each) for each in value)
        return value

    return {index: plain(say) for index, say in found.items()}


BIAS = FloatTensor((3072,), b"\0\0\x80\x3f" * 3072)
REQUESTS = {
    "plain": make_request(),
    "prompt excluded": make_request(output=OutputOptions(exclude_input_from_output=True)),
    "streamed": make_request(streaming=True),
    "everything of tokens": make_request(output=ALL),
    "everything of tokens, streamed": make_request(output=ALL, streaming=True),
    "sampled": make_request(
        streaming=True,
        sampling=SamplingConfig(
            temperature=0.8,
            top_k=40,
            top_p=0.9,
            min_p=0.01,
            random_seed=2**63 + 5,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            no_repeat_ngram_size=3,
            min_length=4,
        ),
    ),
    "decayed, allowed and biased": make_request(
        sampling=SamplingConfig(
            top_p=0.9,
            top_p_decay=0.9,
            top_p_min=0.2,
            top_p_reset_id=7,
            random_seed=3,
            allowed_token_ids=tuple(range(100, 400)),
            logit_bias_ids=(120, 130),
            logit_bias_values=(2.5, float("-inf")),
        )
    ),
    "several": make_request(
        output=ALL, sampling=SamplingConfig(top_k=50, num_return_sequences=3, random_seed=1)
    ),
    "several, streamed": make_request(
        streaming=True, output=ALL, sampling=SamplingConfig(top_k=50, num_return_sequences=3, random_seed=1)
    ),
    "beams": make_request(
        output=replace(ALL, num_top_log_probs=0),
        end_ids=(14,),
        sampling=SamplingConfig(beam_width=3, length_penalty=0.7, early_stopping=1),
    ),
    "beams, streamed, the best two": make_request(
        streaming=True, sampling=SamplingConfig(beam_width=3, num_return_sequences=2)
    ),
    "words": make_request(
        24, streaming=True, stop_words=((14,), (199, 259)), bad_words=((297,), (10, 9)), end_ids=(5,)
    ),
    "several end ids": make_request(64, end_ids=(259, 289, 14)),
    "guided": make_request(end_ids=(0,), guide=Guide(GuideKind.REGEX, "[0-9]{4}")),
    "any JSON": make_request(16, end_ids=(0,), guide=Guide(GuideKind.JSON), streaming=True),
    "biased, drafted and looked up": make_request(
        embedding_bias=BIAS, draft=ExternalDraft((691, 10)), prompt_lookup_num_tokens=2
    ),
    "queued and kept": make_request(
        priority=0.9,
        client_id=2**63 + 1,
        allotted_time_ms=60_000,
        retention=RetentionConfig((TokenRangeRetention(0, None, Retention(50, None)),), Retention(20, 1000)),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_both_clients_get_the_same_responses(remote, local, name):
    request = REQUESTS[name]
    results = {}
    for client in (local, remote):
        responses = Asked(client, request).all()
        assert [response.error for response in responses] == [None] * len(responses)
        assert [response.is_final for response in responses].count(True) == 1
        results[client] = comparable([response.result for response in responses])
    assert as_numbers(results[remote]) == results[local]


REFUSED = {
    "a bad value": (make_request(sampling=SamplingConfig(temperature=-1.0)), InvalidArgument),
    "too long": (make_request(100_000), TooLong),
    "several bad end ids": (make_request(end_ids=(3, 10**6)), InvalidArgument),
    "no such adapter": (make_request(lora=LoraRequest(name="nobody")), NotFound),
    "a guide that is none": (make_request(guide=Guide(GuideKind.REGEX, "(")), InvalidArgument),
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_clients_get_the_same_errors(remote, local, name):
    request, kind = REFUSED[name]
    errors = []
    for client in (local, remote):
        try:
            (response,) = Asked(client, request).all()
            errors.append(response.error)
        except RequestError as error:
            errors.append(error)
    assert [type(error) for error in errors] == [kind, kind]
    assert str(errors[1]) == str(errors[0])


def test_per_request_metrics_are_returned_over_kserve(remote):
    (response,) = Asked(remote, make_request(output=OutputOptions(return_perf_metrics=True))).all()
    metrics = response.result.perf_metrics
    assert 0 < metrics.arrival_time_ns <= metrics.first_token_time_ns < metrics.last_token_time_ns
    assert metrics.num_new_blocks + metrics.num_reused_blocks > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_logits_of_a_prompt_are_sent_once(remote, local, streaming):
    wanted = OutputOptions(exclude_input_from_output=True, return_context_logits=True)
    told = []
    for client in (remote, local):
        responses = Asked(client, make_request(streaming=streaming, output=wanted)).all()
        logits = [each.result.context_logits for each in responses if each.result.context_logits]
        assert len(logits) == 1 and logits[0].shape == (len(PROMPT), 3072)
        told.append(np.frombuffer(logits[0].data, np.float32))
    np.testing.assert_allclose(told[0], told[1], atol=1e-4)


def test_stopped_requests_and_sequences_end_at_once_with_one_final_response(slow_server):
    client = KServeEngineClient(slow_server.grpc, str(DEMO_MODEL))
    asked = Asked(client, make_request(LONG, streaming=True))
    asked.next()
    asked.handle.stop()
    *_, last = asked.all()
    assert last.is_final and last.result.finish_reasons == (FinishReason.CANCELLED,)

    sampling = SamplingConfig(top_k=5, num_return_sequences=2)
    asked = Asked(client, make_request(1000, streaming=True, sampling=sampling))
    asked.next()
    asked.handle.stop(StopReason.STOP_WORDS, 1)
    responses = asked.all()
    client.close()
    ends = {
        r.result.sequence_index: r.result.finish_reasons[0] for r in responses if r.result.is_sequence_final
    }
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.STOP_WORDS}
    assert len([r for r in responses if r.result.is_sequence_final]) == 2 and responses[-1].is_final


def test_the_remote_description_equals_the_engines_own(remote, local):
    far, near = remote.describe(), local.describe()
    assert far.eos_token_ids == near.eos_token_ids and far.model_path == near.model_path
    assert far.tokenizer_dir == str(DEMO_MODEL)
    untold = ("max_adapter_rank", "hidden_size", "additional_outputs", "logits_post_processors")
    for name, value in asdict(near.limits).items():
        assert name in untold or getattr(far.limits, name) == value, name
    assert remote.describe() is far


def test_client_apis_that_the_server_refuses_are_unsupported(remote):
    with pytest.raises(Unsupported, match="enable_adapter_commands"):
        remote.adapters(AdapterCommand(AdapterAction.LIST), PATIENCE_S)
    with pytest.raises(Unsupported, match="generation logits"):
        remote.submit(make_request(output=OutputOptions(return_generation_logits=True)), print)


def test_a_missing_server_or_model_is_unavailable(exact_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nowhere = KServeEngineClient(f"127.0.0.1:{port}", str(DEMO_MODEL))
    with pytest.raises(Unavailable, match="cannot be reached"):
        nowhere.describe()
    (response,) = Asked(nowhere, make_request()).all()
    assert isinstance(response.error, Unavailable)
    nowhere.close()
    with pytest.raises(Unavailable, match="shutting down"):
        nowhere.submit(make_request(), print)

    other = KServeEngineClient(exact_server.grpc, str(DEMO_MODEL), "another_model")
    with pytest.raises(Unavailable):
        other.describe()
    (response,) = Asked(other, make_request()).all()
    assert isinstance(response.error, Unavailable)
    other.close()


def test_streams_serve_one_request_after_another(slow_server, monkeypatch):
    """Refused requests are served too; a stopped request ends its stream."""
    opened = []
    stream_infer = triton.InferenceServerClient.stream_infer

    def counted(connection: Any, requests: Any) -> Any:
        opened.append(requests)
        return stream_infer(connection, requests)

    monkeypatch.setattr(triton.InferenceServerClient, "stream_infer", counted)
    client = KServeEngineClient(slow_server.grpc, str(DEMO_MODEL))
    several = make_request(streaming=True, sampling=SamplingConfig(top_k=5, num_return_sequences=2))
    for request in (make_request(), make_request(4, streaming=True), several, REFUSED["too long"][0]) * 3:
        Asked(client, request).all()
        assert eventually(lambda: not client._requests), "its stream waits for the next"
    assert len(opened) == 1
    asked = Asked(client, make_request(LONG, streaming=True))
    asked.next()
    asked.handle.stop()
    asked.all()
    Asked(client, make_request()).all()
    assert len(opened) == 2
    client.close()


def test_closing_the_client_answers_requests_in_flight(slow_server):
    client = KServeEngineClient(slow_server.grpc, str(DEMO_MODEL))
    asked = Asked(client, make_request(LONG, streaming=True))
    asked.next()
    client.close()
    *_, last = asked.all()
    assert isinstance(last.error, Unavailable) and last.is_final


def test_the_endpoint_serves_in_front_of_a_remote_server(exact_server):
    """The endpoint in a process of its own gives the same response as one beside the server, and ends on a
    signal."""
    command = [sys.executable, "-m", "inflight.openai", "--triton", exact_server.grpc]
    command += ["--tokenizer", str(DEMO_MODEL), "--port", "0", "--served-model-name", "code"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        try:
            word, url = read_line(process).split()
            assert word == "LISTENING"
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            whole = client.completions.create(
                model="code", prompt="import os\n", max_tokens=12, temperature=0
            )
            chunks = client.completions.create(
                model="code", prompt="import os\n", max_tokens=12, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
            expected = generate(exact_server.http, text_input="import os\n", max_tokens=12)["text_output"]
            assert expected == f"import os\n{whole.choices[0].text}"
        finally:
            process.terminate()
    assert process.returncode == 0


# ---------------------------------------------------------------- HTTP in front of both


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def urls(remote, local, template) -> Iterator[tuple[str, str]]:
    """URLs of the endpoint in front of the tritonserver, and of one on the engine's socket."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(served(client, chat_template=template)) for client in (remote, local))


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "def area("}], "temperature": 0, "seed": 1, "max_tokens": 12,
}  # fmt: skip
TEXT: dict[str, Any] = {"prompt": "import os\n", "temperature": 0, "seed": 1, "max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
DRAW = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("chat/completions", CHAT),
    "a chat with log probabilities": ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3}),
    "chats of one": ("chat/completions", {**CHAT, "temperature": 0.9, "top_k": 20, "n": 3}),
    "a call": (
        "chat/completions",
        {
            **CHAT,
            "max_tokens": 60,
            "tools": [DRAW],
            "tool_choice": {"type": "function", "function": {"name": "draw"}},
        },
    ),
    "an object": (
        "chat/completions",
        {
            **CHAT,
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}},
        },
    ),
    "a choice": ("completions", {**TEXT, "guided_choice": ["left", "right"]}),
    "two prompts, and stop texts": (
        "completions",
        {**TEXT, "prompt": ["import os\n", "def "], "stop": ["e"], "max_tokens": 40},
    ),
    "an echo with log probabilities": ("completions", {**TEXT, "echo": True, "logprobs": 3}),
    "an echo alone": ("completions", {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}),
    "log probabilities of a prompt": ("completions", {**TEXT, "prompt_logprobs": 2}),
    "log probabilities of a chat's prompt": ("chat/completions", {**CHAT, "prompt_logprobs": 2}),
    "a search": ("completions", {**TEXT, "n": 2, "use_beam_search": True}),
    "a logits post-processor": ("completions", {**TEXT, "logits_post_processor_name": "even_ids"}),
}
NOT_THE_SAME_TWICE = {"id", "created", "prompt_tokens_details", "system_fingerprint"}


def plain(value: Any) -> Any:
    """Return JSON without values that necessarily differ, and with rounded numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in NOT_THE_SAME_TWICE}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def ask_http(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{route}", json={"model": "demo", **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream_http(url: str, route: str, body: dict[str, Any]) -> tuple[dict[int, list], dict[str, Any]]:
    """Return a stream's merged contents by choice, and its usage."""
    asked = {"model": "demo", **body, "stream": True, "stream_options": {"include_usage": True}}
    said: dict[int, list] = {}
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/{route}", json=asked, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        chunk = json.loads(line)
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            so_far = said.setdefault(choice["index"], ["", "", None])
            so_far[0] += choice.get("text") or delta.get("content") or ""
            so_far[1] += calls
            so_far[2] = choice["finish_reason"] or so_far[2]
    return said, usage


@pytest.mark.parametrize("name", BODIES)
def test_both_endpoints_give_the_same_responses(urls, name):
    route, body = BODIES[name]
    far, near = (ask_http(url, route, body) for url in urls)
    assert plain(far) == plain(near)
    if name == "a call":
        (call,) = far["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["shape"] in ("circle", "square")
    if name == "an object":
        assert json.loads(far["choices"][0]["message"]["content"])["shape"] in ("circle", "square")


@pytest.mark.parametrize(
    "name", [name for name, (_, body) in BODIES.items() if "prompt_logprobs" not in body]
)
def test_both_endpoints_stream_the_same_with_the_same_usage(urls, name):
    route, body = BODIES[name]
    far, near = (stream_http(url, route, body) for url in urls)
    assert far[0] == near[0] and plain(far[1]) == plain(near[1])
    assert len(far[0]) == body.get("n", 1) * (
        len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    )
    assert far[1]["completion_tokens"] > 0 or body["max_tokens"] == 0


def test_cached_prompt_tokens_of_a_remote_server_are_counted(urls):
    """Cached tokens are counted in whole blocks of the remote server's block size."""
    asked = {**TEXT, "prompt": list(range(500, 600)), "max_tokens": 2}
    ask_http(urls[0], "completions", asked)
    told = [ask_http(url, "completions", asked)["usage"]["prompt_tokens_details"] for url in urls]
    assert told == [{"cached_tokens": 96}] * 2


def test_a_chat_without_max_tokens_may_fill_the_models_length(urls):
    """Without max_tokens the limit is the number of tokens that the prompt leaves of the model's length."""
    unbound = {key: value for key, value in CHAT.items() if key != "max_tokens"}
    far, near = (ask_http(url, "chat/completions", {**unbound, "stop": ["\n"]}) for url in urls)
    assert plain(far) == plain(near)


def test_a_client_that_disconnects_ends_its_request_on_the_server(slow_server, template):
    local, remote = local_client(slow_server), KServeEngineClient(slow_server.grpc, str(DEMO_MODEL))

    def num_unanswered() -> int:
        return json.loads(local.state(PATIENCE_S))["unanswered_requests"]

    asked = {"model": "demo", **CHAT, "max_tokens": LONG, "ignore_eos": True}
    with served(remote, chat_template=template) as url:
        with (
            httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            assert num_unanswered() == 1
        assert eventually(lambda: num_unanswered() == 0)
        with closing(HTTPConnection(urlsplit(url).netloc)) as leaving:
            body, headers = json.dumps(asked), {"Content-Type": "application/json"}
            leaving.request("POST", "/v1/chat/completions", body, headers)
            assert eventually(lambda: num_unanswered() == 1)
        assert eventually(lambda: num_unanswered() == 0)
    remote.close()
    local.close()


def config_of(**parameters: str) -> dict[str, Any]:
    """Return a model's configuration as KServe returns it."""
    given = {key: {"string_value": value} for key, value in parameters.items()}
    return {"name": "tensorrt_llm", "max_batch_size": 4, "parameters": given}


def test_defaults_of_a_configuration_equal_those_of_the_engine():
    of_model = describe(str(DEMO_MODEL))
    plain_one = of_model(config_of(tokens_per_block="${tokens_per_block}", of_a_newer_server="1"), None)
    limits = plain_one.limits
    assert (limits.tokens_per_block, limits.max_beam_width, limits.vocab_size) == (32, 4, 3072)
    assert limits.num_blocks >= 1 << 30, "nobody knows"
    cached = of_model(config_of(max_tokens_in_paged_kv_cache="300", tokens_per_block="16"), None).limits
    assert (cached.num_blocks, cached.tokens_per_block) == (18, 16)
    assert cached.room(100) == 18 * 16 + 1 - 100, "which is less than the model's length"
    assert of_model(config_of(max_tokens_in_paged_kv_cache="300"), 7).limits.num_blocks == 7
    packed = of_model(config_of(max_num_tokens="64"), None).limits
    split = of_model(config_of(max_num_tokens="64", enable_chunked_context="true"), None).limits
    assert packed.max_input_length == 64 < split.max_input_length == limits.max_sequence_length - 1


@pytest.mark.exhaustive  # starts a server twice
def test_a_restarted_server_is_used_again(elsewhere: Path, tmp_path: Path):
    """The endpoint reads the server's description again, with the KV cache's size from the server's state."""
    settings = {
        "fake_engine": "vocab=3072,step_us=2000",
        "max_sequence_length": "32768",
        "max_batch_size": "2",
        "enable_state_requests": "true",
    }
    given = [f"--set={key}={value}" for key, value in settings.items()]
    with command(make_fake_repository(tmp_path / "models"), "--allow-model-config", *given) as serving:
        ready = serving.ready_line()
        client = KServeEngineClient(ready["grpc"], str(DEMO_MODEL))
        with served(client) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            limits = client.describe().limits
            assert (limits.num_blocks, limits.tokens_per_block) == (2 * 32768 // 32, 32)
            asked = {**TEXT, "max_tokens": 5, "ignore_eos": True}
            before = ask_http(url, "completions", asked)
            long = {**asked, "max_tokens": 30_000, "stream": True}
            with http.stream("POST", "/v1/completions", json=long) as stream:
                lines = filter(None, stream.iter_lines())
                next(lines)
                os.kill(serving.server(), signal.SIGKILL)
                *_, last, done = lines
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
            away = http.post("/v1/completions", json=asked)
            assert away.status_code == 503 and away.headers["retry-after"], away.text
            assert serving.ready_line() == ready
            assert eventually(lambda: http.get("/health").status_code == 200)
            assert plain(ask_http(url, "completions", asked)) == plain(before)
            assert client.describe().limits == limits
        client.close()


def test_a_host_that_does_not_answer_is_unavailable_after_one_wait(monkeypatch):
    """The host accepts connections and never answers."""
    monkeypatch.setattr(kserve_client, "_CONFIG_S", 0.5)
    now_s, waits, describe = 0.0, [], KServeEngineClient.describe

    def wait_long(client):
        nonlocal now_s
        waits.append(client)
        now_s += 2.0
        return describe(client)

    monkeypatch.setattr(KServeEngineClient, "describe", wait_long)
    monkeypatch.setattr(serving_model, "time", SimpleNamespace(monotonic=lambda: now_s))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = KServeEngineClient(f"127.0.0.1:{silent.getsockname()[1]}", str(DEMO_MODEL))
        with served(client) as url:
            answers = [httpx.post(f"{url}/v1/completions", json=TEXT, timeout=PATIENCE_S) for _ in range(6)]
        client.close()
    assert {answer.status_code for answer in answers} == {503}
    assert "did not answer in 0.5 s" in answers[0].text
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--triton", "localhost:1"], "--triton needs --tokenizer DIR"),
        (["--triton", "localhost:1", "--tokenizer", "/nowhere"], "/nowhere"),
        (["--engine-endpoint", "/s", "--tokenizer", "/t"], "--tokenizer needs --triton"),
        ([], "one of the arguments --triton --engine-endpoint is required"),
    ],
)
def test_an_impossible_command_line_is_refused_at_once(arguments, said, capsys):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capsys.readouterr().err
