"""/v1/messages by Anthropic's own client: answers of given texts, and the prompts that the engine gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message

from inflight.core.ports import EngineClient
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.conftest import TEMPLATE
from tests.openai_endpoint.scripted import ScriptedEngine
from tests.openai_endpoint.serving import DEMO, fake_engine, served
from tests.openai_endpoint.test_errors import num_unanswered, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"name": name, "description": "of something", "input_schema": {"type": "object", "properties": {}}}
    for name in ("area", "time")
]
CALL = '<tool_call>\n{"name": "area", "arguments": {"r": 2}}\n</tool_call>'
OTHER_CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


class Endpoint:
    """Anthropic's client of the application in front of an engine with a given answer."""

    def __init__(self, url: str, engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
        self.url, self.engine, self.client = url, engine, client

    def ask(self, **fields: Any) -> Message:
        """Return the whole answer, after checking that the stream adds up to the same."""
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": MESSAGES, **fields}
        whole = self.client.messages.create(**asked)
        with self.client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert comparable(streamed) == comparable(whole)
        return whole

    def prompt(self, **fields: Any) -> str:
        """Return the prompt that the engine gets, whose length count_tokens must know."""
        self.engine.requests.clear()
        usage = self.ask(**fields).usage
        asked = {"model": "demo", "messages": MESSAGES, **fields}
        no_part = ("temperature", "stop_sequences", "max_tokens")
        asked = {name: value for name, value in asked.items() if name not in no_part}
        counted = self.client.messages.count_tokens(**cast(Any, asked)).input_tokens
        ids = self.engine.requests[0].input_token_ids
        assert counted == len(ids) == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        return Tokenizer.from_dir(DEMO).decode(ids, skip_special_tokens=False)


def comparable(message: Message) -> dict[str, Any]:
    """Return a message without its random ids."""
    plain = json.loads(message.to_json())
    return {
        **{name: value for name, value in plain.items() if name not in ("id", "parsed_output")},
        "content": [
            {name: value for name, value in block.items() if name not in ("id", "parsed_output")}
            for block in plain["content"]
        ],
    }


@contextmanager
def answering(answer: str, tmp_path: Path, template: str = TEMPLATE, **options: Any) -> Iterator[Endpoint]:
    file = tmp_path / "template.jinja"
    file.write_text(template, encoding="utf-8")
    engine = ScriptedEngine(answer)
    with (
        served(cast(EngineClient, engine), chat_template=file, **options) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield Endpoint(url, engine, client)


def said(message: Message) -> list[tuple[Any, ...]]:
    """Return the blocks without their ids."""
    fields = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    return [(block.type, *(getattr(block, name) for name in fields[block.type])) for block in message.content]


def test_an_answer_has_anthropics_form(tmp_path: Path) -> None:
    with answering("one two", tmp_path) as endpoint:
        message = endpoint.ask(
            metadata={"user_id": "me"}, service_tier="auto", cache_control={"type": "ephemeral"}
        )
        assert said(message) == [("text", "one two")]
        assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.id == f"msg_{message._request_id}"
        assert message.usage.output_tokens == len(Tokenizer.from_dir(DEMO).encode("one two"))
        assert message.usage.service_tier == "standard"
        Message.model_validate(json.loads(message.to_json()), strict=True)
        assert endpoint.client.beta.messages.create(model="demo", max_tokens=9, messages=MESSAGES).content


def test_events_have_the_official_order(tmp_path: Path) -> None:
    answer = f"<think>hmm</think>Let me see. {CALL}"
    with answering(answer, tmp_path, TEMPLATE + "{{ '' and '</think>' }}") as endpoint:
        asked = {"model": "demo", "max_tokens": 99, "messages": MESSAGES, "tools": TOOLS, "stream": True}
        raw = httpx.post(f"{endpoint.url}/v1/messages", json=asked)
        assert raw.headers["content-type"].startswith("text/event-stream")
        frames = [frame.split("\n") for frame in raw.text.removesuffix("\n\n").split("\n\n")]
        names = [name.removeprefix("event: ") for name, _ in frames]
        events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
        assert [each["type"] for each in events] == names
        whole = [name for name in names if name != "content_block_delta"]
        block = ["content_block_start", "content_block_stop"]
        assert whole == ["message_start", *block * 3, "message_delta", "message_stop"]
        assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
        kinds = ["thinking_delta", "text_delta", "input_json_delta"]
        place = -1
        for each in events[1:-2]:
            place += each["type"] == "content_block_start"
            assert each["index"] == place
            assert each["type"] != "content_block_delta" or each["delta"]["type"] == kinds[place]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}


@pytest.mark.parametrize(
    ("answer", "blocks"),
    [
        (CALL, [("tool_use", "area", {"r": 2})]),
        (f"See: {CALL}", [("text", "See:"), ("tool_use", "area", {"r": 2})]),
        (
            f"a {CALL} b {OTHER_CALL} c",
            [
                ("text", "a"),
                ("tool_use", "area", {"r": 2}),
                ("text", "b"),
                ("tool_use", "time", {}),
                ("text", "c"),
            ],
        ),
    ],
)
def test_texts_and_calls_stay_in_order(tmp_path: Path, answer: str, blocks: list[Any]) -> None:
    with answering(answer, tmp_path) as endpoint:
        message = endpoint.ask(tools=TOOLS)
        assert (said(message), message.stop_reason) == (blocks, "tool_use")
        one = endpoint.ask(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert sum(block.type == "tool_use" for block in one.content) == 1
        none = endpoint.ask(tools=TOOLS, tool_choice={"type": "none"})
        assert (said(none), none.stop_reason) == ([("text", answer)], "end_turn")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "area"}])
