"""/v1/responses with the official client: answers, streams, tools, conversations, cancellation, refusals."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem
from openai.types.responses.response_item_list import ResponseItemList

from inflight.core.ports import EngineClient
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.conftest import TEMPLATE
from tests.openai_endpoint.scripted import ScriptedEngine
from tests.openai_endpoint.serving import PATIENCE_S, fake_engine, served
from tests.openai_endpoint.test_errors import num_unanswered, wait_until
from tests.openai_endpoint.test_pictures import WITH_PICTURES, FakeEncoder, make_engine, url_of

CALL = '<tool_call>\n{"name": "area", "arguments": {"r": 2}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "area", "parameters": {"type": "object"}}]
LONG: Any = {"model": "demo", "input": "x", "max_output_tokens": 2000, "extra_body": {"ignore_eos": True}}
"""A request that does not end before it is cancelled."""
EFFORT = "{{ reasoning_effort or '' }}" + TEMPLATE


def scripted_client(
    answer: str, folder: Path, source: str = TEMPLATE, **options: Any
) -> tuple[ScriptedEngine, Any]:
    file = folder / "template.jinja"
    file.write_text(source, encoding="utf-8")
    engine = ScriptedEngine(answer)
    return engine, served(cast(EngineClient, engine), chat_template=file, **options)


def connected(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@contextmanager
def slow_server(template: Path) -> Iterator[tuple[EngineClient, openai.OpenAI]]:
    with (
        fake_engine(step_us=2000) as engine,
        served(engine, chat_template=template) as url,
        connected(url) as client,
    ):
        yield engine, client


def prompt_of(engine: ScriptedEngine) -> str:
    tokenizer = Tokenizer.from_dir(Path(engine.description.tokenizer_dir))
    return tokenizer.decode(engine.requests[-1].input_token_ids, skip_special_tokens=False)


def check_response(response: Response) -> None:
    """Assert that every field has the type that the client's specification gives it."""
    Response.model_validate(response.to_dict())


def test_a_text_is_answered_with_the_official_shape(tmp_path: Path) -> None:
    engine, server = scripted_client("yes", tmp_path)
    with server as url, connected(url) as client:
        response = client.responses.create(
            model="demo", input="hello", instructions="be brief", metadata={"a": "b"}, max_output_tokens=20
        )
        assert (response.status, response.output_text, response.error) == ("completed", "yes", None)
        assert response.metadata == {"a": "b"} and response.id.startswith("resp_")
        assert response.usage is not None
        assert response.usage.output_tokens + response.usage.input_tokens == response.usage.total_tokens
        check_response(response)
        assert prompt_of(engine) == "<|system|>be brief\n<|user|>hello\n<|assistant|>"
        cut: Any = client.responses.create(model="demo", input="hello", max_output_tokens=1)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output[0].status == "incomplete"


def test_the_async_client_is_answered(tmp_path: Path) -> None:
    _, server = scripted_client("yes", tmp_path)

    async def ask(url: str) -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(model="demo", input="hello")
            stream = await client.responses.create(model="demo", input="hello", stream=True)
            return whole.output_text, [event.type async for event in stream]

    with server as url:
        text, kinds = asyncio.run(ask(url))
    assert text == "yes" and kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_a_stream_has_openais_events_in_order(tmp_path: Path) -> None:
    _, server = scripted_client(f"<think>hmm</think>So: {CALL}", tmp_path, reasoning_parser="think")
    with server as url, connected(url) as client:
        events = list(client.responses.create(model="demo", input="hello", tools=TOOLS, stream=True))
        raw = httpx.post(f"{url}/v1/responses", json={"input": "hello", "stream": True}).text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if not place or kinds[place - 1] != kind] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    for event in events:  # every event has the specification's fields and types
        type(event).model_validate(event.to_dict())
    frames = raw.split("\n\n")
    assert frames[-1] == "" and "[DONE]" not in raw
    for frame in frames[:-1]:
        name, data = frame.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_the_clients_stream_helper_accumulates_the_response(tmp_path: Path) -> None:
    _, server = scripted_client(f"<think>hmm</think>So: {CALL}", tmp_path, reasoning_parser="think")
    with (
        server as url,
        connected(url) as client,
        client.responses.stream(model="demo", input="hello", tools=TOOLS) as stream,
    ):
        final = stream.get_final_response()
        kept = client.responses.retrieve(final.id)
    reasoning, message, call = final.output
    assert isinstance(reasoning, ResponseReasoningItem) and reasoning.content
    assert reasoning.content[0].text == "hmm" and message.type == "message"
    assert final.output_text == "So:" and call.type == "function_call" and call.arguments == '{"r": 2}'
    sent = [re.sub(r',"parsed(_arguments)?":null', "", item.to_json(indent=None)) for item in final.output]
    assert [item.to_json(indent=None) for item in kept.output] == sent
    assert kept.usage == final.usage and kept.usage is not None
    assert kept.usage.output_tokens_details.reasoning_tokens > 0


