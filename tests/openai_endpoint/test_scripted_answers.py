"""Delivery of scripted answers: reasoning, tool calls, stop strings, and characters split over tokens."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from inflight.openai.streaming import event
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.conftest import TEMPLATE
from tests.openai_endpoint.scripted import BOS_ID, folder_with_bos, scripted
from tests.openai_endpoint.serving import DEMO
from tests.tiers import examples, with_all

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("area", "time")]
CALL = '<tool_call>\n{"name": "area", "arguments": {"r": 2}}\n</tool_call>'
LLAMA = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(url: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the answer to a chat, and the chunks of its stream, whose end is asserted."""
    asked = {"messages": MESSAGES, "max_tokens": 100, **body}
    whole = httpx.post(f"{url}/v1/chat/completions", json=asked)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(f"{url}/v1/chat/completions", json={**asked, **options})
    events = streamed.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return whole.json(), [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Return the message that a stream's chunks join to, and the finish reasons."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons: list[str] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        indices = [call["index"] for call in delta.get("tool_calls", ())]
        assert len(set(indices)) == len(indices), "clients lose all but one entry of an index"
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, reasons


def check(url: str, expected: dict[str, Any], reason: str, **body: Any) -> None:
    """Assert the whole and the streamed answer."""
    expected = {"content": "", "reasoning_content": "", "tool_calls": [], **expected}
    whole, chunks = chat(url, **body)
    (choice,) = whole["choices"]
    said = choice["message"]
    calls = [call["function"] for call in said.get("tool_calls") or []]
    told = {
        "content": said["content"] or "",
        "reasoning_content": said.get("reasoning_content", ""),
        "tool_calls": calls,
    }
    assert (told, choice["finish_reason"]) == (expected, reason)
    assert joined(chunks) == (expected, [reason])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


def template(tmp_path: Path, source: str) -> Path:
    file = tmp_path / "template.jinja"
    file.write_text(source, encoding="utf-8")
    return file


THINKING = "{{ messages[0].content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("source", "parser", "answer", "reasoning", "content"),
    [
        (THINKING + "<think>\n", "auto", "hmm\n</think>\n\nyes", "hmm", "yes"),
        (THINKING, "auto", "<think>hmm</think>yes", "hmm", "yes"),
        (THINKING, "auto", "yes", "", "yes"),
        (THINKING, "deepseek_r1", "hmm</think>yes", "hmm", "yes"),
        (THINKING, "deepseek_r1", "<think>\nhmm</think>yes", "hmm", "yes"),
        (THINKING, "deepseek_r1", "hmm", "hmm", ""),
        (THINKING + "<think>\n", "deepseek_r1", "hmm</think>yes", "hmm", "yes"),
        (THINKING + "<think></think>", "deepseek_r1", "yes", "", "yes"),
    ],
)
def test_reasoning_and_content_are_separated(
    tmp_path: Path, source: str, parser: str, answer: str, reasoning: str, content: str
) -> None:
    with scripted(answer, chat_template=template(tmp_path, source), reasoning_parser=parser) as url:
        check(url, {"reasoning_content": reasoning, "content": content}, "stop")


CALLS = [{"name": "area", "arguments": '{"r": 2}'}, {"name": "time", "arguments": "{}"}]


@pytest.mark.parametrize("behind", with_all(["; ", "\n", "\n\n", ""], ["; ", "\n"]))
def test_llama_calls_may_be_on_separate_lines(tmp_path: Path, behind: str) -> None:
    answer = f'{{"name": "area", "parameters": {{"r": 2}}}}{behind}{{"name": "time", "parameters": {{}}}}'
    with scripted(answer, chat_template=template(tmp_path, LLAMA)) as url:
        check(url, {"tool_calls": CALLS}, "tool_calls", tools=TOOLS)
        check(url, {"tool_calls": CALLS[:1]}, "tool_calls", tools=TOOLS, parallel_tool_calls=False)
        check(url, {"content": answer}, "stop", tools=TOOLS, tool_choice="none")


