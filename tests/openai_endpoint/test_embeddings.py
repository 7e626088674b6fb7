"""/v1/embeddings, compared with transformers' last hidden states."""

from __future__ import annotations

import json
import random
import shutil
import threading
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.openai.errors import CONTEXT_LENGTH_EXCEEDED
from tests.openai_endpoint.serving import PATIENCE_S, demo_engine, served
from tests.openai_endpoint.small_models import HIDDEN, POSITIONS, make_qwen3, write_pooling
from tests.openai_endpoint.test_fuzz import Client, check_answer, mutated

TEXTS = ["a", "the rain in spain", "stays mainly " * 30, "in the plain"]
TOLERANCE = 1e-4
OUTPUT = {"additional_model_outputs": "last_hidden_state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as Qwen3-Embedding is published: a whole model's class, but the decoder's tensors alone."""
    made = make_qwen3(tmp_path_factory.mktemp("models") / "embedder", tied=False, bare=True, appends_end=True)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    return write_pooling(made)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine, served(engine) as made:
        yield made


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def token_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    return transformers.AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]


def last_states(folder: Path, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    """Return transformers' last hidden state of the last token of each prompt, [prompts, HIDDEN]."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0, -1].numpy() for ids in prompts]
    return np.stack(states)


def normalized(states: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return states / np.linalg.norm(states, axis=-1, keepdims=True)


def values(answer: Any) -> np.ndarray[Any, Any]:
    return np.array([each.embedding for each in answer.data])


def post(url: str, **body: Any) -> Any:
    return httpx.post(f"{url}/v1/embeddings", json=body, timeout=PATIENCE_S)


def error(url: str, status: int = 400, **body: Any) -> Any:
    answer = post(url, **body)
    assert answer.status_code == status, answer.text[:1000]
    return answer.json()["error"]


def test_texts_of_several_lengths(client: openai.OpenAI, folder: Path) -> None:
    answer = client.embeddings.create(model="demo", input=TEXTS)
    ids = token_ids(folder, TEXTS)
    assert all(each[-1] == ids[0][-1] for each in ids)  # the tokenizer appends the end id
    assert np.abs(values(answer) - normalized(last_states(folder, ids))).max() < TOLERANCE
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    count = sum(map(len, ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "demo", "embedding")


@pytest.mark.parametrize(
    "parameters",
    [
        {"engine": "torch"},
        {"engine": "transformers"},
        {"enable_chunked_context": "true", "max_num_tokens": "48", "max_batch_size": "4"},
        {"enable_kv_cache_reuse": "true", "tokens_per_block": "16"},
    ],
)
def test_engines_and_chunks(folder: Path, parameters: dict[str, str]) -> None:
    ids = token_ids(folder, TEXTS)
    expected = normalized(last_states(folder, ids))
    with demo_engine(gpt_model_path=str(folder), **OUTPUT, **parameters) as engine, served(engine) as url:
        for _ in range(2):  # the second time, whole prompts may be in the KV cache
            found = post(url, input=ids).json()["data"]
            assert np.abs(np.array([each["embedding"] for each in found]) - expected).max() < TOLERANCE


def test_a_whole_decoder_with_tied_embeddings(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "whole")
    ids = token_ids(folder, TEXTS)
    with (
        demo_engine(gpt_model_path=str(folder), **OUTPUT) as made,
        served(made, convert="embed") as url,
    ):
        found = post(url, input=TEXTS).json()["data"]
    expected = normalized(last_states(folder, ids))
    assert np.abs(np.array([each["embedding"] for each in found]) - expected).max() < TOLERANCE


@pytest.mark.parametrize("chosen", [{}, {"engine": "transformers"}])
def test_a_class_without_output_projection(tmp_path: Path, chosen: dict[str, str]) -> None:
    folder = write_pooling(make_qwen3(tmp_path / "bare", bare=True))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with demo_engine(gpt_model_path=str(folder), **OUTPUT, **chosen) as engine, served(engine) as url:
        found = post(url, input="a text").json()["data"][0]["embedding"]
    expected = normalized(last_states(folder, token_ids(folder, ["a text"])))
    assert np.abs(np.array(found) - expected[0]).max() < TOLERANCE


def test_without_the_module_normalize_embeddings_keep_their_length(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    modules = json.loads((copy / "modules.json").read_text())
    (copy / "modules.json").write_text(json.dumps(modules[:2]))
    with demo_engine(gpt_model_path=str(copy), **OUTPUT) as engine, served(engine) as url:
        found = post(url, input=TEXTS).json()["data"]
    expected = last_states(folder, token_ids(folder, TEXTS))
    assert np.abs(np.array([each["embedding"] for each in found]) - expected).max() < TOLERANCE
    assert np.linalg.norm(expected, axis=1).min() > 2.0


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_forms_of_input(url: str, folder: Path, form: str) -> None:
    (ids,) = token_ids(folder, ["the rain"])
    given = {"text": "the rain", "texts": ["the rain"], "ids": ids, "lists of ids": [ids]}[form]
    (found,) = post(url, input=given).json()["data"]
    assert np.abs(found["embedding"] - normalized(last_states(folder, [ids]))[0]).max() < TOLERANCE


def test_base64_has_the_same_values(url: str) -> None:
    floats = post(url, input=TEXTS, encoding_format="float").json()["data"]
    texts = post(url, input=TEXTS, encoding_format="base64").json()["data"]
    for one, other in zip(floats, texts, strict=True):
        decoded = np.frombuffer(b64decode(other["embedding"]), "<f4")
        assert decoded.shape == (HIDDEN,)
        # Batches may be composed differently, so the values may differ by a rounding.
        assert np.abs(decoded - np.array(one["embedding"])).max() < 1e-6


def test_fewer_dimensions_are_the_first_ones_normalized_again(client: openai.OpenAI, folder: Path) -> None:
    answer = client.embeddings.create(model="demo", input=TEXTS, dimensions=8)
    expected = normalized(last_states(folder, token_ids(folder, TEXTS))[:, :8])
    assert np.abs(values(answer) - expected).max() < TOLERANCE


def test_truncation_keeps_the_tokens_that_the_tokenizer_appends(url: str, folder: Path) -> None:
    text = "the rain in spain stays mainly in the plain"
    (whole,) = token_ids(folder, [text])
    cut = transformers.AutoTokenizer.from_pretrained(folder)([text], truncation=True, max_length=6)
    answer = post(url, input=text, truncate_prompt_tokens=6).json()
    assert answer["usage"]["prompt_tokens"] == 6 < len(whole)
    expected = normalized(last_states(folder, cut["input_ids"]))
    assert np.abs(answer["data"][0]["embedding"] - expected[0]).max() < TOLERANCE
    first = post(url, input=whole, truncate_prompt_tokens=6).json()["data"][0]["embedding"]
    assert np.abs(first - normalized(last_states(folder, [whole[:6]]))[0]).max() < TOLERANCE


def test_a_prompt_that_is_too_long(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="demo", input=["short", "rain " * POSITIONS])
    assert raised.value.code == CONTEXT_LENGTH_EXCEEDED
    assert raised.value.param == "input"
    assert f"at most {POSITIONS - 1}" in str(raised.value)
    answer = post(url, input="rain " * POSITIONS, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == POSITIONS - 1


def test_with_generating_requests(folder: Path) -> None:
    """One engine embeds and generates at the same time, and neither changes the other's answers."""
    expected = normalized(last_states(folder, token_ids(folder, TEXTS)))
    lock, answers, all_ended = threading.Lock(), [], threading.Event()

    def on_response(response: Response) -> None:
        with lock:
            answers.append(response)
            if sum(each.is_final for each in answers) == 6:
                all_ended.set()

    with demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine, served(engine) as url:
        for _ in range(6):
            engine.submit(Request(0, (5, 6, 7, 8), 100), on_response)
        for _ in range(5):
            found = post(url, input=TEXTS).json()["data"]
            assert np.abs(np.array([each["embedding"] for each in found]) - expected).max() < TOLERANCE
        assert all_ended.wait(PATIENCE_S)
    tokens = {each.result.output_token_ids[0] for each in answers if each.result is not None}
    assert len(tokens) == 1  # greedy answers to equal prompts
    assert len(tokens.pop()) == 104


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [100_000]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": ["a"] * 5001}, "input"),
    ],
)
def test_invalid_bodies(url: str, body: dict[str, Any], param: str) -> None:
    assert error(url, **body)["param"] == param