class Point(pydantic.BaseModel):
    x: int
    y: int


def test_responses_parse_gives_a_pydantic_object(tmp_path: Path) -> None:
    engine, server = scripted_client('{"x": 1, "y": 2}', tmp_path)
    with server as url, connected(url) as client:
        response = client.responses.parse(model="demo", input="a point", text_format=Point)
    assert response.output_parsed == Point(x=1, y=2)
    guide = engine.requests[-1].guide
    assert guide is not None and set(json.loads(guide.text)["properties"]) == {"x", "y"}


def test_a_schema_is_enforced_on_the_demo_model(demo_client: openai.OpenAI) -> None:
    response = demo_client.responses.parse(
        model="demo", input="a point", text_format=Point, max_output_tokens=60, temperature=0
    )
    assert response.status == "incomplete" or isinstance(response.output_parsed, Point)
    whole = demo_client.responses.create(
        model="demo",
        input="x",
        max_output_tokens=20,
        text={
            "format": {
                "type": "json_schema",
                "name": "answer",
                "schema": {"enum": ["yes", "no"]},
                "strict": True,
            }
        },
    )
    assert whole.status == "completed" and whole.output_text in ('"yes"', '"no"')


@pytest.mark.parametrize("by_id", [True, False])
def test_tools_over_two_turns(tmp_path: Path, by_id: bool) -> None:
    engine, server = scripted_client(f"So: {CALL}", tmp_path)
    with server as url, connected(url) as client:
        first = client.responses.create(model="demo", input="area?", tools=TOOLS)
        call = first.output[-1]
        assert isinstance(call, ResponseFunctionToolCall) and json.loads(call.arguments) == {"r": 2}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12.6"}
        if by_id:
            second = client.responses.create(
                model="demo", input=[result], tools=TOOLS, previous_response_id=first.id
            )
        else:
            passed: Any = [{"role": "user", "content": "area?"}, *first.output, result]
            second = client.responses.create(model="demo", input=passed, tools=TOOLS)
    assert second.status == "completed"
    assert prompt_of(engine).startswith(
        '<|user|>area?\n<|assistant|>So:<tool_call>{"name": "area", "arguments": {"r": 2}}</tool_call>\n'
        "<|tool|>12.6\n<tools>"
    )


def test_a_forced_function_is_called(tmp_path: Path) -> None:
    engine, server = scripted_client(CALL, tmp_path)
    with server as url, connected(url) as client:
        for choice in ("required", {"type": "function", "name": "area"}):
            response = client.responses.create(
                model="demo", input="x", tools=TOOLS, tool_choice=cast(Any, choice)
            )
            (call,) = response.output
            assert call.type == "function_call" and response.tool_choice
            assert engine.requests[-1].guide is not None
        free = client.responses.create(model="demo", input="x", tools=TOOLS, tool_choice="none")
        assert free.output_text == CALL


def test_instructions_are_not_carried_over_and_items_are(tmp_path: Path) -> None:
    engine, server = scripted_client("yes", tmp_path)
    with server as url, connected(url) as client:
        first = client.responses.create(model="demo", input="one", instructions="old rule")
        second = client.responses.create(model="demo", input="two", previous_response_id=first.id)
        client.responses.create(
            model="demo", input="three", instructions="new rule", previous_response_id=second.id
        )
        assert prompt_of(engine) == (
            "<|system|>new rule\n<|user|>one\n<|assistant|>yes\n<|user|>two\n<|assistant|>yes\n<|user|>three\n"
            "<|assistant|>"
        )
        pages: Any = client.responses.input_items.list(second.id, limit=2, order="asc")
        ResponseItemList.model_validate({"first_id": pages.data[0].id, "object": "list", **pages.to_dict()})
        texts = [item.content[0].text for item in pages]
        assert texts == ["one", "yes", "two"] and pages.has_more
        newest: Any = client.responses.input_items.list(second.id).data
        assert newest[0].content[0].text == "two"


