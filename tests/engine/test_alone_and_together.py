"""A row's results on compiled code are bitwise the same alone, in any batch, and with any chunks of its context.

An int8 row has its own scale and its sums are integers; sums of bfloat16 or float32 products have an order
that does not depend on the number of rows. Everything else is computed row by row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from inflight.testing.make_model import Shape, make_model
from tests.engine.driver import Driver, Row, alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.serving import WAYS, Served, config_of, load, serve, to_torch
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

DTYPES = ["int8", "bfloat16", "float32"]
NUM_TOKENS = 12
LOGITS = OutputOptions(return_generation_logits=True, return_context_logits=True)
SAMPLED = SamplingConfig(temperature=1.1, top_k=30, repetition_penalty=1.2, random_seed=4)

pytestmark = [needs_native, pytest.mark.parametrize("dtype", DTYPES)]


def load_native(folder: Path, dtype: str, **changes: Any) -> ModelEngine:
    return load_engine(folder, **{"dtype": dtype, "kernels": "native", "max_num_sequences": 20, **changes})


def assert_equal(row: Row, other: Row) -> None:
    count = min(len(row.logits), len(other.logits))
    assert count > 0
    assert row.generated[:count] == other.generated[:count]
    assert torch.equal(torch.stack(row.logits[:count]), torch.stack(other.logits[:count]))


@pytest.mark.parametrize(
    "case",
    with_all(
        [
            *("llama-gqa", "llama-head-dim", "qwen3", "gpt2", "mixtral", "qwen2-moe"),
            *("glm4-moe", "deepseek-v3"),
            *("qwen3.5", "qwen3.5-moe", "granite-hybrid", "lfm2"),
        ],
        ["llama-gqa", "mixtral", "deepseek-v3", "granite-hybrid"],
    ),
)
@pytest.mark.parametrize("size", with_all([2, 3, 16], [3]))
def test_rows_have_the_same_tokens_and_logits_in_a_batch_and_alone(
    zoo: Zoo, case: str, dtype: str, size: int
) -> None:
    """Contexts together, then contexts beside generation, then generation alone."""
    model = zoo[case]
    engine = load_native(model.folder, dtype)
    prompts = [model.prompt(3 + 7 * number % 50, number) for number in range(size)]
    singles = [alone(engine, prompt, NUM_TOKENS) for prompt in prompts]
    driver = Driver(engine)
    rows = [driver.start(prompt) for prompt in prompts]
    first, last = rows[: size - 1], rows[-1]
    driver.step({row: len(row.tokens) for row in first})
    driver.step({last: len(last.tokens)}, first)
    for number in range(NUM_TOKENS - 1):
        driver.step(generation=rows[:: 1 if number % 2 else -1])
    for row, single in zip(rows, singles, strict=True):
        assert_equal(row, single)


@pytest.mark.parametrize(
    "case",
    with_all(
        ["llama-gqa", "mistral-window", "gpt2", "qwen3-moe", "qwen3.5", "granite-hybrid", "lfm2"],
        ["mistral-window", "qwen3-moe", "lfm2"],
    ),
)
@pytest.mark.parametrize("chunk", with_all([1, 7, 8, 33], [7]))
def test_a_context_in_chunks_gives_the_logits_of_a_whole_one(
    zoo: Zoo, case: str, dtype: str, chunk: int
) -> None:
    model = zoo[case]
    engine = load_native(model.folder, dtype)
    prompt = model.prompt(75)
    driver = Driver(engine)
    row = driver.start(prompt)
    driver.generate(row, NUM_TOKENS, chunk)
    assert_equal(row, alone(engine, prompt, NUM_TOKENS))


@pytest.mark.parametrize("tokens_per_block", with_all([16, 24], [24]))
def test_rows_with_wide_windows_have_the_same_logits_alone_and_together(
    tmp_path: Path, dtype: str, tokens_per_block: int
) -> None:
    """At the beginning of a row's window, another row of the same tile attends to earlier keys."""
    folder = make_model(tmp_path, shape=Shape(2, 64, 4, 4, 96, 300, 1024, 10_000.0))
    changes = {
        "tokens_per_block": tokens_per_block,
        "max_attention_window_size": (300,),
        "max_num_tokens": 1024,
    }
    engine = load_native(folder, dtype, max_sequence_length=1024, max_num_sequences=2, **changes)
    prompt = tuple(number * 7 % 290 for number in range(700))
    whole = alone(engine, prompt, 3 * NUM_TOKENS)
    driver = Driver(engine)
    row = driver.start(prompt + tuple(whole.generated[:NUM_TOKENS]))  # restarted as after a pause
    driver.generate(row, 2 * NUM_TOKENS)
    assert row.generated == whole.generated[NUM_TOKENS:]
    assert torch.equal(torch.stack(row.logits), torch.stack(whole.logits[NUM_TOKENS:]))


def test_long_contexts_give_the_same_logits_together_and_alone(zoo: Zoo, dtype: str) -> None:
    """Contexts are longer than the keys scored at a time, in blocks that do not divide that number."""
    model = zoo["llama-gqa"]
    engine = load_native(model.folder, dtype, tokens_per_block=6, max_num_tokens=1024)
    prompts = [model.prompt(length, length) for length in (240, 3, 200, 17)]
    driver = Driver(engine)
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step({row: len(row.tokens) - 2 for row in rows if len(row.tokens) > 3})
    driver.step({row: len(row.tokens) - row.num_computed for row in rows})
    for _ in range(NUM_TOKENS):
        driver.step(generation=rows)
    for row, prompt in zip(rows, prompts, strict=True):
        assert_equal(row, alone(engine, prompt, NUM_TOKENS))


def make_requests(model: ZooModel) -> list[Request]:
    """Return eight requests of all kinds but beam searches, which do not return logits of single steps."""
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": SAMPLED},
        {"draft": ExternalDraft(model.prompt(4, 99))},
        {"prompt_lookup_num_tokens": 3},
        {"sampling": SamplingConfig(repetition_penalty=1.3)},
        {},
        {"sampling": SAMPLED, "streaming": True},
        {"prompt_lookup_num_tokens": 5, "streaming": True},
    ]
    return [
        Request(number, model.prompt(5 + 9 * number, number), 16, output=LOGITS, **kind)
        for number, kind in enumerate(kinds)
    ]


def logits_of(served: Served, request: Request) -> list[torch.Tensor]:
    result = served.result(request)
    return [to_torch(tensor) for tensor in (result.context_logits, *result.generation_logits)]


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3.5"])
@pytest.mark.parametrize("way", with_all(WAYS, ["utilization-chunked-no-reuse"]))
def test_scheduled_requests_get_the_same_logits_together_and_alone(
    zoo: Zoo, case: str, dtype: str, way: str
) -> None:
    """Mixed requests arrive one after the other, with chunks and pauses, and get the same results as alone."""
    model = zoo[case]
    requests = make_requests(model)
    engine = load(model.folder, 36, 8, dtype=dtype, kernels="native")
    together = serve(engine, config_of(way), requests, per_iteration=3)
    if way.startswith("utilization"):
        assert together.num_pauses > 0
    for request in requests:
        by_itself = serve(engine, config_of("no-evict"), [request])
        assert together.tokens(request) == by_itself.tokens(request)
        for found, expected in zip(logits_of(together, request), logits_of(by_itself, request), strict=True):
            assert torch.equal(found, expected)
