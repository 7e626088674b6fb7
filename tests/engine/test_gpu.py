"""On a GPU: the answers of the CPU."""

from __future__ import annotations

import pytest
import torch

from inflight.core.sampling_config import SamplingConfig
from tests.engine.driver import Driver, alone, load_engine
from tests.models.zoo import CASES, Zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_in_float32(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    prompt = model.prompt(27)
    engine = load_engine(model.folder, device="cuda", kv_cache_free_gpu_mem_fraction=0.05)
    row = alone(engine, prompt, 64)
    assert row.generated == model.greedy(prompt, 64)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "gpt2"])
def test_a_mixed_batch_with_sampling(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    engines = [
        load_engine(model.folder, device=device, max_tokens_in_paged_kv_cache=4096)
        for device in ("cpu", "cuda")
    ]
    samplings = (
        SamplingConfig(),
        SamplingConfig(temperature=0.8, top_p=0.9, random_seed=1),
        SamplingConfig(top_k=5, random_seed=2),
        SamplingConfig(top_p=1.0, random_seed=3),
    )
    results = []
    for engine in engines:
        driver = Driver(engine)
        rows = [driver.start(model.prompt(20 + i, i), sampling) for i, sampling in enumerate(samplings)]
        driver.step(dict.fromkeys(rows, 11))
        driver.step({row: 9 + i for i, row in enumerate(rows)})
        for _ in range(20):
            driver.step(generation=rows)
        results.append([row.generated for row in rows])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(zoo: Zoo, dtype: str) -> None:
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, device="cuda", dtype=dtype, max_tokens_in_paged_kv_cache=4096)
    row = alone(engine, model.prompt(32), 24)
    exact = model.logits(row.tokens)[31:-1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error < {"bfloat16": 0.15, "float16": 0.02}[dtype]
