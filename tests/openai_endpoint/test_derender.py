"""The derender routes: the answers of the requests' own routes, from token ids that were generated before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from inflight.core.ports import EngineClient
from tests.openai_endpoint.scripted import END_ID, ScriptedEngine
from tests.openai_endpoint.serving import PATIENCE_S, served
from tests.openai_endpoint.test_render import MESSAGES, TOOLS, post

CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "lock"}}\n</tool_call>'
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TOKENS: dict[str, Any] = {"choices": [{"index": 0, "token_ids": [5, 6], "finish_reason": "stop"}]}


@pytest.fixture(scope="module")
def url(template: Path) -> Iterator[str]:
    engine = cast(EngineClient, ScriptedEngine(f"<think>hmm</think>I look. {CALL}"))
    with served(engine, chat_template=template, reasoning_parser="think") as made:
        yield made


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs between two answers to one request."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "n": 2, "parallel_tool_calls": False},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["look"]},
        {"max_tokens": 3, "return_token_ids": True},
    ],
    ids=["plain", "tools", "several", "logprobs", "stop", "cut"],
)
def test_a_chats_answer_is_that_of_its_own_route(url: str, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "seed": 3, **fields}
    answer = post(url, "/inference/v1/generate", post(url, f"{CHAT}/render", body))
    whole = post(url, f"{CHAT}/derender", {"chat_request": body, "generate_response": answer})
    assert whole["id"].startswith("chatcmpl-")
    assert without_ids(whole) == without_ids(post(url, CHAT, body))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["one", "two"], "n": 2},
        {"logprobs": 2},
        {"echo": True, "max_tokens": 2},
        {"prompt": [4, 5, 6], "return_token_ids": True},
    ],
    ids=["plain", "several", "logprobs", "echo", "ids"],
)
def test_a_completions_answer_is_that_of_its_own_route(url: str, fields: dict[str, Any]) -> None:
    body = {"prompt": "def area(radius):", "seed": 3, **fields}
    answers = [post(url, "/inference/v1/generate", each) for each in post(url, f"{COMPLETION}/render", body)]
    whole = post(url, f"{COMPLETION}/derender", {"completion_request": body, "generate_responses": answers})
    assert without_ids(whole) == without_ids(post(url, COMPLETION, body))


def test_the_end_id_of_another_servers_answer_is_no_text(url: str) -> None:
    body: dict[str, Any] = {"chat_request": {"messages": MESSAGES, "skip_special_tokens": False}}
    texts: list[str] = []
    for ids in ([5, 6], [5, 6, END_ID]):
        given = {"choices": [{**TOKENS["choices"][0], "token_ids": ids}], "metrics": {"of": "another server"}}
        answer = post(url, f"{CHAT}/derender", {**body, "generate_response": given, "prompt_tokens": 7})
        texts.append(answer["choices"][0]["message"]["content"])
        assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 2
    assert texts[0] == texts[1]


ASKED: dict[str, Any] = {"chat_request": {"messages": MESSAGES}}


def answer_of(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": [5], **choice}]}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, {"generate_response": TOKENS}, "chat_request"),
        (CHAT, ASKED, "generate_response"),
        (CHAT, {**ASKED, "generate_response": TOKENS, "stream": True}, "stream"),
        (
            CHAT,
            {"chat_request": {"messages": MESSAGES, "logprobs": True}, "generate_response": TOKENS},
            "logprobs",
        ),
        (CHAT, {**ASKED, "generate_response": answer_of(index=1)}, "choices"),
        (CHAT, {**ASKED, "generate_response": answer_of(token_ids=[5] * 300)}, "token_ids"),
        (CHAT, {**ASKED, "generate_response": answer_of(token_ids=["x"])}, "generate_response"),
        (CHAT, {**ASKED, "generate_response": {**TOKENS, "output_mode": "text"}}, "generate_response"),
        (
            COMPLETION,
            {"completion_request": {"prompt": ["x", "y"]}, "generate_responses": [TOKENS]},
            "generate_responses",
        ),
        (
            COMPLETION,
            {"completion_request": {"prompt": "x"}, "generate_responses": [TOKENS], "prompt_tokens": [1, 2]},
            "prompt_tokens",
        ),
    ],
)
def test_what_is_refused(url: str, route: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}{route}/derender", json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"].partition(".")[0] == param and param in error["message"]