def test_reasoning_is_passed_back_to_the_template(tmp_path: Path) -> None:
    source = TEMPLATE.replace("{{ message.content", "[{{ message.reasoning_content }}]{{ message.content")
    engine, server = scripted_client("<think>hmm</think>yes", tmp_path, source, reasoning_parser="think")
    with server as url, connected(url) as client:
        first = client.responses.create(model="demo", input="one")
        client.responses.create(model="demo", input="two", previous_response_id=first.id)
    assert "<|assistant|>[hmm]yes\n" in prompt_of(engine)


def test_the_reasoning_effort_reaches_the_template(tmp_path: Path) -> None:
    engine, server = scripted_client("yes", tmp_path, EFFORT)
    with server as url, connected(url) as client:
        response = client.responses.create(
            model="demo", input="x", reasoning={"effort": "low", "summary": "auto"}
        )
    assert prompt_of(engine).startswith("low<|user|>")
    assert response.reasoning is not None and response.reasoning.effort == "low"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probs_are_those_of_the_text(tmp_path: Path, is_streamed: bool) -> None:
    _, server = scripted_client(f"<think>hmm</think>So it is {CALL}", tmp_path, reasoning_parser="think")
    asked: Any = {
        "model": "demo",
        "input": "x",
        "tools": TOOLS,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    with server as url, connected(url) as client:
        if is_streamed:
            events: Any = list(client.responses.create(**asked, stream=True))
            response = events[-1].response
            told = [
                each
                for event in events
                if event.type == "response.output_text.delta"
                for each in event.logprobs
            ]
            assert "".join(each.token for each in told) == "So it is"
        else:
            response = client.responses.create(**asked)
    content: Any = response.output[1]
    logprobs = content.content[0].logprobs
    assert "".join(each.token for each in logprobs) == "So it is"
    assert all(len(each.top_logprobs) == 2 and each.logprob == -0.5 for each in logprobs)
    check_response(response)


def test_pictures_are_input_images(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(WITH_PICTURES, encoding="utf-8")
    encoder, png = FakeEncoder(), b"a picture"
    content: Any = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": url_of(png), "detail": "auto"},
    ]
    with (
        served(cast(EngineClient, make_engine("yes")), picture_encoder=encoder, chat_template=file) as url,
        connected(url) as client,
    ):
        response = client.responses.create(model="demo", input=[{"role": "user", "content": content}])
    assert response.output_text == "yes" and encoder.asked[-1][1] == [png]
    assert encoder.asked[-1][0] == "<|user|>see<|image|><|assistant|>"


def test_truncation_auto_drops_the_first_turns(tmp_path: Path) -> None:
    engine, server = scripted_client("yes", tmp_path)
    turns = [{"role": "developer", "content": "rule"}] + [
        {"role": "user", "content": f"{'word ' * 20}{place}"} for place in range(9)
    ]
    with server as url, connected(url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="demo", input=cast(Any, turns))
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        response = client.responses.create(model="demo", input=cast(Any, turns), truncation="auto")
        assert response.status == "completed"
        prompt = prompt_of(engine)
        assert prompt.startswith("<|developer|>rule\n<|user|>word") and prompt.endswith("8\n<|assistant|>")
        kept = prompt.count("<|user|>")
        one_more: Any = [turns[0], *turns[-kept - 1 :]]
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="demo", input=one_more)
        with pytest.raises(openai.BadRequestError) as caught:  # the last turn alone does not fit
            client.responses.create(model="demo", input="word " * 300, truncation="auto")
        assert caught.value.code == "context_length_exceeded"


def test_a_response_in_progress_is_read_and_cancelled(template: Path) -> None:
    with slow_server(template) as (engine, client):
        stream = client.responses.create(**LONG, stream=True)
        events = iter(stream)
        first = next(events)
        assert first.type == "response.created"
        assert client.responses.retrieve(first.response.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="in progress"):
            client.responses.create(model="demo", input="y", previous_response_id=first.response.id)
        cancelled = client.responses.cancel(first.response.id)
        assert cancelled.status == "cancelled"
        rest = list(events)
        last: Any = rest[-1]
        assert last.type == "response.incomplete" and last.response.status == "cancelled"
        wait_until(lambda: num_unanswered(engine) == 0)
        again = client.responses.cancel(first.response.id)
        assert again.status == "cancelled" and again.output == last.response.output
        done = client.responses.create(model="demo", input="x", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match=r"has status (incomplete|completed)"):
            client.responses.cancel(done.id)


