"""Chats with pictures, through the application, with an encoder that this test provides: the engine's request."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from inflight.core.ports import EngineClient
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.errors import InflightError, InvalidArgument, Name, QueueFull, Unreachable
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.conftest import TEMPLATE
from tests.openai_endpoint.scripted import LIMITS, ScriptedEngine
from tests.openai_endpoint.serving import DEMO, PATIENCE_S, fake_engine, served
from tests.prometheus import parse

WIDTH, ROTARY_DIM, ROWS = 4, 2, 3
VOCABULARY = LIMITS.vocab_size
PLACE = "<|image|>"
WITH_PICTURES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class FakeEncoder:
    """Encodes each picture as three rows, and remembers what it was asked; or raises an error."""

    asked: list[tuple[str, list[bytes]]] = field(default_factory=list[tuple[str, list[bytes]]])
    error: InflightError | None = None
    width: int = WIDTH
    waits: bool = False
    was_cancelled: threading.Event = field(default_factory=threading.Event)

    async def stats(self) -> PictureStats:
        if self.error is not None:
            raise self.error
        return PictureStats(2, 1, 1500.0, 64)

    async def encode(self, text: str, pictures: Sequence[bytes], vocab_size: int) -> EncodedPrompt:
        self.asked.append((text, list(pictures)))
        if self.error is not None:
            raise self.error
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled.set()
        tokenizer, ids, extra_ids = Tokenizer.from_dir(DEMO), [], []
        for index, piece in enumerate(text.split(PLACE)):
            if index:
                ids += [vocab_size + (index - 1) * ROWS + row for row in range(ROWS)]
                extra_ids += [1000 + index] * ROWS
            words = tokenizer.encode(piece, add_special_tokens=False)
            ids += words
            extra_ids += [0] * len(words)
        num_rows = ROWS * len(pictures)
        rows = Matrix((num_rows, self.width), "float32", RawBuffer(bytes(4 * num_rows * self.width)))
        angles = Matrix((len(ids), ROTARY_DIM), "float32", RawBuffer(bytes(4 * len(ids) * ROTARY_DIM)))
        return EncodedPrompt(
            tuple(ids),
            tuple(extra_ids),
            PromptTable.of(rows, is_identified=True),
            RotaryTable.of(angles, -2, is_identified=True),
            (ROWS,) * len(pictures),
        )


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(content: bytes, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(content), **more}}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


class Endpoint:
    """The application in front of an engine with given answers."""

    def __init__(self, url: str, engine: ScriptedEngine, encoder: FakeEncoder) -> None:
        self.url, self.engine, self.encoder = url, engine, encoder

    def post(self, messages: Any, route: str = "v1/chat/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/{route}", json={"messages": messages, "max_tokens": 20, **body})

    def refusal(self, messages: Any, **body: Any) -> str:
        """Return the message of an error 400 that names the messages."""
        answer = self.post(messages, **body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] in ("messages", *body), answer.text
        return error["message"]


def make_engine(answer: str) -> ScriptedEngine:
    engine = ScriptedEngine(answer)
    limits = replace(LIMITS, hidden_size=WIDTH, rotary_dim=ROTARY_DIM)
    engine.description = replace(engine.description, limits=limits)
    return engine


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "pictures.jinja"
    file.write_text(WITH_PICTURES, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a.png").write_bytes(b"of a file")
    return folder


@pytest.fixture(scope="module")
def shared(template: Path, folder: Path) -> Iterator[Endpoint]:
    engine, encoder = make_engine("yes, a cat"), FakeEncoder()
    client = cast(EngineClient, engine)
    options = {"max_pictures": 3, "allowed_local_media_path": folder}
    with served(client, picture_encoder=encoder, chat_template=template, **options) as url:
        yield Endpoint(url, engine, encoder)


@pytest.fixture
def endpoint(shared: Endpoint) -> Endpoint:
    shared.encoder.error, shared.encoder.width, shared.encoder.waits = None, WIDTH, False
    shared.encoder.asked.clear()
    shared.engine.requests.clear()
    return shared


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    *user(text("What are "), part(b"one", detail="low"), text(" and "), part(b"two"), text("?")),
    {"role": "assistant", "content": "Cats."},
    *user(part(b"one", detail="high"), text("again")),
]


def test_the_engine_gets_the_encoded_prompt(endpoint: Endpoint) -> None:
    body = {"cache_salt": "mine", "seed": 5, "stop": ["cat"], "logprobs": True, "top_logprobs": 2}
    answer = endpoint.post(CONVERSATION, **body)
    assert answer.status_code == 200, answer.text
    ((asked, pictures),) = endpoint.encoder.asked
    assert asked == (
        f"<|system|>Be kind.<|user|>What are {PLACE} and {PLACE}?<|assistant|>Cats."
        f"<|user|>{PLACE}again<|assistant|>"
    )
    assert pictures == [b"one", b"two", b"one"]
    (request,) = endpoint.engine.requests
    virtual = [token for token in request.input_token_ids if token >= VOCABULARY]
    assert virtual == list(range(VOCABULARY, VOCABULARY + 9))
    assert request.prompt_table is not None and request.prompt_table.num_rows == 9
    assert request.rotary_table is not None and request.rotary_table.delta == -2
    extra = [
        extra
        for token, extra in zip(request.input_token_ids, request.identity.extra_ids, strict=True)
        if token >= VOCABULARY
    ]
    assert extra == [1001] * 3 + [1002] * 3 + [1003] * 3 and sum(request.identity.extra_ids) == sum(extra)
    assert request.identity.cache_salt_id and request.sampling.random_seed == 5
    told = answer.json()
    assert told["usage"]["prompt_tokens"] == len(request.input_token_ids)
    assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    choice = told["choices"][0]
    assert choice["message"]["content"] == "yes, a " and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_the_length_of_an_answer_is_what_the_pictures_leave(endpoint: Endpoint) -> None:
    assert endpoint.post(user(text("x"), part(b"one")), max_tokens=None).status_code == 200
    (request,) = endpoint.engine.requests
    assert request.max_new_tokens == LIMITS.max_sequence_length - len(request.input_token_ids)


def test_streams_and_several_answers_have_pictures_too(endpoint: Endpoint) -> None:
    answer = endpoint.post(user(part(b"one")), n=2, stream=True, stream_options={"include_usage": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    chunks = [json.loads(event) for event in events[:-2]]
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["yes, a cat"] * 2
    (request,) = endpoint.engine.requests
    assert chunks[-1]["usage"]["prompt_tokens"] == request.prompt_length and request.prompt_table is not None


def test_guides_and_tool_calls_have_pictures_too(endpoint: Endpoint) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *user(text("look")),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [part(b"seen"), text("seen")]},
    ]
    assert endpoint.post(messages, tools=tools, guided_regex="yes").status_code == 200
    forced = endpoint.post(user(part(b"one")), tools=tools, tool_choice="required")
    assert forced.status_code == 200, forced.text
    guided, called = endpoint.engine.requests
    assert guided.guide is not None and called.guide is not None
    assert guided.prompt_table is not None and called.prompt_table is not None
    (asked, pictures), _ = endpoint.encoder.asked
    assert f"<|tool|>{PLACE}seen" in asked and pictures == [b"seen"]


def test_the_metrics_page_counts_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FakeEncoder()
    with fake_engine() as engine, served(engine, picture_encoder=encoder) as url:
        page = parse(httpx.get(f"{url}/metrics").text)
        encoder.error = Unreachable("the process has ended")
        assert "inflight_picture" not in httpx.get(f"{url}/metrics").text
    assert page.value("inflight_pictures_total", model="multimodal_encoders", rows="encoded") == 2
    assert page.value("inflight_picture_encoding_seconds_total", version="1") == 1.5
    assert page.has("inflight_generated_tokens_total") and page.has("vllm:num_requests_running")
    monkeypatch.setattr("inflight.openai.server_routes._fetch", lambda url: ("x 1", "text/plain"))
    with fake_engine() as engine, served(engine, picture_encoder=encoder, metrics_url="http://x/") as url:
        assert "inflight_picture" not in httpx.get(f"{url}/metrics").text  # Triton's page has them


def test_texts_alone_are_not_encoded(endpoint: Endpoint) -> None:
    assert endpoint.post(user(text("Hello"))).status_code == 200
    assert endpoint.post([{"role": "user", "content": f"What is {PLACE}?"}]).status_code == 200
    assert endpoint.encoder.asked == []
    for request in endpoint.engine.requests:
        assert request.prompt_table is None and request.rotary_table is None
        assert request.identity.extra_ids == ()


def test_the_rules_of_the_options_are_used(endpoint: Endpoint, folder: Path) -> None:
    """The URL may also be the part's value itself, as some clients send it."""
    of_file = {"type": "image_url", "image_url": f"file://{folder}/a.png"}
    assert endpoint.post(user(of_file)).status_code == 200
    assert endpoint.encoder.asked[0][1] == [b"of a file"]
    other = {"type": "image_url", "image_url": "file:///etc/passwd"}
    assert "not a file in the allowed folder" in endpoint.refusal(user(other))


