"""/v1/rerank and /v1/score, compared with transformers' logits by the recipe of Qwen3-Reranker's authors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from inflight.openai.errors import CONTEXT_LENGTH_EXCEEDED
from tests.openai_endpoint.serving import PATIENCE_S, demo_engine, served
from tests.openai_endpoint.small_models import POSITIONS, make_qwen3

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
QUERY = "rain?"
DOCUMENTS = ["it rains", "the sun shines on the plain of spain", "a", "it rains no more", "snow"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("models") / "reranker")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    parameters = {"gpt_model_path": str(folder), "enable_kv_cache_reuse": "true"}
    with demo_engine(**parameters) as engine, served(engine, convert="classify") as made:
        yield made


def expected_scores(folder: Path, pairs: list[tuple[str, str]], task: str = TASK) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, AFTER))
    words = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    scores: list[float] = []
    for query, document in pairs:
        text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        ids = before + tokenizer(text)["input_ids"] + after
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, words]
        scores.append(logits.softmax(0)[1].item())
    return scores


def post(url: str, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_best_first(url: str, folder: Path, route: str) -> None:
    answer = post(url, route, model="demo", query=QUERY, documents=DOCUMENTS).json()
    expected = expected_scores(folder, [(QUERY, each) for each in DOCUMENTS])
    assert max(expected) - min(expected) > 0.1
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert answer["model"] == "demo"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_options_of_rerank(url: str, folder: Path) -> None:
    documents = [{"text": each} for each in DOCUMENTS]
    task = "find weather"
    body = {
        "query": QUERY,
        "documents": documents,
        "top_n": 2,
        "return_documents": False,
        "instruction": task,
    }
    results = post(url, "/v1/rerank", **body).json()["results"]
    expected = expected_scores(folder, [(QUERY, each) for each in DOCUMENTS], task)
    assert [each["relevance_score"] for each in results] == pytest.approx(
        sorted(expected, reverse=True)[:2], abs=1e-4
    )
    assert all(set(each) == {"index", "relevance_score"} for each in results)
    assert len(post(url, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=0).json()["results"]) == 5


@pytest.mark.parametrize("first", [QUERY, [QUERY], [QUERY, "sun?"]])
def test_scores_of_pairs(url: str, folder: Path, first: str | list[str]) -> None:
    answer = post(url, "/v1/score", text_1=first, text_2=DOCUMENTS[:2]).json()
    queries = first if isinstance(first, list) and len(first) == 2 else [QUERY, QUERY]
    expected = expected_scores(folder, list(zip(queries, DOCUMENTS[:2], strict=True)))
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-4)
    assert [each["index"] for each in answer["data"]] == [0, 1]


def test_truncation_cuts_the_document(url: str, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    document = "a b c d e f g h i j k"
    text = f"{BEFORE}<Instruct>: {TASK}\n<Query>: {QUERY}\n<Document>: {document}{AFTER}"
    count = len(tokenizer.encode(text, add_special_tokens=False)) - len(tokenizer.encode(" h i j k"))
    answer = post(url, "/score", text_1=QUERY, text_2=document, truncate_prompt_tokens=count).json()
    assert answer["usage"]["prompt_tokens"] == count
    (expected,) = expected_scores(folder, [(QUERY, "a b c d e f g")])
    assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("route", "body", "param", "code"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "missing"),
        ("/v1/rerank", {"query": "a"}, "documents", "missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "invalid_value"),
        ("/v1/rerank", {"query": "a", "documents": [1]}, "documents", "invalid_value"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 5001}, "documents", None),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["a", "b " * POSITIONS]},
            "documents",
            CONTEXT_LENGTH_EXCEEDED,
        ),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "invalid_value"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "invalid_value"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9},
            "truncate_prompt_tokens",
            "invalid_value",
        ),
    ],
)
def test_invalid_bodies(url: str, route: str, body: dict[str, Any], param: str, code: str | None) -> None:
    answer = post(url, route, **body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def test_other_tasks_are_refused(url: str, fake_url: str) -> None:
    for route, body in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
        told = post(url, route, **body).json()["error"]
        assert told["code"] == "unsupported_model"
        assert "/v1/rerank or /v1/score" in told["message"]
    for route, body in (
        ("/v2/rerank", {"query": "x", "documents": ["y"]}),
        ("/score", {"text_1": "x", "text_2": "y"}),
    ):
        assert "--convert embed or classify" in post(fake_url, route, **body).json()["error"]["message"]


def test_a_model_without_the_tokens(fake_url: str) -> None:
    """The demo model's tokenizer spells "yes" with several tokens."""
    with demo_engine() as engine, served(engine, convert="classify") as url:
        answer = post(url, "/v1/score", text_1="a", text_2="b")
    assert answer.status_code == 400
    assert "has no token 'yes'" in answer.json()["error"]["message"]
