"""The render routes: transformers' token ids, and the request that the engine gets for the same body."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import transformers

from inflight.core.ports import EngineClient
from inflight.core.request.request import Request
from tests.openai_endpoint.scripted import BOS_ID, LIMITS, ScriptedEngine, folder_with_bos
from tests.openai_endpoint.serving import DEMO, PATIENCE_S, served

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a lock?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "finds",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]
PROMPT = "def area(radius):"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine("a lock")


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine, template: Path) -> Iterator[str]:
    with served(cast(EngineClient, engine), chat_template=template) as made:
        yield made


def post(url: str, route: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ids_of_a_chat_are_those_of_transformers(url: str, template: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    rendered = post(url, "/v1/chat/completions/render", {"messages": MESSAGES, "tools": TOOLS})
    expected = tokenizer.apply_chat_template(
        MESSAGES,
        TOOLS,
        chat_template=template.read_text(encoding="utf-8"),
        add_generation_prompt=True,
        return_dict=False,
    )
    assert rendered["token_ids"] == expected


@pytest.mark.parametrize("adds", [True, False])
def test_ids_of_completions_are_those_of_the_tokenizer(tmp_path: Path, adds: bool) -> None:
    folder = folder_with_bos(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [PROMPT, "x"]
    with served(cast(EngineClient, ScriptedEngine("", folder))) as url:
        rendered = post(url, "/v1/completions/render", {"prompt": texts, "add_special_tokens": adds})
    assert [each["token_ids"] for each in rendered] == tokenizer(texts, add_special_tokens=adds)["input_ids"]
    assert (rendered[0]["token_ids"][0] == BOS_ID) == adds
    assert rendered[0]["request_id"] != rendered[1]["request_id"]


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampling": {
        "temperature": 0.3,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "n": 2,
        "logit_bias": {"17": 2.0},
        "bad_words": ["lock"],
        "allowed_token_ids": [1, 2, 3],
        "no_repeat_ngram_size": 3,
    },
    "ends": {"max_tokens": 9, "stop": ["\n"], "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2},
    "a default length": {"max_completion_tokens": None},
    "log probs": {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2},
    "a forced call": {"tools": TOOLS, "tool_choice": "required"},
    "a named call": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}},
    "a schema": {"response_format": {"type": "json_object"}},
    "a grammar": {"structured_outputs": {"grammar": 'root ::= "a"'}},
    "choices": {"guided_choice": ["a", "b"]},
    "an expression": {"guided_regex": "a+"},
    "a structural tag": {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
            "triggers": ["<a>"],
        }
    },
    "a continued message": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "A lock is"}],
        "continue_final_message": True,
    },
    "a cut prompt": {"truncate_prompt_tokens": 5},
    "special tokens": {"skip_special_tokens": False, "prompt_lookup_num_tokens": 3},
    "a client": {"user": "u1", "priority": 4, "cache_salt": "s"},
}


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_a_rendered_chat_is_the_same_request(
    url: str, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, "seed": -3, **fields}
    before = len(engine.requests)
    rendered = post(url, "/v1/chat/completions/render", body)
    assert len(engine.requests) == before, "rendering needs no engine"
    whole = post(url, "/v1/chat/completions", {**body, "return_token_ids": True})
    answer = post(url, "/inference/v1/generate", rendered)
    of_chat, of_ids = engine.requests[before:]
    assert rendered["token_ids"] == list(of_chat.input_token_ids) == whole["prompt_token_ids"]
    assert without_transport(of_ids) == without_transport(of_chat)
    assert [each["token_ids"] for each in answer["choices"]] == [
        each["token_ids"] for each in whole["choices"]
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": [PROMPT, "x"], "n": 2, "max_tokens": 3},
        {"prompt": [4, 5, 6], "logprobs": 2},
        {"prompt": [[4, 5], [6]]},
        {"echo": True, "logprobs": 1, "max_tokens": 2},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
    ids=["plain", "texts", "ids", "lists", "echo", "stream"],
)
def test_rendered_completions_are_the_same_requests(
    url: str, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "seed": 3, **fields}
    before = len(engine.requests)
    rendered = post(url, "/v1/completions/render", body)
    httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()
    for each in rendered:
        httpx.post(f"{url}/inference/v1/generate", json=each, timeout=PATIENCE_S).raise_for_status()
    made = engine.requests[before:]
    expected, found = made[: len(rendered)], made[len(rendered) :]
    assert [without_transport(each) for each in found] == [without_transport(each) for each in expected]
    assert rendered[0]["sampling_params"]["max_tokens"] == body.get("max_tokens", 16)


def without_transport(request: Request) -> Request:
    """Return the request as it is on every route: without its id, and what only the answer's form needs."""
    return replace(request, request_id=0, output=replace(request.output, return_perf_metrics=False))


def test_a_chat_without_a_length_may_fill_the_model(url: str, template: Path) -> None:
    rendered = post(url, "/v1/chat/completions/render", {"messages": MESSAGES})
    room = LIMITS.max_sequence_length - len(rendered["token_ids"])
    assert rendered["sampling_params"] == {"max_tokens": room}
    engine = cast(EngineClient, ScriptedEngine())
    with served(engine, chat_template=template, default_max_tokens=11) as limited:
        rendered = post(limited, "/v1/chat/completions/render", {"messages": MESSAGES})
    assert rendered["sampling_params"] == {"max_tokens": 11}


def test_fields_beside_the_parameters(url: str) -> None:
    body = {"messages": MESSAGES, "model": "demo", "temperature": 0, "max_tokens": 4, "cache_salt": "s"}
    rendered = post(url, "/v1/chat/completions/render", {**body, "stream": True, "priority": 2})
    assert rendered.pop("request_id").startswith("chatcmpl-")
    assert rendered.pop("token_ids")
    assert rendered == {
        "features": None,
        "sampling_params": {"max_tokens": 4, "temperature": 0.0},
        "model": "demo",
        "stream": True,
        "stream_options": None,
        "cache_salt": "s",
        "priority": 2,
        "kv_transfer_params": None,
    }


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        (
            "/v1/chat/completions/render",
            {"messages": MESSAGES, "use_beam_search": True},
            400,
            "use_beam_search",
        ),
        ("/v1/completions/render", {"prompt": "x", "use_beam_search": True}, 400, "use_beam_search"),
        (
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": [PICTURE]}]},
            400,
            "messages",
        ),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "model": "other"}, 404, "model"),
        ("/v1/completions/render", {"prompt": []}, 400, "prompt"),
        ("/v1/completions/render", {"prompt": [1] * 300}, 400, "prompt"),
        ("/v1/completions/render", {"prompt": "x", "messages": MESSAGES}, 400, "messages"),
    ],
)
def test_what_is_refused(url: str, route: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
