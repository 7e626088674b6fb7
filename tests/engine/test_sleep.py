"""Engines of several kinds sleep and wake: their tokens, and what they reuse, are those of a new engine."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from inflight.config import Speculation
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.sleep import SleepAction
from tests.block_store.test_served import NUM_BLOCKS, PROMPT, TIMEOUT_S, Served, served
from tests.models.draft_heads import make_drafting_model
from tests.models.zoo import Zoo, make_model
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


def reused_and_taken(engine: Served) -> tuple[int, int]:
    """The number of blocks found in the cache, and of blocks taken, since the start."""
    cache = engine.engine._manager._scheduler.kv_cache
    return cache.num_reused_blocks, cache.num_taken_blocks


CASES = [
    ("llama-gqa", "torch", "auto"),
    ("qwen3.5", "native", "auto"),
    ("mixtral", "native", "int8"),
    ("gemma3", "torch", "fp8"),
    ("deepseek-v3", "torch", "auto"),
    ("llama-gqa", "transformers", "auto"),
]


@pytest.mark.parametrize(("case", "kernels", "kv_cache_dtype"), with_all(CASES, CASES[:2]))
def test_a_kept_cache_is_used_again(zoo: Zoo, case: str, kernels: str, kv_cache_dtype: str) -> None:
    """An engine that kept its KV cache in sleep computes and reuses what it would have without the sleep."""
    model = zoo[case]
    prompt = tuple(model.prompt(70))
    of_engine = {"tokens_per_block": 16, "max_num_sequences": 4, "kv_cache_dtype": kv_cache_dtype}
    kind = {"implementation": kernels} if kernels == "transformers" else {"kernels": kernels}
    fields: dict[str, Any] = {"engine": of_engine | kind}

    def conversation(sleeps: bool) -> list[Any]:
        found: list[Any] = []
        with served(None, model.folder, enable_sleep_mode=True, **fields) as engine:
            client = engine.engine.client
            for turn in (prompt, prompt, prompt[:40], (*prompt, 5, 6, 7), prompt):
                found.append((engine.tokens(turn), *reused_and_taken(engine)))
                if sleeps:
                    runner: Any = engine.engine._manager._engine.runner
                    decoder, cache = weakref.ref(runner.decoder), weakref.ref(runner.cache)
                    del runner
                    assert client.sleep(SleepAction.SLEEP, TIMEOUT_S, only_weights=True)
                    gc.collect()
                    assert decoder() is None and cache() is not None
                    assert not client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
        return found

    awake = conversation(sleeps=False)
    assert awake[1][1] > awake[0][1], "the second prompt is found in the cache"
    assert conversation(sleeps=True) == awake


@pytest.mark.usefixtures("cheap_heads")
@pytest.mark.parametrize("case", with_all(["deepseek-v3", "qwen3.5"], ["qwen3.5"]))
def test_what_a_draft_head_has_cached_is_kept(tmp_path: Path, case: str) -> None:
    """As many guesses are right behind a kept prompt as without the sleep."""
    model = make_drafting_model(tmp_path / "model", case, agrees=True)
    prompt = tuple(model.prompt(70))
    fields: dict[str, Any] = {
        "engine": {"tokens_per_block": 16, "max_num_sequences": 4, "has_draft_head": True},
        "scheduler": {"speculative_decoding_mode": Speculation(Speculation.MTP, 2)},
    }

    def found(sleeps: bool) -> list[Any]:
        with served(None, model.folder, enable_sleep_mode=True, **fields) as engine:
            first = engine.tokens(prompt)
            if sleeps:
                engine.engine.client.sleep(SleepAction.SLEEP, TIMEOUT_S, only_weights=True)
                engine.engine.client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
            second, metrics = engine.tokens((*prompt, *first[0])), engine.engine._manager._scheduler.metrics()
            return [first, second, reused_and_taken(engine), metrics.num_accepted_draft_tokens]

    awake = found(sleeps=False)
    assert awake[-1] > 0 and awake[-2][0] > 0
    assert found(sleeps=True) == awake


def test_a_kept_cache_that_is_given_back_later_is_empty(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    prompt = tuple(model.prompt(70))
    with served(None, model.folder, enable_sleep_mode=True, engine={"tokens_per_block": 16}) as engine:
        client = engine.engine.client
        before = engine.tokens(prompt)
        cache: Any = weakref.ref(engine.engine._manager._engine.runner.cache)
        client.sleep(SleepAction.SLEEP, TIMEOUT_S, only_weights=True)
        client.sleep(SleepAction.SLEEP, TIMEOUT_S)
        gc.collect()
        assert cache() is None
        client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
        assert engine.tokens(prompt) == before and reused_and_taken(engine)[0] == 0


def test_saved_blocks_outlive_a_sleep(tmp_path: Path) -> None:
    with served(tmp_path, enable_sleep_mode=True) as engine:
        client = engine.engine.client
        before = engine.tokens()
        for number in range(1, 3):
            cache: Any = weakref.ref(engine.engine._manager._engine.runner.cache)
            client.sleep(SleepAction.SLEEP, TIMEOUT_S)
            gc.collect()
            assert cache() is None
            client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
            assert engine.tokens() == before
            assert engine.counts[1:] == (number * NUM_BLOCKS, 0)
        client.sleep(SleepAction.SLEEP, TIMEOUT_S, only_weights=True)
        client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
        assert engine.tokens() == before and engine.counts[1:] == (2 * NUM_BLOCKS, 0)
        other = tuple(reversed(PROMPT))
        of_other = engine.tokens(other)
    with served(tmp_path) as restarted:  # what was computed after waking is saved, too
        assert restarted.tokens() == before and restarted.tokens(other) == of_other
        assert restarted.counts[1:] == (2 * NUM_BLOCKS, 0)


def test_saved_recurrent_states_outlive_a_sleep(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3.5")
    prompt = tuple(number % 40 for number in range(9, 9 + 5 * 8 + 3))
    fields = {"tokens_per_block": 8, "max_sequence_length": 96}
    with served(tmp_path / "kv", model.folder, enable_sleep_mode=True, engine=fields) as engine:
        expected = model.greedy(prompt, 24)
        assert [*engine.tokens(prompt, 24)[0]] == expected
        engine.engine.client.sleep(SleepAction.SLEEP, TIMEOUT_S)
        engine.engine.client.sleep(SleepAction.WAKE_UP, TIMEOUT_S)
        assert [*engine.tokens(prompt, 24)[0]] == expected
        assert engine.counts[1] >= 5 + 1 and engine.counts[2] == 0, "five blocks and a state"