def test_every_body_is_answered(url: str) -> None:
    chance, client = random.Random(0), Client(url)
    bodies: list[dict[str, Any]] = [
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "me", "priority": 1},
        {"input": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2, "cache_salt": "x", "model": "demo"},
        {"input": "a \ud800", "truncate_prompt_tokens": -1},
    ]
    for _ in range(300):
        raw = json.dumps(mutated(chance, chance.choice(bodies))).encode()
        check_answer(*client.post("/v1/embeddings", raw), raw)


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": 4}])
def test_half_a_surrogate_pair_is_refused_even_if_it_may_be_cut(url: str, more: dict[str, int]) -> None:
    raw = json.dumps({"input": "a \ud800", **more}).encode()
    status, answer = Client(url).post("/v1/embeddings", raw)
    assert status == 400, answer
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


def test_other_tasks_are_refused(url: str, fake_url: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    bodies = {
        "chat/completions": chat,
        "completions": {"prompt": "x"},
        "rerank": {"query": "x", "documents": ["y"]},
    }
    for route, body in bodies.items():
        answer = httpx.post(f"{url}/v1/{route}", json=body)
        told = answer.json()["error"]
        assert (answer.status_code, told["param"], told["code"]) == (400, "model", "unsupported_model")
        assert "this server computes embeddings: send texts to /v1/embeddings" in told["message"]
    told = error(fake_url, input="x")
    assert told["code"] == "unsupported_model"
    assert "--convert embed" in told["message"]
    assert error(url, 404, input="x", model="other")["code"] == "model_not_found"


def test_an_engine_without_the_output(folder: Path) -> None:
    with demo_engine(gpt_model_path=str(folder)) as engine, served(engine) as url:
        assert "additional_model_outputs" in error(url, input="x")["message"]