def test_calls_have_the_finish_reason_tool_calls(tmp_path: Path) -> None:
    file = template(tmp_path, TEMPLATE)
    with scripted(f"Let me see. {CALL}", chat_template=file) as url:
        both = {"content": "Let me see.", "tool_calls": CALLS[:1]}
        check(url, both, "tool_calls", tools=TOOLS)
        check(url, {"content": f"Let me see. {CALL}"}, "stop", tools=TOOLS, tool_choice="none")
        check(url, {"content": f"Let me see. {CALL}"}, "stop")
        whole, _ = chat(url, tools=TOOLS)
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert call["type"] == "function" and call["id"]
        whole, chunks = chat(url, tools=TOOLS, n=3)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        for index in range(3):
            message, reasons = joined(chunks, index)
            assert (message, reasons) == ({"reasoning_content": "", **both}, ["tool_calls"])
        assert whole["usage"] == chunks[-1]["usage"]
    length = len(Tokenizer.from_dir(DEMO).encode(CALL))
    with scripted(CALL, chat_template=file) as url:
        check(url, {"tool_calls": CALLS[:1]}, "tool_calls", tools=TOOLS)
        whole, _ = chat(url, tools=TOOLS, max_tokens=length - 6)
        assert whole["choices"][0]["finish_reason"] == "length"


def test_an_empty_answer_has_empty_content(tmp_path: Path) -> None:
    with scripted("", chat_template=template(tmp_path, TEMPLATE)) as url:
        check(url, {}, "stop")
        check(url, {}, "stop", tools=TOOLS, logprobs=True)
        whole, chunks = chat(url)
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": ""}
        assert whole["usage"]["completion_tokens"] == 0
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_an_answer_of_one_token_is_streamed(tmp_path: Path) -> None:
    with scripted("def area", chat_template=template(tmp_path, TEMPLATE)) as url:
        whole, chunks = chat(url, max_tokens=1)
        assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["completion_tokens"] == 1
        check(url, {"content": whole["choices"][0]["message"]["content"]}, "length", max_tokens=1)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


UNICODE = "naïve 😀👩‍👩‍👧 日本 end"


def test_characters_split_over_tokens_are_joined(tmp_path: Path) -> None:
    ids = Tokenizer.from_dir(DEMO).encode(UNICODE, add_special_tokens=False)
    table = Tokenizer.from_dir(DEMO).token_bytes()
    assert any(b"\xf0" in table[token_id] and table[token_id] != "😀".encode() for token_id in ids)
    with scripted(UNICODE, chat_template=template(tmp_path, TEMPLATE)) as url:
        check(url, {"content": UNICODE}, "stop")
        whole, chunks = chat(url, logprobs=True, top_logprobs=2)
        told = whole["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in told) == UNICODE.encode()
        assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in told)
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
        assert [entry for part in parts if part for entry in part["content"]] == told


@pytest.mark.parametrize(
    "stop", with_all(["😀", "\u200d", "日本", "ve \U0001f600", " e"], ["\u200d", "ve \U0001f600"])
)
def test_stop_strings_match_across_tokens(tmp_path: Path, stop: str) -> None:
    kept = UNICODE[: UNICODE.index(stop)]
    with scripted(UNICODE, chat_template=template(tmp_path, TEMPLATE)) as url:
        check(url, {"content": kept}, "stop", stop=stop)
        check(url, {"content": kept}, "stop", stop=["never", stop])
        whole, _ = chat(url, stop=stop, logprobs=True)
        told = whole["choices"][0]["logprobs"]["content"]
        assert len(told) == whole["usage"]["completion_tokens"]


def test_stop_strings_may_be_special_tokens(tmp_path: Path) -> None:
    """A stop string that is a special token ends the answer even if texts leave out special tokens."""
    tokenizer, marker = Tokenizer.from_dir(DEMO), "<s>"
    ids = [*tokenizer.encode("one "), BOS_ID, *tokenizer.encode("two")]
    with scripted(ids, folder_with_bos(tmp_path), chat_template=template(tmp_path, TEMPLATE)) as url:
        check(url, {"content": "one two"}, "stop")
        check(url, {"content": f"one {marker}two"}, "stop", skip_special_tokens=False)
        for skipped in (True, False):
            check(url, {"content": "one "}, "stop", stop=marker, skip_special_tokens=skipped)
        check(url, {"content": "one"}, "stop", stop=f" {marker}", skip_special_tokens=False)


