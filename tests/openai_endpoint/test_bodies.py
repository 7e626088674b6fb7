"""Reading of bodies: limits on their size, on their number of values, and on waiting bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest
from starlette.requests import Request

from inflight.core.ports import EngineClient
from inflight.errors import Cancelled, Unavailable
from inflight.openai.bodies import MAX_CONTAINERS, MAX_TEXTS, MAX_VALUES, BodyReader, parse_body
from inflight.openai.errors import ApiError
from inflight.openai.protocol import (
    MAX_TOKEN_IDS,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from inflight.serving.engine_session import EngineSession

JSON = "application/json"


def many(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def object_with(count: int) -> str:
    return json.dumps({str(each): 1 for each in range(count)})


@pytest.mark.parametrize(
    ("kind", "field", "make", "said"),
    [
        (CompletionBody, "prompt", partial(many, "[1]", MAX_CONTAINERS), "lists and objects"),
        (CompletionBody, "prompt", partial(many, "1", MAX_VALUES + 3), "values"),
        (CompletionBody, "prompt", partial(many, '"a"', MAX_TEXTS), "texts and keys"),
        (ChatBody, "messages", partial(many, "{}", MAX_CONTAINERS), "lists and objects"),
        (TokenizeBody, "messages", partial(many, '{"role":"user","content":"[,{"}', MAX_CONTAINERS), "lists"),
        (DetokenizeBody, "tokens", partial(many, "1", MAX_VALUES + 3), "values"),
        (ChatBody, "chat_template_kwargs", partial(object_with, MAX_TEXTS), "texts and keys"),
        pytest.param(
            ChatBody,
            "chat_template_kwargs",
            partial(object_with, MAX_VALUES + 3),
            "(values|texts)",
            marks=pytest.mark.exhaustive,  # it is large
        ),
    ],
)
def test_a_body_with_too_many_values_is_refused_before_parsing(
    kind: type[Body], field: str, make: Callable[[], str], said: str
) -> None:
    with pytest.raises(ApiError, match=f"the body has [0-9]+ {said}.*: this server takes at most") as caught:
        parse_body(kind, f'{{"{field}": {make()}}}'.encode(), JSON)
    assert caught.value.status == 400


@pytest.mark.parametrize("text", ["," * (MAX_VALUES + 5), "[{" * MAX_CONTAINERS, '\\",' * MAX_VALUES, "\\\\"])
def test_brackets_and_commas_in_texts_are_not_counted(text: str) -> None:
    body = parse_body(CompletionBody, f'{{"prompt": "{text}", "stop": ["{text}"]}}'.encode(), JSON)
    assert body.prompt == json.loads(f'"{text}"') and body.stop == [body.prompt]


def test_a_body_at_the_limits_is_accepted() -> None:
    body = parse_body(CompletionBody, f'{{"prompt": {many("1", MAX_VALUES)}}}'.encode(), JSON)
    assert body.prompt == [1] * MAX_VALUES


@pytest.mark.parametrize(
    ("kind", "more", "param"),
    [
        (CompletionBody, {"logit_bias": {str(each): 1 for each in range(MAX_TOKEN_IDS + 1)}}, "logit_bias"),
        (CompletionBody, {"stop_token_ids": [1] * (MAX_TOKEN_IDS + 1)}, "stop_token_ids"),
        (
            ChatBody,
            {"chat_template_kwargs": {str(each): 1 for each in range(1000)}},
            "chat_template_kwargs",
        ),
    ],
)
def test_a_field_with_too_many_items_is_named(kind: type[Body], more: dict[str, Any], param: str) -> None:
    asked = {"prompt": "x"} if kind is CompletionBody else {"messages": [{}]}
    with pytest.raises(ApiError) as caught:
        parse_body(kind, json.dumps({**asked, **more}).encode(), JSON)
    assert caught.value.param == param and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[" * 100_000,
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"NaN",
        b'{"prompt": NaN}',
        b"1" * 10_000,
    ]
    + [b'{"temperature": 1e999}', b'{"a": "' + b"x" * 1000, b"\x00", b'\\"[[', b'{"prompt": "\\ud800"}']
    + [b"null", b"3", b'"text"', b"[]", b"{}"],
)
def test_a_malformed_body_is_refused_with_an_explanation(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, raw, JSON)
    assert caught.value.status == 400 and len(str(caught.value)) < 300


def test_errors_shorten_large_values() -> None:
    for value in ("x" * 1_000_000, ["x"] * 100_000, {str(each): each for each in range(100_000)}):
        with pytest.raises(ApiError) as caught:
            parse_body(CompletionBody, json.dumps({"prompt": "x", "n": value}).encode(), JSON)
        assert caught.value.param == "n" and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "header", [JSON, "application/json; charset=utf-8", "Application/JSON", "application/a+json"]
)
def test_json_content_types_are_accepted(header: str) -> None:
    assert parse_body(CompletionBody, b'{"prompt": "x"}', header).prompt == "x"


@pytest.mark.parametrize("header", ["", "text/plain", "text/json", "application/x-www-form-urlencoded"])
def test_content_types_that_need_no_preflight_are_refused(header: str) -> None:
    found = repr(header) if header else "no such header"
    with pytest.raises(ApiError, match=f"Content-Type must be application/json, got {found}"):
        parse_body(CompletionBody, b'{"prompt": "x"}', header)


@pytest.fixture
def session() -> Iterator[EngineSession]:
    found = EngineSession(cast(EngineClient, None))  # no request is submitted
    yield found
    found.close()


def request_of(parts: Sequence[bytes | None], length: int | None = None) -> Request:
    """Return a request whose body arrives in parts; at a part None its client disconnects."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        part = left.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    headers = [(b"content-type", JSON.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def test_a_body_may_be_as_large_as_the_limit_and_no_larger(session: EngineSession) -> None:
    body = b'{"prompt": "x"}'
    reader = BodyReader(session, len(body))
    parts = [body[:4], body[4:]]
    assert asyncio.run(reader.read(CompletionBody, request_of(parts))).prompt == "x"
    assert asyncio.run(reader.read(CompletionBody, request_of(parts, len(body)))).prompt == "x"
    with pytest.raises(ApiError, match="larger than 15 bytes") as caught:
        asyncio.run(reader.read(CompletionBody, request_of([*parts, b" ", b"never read"])))
    assert caught.value.status == 413
    for length in (len(body) + 1, 10**30):
        with pytest.raises(ApiError, match="larger than 15 bytes"):
            asyncio.run(reader.read(CompletionBody, request_of([], length)))