def test_a_client_cannot_send_what_stands_for_a_picture(endpoint: Endpoint) -> None:
    says = "messages[0].content[0] is of type 'image'; this server takes parts of type text and image_url"
    assert endpoint.refusal(user({"type": "image"})) == says


URL = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (user({"type": "image_url"}), f"{URL} is missing"),
        (user({"type": "image_url", "image_url": {}}), f"{URL} is missing"),
        (user({"type": "image_url", "image_url": {"url": 5}}), f"{URL} is 5, expected a text"),
        (user(part(b"x", detail="most")), "image_url.detail is 'most', expected one of auto, low, high"),
        (
            user(text("x"), {"type": "image_url", "image_url": {"url": "x"}}),
            "content[1].image_url.url is 'x'",
        ),
        (user({"type": "image_url", "image_url": {"url": "https://h/x"}}), "--allowed-media-domains"),
        (user(*[part(b"x")] * 4), "messages have 4 pictures; this server takes at most 3 in a prompt"),
        ([{"role": "system", "content": [part(b"x")]}, *user(text("x"))], "message of role 'system'"),
        ([*user(text("x")), {"role": "assistant", "content": [part(b"x")]}], "message of role 'assistant'"),
    ],
)
def test_invalid_pictures_are_refused(endpoint: Endpoint, messages: Any, says: str) -> None:
    assert says in endpoint.refusal(messages)
    assert endpoint.encoder.asked == [] and endpoint.engine.requests == []


