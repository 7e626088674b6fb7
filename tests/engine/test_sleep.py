"""Engines of several kinds sleep and wake: their tokens, and what they reuse, are those of a new engine."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.sleep import SleepAction
from tests.block_store.test_served import TIMEOUT_S, served
from tests.models.zoo import Zoo
from tests.tiers import with_all


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("case", with_all(["qwen3.5", "llama-gqa", "gemma3", "mixtral"], ["qwen3.5"]))
def test_a_woken_engine_generates_what_it_generated_before(zoo: Zoo, case: str, kernels: str) -> None:
    model = zoo[case]
    prompt = tuple(model.prompt(70))
    fields: dict[str, Any] = {"engine": {"kernels": kernels, "tokens_per_block": 16, "max_num_sequences": 4}}
    sampled = {"sampling": SamplingConfig(temperature=0.9, random_seed=7, num_return_sequences=2)}
    with served(None, model.folder, enable_sleep_mode=True, **fields) as engine:
        client = engine.engine.client

        def results() -> list[Any]:
            return [engine.tokens(prompt), engine.tokens(prompt), engine.tokens(prompt[:40], **sampled)]

        first = results()
        for _ in range(2):
            assert client.sleep(SleepAction.SLEEP, TIMEOUT_S)
            assert not client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
            assert results() == first
