"""/v1/classify and the scores of classifiers, compared with transformers' classes for sequence classification."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from inflight.openai.errors import CONTEXT_LENGTH_EXCEEDED
from tests.openai_endpoint.serving import PATIENCE_S, demo_engine, served
from tests.openai_endpoint.small_models import LABELS, POSITIONS, make_classifier
from tests.openai_endpoint.test_fuzz import Client, check_answer, mutated

TEXTS = ["a", "the rain in spain", "stays mainly " * 30, "in the plain"]
TOLERANCE = 1e-4
OUTPUT = {"additional_model_outputs": "last_hidden_state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("models") / "classifier", appends_end=True)


@pytest.fixture(scope="module")
def url(folder: Path, template: Path) -> Iterator[str]:
    with (
        demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine,
        served(engine, chat_template=template) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("models") / "scorer", labels=("relevant",))


@pytest.fixture(scope="module")
def scorer_url(scorer: Path) -> Iterator[str]:
    with demo_engine(gpt_model_path=str(scorer), **OUTPUT) as engine, served(engine) as made:
        yield made


def post(url: str, route: str = "/v1/classify", **body: Any) -> Any:
    answer = httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def token_ids(folder: Path, texts: list[str], adds: bool = True) -> list[list[int]]:
    return transformers.AutoTokenizer.from_pretrained(folder)(texts, add_special_tokens=adds)["input_ids"]


def products(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    """Return what transformers' own class returns for each prompt, [prompts, classes]."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids])).logits for ids in prompts])


def probs(answer: Any) -> torch.Tensor:
    return torch.tensor([each["probs"] for each in answer["data"]])


@pytest.mark.parametrize("route", ["/v1/classify", "/classify"])
def test_texts_of_several_lengths(url: str, folder: Path, route: str) -> None:
    answer = post(url, route, model="demo", input=TEXTS)
    ids = token_ids(folder, TEXTS)
    expected = products(folder, ids).softmax(-1)
    assert (expected.max(0).values - expected.min(0).values).max() > 0.1, "the texts differ"
    assert (probs(answer) - expected).abs().max() < TOLERANCE
    assert [each["label"] for each in answer["data"]] == [LABELS[index] for index in expected.argmax(-1)]
    assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    assert {each["num_classes"] for each in answer["data"]} == {3}
    assert (answer["object"], answer["model"]) == ("list", "demo")
    assert answer["id"].startswith("classify-")
    count = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig,
        transformers.Qwen2Config,
        transformers.Qwen3MoeConfig,
        transformers.GPT2Config,
        transformers.MistralConfig,
        transformers.Gemma2Config,
    ],
)
def test_families(tmp_path: Path, config: type[transformers.PretrainedConfig]) -> None:
    folder = make_classifier(tmp_path / "model", config)
    with demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine, served(engine) as url:
        found = probs(post(url, input=TEXTS))
    expected = products(folder, token_ids(folder, TEXTS)).softmax(-1)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "parameters",
    [
        {"engine": "torch"},
        {"enable_chunked_context": "true", "max_num_tokens": "48", "max_batch_size": "4"},
        {"enable_kv_cache_reuse": "true", "tokens_per_block": "16"},
    ],
)
def test_engines_and_chunks(folder: Path, parameters: dict[str, str]) -> None:
    ids = token_ids(folder, TEXTS)
    expected = products(folder, ids).softmax(-1)
    with demo_engine(gpt_model_path=str(folder), **OUTPUT, **parameters) as engine, served(engine) as url:
        for _ in range(2):  # the second time, whole prompts may be in the KV cache
            assert (probs(post(url, input=ids)) - expected).abs().max() < TOLERANCE


