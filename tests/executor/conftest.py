"""A random checkpoint in float32, executors on it, and transformers' tokens for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import inflight.executor as trtllm
from inflight.testing.make_model import Shape, make_model

VOCABULARY = 512
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With small weights, a random model repeats its last token.
    shape = Shape(2, 32, 4, 2, 64, VOCABULARY, 32768, 10_000.0)
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_model(folder, shape=shape, dtype="float32", standard_deviation=0.4)


@pytest.fixture(scope="session")
def reference(checkpoint: Path):
    """Return a function for transformers' greedy tokens of a prompt, without end ids."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def greedy(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        return out[0, len(prompt) :].tolist()

    return greedy


def make_config(**fields) -> trtllm.ExecutorConfig:
    cache = fields.pop("kv_cache_config", None) or trtllm.KvCacheConfig(max_tokens=65536)
    fields = {"max_beam_width": 4, "max_batch_size": 8, **fields}
    return trtllm.ExecutorConfig(kv_cache_config=cache, **fields)


def make_executor(checkpoint: Path, **fields) -> trtllm.Executor:
    return trtllm.Executor(checkpoint, trtllm.ModelType.DECODER_ONLY, make_config(**fields))


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Iterator[trtllm.Executor]:
    """An executor shared by the tests of a file; each test takes all responses of its requests."""
    with make_executor(
        checkpoint, request_stats_max_iterations=1000, gather_generation_logits=True
    ) as shared:
        yield shared


def responses_of(executor: trtllm.Executor, request_id: int) -> list[trtllm.Response]:
    """Return all responses of a request, up to the final one."""
    found: list[trtllm.Response] = []
    while not found or not (found[-1].has_error() or found[-1].result.is_final):
        found += executor.await_responses(request_id)
    return found


def results_of(executor: trtllm.Executor, request: trtllm.Request) -> list[trtllm.Result]:
    return [response.result for response in responses_of(executor, executor.enqueue_request(request))]
