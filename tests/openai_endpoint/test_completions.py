"""/v1/completions by OpenAI's own client, on the fake engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from inflight.endpoint.local import LocalEngineClient
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.scripted import scripted
from tests.openai_endpoint.serving import DEMO, fake_engine, served

PROMPT = "def area(radius):"
ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}


def texts_of(chunks: Any) -> dict[int, str]:
    """Return the texts of a stream's choices, by index."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_models_lists_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_model_has_all_given_names_or_its_folders_name() -> None:
    with fake_engine() as engine:
        with served(engine, served_model_names=("a", "b")) as url:
            assert [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]] == ["a", "b"]
            for asked, told in (("a", "a"), ("b", "b"), (None, "a")):
                body = {"prompt": PROMPT, "max_tokens": 1, "model": asked}
                assert httpx.post(f"{url}/v1/completions", json=body).json()["model"] == told
        renamed = LocalEngineClient(replace(engine.describe(), model_path="/models/tiny-1b"), lambda: None)
        with served(renamed, served_model_names=()) as url:
            assert [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]] == ["tiny-1b"]


def test_a_prompt_is_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(**{**ASKED, "max_tokens": 5})
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "demo"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == len(Tokenizer.from_dir(DEMO).encode(PROMPT))


def test_max_tokens_is_16_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_a_stream_has_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASKED)
    chunks = list(client.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert texts_of(chunks) == {0: whole.choices[0].text}
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_every_chunk_has_the_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    num_chunks = 0
    for _ in range(20):  # a slow sender may merge all chunks into one
        chunks = list(client.completions.create(**ASKED, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == 20
        num_chunks = len(chunks)
        if num_chunks > 1:
            break
    assert num_chunks > 1


def test_a_stream_has_no_usage_by_default(client: openai.OpenAI) -> None:
    assert all(chunk.usage is None for chunk in client.completions.create(**ASKED, stream=True))


def test_prompts_may_be_texts_ids_or_batches(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.from_dir(DEMO)
    prompts = [PROMPT, "import os"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    alone = [client.completions.create(**{**ASKED, "prompt": each}).choices[0].text for each in prompts]
    assert alone[0] != alone[1]
    for batch in (prompts, ids):
        answer = client.completions.create(**{**ASKED, "prompt": batch})
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(**{**ASKED, "prompt": ids[1]}).choices[0].text == alone[1]
    assert texts_of(client.completions.create(**{**ASKED, "prompt": ids}, stream=True)) == dict(
        enumerate(alone)
    )


def test_choices_of_several_prompts_are_numbered_in_order(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": [PROMPT, "x"], "n": 3, "max_tokens": 6, "seed": 7}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = {choice.index: choice.text for choice in whole.choices}
    assert len(set(texts.values())) > 2
    assert texts_of(client.completions.create(**asked, stream=True)) == texts
    assert whole.usage is not None and whole.usage.completion_tokens == 36


def test_a_seed_repeats_the_text_and_no_seed_does_not(client: openai.OpenAI) -> None:
    def text(**changes: Any) -> str:
        return client.completions.create(**{**ASKED, "temperature": 1.5, **changes}).choices[0].text

    assert text(seed=5) == text(seed=5) != text(seed=-6) == text(seed=-6)
    assert text() != text()


def test_a_text_ends_before_its_first_stop_string(client: openai.OpenAI) -> None:
    text = client.completions.create(**{**ASKED, "max_tokens": 40}).choices[0].text
    stops = [text[25:29], text[10:13], "never so", *(f"stop {number}" for number in range(20))]
    expected = text[: min(text.find(stop) for stop in stops if stop in text)]
    asked = {**ASKED, "max_tokens": 40, "stop": stops}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(**asked, stream=True))
    assert texts_of(chunks) == {0: expected}
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    single = client.completions.create(**{**asked, "stop": stops[1]})
    assert single.choices[0].text == text[: text.find(stops[1])]


def test_a_stop_token_ends_a_text_and_is_not_shown(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASKED, extra_body={"return_token_ids": True})
    ids = whole.choices[0].model_extra["token_ids"]  # type: ignore[index]
    stopped = client.completions.create(
        **ASKED, extra_body={"return_token_ids": True, "stop_token_ids": [ids[7]]}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra["token_ids"] == ids[: ids.index(ids[7])]  # type: ignore[index]


def test_a_repeated_long_prompt_is_cached(client: openai.OpenAI) -> None:
    prompt = [5 + number % 50 for number in range(300)]

    def cached(**changes: Any) -> int:
        answer = client.completions.create(**{**ASKED, "prompt": prompt, "max_tokens": 2}, **changes)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    cached()
    assert 256 <= cached() < 300
    assert cached(extra_body={"cache_salt": "another tenant"}) == 0
    asked: dict[str, Any] = {**ASKED, "prompt": prompt, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(**asked, stream=True)
    assert 256 <= last.usage.prompt_tokens_details.cached_tokens < 300


def test_beams_are_returned_best_first_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "n": 3, "extra_body": {"use_beam_search": True}}
    whole = client.completions.create(**asked)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) == 3
    assert texts_of(client.completions.create(**asked, stream=True)) == texts


def test_a_prompt_is_truncated_from_the_left(client: openai.OpenAI) -> None:
    ids = list(range(10, 60))
    extra = {"truncate_prompt_tokens": 8}
    cut = client.completions.create(**{**ASKED, "prompt": ids}, extra_body=extra)
    assert cut.usage is not None and cut.usage.prompt_tokens == 8
    assert cut.choices[0].text == client.completions.create(**{**ASKED, "prompt": ids[-8:]}).choices[0].text


@pytest.mark.parametrize("max_tokens", [1, 20, 255])
def test_a_truncated_prompt_leaves_room_for_the_answer(max_tokens: int) -> None:
    extra = {"truncate_prompt_tokens": -1, "ignore_eos": True, "max_tokens": max_tokens}
    with scripted([5] * 300) as url:
        asked = {"prompt": list(range(10, 410)), **extra}
        usage = httpx.post(f"{url}/v1/completions", json=asked).json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (max_tokens, 256)


def test_echo_with_log_probs_has_a_row_for_every_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(**{**ASKED, "max_tokens": 4}, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT) and choice.logprobs is not None
    told = choice.logprobs
    assert told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    assert "".join(told.tokens[: len(told.tokens) - 4]) == PROMPT
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    for token, value, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs))[1:]:
        assert 2 <= len(top) <= 3 and top[token] == pytest.approx(value, abs=1e-4)
        assert all(other <= max(list(top.values())[:2]) + 1e-6 for other in top.values())
    alone = client.completions.create(**{**ASKED, "max_tokens": 0}, echo=True, logprobs=2)
    assert alone.choices[0].text == PROMPT and alone.usage is not None and alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs == told.token_logprobs[:-4]


def test_streamed_log_probs_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "logprobs": 1, "echo": True}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [value for part in parts if part for value in getattr(part, name)]
        assert told == getattr(whole, name)


def test_the_async_client_runs_many_requests_at_once(fake_url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fake_url}/v1", api_key="none") as client:

            async def one(number: int) -> str:
                asked = {**ASKED, "prompt": [number + 1, 2, 3]}
                if number % 2:
                    return (await client.completions.create(**asked)).choices[0].text
                stream = await client.completions.create(**asked, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(16)))

    together = asyncio.run(ask())
    with openai.OpenAI(base_url=f"{fake_url}/v1", api_key="none") as client:
        for number in (0, 1, 14, 15):
            alone = client.completions.create(**{**ASKED, "prompt": [number + 1, 2, 3]})
            assert alone.choices[0].text == together[number]