def test_a_disconnected_client_cancels_its_response(template: Path) -> None:
    with slow_server(template) as (engine, client):
        stream = client.responses.create(**LONG, stream=True)
        first: Any = next(iter(stream))
        stream.close()
        wait_until(lambda: num_unanswered(engine) == 0)
        wait_until(lambda: client.responses.retrieve(first.response.id).status == "cancelled")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{client.base_url}responses",
                json={"input": "x", "ignore_eos": True, "max_output_tokens": 2000},
                timeout=0.3,
            )
        wait_until(lambda: num_unanswered(engine) == 0)


def test_an_engine_lost_during_a_stream_fails_the_response(template: Path) -> None:
    with slow_server(template) as (engine, client):
        stream = iter(client.responses.create(**LONG, stream=True))
        next(stream)
        engine.close()
        last: Any = list(stream)[-1]
        assert last.type == "response.failed" and last.response.error.code == "server_error"
        assert client.responses.retrieve(last.response.id).status == "failed"


def test_responses_are_retrieved_and_deleted(tmp_path: Path) -> None:
    _, server = scripted_client("yes", tmp_path)
    with server as url, connected(url) as client:
        made = client.responses.create(model="demo", input="x")
        assert client.responses.retrieve(made.id) == made
        answer = httpx.delete(f"{url}/v1/responses/{made.id}").json()
        assert answer == {"id": made.id, "object": "response", "deleted": True}
        unkept = client.responses.create(model="demo", input="x", store=False)
        for response in (made, unkept):
            calls: list[Any] = [
                client.responses.retrieve,
                client.responses.delete,
                client.responses.cancel,
                client.responses.input_items.list,
            ]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    call(response.id)
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model="demo", input="y", previous_response_id=response.id)
            assert caught.value.code == "previous_response_not_found"
            assert caught.value.param == "previous_response_id"


