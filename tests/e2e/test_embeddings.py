"""Checkpoints for embeddings and classes on a real tritonserver: /v1, and text at Triton's endpoints."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import torch
import transformers

from inflight.server.launch import ServerOptions, serve
from inflight.server.ports import Ports
from tests.openai_endpoint.small_models import make_classifier, make_qwen3, write_pooling

from .clients import completion

SETTINGS = {"max_tokens_in_paged_kv_cache": "2048"}
TEXTS = ["a", "the rain in spain", "stays mainly " * 30]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_embeddings_beside_text(elsewhere, tmp_path, ranks):
    folder = write_pooling(make_qwen3(tmp_path / "embedder", tied=False, bare=True, appends_end=True))
    mode = "orchestrator" if ranks > 1 else "in_process"
    options = ServerOptions(ports=Ports(0, 0, 0, 0), tp=ranks, mode=mode)
    with serve(None, folder, "float32", SETTINGS, options=options) as server:
        answer = httpx.post(f"{server.openai}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()
        text = completion(server.grpc, input_ids=[5, 6, 7], request_output_len=4, end_id=-1)
    assert len(text.ids) == 4
    found = np.array([each["embedding"] for each in answer["data"]])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    for embedding, ids in zip(found, tokenizer(TEXTS)["input_ids"], strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert np.abs(embedding - (expected / expected.norm()).numpy()).max() < 1e-4


def test_classes_beside_text(elsewhere, tmp_path):
    folder = make_classifier(tmp_path / "classifier", transformers.LlamaConfig)
    with serve(None, folder, "float32", SETTINGS, options=ServerOptions(ports=Ports(0, 0, 0, 0))) as server:
        answer = httpx.post(f"{server.openai}/v1/classify", json={"input": TEXTS}, timeout=60).json()
        text = completion(server.grpc, input_ids=[5, 6, 7], request_output_len=4, end_id=-1)
    assert len(text.ids) == 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for found, ids in zip(answer["data"], tokenizer(TEXTS)["input_ids"], strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].softmax(-1)
        assert np.abs(np.array(found["probs"]) - expected.numpy()).max() < 1e-4
        assert found["label"] == model.config.id2label[int(expected.argmax())]