def test_a_forced_call_is_guided(tmp_path: Path, choice: Any) -> None:
    with answering(CALL, tmp_path) as endpoint:
        assert said(endpoint.ask(tools=TOOLS, tool_choice=choice)) == [("tool_use", "area", {"r": 2})]
        guides = [request.guide for request in endpoint.engine.requests]
        assert all(guide and '"area"' in guide.text for guide in guides)
        assert all(guide and ('"time"' in guide.text) == (choice["type"] == "any") for guide in guides)


def test_a_call_that_the_length_cuts_has_its_complete_arguments(tmp_path: Path) -> None:
    call = CALL.replace('"r": 2', '"r": 2, "unit": "metres"')
    ids = Tokenizer.from_dir(DEMO).encode(call)
    with answering(call, tmp_path) as endpoint:
        cuts = [endpoint.ask(tools=TOOLS, max_tokens=count) for count in range(1, len(ids))]
    assert {each.stop_reason for each in cuts} == {"max_tokens"}
    inputs = [block.input for each in cuts for block in each.content if block.type == "tool_use"]
    assert {} in inputs and {"r": 2} in inputs and inputs[-1] == {"r": 2, "unit": "metres"}


def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    with answering("one two three", tmp_path) as endpoint:
        message = endpoint.ask(stop_sequences=["never", "thr", "wo"])
        assert said(message) == [("text", "one t")]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wo")


def test_an_answer_may_fill_the_context(tmp_path: Path) -> None:
    with answering("a " * 300, tmp_path) as endpoint:
        message = endpoint.ask(max_tokens=20_000)
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.input_tokens + message.usage.output_tokens == 256
        assert endpoint.ask(max_tokens=5).stop_reason == "max_tokens"


def test_thinking_is_a_block_of_its_own(tmp_path: Path) -> None:
    with answering("<think>hmm</think>yes", tmp_path, THINKING) as endpoint:
        message = endpoint.ask()
        assert said(message) == [("thinking", "hmm"), ("text", "yes")]
        details = message.usage.output_tokens_details
        assert details is not None and 0 < details.thinking_tokens < message.usage.output_tokens
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        assert said(endpoint.ask(thinking=enabled, max_tokens=2000)) == said(message)
        hidden = endpoint.ask(thinking={"type": "adaptive", "display": "omitted"})
        assert said(hidden) == [("text", "yes")]
        back = [*MESSAGES, {"role": "assistant", "content": message.content}, *MESSAGES]
        assert endpoint.prompt(messages=back).count("<think>hmm</think>yes") == 1
        assert endpoint.prompt(thinking={"type": "disabled"}).endswith("<think></think>")
        prefilled = [*MESSAGES, {"role": "assistant", "content": "It is"}]
        assert endpoint.prompt(messages=prefilled).endswith("<|assistant|>It is")
    with (
        answering("yes", tmp_path) as endpoint,
        pytest.raises(anthropic.BadRequestError, match="no reasoning"),
    ):
        endpoint.ask(thinking=enabled, max_tokens=2000)