@pytest.mark.parametrize(
    "body", [{"truncate_prompt_tokens": 5}, {"add_special_tokens": True}, {"prompt_logprobs": 0}]
)
def test_fields_that_pictures_exclude_are_named(endpoint: Endpoint, body: dict[str, Any]) -> None:
    assert next(iter(body)) in endpoint.refusal(user(part(b"x")), **body)
    assert endpoint.engine.requests == []


def test_a_continued_message_ends_with_a_text(endpoint: Endpoint) -> None:
    messages, body = user(text("x"), part(b"x")), {"continue_final_message": True}
    assert "ends with a picture" in endpoint.refusal(messages, **body)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (
            InvalidArgument(Name("pictures[1]"), " cannot be decoded: x"),
            400,
            "messages[0].content[1].image_url.url cannot be decoded: x",
        ),
        (InvalidArgument("2 places, but 1 ", Name("pictures")), 400, "2 places, but 1 pictures"),
        (QueueFull("too many prompts wait"), 429, "too many prompts wait"),
        (Unreachable("it does not run"), 503, "pictures cannot be encoded now; a later attempt may succeed"),
    ],
)
def test_errors_of_the_encoder_name_the_picture(
    endpoint: Endpoint, error: InflightError, status: int, says: str
) -> None:
    endpoint.encoder.error = error
    answer = endpoint.post(user(part(b"one"), part(b"two")))
    told = answer.json()["error"]
    assert (answer.status_code, told["message"]) == (status, says)
    assert told["param"] == ("messages" if status == 400 else None)
    assert endpoint.engine.requests == []


