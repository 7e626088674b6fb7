"""/inference/v1/generate, compared with transformers' tokens and with /v1/completions for the same prompt."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
import torch
import transformers

from inflight.core.ports import EngineClient
from tests.openai_endpoint.scripted import scripted
from tests.openai_endpoint.serving import DEMO, DEMO_VOCABULARY, PATIENCE_S
from tests.openai_endpoint.test_fuzz import Client, check_answer, mutated

PROMPT = [97, 514, 40, 1021, 9]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(demo: tuple[EngineClient, str]) -> str:
    return demo[1]


def ask(url: str, route: str = "/inference/v1/generate", **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S)


def generate(url: str, sampling: dict[str, Any] = GREEDY, **body: Any) -> Any:
    answer = ask(url, token_ids=PROMPT, sampling_params=sampling, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(url: str, **fields: Any) -> Any:
    body = {
        "prompt": PROMPT,
        **GREEDY,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **fields,
    }
    answer = ask(url, "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(url: str, sampling: dict[str, Any] = GREEDY, **body: Any) -> list[Any]:
    answer = ask(url, token_ids=PROMPT, sampling_params=sampling, stream=True, **body)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(each) for each in events]


def test_tokens_are_those_of_transformers(url: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
    )
    answer = generate(url, request_id="r1", model="demo")
    assert answer["choices"] == [
        {
            "index": 0,
            "token_ids": ids[0, len(PROMPT) :].tolist(),
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert (answer["request_id"], answer["model"]) == ("generate-tokens-r1", "demo")
    assert answer["output_mode"] == "tokens"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)


def test_several_answers_to_a_seed(url: str) -> None:
    sampling = {**GREEDY, "temperature": 1.3, "seed": 4, "n": 3}
    expected = complete(url, **sampling)
    answer = generate(url, sampling)
    assert [each["token_ids"] for each in answer["choices"]] == [
        each["token_ids"] for each in expected["choices"]
    ]
    assert len({tuple(each["token_ids"]) for each in answer["choices"]}) == 3


def test_a_stream_has_the_same_tokens(url: str) -> None:
    sampling = {**GREEDY, "temperature": 1.0, "seed": 5, "n": 2}
    whole = generate(url, sampling)
    *parts, last = chunks(url, sampling, stream_options={"include_usage": True}, return_token_ids=True)
    assert parts[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in each for each in parts[1:])
    for choice in whole["choices"]:
        of_choice = [each for part in parts for each in part["choices"] if each["index"] == choice["index"]]
        assert [each for part in of_choice for each in part["token_ids"]] == choice["token_ids"]
        assert [each["finish_reason"] for each in of_choice if each["finish_reason"]] == ["length"]
    assert last["choices"] == []
    assert {**last["usage"], "prompt_tokens_details": 0} == {**whole["usage"], "prompt_tokens_details": 0}


def test_log_probs_name_ids(url: str) -> None:
    sampling = {**GREEDY, "logprobs": 3, "prompt_logprobs": 1}
    answer, expected = generate(url, sampling), complete(url, logprobs=3, prompt_logprobs=1)
    told, choice = answer["choices"][0]["logprobs"]["content"], expected["choices"][0]
    assert [each["token_id"] for each in told] == choice["token_ids"]
    assert [each["token"] for each in told] == choice["logprobs"]["tokens"]
    assert [each["logprob"] for each in told] == choice["logprobs"]["token_logprobs"]
    for each, top in zip(told, choice["logprobs"]["top_logprobs"], strict=True):
        assert {one["token"]: one["logprob"] for one in each["top_logprobs"]} == top
        assert each["top_logprobs"][0]["token_id"] == each["token_id"], "the generated token is the first"
    assert answer["prompt_logprobs"] == choice["prompt_logprobs"]


def test_log_probs_without_others(url: str) -> None:
    (choice,) = generate(url, {**GREEDY, "logprobs": 0})["choices"]
    for each, token_id in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        assert [one["token_id"] for one in each["top_logprobs"]] == [token_id]


def test_a_drawn_token_comes_before_the_likeliest() -> None:
    with scripted([7]) as url:  # the scripted engine's likeliest tokens are 7, 0
        answer = ask(url, token_ids=[5], sampling_params={"max_tokens": 1, "logprobs": 2}).json()
    (told,) = answer["choices"][0]["logprobs"]["content"]
    assert [each["token_id"] for each in told["top_logprobs"]] == [7, 0]


def test_texts(url: str) -> None:
    expected = complete(url, logprobs=2, return_tokens_as_token_ids=False)["choices"][0]
    (choice,) = generate(url, {**GREEDY, "logprobs": 2}, output_mode="text")["choices"]
    assert choice["text"] == expected["text"]
    assert [each["token"] for each in choice["logprobs"]["content"]] == expected["logprobs"]["tokens"]
    assert all(each["bytes"] for each in choice["logprobs"]["content"])
    parts = chunks(url, output_mode="text")
    assert "".join(part["choices"][0]["text"] for part in parts) == expected["text"]
    assert all("text" not in part["choices"][0] for part in chunks(url))


def test_a_stop_string_ends_the_answer(url: str) -> None:
    text = complete(url)["choices"][0]["text"]
    stop = text[4:7]
    (choice,) = generate(url, {**GREEDY, "stop": [stop]}, output_mode="text")["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_adapters_are_named_by_model(url: str) -> None:
    plain, changed = generate(url), generate(url, model="shouting")
    assert changed["choices"][0]["token_ids"] == complete(url, model="shouting")["choices"][0]["token_ids"]
    assert changed["choices"][0]["token_ids"] != plain["choices"][0]["token_ids"]
    assert changed["model"] == "shouting"


def test_without_a_length_the_answer_may_fill_the_model() -> None:
    with scripted("a") as url:
        answer = ask(url, token_ids=[5, 6], sampling_params={}).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
    with scripted([7] * 600) as url:
        answer = ask(url, token_ids=[5, 6], sampling_params={}).json()
        assert answer["usage"]["total_tokens"] == 256


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"token_ids": []}, 400, "token_ids", "1 or more"),
        ({"token_ids": None}, 400, "token_ids", "required"),
        ({"token_ids": [-1]}, 400, "token_ids", "-1"),
        ({"token_ids": "text"}, 400, "token_ids", "list"),
        ({"token_ids": [DEMO_VOCABULARY + 9]}, 400, "token_ids", "token_ids"),
        ({"token_ids": [1] * 5000}, 400, "token_ids", "5000"),
        ({"sampling_params": None}, 400, "sampling_params", "required"),
        ({"sampling_params": {"top_p": 2}}, 400, "sampling_params", "sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 0}}, 400, "sampling_params", "sampling_params.max_tokens"),
        (
            {"sampling_params": {"allowed_token_ids": [99999]}},
            400,
            "sampling_params",
            "sampling_params.allowed_token_ids",
        ),
        (
            {"sampling_params": {"tempreature": 1}},
            400,
            "sampling_params",
            "sampling_params.tempreature: it would be",
        ),
        (
            {"sampling_params": {"flat_logprobs": True}},
            400,
            "sampling_params",
            "sampling_params.flat_logprobs: ",
        ),
        ({"features": {"mm_hashes": {}}}, 400, "features", "pictures"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params", "one engine"),
        ({"reasoning_ended": False}, 400, "reasoning_ended", "reasoning"),
        ({"output_mode": "bytes"}, 400, "output_mode", "bytes"),
        (
            {"output_mode": "text", "sampling_params": {"detokenize": False}},
            400,
            "output_mode",
            "detokenize",
        ),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
        ({"model": "other"}, 404, "model", "does not exist"),
        ({"prompt": "x"}, 400, "prompt", "unknown field"),
    ],
)
def test_what_is_refused(url: str, change: dict[str, Any], status: int, param: str, words: str) -> None:
    answer = ask(url, **{"token_ids": PROMPT, "sampling_params": GREEDY, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"]


def test_random_bodies(url: str) -> None:
    chance, client = random.Random(5), Client(url)
    sampling = {**GREEDY, "max_tokens": 2, "logprobs": 1, "stop": ["a"], "logit_bias": {"5": 1.0}}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": False, "output_mode": "text"}
    for _ in range(80):
        raw = json.dumps(mutated(chance, body)).encode()
        check_answer(*client.post("/inference/v1/generate", raw), raw)


def test_what_has_no_effect(url: str) -> None:
    sampling = {**GREEDY, "detokenize": False, "output_kind": 2, "flat_logprobs": False, "seed": None}
    body = {"features": None, "kv_transfer_params": None, "reasoning_ended": True, "content_parts": []}
    assert generate(url, sampling, **body)["choices"] == generate(url)["choices"]