def test_completions_have_16_tokens_by_default_and_chats_all_that_fit(tmp_path: Path) -> None:
    """By default, 16 tokens for completions, and all that fit for chats."""
    file = template(tmp_path, "{{ messages[0].content }}")

    def lengths(url: str, **body: Any) -> list[int]:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("completions", {"prompt": [7] * 6}),
            ("chat/completions", {"messages": MESSAGES}),
        ]
        answers = [httpx.post(f"{url}/v1/{route}", json={**each, **body}).json() for route, each in asked]
        return [answer["usage"]["completion_tokens"] for answer in answers]

    prompt_length = len(Tokenizer.from_dir(DEMO).encode("hello"))
    with scripted([5] * 300, chat_template=file) as url:
        assert lengths(url) == [16, 256 - prompt_length]
    with scripted([5] * 300, chat_template=file, default_max_tokens=40) as url:
        assert lengths(url) == [40, 40]
        assert lengths(url, max_tokens=50) == [50, 50]
    with scripted([5] * 300, chat_template=file, default_max_tokens=1000) as url:  # no more than fit
        assert lengths(url) == [250, 256 - prompt_length]


@pytest.mark.parametrize("answer", [f"Let me see. {CALL}\n{CALL}", f"{CALL} and on"])
def test_streamed_call_deltas_join_to_the_whole_call(tmp_path: Path, answer: str) -> None:
    with scripted(answer, chat_template=template(tmp_path, TEMPLATE)) as url:
        whole, _ = chat(url, tools=TOOLS)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            client.chat.completions.stream(
                model="demo", messages=cast(Any, MESSAGES), tools=cast(Any, TOOLS), max_tokens=100
            ) as stream,
        ):
            calls = stream.get_final_completion().choices[0].message.tool_calls or []
        wanted = whole["choices"][0]["message"]["tool_calls"]
        assert [call.function.arguments for call in calls] == [
            call["function"]["arguments"] for call in wanted
        ]
        assert [json.loads(call.function.arguments) for call in calls] == [{"r": 2}] * len(wanted)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_cut_by_the_length_shows_no_marks(tmp_path: Path, choice: str) -> None:
    length = len(Tokenizer.from_dir(DEMO).encode(CALL))
    with scripted(CALL, chat_template=template(tmp_path, TEMPLATE)) as url:
        for max_tokens in range(1, length, examples(6, all=1)):
            whole, chunks = chat(url, tools=TOOLS, tool_choice=choice, max_tokens=max_tokens)
            (said,) = whole["choices"]
            assert len(said["message"]["content"] or "") <= 1 and said["finish_reason"] == "length"
            assert len(joined(chunks)[0]["content"]) <= 1


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stop", with_all(["call>", "{", "name", "area"], ["call>", "area"]))
def test_a_call_cut_by_a_stop_string_shows_no_marks(tmp_path: Path, choice: str, stop: str) -> None:
    with scripted(CALL, chat_template=template(tmp_path, TEMPLATE)) as url:
        check(url, {}, "stop", tools=TOOLS, tool_choice=choice, stop=stop)


def test_a_reasoning_mark_cut_by_a_stop_string_is_dropped(tmp_path: Path) -> None:
    with scripted("<think>hmm</think>yes", chat_template=template(tmp_path, THINKING)) as url:
        check(url, {"reasoning_content": "hmm"}, "stop", stop="ink>yes")
        check(url, {}, "stop", stop="ink>hmm")


@pytest.mark.parametrize("answer", ["<think>hmm</think>yes", "<think>"])
def test_an_answer_without_reasoning_is_all_content(tmp_path: Path, answer: str) -> None:
    file = template(tmp_path, THINKING + "<think>\n\n</think>\n\n")
    for parser in ("auto", "think", "deepseek_r1"):
        with scripted(answer, chat_template=file, reasoning_parser=parser) as url:
            check(url, {"content": answer}, "stop")


def test_usage_has_reasoning_tokens(tmp_path: Path) -> None:
    thought = "<think>what is it</think>"
    count = len(Tokenizer.from_dir(DEMO).encode(thought))
    with scripted(f"{thought}yes", chat_template=template(tmp_path, THINKING)) as url:
        for body in ({}, {"n": 2}):
            whole, chunks = chat(url, **body)
            usage = whole["usage"]
            assert chunks[-1]["usage"] == usage
            told = usage["completion_tokens_details"]["reasoning_tokens"]
            # A token may contain the mark's last character and following text.
            assert told in (count * body.get("n", 1), (count - 1) * body.get("n", 1))
            assert told < usage["completion_tokens"]
    for options in ({}, {"reasoning_parser": "none"}):
        with scripted("yes", chat_template=template(tmp_path, THINKING), **options) as url:
            whole, chunks = chat(url)
            assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
            assert chunks[-1]["usage"] == whole["usage"]


def test_chunks_with_the_prompt_are_made_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_on: list[int] = []

    def watched(chunk: Any) -> bytes:
        made_on.append(threading.get_ident())
        return event(chunk)

    with scripted("one two three", chat_template=template(tmp_path, TEMPLATE)) as url:
        for module, route, body in (
            ("chat_completions", "chat/completions", {"messages": MESSAGES}),
            ("completions", "completions", {"prompt": "a b c", "max_tokens": 9}),
        ):
            monkeypatch.setattr(f"inflight.openai.{module}.event", watched)
            made_on.clear()
            # The usage is in a chunk of its own, even of a merged answer.
            asked = {
                **body,
                "stream": True,
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
            }
            streamed = httpx.post(f"{url}/v1/{route}", json=asked).text
            assert streamed.count('"prompt_token_ids"') == 1
            assert streamed.index('"prompt_token_ids"') < streamed.index("\n\n")
            assert made_on[0] != made_on[-1]  # the last chunk is small, and is made on the event loop


def test_a_stop_string_waits_for_min_tokens(tmp_path: Path) -> None:
    with scripted("one two one two one two", chat_template=template(tmp_path, TEMPLATE)) as url:
        check(url, {"content": ""}, "stop", stop="one")
        ids = Tokenizer.from_dir(DEMO).encode("one two")
        check(url, {"content": "one two "}, "stop", stop="one", min_tokens=len(ids))
        check(url, {"content": "one two one two one two"}, "stop", stop="one", min_tokens=90)
        asked = {"prompt": "x", "stop": ["one"], "min_tokens": len(ids), "max_tokens": 50}
        answer = httpx.post(f"{url}/v1/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] > len(ids)


def test_every_answer_has_an_id_and_a_fingerprint(tmp_path: Path) -> None:
    mine = {"x-request-id": "trace 7/2"}
    with scripted("yes", chat_template=template(tmp_path, TEMPLATE)) as url:
        whole, chunks = chat(url)
        completion = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=mine)
        prints = {each["system_fingerprint"] for each in (whole, *chunks, completion.json())}
        assert len(prints) == 1 and re.fullmatch("fp_[0-9a-f]{10}", prints.pop())
        assert completion.headers["x-request-id"] == mine["x-request-id"]
        assert completion.json()["id"] == f"cmpl-{mine['x-request-id']}"
        named = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "request_id": "me"}, headers=mine)
        assert named.json()["id"] == "cmpl-me"
        # The third request fails: this engine cannot list adapters.
        for path in ("/v1/nothing", "/health", "/v1/models"):
            assert httpx.get(url + path, headers=mine).headers["x-request-id"] == mine["x-request-id"]
            assert len(httpx.get(url + path).headers["x-request-id"]) == 32
        for bad in ("x" * 257, b"\xe9"):
            refused = httpx.get(f"{url}/v1/models", headers={"x-request-id": bad})
            assert refused.status_code == 400 and "X-Request-Id" in refused.json()["error"]["message"]
            assert len(refused.headers["x-request-id"]) == 32
    with scripted("yes", api_keys=("key",)) as url:
        assert "x-request-id" in httpx.get(f"{url}/v1/models").headers