def test_a_client_that_disconnects_within_its_body_is_cancelled(session: EngineSession) -> None:
    with pytest.raises(Cancelled):
        asyncio.run(BodyReader(session, 100).read(CompletionBody, request_of([b"{", None])))


def test_waiting_large_bodies_are_bounded_and_small_ones_accepted(session: EngineSession) -> None:
    size = 1 << 20
    reader = BodyReader(session, size)
    waiting = asyncio.Event()

    def begun() -> Request:
        """Return a request whose client sends nearly all of its body now, and the rest later."""
        begin = b'{"prompt": "' + b"x" * (size - 100)

        async def receive() -> dict[str, Any]:
            nonlocal begin
            if begin:
                part, begin = begin, b""
                return {"type": "http.request", "body": part, "more_body": True}
            await waiting.wait()
            return {"type": "http.request", "body": b'"}', "more_body": False}

        headers = [(b"content-type", JSON.encode())]
        return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)

    async def run() -> None:
        reading = [asyncio.create_task(reader.read(CompletionBody, begun())) for _ in range(30)]
        await asyncio.sleep(0)
        refused = [each for each in reading if each.done()]
        assert 0 < len(refused) < len(reading) - 10
        assert all(isinstance(each.exception(), Unavailable) for each in refused)
        small = request_of([b'{"prompt": "small"}'])
        assert (await reader.read(CompletionBody, small)).prompt == "small"
        waiting.set()
        read = await asyncio.gather(*(each for each in reading if each not in refused))
        assert all(len(body.prompt) == size - 100 for body in read)
        assert (await reader.read(CompletionBody, begun())).prompt  # there is room again

    asyncio.run(run())