def test_responses_may_outlive_the_server(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    store = tmp_path / "responses.db"
    _, server = scripted_client("yes", tmp_path / "model", response_store=store)
    with server as url, connected(url) as client:
        first = client.responses.create(model="demo", input="one")
        second = client.responses.create(model="demo", input="two", previous_response_id=first.id)
        client.responses.delete(first.id)
    engine, server = scripted_client("no", tmp_path / "model", response_store=store)
    with server as url, connected(url) as client:
        assert client.responses.retrieve(second.id) == second
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        client.responses.create(model="demo", input="three", previous_response_id=second.id)
        prompt = prompt_of(engine)
        places = [prompt.index(each) for each in ("one", "two", "three")]
        assert places == sorted(places)


def test_responses_belong_to_the_key_that_made_them(tmp_path: Path) -> None:
    _, server = scripted_client("yes", tmp_path, api_keys=("mine", "yours"))
    with server as url, connected(url, "mine") as mine, connected(url, "yours") as yours:
        made = mine.responses.create(model="demo", input="x")
        assert mine.responses.retrieve(made.id).output_text == "yes"
        for call in (yours.responses.retrieve, yours.responses.delete, yours.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError):
            yours.responses.create(model="demo", input="y", previous_response_id=made.id)
        assert mine.responses.create(model="demo", input="y", previous_response_id=made.id).status


def test_the_oldest_responses_make_room(tmp_path: Path) -> None:
    for limits in ({"max_stored_responses": 2}, {"max_stored_bytes": 3000}):
        _, server = scripted_client("yes", tmp_path, **limits)
        with server as url, connected(url) as client:
            made = [client.responses.create(model="demo", input="x").id for _ in range(3)]
            assert client.responses.retrieve(made[-1]).id == made[-1]
            with pytest.raises(openai.NotFoundError, match="--max-stored-responses"):
                client.responses.retrieve(made[0])
    _, server = scripted_client("yes", tmp_path, max_stored_responses=0)
    with server as url, connected(url) as client:
        response = client.responses.create(model="demo", input="x")
        assert response.status == "completed"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


PART = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("changes", "param", "code", "said"),
    [
        ({"input": None}, "input", "missing", "input is required"),
        ({"input": 5}, "input", "invalid_value", "a text or a list of objects, got 5"),
        ({"input": []}, "input", "invalid_value", "input is empty"),
        (
            {"input": [{"type": "computer_call"}]},
            "input",
            "invalid_value",
            "input[0].type is 'computer_call'",
        ),
        ({"input": [{"content": "x"}]}, "input", "invalid_value", "input[0].type is missing"),
        ({"input": [PART, {"role": "wizard", "content": "x"}]}, "input", "invalid_value", "input[1].role is"),
        ({"input": [{"role": "user"}]}, "input", "invalid_value", "input[0].content is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input",
            "unsupported_parameter",
            "input[0].content[0] is of type 'input_file'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
            "input",
            "invalid_value",
            "input[0].content[0] is of type 'input_image'",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input",
            "invalid_value",
            "input[0].arguments is '{'",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input",
            "invalid_value",
            "input[0].call_id is missing",
        ),
        (
            {"input": [{"type": "reasoning", "content": ["x"]}]},
            "input",
            "invalid_value",
            "input[0].content[0]",
        ),
        (
            {"input": [{"type": "reasoning", "summary": ["x"]}]},
            "input",
            "invalid_value",
            "input[0].summary[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input", "unsupported_parameter", "item itself"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools",
            "unsupported_parameter",
            "tools[0].type is 'web_search'",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "invalid_value", "tools[0].name is None"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools", "invalid_value", "tools[1].name is 'area'"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value", "there are no tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "invalid_value", "tool_choice is"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
            "invalid_value",
            "tool_choice.name is 'f', expected one of the tools: area",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text", "invalid_value", "text.format.type must be"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "text",
            "invalid_value",
            "text.format.schema is missing",
        ),
        (
            {"text": {"fromat": {}}},
            "text",
            "unknown_parameter",
            "field text.fromat: ",
        ),
        (
            {"reasoning": {"effort": "low"}},
            "reasoning",
            "unsupported_parameter",
            "reasoning.effort: the chat",
        ),
        ({"reasoning": {"summary": "long"}}, "reasoning", "invalid_value", "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter", "file_search_call"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "message.output_text.logprobs in include"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value", "expected 1 or more"),
        (
            {"max_output_tokens": 9999},
            "max_output_tokens",
            "context_length_exceeded",
            "max_output_tokens is 9999",
        ),
        ({"truncation": "maybe"}, "truncation", "invalid_value", "'auto' or 'disabled'"),
        ({"background": True}, "background", "unsupported_parameter", "background: responses are generated"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter", "send previous_response_id"),
        (
            {"previous_response_id": "resp_0"},
            "previous_response_id",
            "previous_response_not_found",
            "'resp_0'",
        ),
        ({"messages": []}, "messages", "unknown_parameter", "/v1/chat/completions takes messages"),
        ({"temperature": -1}, "temperature", "invalid_value", "got -1"),
    ],
)
def test_an_invalid_field_is_named(
    refusing: str, changes: dict[str, Any], param: str, code: str, said: str
) -> None:
    asked = {name: value for name, value in {"input": "x", **changes}.items() if value is not None}
    answer = httpx.post(f"{refusing}/v1/responses", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"], error["code"]) == (param, code), error
    assert said in error["message"]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    _, server = scripted_client("yes", tmp_path_factory.mktemp("refusing"))
    with server as url:
        yield url


def test_errors_have_the_clients_classes(client: openai.OpenAI, refusing: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="x")
    assert caught.value.code == "model_not_found"
    with connected(refusing) as client:
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="demo", input="x", background=True)
        made = client.responses.create(model="demo", input="x")
        for query, param in (
            ({"stream": True}, "stream"),
            ({"order": "up"}, "order"),
            ({"limit": 0}, "limit"),
        ):
            route = made.id if param == "stream" else f"{made.id}/input_items"
            answer = httpx.get(f"{refusing}/v1/responses/{route}", params=cast(Any, query))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, after="msg_0")


def test_an_empty_answer_is_an_empty_message(tmp_path: Path) -> None:
    _, server = scripted_client("", tmp_path)
    with server as url, connected(url) as client:
        response = client.responses.create(model="demo", input="x")
        assert response.status == "completed" and response.output[0].type == "message"
        assert response.output_text == ""
        last: Any = list(client.responses.create(model="demo", input="x", stream=True))[-1]
        assert last.response.output_text == "" and len(last.response.output) == 1


def test_errors_about_pictures_name_the_item(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(WITH_PICTURES, encoding="utf-8")
    part = {"type": "input_image", "image_url": "https://elsewhere.example/a.png"}
    items = [{"role": "user", "content": "see"}, {"role": "user", "content": [part]}]
    with served(
        cast(EngineClient, make_engine("yes")), picture_encoder=FakeEncoder(), chat_template=file
    ) as url:
        answer = httpx.post(f"{url}/v1/responses", json={"input": items})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input")
    assert error["message"].startswith("input[1].content[0].image_url ")