def test_a_role_unknown_to_the_template_is_refused(tmp_path: Path) -> None:
    rule = {"role": "wizard", "content": "SECRET RULE"}
    for source in (
        TEMPLATE,
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    ):
        with scripted("yes", chat_template=template(tmp_path, source)) as url:
            for route in ("v1/chat/completions", "tokenize"):
                answer = httpx.post(f"{url}/{route}", json={"messages": [*MESSAGES, rule, *MESSAGES]})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "messages")
                assert "messages[1].role is 'wizard'" in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url"])
def test_parts_other_than_texts_are_refused(tmp_path: Path, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,x"}}
    content = [{"type": "text", "text": "What is this?"}, part]
    with scripted("yes", chat_template=template(tmp_path, TEMPLATE)) as url:
        body = {"messages": [{"role": "user", "content": content}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "invalid_value")
        says = f"messages[0].content[1] is of type '{kind}'; this server takes parts of type text alone"
        assert error["message"] == says


def test_calls_without_a_parser_are_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<function={{ call.function.name }}>{% endfor %}{% endfor %}"
    )
    with scripted("yes", chat_template=template(tmp_path, source)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "tools": TOOLS})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert "<function=" in error["message"] and "--tool-call-parser" in error["message"]
        check(url, {"content": "yes"}, "stop", tools=TOOLS, tool_choice="none")
    assert "<function=" in caplog.text and "--tool-call-parser" in caplog.text