def test_pictures_of_a_client_that_leaves_are_not_encoded(endpoint: Endpoint) -> None:
    endpoint.encoder.waits = True
    with pytest.raises(httpx.ReadTimeout):
        body = {"messages": user(part(b"one"))}
        httpx.post(f"{endpoint.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.2))
    assert endpoint.encoder.was_cancelled.wait(PATIENCE_S)
    assert endpoint.engine.requests == []


def test_rows_that_the_engine_does_not_take_are_refused(endpoint: Endpoint) -> None:
    endpoint.encoder.width = WIDTH + 1
    assert "must have shape" in endpoint.refusal(user(part(b"one")))


def test_a_prompt_that_is_too_long_is_refused_before_its_pictures_are_read(endpoint: Endpoint) -> None:
    assert "messages" in endpoint.refusal(user(text("x" * 1_000_000), part(b"one")))
    assert endpoint.encoder.asked == []


def test_tokenize_refuses_pictures(endpoint: Endpoint) -> None:
    answer = httpx.post(f"{endpoint.url}/tokenize", json={"messages": user(part(b"one"))})
    assert answer.status_code == 400 and "/tokenize takes texts alone" in answer.text
    assert httpx.post(f"{endpoint.url}/tokenize", json={"messages": user(text("x"))}).status_code == 200


@pytest.mark.parametrize(("source", "has_encoder"), [(WITH_PICTURES, False), (TEMPLATE, True)])
def test_pictures_are_refused_without_an_encoder_or_a_place_in_the_template(
    tmp_path: Path, source: str, has_encoder: bool
) -> None:
    (tmp_path / "chat.jinja").write_text(source, encoding="utf-8")
    encoder = FakeEncoder() if has_encoder else None
    client = cast(EngineClient, make_engine("yes"))
    with served(client, picture_encoder=encoder, chat_template=tmp_path / "chat.jinja") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": user(text("x"), part(b"x"))})
        says = "messages[0].content[1] is of type 'image_url'; this server takes parts of type text alone"
        assert answer.status_code == 400 and answer.json()["error"]["message"] == says


def test_the_playground_is_told_how_large_pictures_may_be(endpoint: Endpoint) -> None:
    told = httpx.get(f"{endpoint.url}/playground/model").json()
    assert told == {"has_chat_template": True, "reason": "", "max_picture_bytes": (16 << 20) * 7 // 10}


def test_messages_may_have_pictures(endpoint: Endpoint, folder: Path) -> None:
    data = base64.b64encode(b"of data").decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    of_file = {"type": "image", "source": {"type": "url", "url": f"file://{folder}/a.png"}}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("seen:"), of_file]}
    messages = [
        *user(text("What is this?"), image),
        {"role": "assistant", "content": [use]},
        *user(result),
    ]
    answer = endpoint.post(messages, "v1/messages")
    assert answer.status_code == 200, answer.text
    ((prompt, pictures),) = endpoint.encoder.asked
    assert pictures == [b"of data", b"of a file"]
    assert f"<|user|>What is this?{PLACE}" in prompt and f"<|tool|>seen:{PLACE}" in prompt
    (request,) = endpoint.engine.requests
    assert request.prompt_table is not None and request.prompt_table.rows.shape[0] == 2 * ROWS
    counted = httpx.post(f"{endpoint.url}/v1/messages/count_tokens", json={"messages": messages})
    usage = answer.json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    for source, says in (
        ({"type": "url", "url": "https://example.com/a.png"}, "messages[0].content[0].source"),
        (
            {"type": "file", "file_id": "f"},
            "messages[0].content[0].source.type is 'file', expected base64 or url",
        ),
        (
            {"type": "base64", "data": data},
            "messages[0].content[0].source: expected type base64 with media_type",
        ),
    ):
        refused = endpoint.post(user({"type": "image", "source": source}), "v1/messages")
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
        assert says in error["message"], error