def test_a_conversation_with_tools_is_that_of_a_chat(tmp_path: Path) -> None:
    """The prompt is the same as that of the chat with the same meaning."""
    with answering(f"Let me see.{CALL}", tmp_path) as endpoint:
        answer = endpoint.ask(tools=TOOLS, system="Be brief.")
        (_, call) = answer.content
        assert call.type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "12.6", "cache_control": {}}
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        told = endpoint.prompt(tools=TOOLS, system=system, messages=turns)
        arguments = json.dumps({"r": 2})
        chat = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "tool_calls": [
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": "area", "arguments": arguments},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": call.id, "content": "12.6"},
                {"role": "user", "content": "And now?"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool["description"],
                        "parameters": tool["input_schema"],
                    },
                }
                for tool in TOOLS
            ],
        }
        ids = httpx.post(f"{endpoint.url}/tokenize", json=chat).json()["tokens"]
        assert told == Tokenizer.from_dir(DEMO).decode(ids, skip_special_tokens=False)
        failed = [*turns[:2], {"role": "user", "content": [{**result, "is_error": True}]}]
        assert "<|tool|>Error:\n12.6\n" in endpoint.prompt(tools=TOOLS, messages=failed)
        empty = [*turns[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id}]}]
        assert "<|tool|>\n" in endpoint.prompt(tools=TOOLS, messages=empty)


def test_deferred_tools_are_in_the_prompt_and_may_be_referred_to(tmp_path: Path) -> None:
    """As Claude Code sends them, whose own search returns references."""
    with answering(f"Let me see.{CALL}", tmp_path) as endpoint:
        deferred: Any = [{**each, "defer_loading": True} for each in TOOLS]
        assert endpoint.prompt(tools=deferred) == endpoint.prompt(tools=TOOLS)
        call = endpoint.ask(tools=deferred).content[1]
        assert call.type == "tool_use"
        reference: Any = {"type": "tool_reference", "tool_name": "area"}
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [reference]}
        turns: Any = [
            *MESSAGES,
            {"role": "assistant", "content": [call.to_dict()]},
            {"role": "user", "content": [result]},
        ]
        assert "The tool area is available." in endpoint.prompt(tools=deferred, messages=turns)


def test_an_answer_may_follow_a_schema(tmp_path: Path) -> None:
    class Area(pydantic.BaseModel):
        r: int

    with answering('{"r": 2}', tmp_path) as endpoint:
        parsed = endpoint.client.messages.parse(
            model="demo", max_tokens=50, messages=MESSAGES, output_format=Area
        )
        assert parsed.parsed_output == Area(r=2)
        (request,) = endpoint.engine.requests
        assert request.guide is not None and '"r"' in request.guide.text


def test_sampling_fields_reach_the_engine(tmp_path: Path) -> None:
    with answering("x", tmp_path) as endpoint:
        sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 7}
        endpoint.client.messages.create(
            model="demo", max_tokens=5, messages=MESSAGES, metadata={"user_id": "me"}, extra_body=sampling
        )
        (request,) = endpoint.engine.requests
        asked = request.sampling
        assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.25, 7) and request.client_id


USE: Any = {"type": "tool_use", "id": "c1", "name": "area", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens: expected 1 or more, got 0"),
        ({"messages": []}, "messages: expected 1 or more values, got []"),
        ({"max_token": 3}, "unknown field max_token: it would be ignored; did you mean max_tokens?"),
        ({"n": 2}, "unknown field n"),
        ({"container": "c1"}, "container: this server runs no code"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences: expected a list, got"),
        ({"stop_sequences": ["x" * 40_000]}, "stop_sequences"),
        (
            {"thinking": {"type": "enabled"}},
            "thinking.budget_tokens is None, expected at least 1024 with enabled",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "expected less than max_tokens, 100"),
        ({"output_config": {"effort": "lowest"}}, "output_config.effort: expected 'low'"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}},
            "context_management: this server edits no conversation",
        ),
        ({"output_config": {"format": {"type": "json"}}}, "format.type: expected 'json_schema', got"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "type is 'bash_20250124', expected custom"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOLS[0]] * 2}, "tools[1].name is 'area', which another tool has"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any', expected auto or none without tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}},
            "expected one of the tools: area, time",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is None, expected a name"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image', expected text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool', expected user or"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3, expected a text or"),
        ({"messages": [{**MESSAGES[0], "name": "x"}]}, "messages[0] has the unknown field name"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text is missing, expected a text"),
        ({"messages": [user({"type": "text", "text": 3})]}, "content[0].text is 3, expected a text"),
        ({"messages": [user({"type": "text", "text": "", "x": 3})]}, "content[0] has the unknown field x"),
        (
            {"messages": [user({"type": "document"})]},
            "messages[0].content[0].type is 'document', expected text",
        ),
        ({"messages": [user({"type": "image", "source": {}})]}, "content[0].type is 'image', expected text"),
        ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id is 'c1', expected the id"),
        ({"messages": [*MESSAGES, assistant(USE)]}, "expected a tool_result for each tool_use before"),
        ({"messages": [*MESSAGES, assistant(USE), *MESSAGES]}, "messages[2].content: expected a tool_result"),
        (
            {"messages": [*MESSAGES, assistant(USE), user({"type": "text", "text": "x"}, RESULT)]},
            "messages[2].content[1] is a tool_result, expected before",
        ),
        ({"messages": [*MESSAGES, assistant()]}, "has no text to continue"),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "this model takes at most 256 tokens"),
    ],
)
def test_errors_name_the_field_in_anthropics_form(
    shared: Endpoint, fields: dict[str, Any], says: str
) -> None:
    asked = {"model": "demo", "max_tokens": 100, "messages": MESSAGES, **fields}
    with pytest.raises(anthropic.BadRequestError) as caught:
        shared.client.post("/v1/messages", body=asked, cast_to=Message)
    body = cast(dict[str, Any], caught.value.body)
    assert (body["type"], caught.value.type) == ("error", "invalid_request_error")
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    assert body["request_id"] == caught.value.request_id
    assert says in body["error"]["message"]


