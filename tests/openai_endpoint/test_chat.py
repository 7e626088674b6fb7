"""/v1/chat/completions by OpenAI's own client, on the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import transformers

from inflight.core.ports import EngineClient
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.scripted import BOS_ID, ScriptedEngine, folder_with_bos, scripted
from tests.openai_endpoint.serving import DEMO, demo_engine, fake_engine, served

MESSAGES: list[Any] = [
    {"role": "system", "content": "You write code."},
    {"role": "user", "content": [{"type": "text", "text": "area of a circle?"}]},
]
RENDERED = "<|system|>You write code.\n<|user|>area of a circle?\n<|assistant|>"
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0}


def test_an_answer_continues_the_rendered_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    message = answer.choices[0].message
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert message.role == "assistant" and message.tool_calls is None
    plain = client.completions.create(
        model="demo", prompt=RENDERED, max_tokens=20, temperature=0, extra_body={"add_special_tokens": False}
    )
    assert message.content == plain.choices[0].text
    assert answer.usage is not None and plain.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_streamed_answer_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED, n=2, seed=5)
    chunks = list(
        client.chat.completions.create(
            **ASKED, n=2, seed=5, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, roles, reasons = ["", ""], [0, 0], [[], []]  # type: ignore[var-annotated]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [1, 1] and reasons == [["length"], ["length"]]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40


def test_openais_stream_helper_accumulates_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED).choices[0].message.content or ""
    end = whole[12:16]  # the helper raises an error for an answer cut by its length
    with client.chat.completions.stream(**ASKED, stop=[end]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole[: whole.find(end)]


def test_without_max_tokens_an_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    short = {**ASKED, "max_completion_tokens": None}
    answer = client.chat.completions.create(**short, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == client_length(client)


def client_length(client: openai.OpenAI) -> int:
    return client.models.retrieve("demo").model_extra["max_model_len"]  # type: ignore[index]


def test_an_answer_may_continue_the_last_message(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "def area("}]
    answer = client.chat.completions.create(
        **{**ASKED, "messages": messages}, extra_body={"continue_final_message": True}
    )
    prompt = RENDERED + "def area("
    plain = client.completions.create(model="demo", prompt=prompt, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].text


def test_log_probs_of_chat_have_bytes_and_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3}
    told = client.chat.completions.create(**asked).choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 5
    table = Tokenizer.from_dir(DEMO).token_bytes()
    for entry in told.content:
        assert bytes(entry.bytes or ()) in table and len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and entry.logprob <= values[0]
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [entry for chunk in chunks for entry in (chunk.choices[0].logprobs or told).content or ()]
    assert streamed == told.content


def test_async_streams_run_together(fake_url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fake_url}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(**ASKED, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert len(set(asyncio.run(ask()))) == 1


def test_a_chat_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    with fake_engine(tokenizer_dir=str(tmp_path)) as engine, served(engine) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASKED)
        assert answer.status_code == 400 and "--chat-template" in answer.json()["error"]["message"]


def test_reasoning_is_separate_from_content(tmp_path: Path) -> None:
    file = tmp_path / "thinking.jinja"
    source = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}<think>"
    file.write_text(source, encoding="utf-8")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    asked: dict[str, Any] = {**ASKED, "messages": messages}
    with fake_engine() as engine, served(engine, chat_template=file) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        plain = client.completions.create(model="demo", prompt="hello<think>", max_tokens=20, temperature=0)
        message = client.chat.completions.create(**asked).choices[0].message
        thought = plain.choices[0].text.strip()
        assert message.content == ""
        assert message.model_extra == {"reasoning": thought, "reasoning_content": thought}
        chunks = client.chat.completions.create(**asked, stream=True)
        said = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(each.get(name, "") for each in said) == thought
        hidden = client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
        assert not hidden.choices[0].message.model_extra
        client.close()


def test_the_budget_of_the_reasoning_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "thinking.jinja"
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}{{ tools }}<think>"
    file.write_text(source, encoding="utf-8")
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "def area("}]}
    with demo_engine() as engine, served(engine, chat_template=file) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

        def ask(budget: int | None, **more: Any) -> Any:
            extra = {"thinking_token_budget": budget, **more}
            return client.chat.completions.create(**asked, max_tokens=60, temperature=0, extra_body=extra)

        num_free = ask(None).usage.completion_tokens_details.reasoning_tokens
        for budget in (0, 5):
            answer = ask(budget)
            assert answer.choices[0].message.content and num_free > budget + len("</think>")
            num_reasoning = answer.usage.completion_tokens_details.reasoning_tokens
            assert budget < num_reasoning <= budget + len("</think>")
        guided = ask(5, structured_outputs={"choice": ["yes", "no"]}).choices[0].message
        assert guided.content in ("yes", "no") and guided.model_extra["reasoning"]
        forced = ask(5, tools=TOOLS, tool_choice="required").choices[0].message
        assert forced.tool_calls[0].function.name == "area" and forced.model_extra["reasoning"]
        rendered = httpx.post(f"{url}/v1/chat/completions/render", json={**asked, "thinking_token_budget": 5})
        assert '"max_tokens": 5' in rendered.json()["sampling_params"]["structured_outputs"]["structural_tag"]
        client.close()
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    with fake_engine() as engine, served(engine, chat_template=file) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={**asked, "thinking_token_budget": 5})
        assert answer.status_code == 400 and "no reasoning" in answer.json()["error"]["message"]


TOOLS = [{"type": "function", "function": {"name": "area", "parameters": {"type": "object"}}}]


def test_without_a_tool_parser_calls_are_text(template: Path) -> None:
    with fake_engine() as engine, served(engine, chat_template=template, tool_call_parser="none") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={**ASKED, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


def test_without_a_reasoning_parser_reasoning_is_text(tmp_path: Path) -> None:
    file = tmp_path / "thinking.jinja"
    file.write_text("{{ messages[0].content.split('</think>')[-1] }}<think>", encoding="utf-8")
    asked = {**ASKED, "messages": [{"role": "user", "content": "hello"}]}
    with fake_engine() as engine, served(engine, chat_template=file, reasoning_parser="none") as url:
        message = httpx.post(f"{url}/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert message["content"] and not {"reasoning", "reasoning_content"} & message.keys()


def test_tokenize_returns_the_ids_of_the_prompt(fake_url: str) -> None:
    tokenizer = Tokenizer.from_dir(DEMO)
    whole = httpx.post(f"{fake_url}/tokenize", json={"prompt": "def f():", "return_token_strs": True}).json()
    assert whole["tokens"] == tokenizer.encode("def f():") and whole["count"] == len(whole["token_strs"])
    chat = httpx.post(f"{fake_url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == tokenizer.encode(RENDERED, add_special_tokens=False)
    back = httpx.post(f"{fake_url}/detokenize", json={"tokens": chat["tokens"]}).json()
    assert back == {"prompt": RENDERED}


def test_tokenizer_info_has_the_special_tokens_and_the_template(tmp_path: Path) -> None:
    folder = folder_with_bos(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    with fake_engine(tokenizer_dir=str(folder)) as engine:
        with served(engine) as url:
            info = httpx.get(f"{url}/tokenizer_info").json()
            assert info.pop("chat_template") == theirs.chat_template
            assert info == {name: str(text) for name, text in theirs.special_tokens_map.items()}
        file = tmp_path / "other.jinja"
        file.write_text("other")
        with served(engine, chat_template=file) as url:
            assert httpx.get(f"{url}/tokenizer_info").json()["chat_template"] == "other"


def test_tokenizer_info_has_the_end_token_of_a_checkpoint_without_names(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    (folder / "tokenizer_config.json").unlink()
    with served(cast(EngineClient, ScriptedEngine(folder=folder))) as url:
        info = httpx.get(f"{url}/tokenizer_info").json()
    assert info == {"chat_template": None, "eos_token": "<|endoftext|>"}


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_chat_has_only_the_bos_of_its_template(tmp_path: Path, writes_bos: bool) -> None:
    """The tokenizer does not add its own BOS, as it does for other texts."""
    source = "{{ bos_token }}" * writes_bos + "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    folder = folder_with_bos(tmp_path, chat_template=source)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "hello"}]
    rendered: Any = theirs.apply_chat_template(messages)
    wanted = list(rendered["input_ids"])
    assert wanted.count(BOS_ID) == writes_bos and theirs("hello")["input_ids"][0] == BOS_ID
    with scripted("x", folder) as url:

        def computed(**body: Any) -> list[int]:
            asked = {"messages": messages, "return_token_ids": True, **body}
            return httpx.post(f"{url}/v1/chat/completions", json=asked).json()["prompt_token_ids"]

        def tokenized(**body: Any) -> list[int]:
            return httpx.post(f"{url}/tokenize", json=body).json()["tokens"]

        assert computed() == tokenized(messages=messages) == wanted
        both = {"messages": messages, "add_special_tokens": True}
        assert computed(**both) == tokenized(**both) == [BOS_ID, *wanted]
        plain = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "return_token_ids": True}).json()
        assert plain["choices"][0]["prompt_token_ids"] == tokenized(prompt="hello")
        assert tokenized(prompt="hello") == theirs("hello")["input_ids"]


@pytest.mark.parametrize("asked", [{"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}])
def test_top_logprobs_0_needs_no_logprobs(fake_url: str, asked: dict[str, Any]) -> None:
    """As in vLLM, top_logprobs 0 is accepted without logprobs, because clients send their defaults."""
    answer = httpx.post(f"{fake_url}/v1/chat/completions", json={**ASKED, **asked})
    assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None


def test_reasoning_effort_is_passed_to_the_template(tmp_path: Path) -> None:
    file = tmp_path / "effort.jinja"
    file.write_text("{{ reasoning_effort }}{{ messages[0].content }}", encoding="utf-8")
    asked = {**ASKED, "messages": MESSAGES[:1], "reasoning_effort": "high", "return_token_ids": True}
    with fake_engine() as engine, served(engine, chat_template=file) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked).json()
    assert answer["prompt_token_ids"] == Tokenizer.from_dir(DEMO).encode("highYou write code.")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tokens": 0, "max_completion_tokens": None}, "max_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"nobody": 1}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"frequency_penalty": 1e300}, "frequency_penalty"),
        ({"tools": [{"type": "function", "function": {"name": "temperature"}}] * 2}, "tools"),
    ],
)
def test_unsupported_fields_are_refused(fake_url: str, changes: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{fake_url}/v1/chat/completions", json={**ASKED, **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert any(name in error["message"] for name in changes), error


@pytest.mark.parametrize(
    ("policy", "default_max_tokens", "num_running"),
    [("guaranteed_no_evict", None, 2), ("guaranteed_no_evict", 100, 6), ("max_utilization", None, 6)],
)
def test_chats_without_a_length_run_as_many_as_the_cache_allows(
    template: Path, policy: str, default_max_tokens: int | None, num_running: int
) -> None:
    """The KV cache has room for two sequences of the model's length."""
    parameters = {"max_sequence_length": "512", "max_tokens_in_paged_kv_cache": "1024"}
    asked = {"messages": MESSAGES, "stream": True, "ignore_eos": True}
    with (
        fake_engine(
            step_us=20_000, max_batch_size="8", batch_scheduler_policy=policy, **parameters
        ) as engine,
        served(engine, chat_template=template, default_max_tokens=default_max_tokens) as url,
        contextlib.ExitStack() as streams,
    ):

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)

        def places() -> tuple[int, int, int]:
            state = json.loads(engine.state(60))["batcher"]["state"]
            return len(state["running"]), len(state["waiting"]), state["iteration"]

        def wait_until(condition: Callable[[tuple[int, int, int]], bool]) -> tuple[int, int, int]:
            deadline = time.monotonic() + 60
            while not condition(found := places()):
                assert time.monotonic() < deadline, found
                time.sleep(0.01)
            return found

        pool = streams.enter_context(ThreadPoolExecutor(6))
        for _ in range(6):
            pool.submit(ask)
        begun = wait_until(lambda found: found[0] + found[1] == 6)[2]
        assert wait_until(lambda found: found[2] > begun + 2)[:2] == (num_running, 6 - num_running)
        engine.close()  # ends requests that still run