def test_many_at_once(url: str, folder: Path) -> None:
    texts = [f"{word} {count}" for count in range(6) for word in ("rain", "sun " * count)]
    expected = products(folder, token_ids(folder, texts)).softmax(-1)
    found: dict[int, Any] = {}

    def ask(index: int) -> None:
        found[index] = post(url, input=texts[index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (
        torch.cat([probs(found[index]) for index in range(len(texts))]) - expected
    ).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_classifier(tmp_path / "model", dtype=dtype, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists(), "the head is in one of several files"
    with demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine, served(engine) as url:
        found = probs(post(url, input=TEXTS))
    expected = products(folder, token_ids(folder, TEXTS)).softmax(-1)  # in float32, as the engine
    assert (found - expected).abs().max() < TOLERANCE


def test_products_without_activation(url: str, folder: Path) -> None:
    found = probs(post(url, input=TEXTS, use_activation=False))
    assert (found - products(folder, token_ids(folder, TEXTS))).abs().max() < 1e-3  # products are up to 10
    assert (found.softmax(-1) - probs(post(url, input=TEXTS))).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("problem_type", "labels", "activation"),
    [
        ("multi_label_classification", LABELS, torch.sigmoid),
        ("single_label_classification", LABELS, lambda products: products.softmax(-1)),
        ("regression", ("value",), lambda products: products),
        (None, ("relevant",), torch.sigmoid),
    ],
)
def test_activations(tmp_path: Path, problem_type: str, labels: tuple[str, ...], activation: Any) -> None:
    folder = make_classifier(tmp_path / "model", labels=labels, problem_type=problem_type)
    with demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine, served(engine) as url:
        found = probs(post(url, input=TEXTS))
    expected = activation(products(folder, token_ids(folder, TEXTS)))
    assert (found - expected).abs().max() < (1e-3 if problem_type == "regression" else TOLERANCE)


def test_classes_without_labels(tmp_path: Path) -> None:
    """transformers names two classes LABEL_0 and LABEL_1, and leaves these names out of config.json."""
    folder = make_classifier(tmp_path / "model", labels=("LABEL_0", "LABEL_1"))
    assert "id2label" not in json.loads((folder / "config.json").read_text())
    with demo_engine(gpt_model_path=str(folder), **OUTPUT) as engine, served(engine) as url:
        (told,) = post(url, input="a")["data"]
    assert told["label"] == f"LABEL_{int(told['probs'][1] > told['probs'][0])}"


def test_a_chat(url: str, folder: Path, template: Path) -> None:
    """A reward model's prompt is a rendered chat, which does not begin an answer unless the body says so."""
    messages = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "it rains"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source = template.read_text(encoding="utf-8")
    for begins in (False, True):
        ids = tokenizer.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=begins, return_dict=False
        )
        answer = post(url, messages=messages, add_generation_prompt=begins)
        assert (probs(answer) - products(folder, [ids]).softmax(-1)).abs().max() < TOLERANCE
        assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("adds", [True, False])
def test_special_tokens_and_truncation(url: str, folder: Path, adds: bool) -> None:
    (whole,) = token_ids(folder, [TEXTS[2]], adds)
    kept = [*whole[:9], whole[-1]] if adds else whole[:10]
    answer = post(url, input=TEXTS[2], truncate_prompt_tokens=10, add_special_tokens=adds)
    assert answer["usage"]["prompt_tokens"] == 10
    assert (probs(answer) - products(folder, [kept]).softmax(-1)).abs().max() < TOLERANCE


PAIRS = [("rain?", "it rains"), ("rain?", "the sun shines on the plain of spain"), ("rain?", "snow")]


@pytest.mark.parametrize("route", ["/v1/score", "/score"])
def test_scores_of_a_model_with_one_class(scorer_url: str, scorer: Path, route: str) -> None:
    answer = post(scorer_url, route, text_1="rain?", text_2=[document for _, document in PAIRS])
    expected = products(scorer, token_ids(scorer, [query + document for query, document in PAIRS])).sigmoid()
    assert expected.max() - expected.min() > 0.1
    found = torch.tensor([[each["score"]] for each in answer["data"]])
    assert (found - expected).abs().max() < TOLERANCE


def test_documents_are_ranked_by_a_model_with_one_class(scorer_url: str) -> None:
    documents = [document for _, document in PAIRS]
    scores = [
        each["score"] for each in post(scorer_url, "/v1/score", text_1="rain?", text_2=documents)["data"]
    ]
    results = post(scorer_url, "/v1/rerank", query="rain?", documents=documents)["results"]
    assert [each["index"] for each in results] == sorted(range(3), key=lambda index: -scores[index])
    assert [each["relevance_score"] for each in results] == sorted(scores, reverse=True)
    (classified,) = post(scorer_url, input="rain?snow")["data"]
    assert (classified["label"], classified["probs"]) == ("relevant", [pytest.approx(scores[2], abs=1e-6)])


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "invalid_value"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": 3}, "input", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"input": [[1, 99999]]}, "input", "invalid_value"),
        ({"input": "b " * POSITIONS}, "input", CONTEXT_LENGTH_EXCEEDED),
        ({"input": "a", "softmax": False}, "softmax", "unsupported_parameter"),
        ({"input": "a", "activation": False}, "activation", "unsupported_parameter"),
        ({"input": "a", "chat_template": "x"}, "chat_template", "unsupported_parameter"),
        ({"input": "a", "use_activation": "no"}, "use_activation", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ],
)
def test_invalid_bodies(url: str, body: dict[str, Any], param: str, code: str) -> None:
    answer = httpx.post(f"{url}/v1/classify", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code), answer.text


def test_other_tasks_are_refused(url: str, scorer_url: str, fake_url: str) -> None:
    def refusal(url: str, route: str, **body: Any) -> str:
        answer = httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")
        return answer.json()["error"]["message"]

    for route, body in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
        assert "send them to /v1/classify" in refusal(url, route, **body)
    assert "has 3 classes" in refusal(url, "/v1/score", text_1="a", text_2="b")
    assert "generates text" in refusal(fake_url, "/v1/classify", input="x")
    body = {"query": "a", "documents": ["b"], "instruction": "find"}
    answer = httpx.post(f"{scorer_url}/v1/rerank", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instruction")


def test_random_bodies(url: str) -> None:
    chance, client = random.Random(3), Client(url)
    body = {"input": ["a", "b"], "use_activation": True, "truncate_prompt_tokens": 3, "priority": 1}
    for _ in range(60):
        raw = json.dumps(mutated(chance, body)).encode()
        check_answer(*client.post("/v1/classify", raw), raw)