def test_an_effort_and_edits_without_effect_are_accepted(shared: Endpoint) -> None:
    """Claude Code sends both with every request."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    plain = shared.ask()
    hinted = shared.ask(output_config={"effort": "high"}, extra_body={"context_management": edits})
    assert comparable(hinted) == comparable(plain)
    first, second = shared.engine.requests[-2:]
    assert first.input_token_ids == second.input_token_ids


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with answering("yes", tmp_path_factory.mktemp("messages")) as endpoint:
        yield endpoint


def test_other_errors_have_the_clients_classes(fake_url: str) -> None:
    with anthropic.Anthropic(base_url=fake_url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="the model 'none' does not exist"):
            client.messages.create(model="none", max_tokens=1, messages=MESSAGES)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="none", messages=MESSAGES)
        wrong: Any = {"type": "json_schema", "schema": {"type": 3}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            client.messages.create(
                model="demo", max_tokens=1, messages=MESSAGES, output_config={"format": wrong}
            )
    for method, path, status in (
        ("GET", "messages", 405),
        ("POST", "messages/batches", 501),
        ("POST", "messages/none", 404),
    ):
        answer = httpx.request(method, f"{fake_url}/v1/{path}")
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
    half = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}'
    for raw in (b"", b"{", b"3", half):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{fake_url}/v1/messages", content=raw, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_keys_may_be_sent_in_either_header(tmp_path: Path) -> None:
    with answering("yes", tmp_path, api_keys=("secret", "other")) as endpoint:
        asked: Any = {"model": "demo", "max_tokens": 5, "messages": MESSAGES}
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key") as caught:
            endpoint.client.messages.create(**asked)
        assert caught.value.type == "authentication_error"
        both = {"api_key": "x", "default_headers": {"authorization": "Bearer secret"}}
        for keys in ({"api_key": "secret"}, {"auth_token": "other"}, both):
            with anthropic.Anthropic(base_url=endpoint.url, max_retries=0, **cast(Any, keys)) as client:
                assert client.messages.create(**asked).content


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (
        answering("yes", tmp_path, max_body_bytes=1000) as endpoint,
        pytest.raises(anthropic.RequestTooLargeError, match="larger than 1000 bytes"),
    ):
        endpoint.client.messages.create(model="demo", max_tokens=5, messages=MESSAGES, system="x" * 1000)


def test_async_streams_run_together(tmp_path: Path) -> None:
    async def ask(url: str) -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

            async def one() -> str:
                asked: Any = {"model": "demo", "max_tokens": 20, "messages": MESSAGES}
                async with client.messages.stream(**asked) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    with answering("one two three", tmp_path) as endpoint:
        assert set(asyncio.run(ask(endpoint.url))) == {"one two three"}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_request(template: Path, is_streamed: bool) -> None:
    with fake_engine(step_us=20_000) as engine, served(engine, chat_template=template) as url:

        def wait_for(count: int) -> None:
            wait_until(lambda: num_unanswered(engine) == count)

        asked: dict[str, Any] = {"model": "demo", "max_tokens": 20_000, "messages": MESSAGES}
        if is_streamed:
            with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
                with client.messages.stream(**asked) as stream:
                    next(iter(stream))
                    wait_for(1)
                wait_for(0)
            return

        async def leave() -> None:
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                asking = asyncio.create_task(client.messages.create(**asked))
                await asyncio.to_thread(wait_for, 1)
                asking.cancel()
            await asyncio.to_thread(wait_for, 0)

        asyncio.run(leave())
