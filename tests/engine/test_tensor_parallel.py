"""Two and four tensor-parallel ranks give what one gives: logits, greedy tokens, every control, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.core.output_config import OutputConfig
from inflight.core.request import ExternalDraft, Request
from inflight.core.sampling_config import SamplingConfig
from inflight.engine.torch import TorchEngineConfig
from inflight.testing.thread_ranks import ThreadRanks
from tests.engine.driver import alone
from tests.engine.serving import WAYS, config_of, load, serve
from tests.models.zoo import Zoo

NUM_TOKENS = 24


@contextmanager
def ranks(folder: Path, size: int, num_blocks: int = 64, **changes: Any) -> Iterator[ThreadRanks]:
    values = {
        "dtype": "float32", "device": "cpu", "max_num_tokens": 512, "tokens_per_block": 8, "max_num_sequences": 4,
        "max_tokens_in_paged_kv_cache": 8 * num_blocks, **changes,
    }  # fmt: skip
    engine = ThreadRanks(TorchEngineConfig(str(folder), **values), size)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "case",
    ["llama", "llama-gqa", "llama-gqa-tied", "llama-mlp-bias", "mistral-window", "qwen2", "qwen3", "gpt2"],
)
def test_tokens_and_logits_are_those_of_transformers(zoo: Zoo, case: str, size: int) -> None:
    model = zoo[case]
    prompt = model.prompt(27)
    with ranks(model.folder, size) as engine:
        row = alone(engine, prompt, NUM_TOKENS)
        calls = {collectives.num_calls for collectives in engine.collectives}
        heads = engine.engines[0]._cache._head_shape[0]

    assert row.generated == model.greedy(prompt, NUM_TOKENS)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=1e-4)
    layers, kv_heads = 3, getattr(model.oracle.config, "num_key_value_heads", None) or 4
    assert calls == {NUM_TOKENS * (2 * layers + 2)}, "two sums a layer, the embedding's, and the logits"
    assert heads == max(1, kv_heads // size), "every rank caches its own key heads alone"


def _requests(prompt: tuple[int, ...], other: tuple[int, ...]) -> list[Request]:
    sampled = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, random_seed=3, repetition_penalty=1.2)
    details = OutputConfig(return_log_probs=True, num_top_log_probs=3)
    return [
        Request(1, prompt, 20, streaming=True),
        Request(2, prompt, 20, sampling=sampled, output=details),
        Request(3, other, 16, sampling=SamplingConfig(beam_width=3, length_penalty=1.0)),
        Request(4, (*prompt, 7), 16, prompt_lookup_num_tokens=3),
        Request(5, other, 12, draft=ExternalDraft((5, 6, 7))),
        Request(6, other[:9], 14, sampling=SamplingConfig(num_return_sequences=2, top_k=5, random_seed=1)),
    ]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_everything_at_once_is_what_one_rank_gives(zoo: Zoo, way: str, size: int) -> None:
    """Samples, penalties, beams, drafts, siblings, log probs; with chunks, reuse and pauses."""
    model = zoo["llama-gqa"]
    requests = _requests(model.prompt(33), model.prompt(21, seed=1))
    num_blocks = 24
    one = serve(load(model.folder, num_blocks), config_of(way), requests)
    with ranks(model.folder, size, num_blocks) as engine:
        many = serve(engine, config_of(way), requests)
    assert many.num_iterations == one.num_iterations and many.num_pauses == one.num_pauses
    assert many.responses.keys() == one.responses.keys()
    for key in one.responses:
        mine, theirs = many.result(*key), one.result(*key)
        assert mine.output_token_ids == theirs.output_token_ids
        assert mine.finish_reasons == theirs.finish_reasons
        for found, expected in zip(mine.log_probs or (), theirs.log_probs or (), strict=True):
            assert found == pytest.approx(expected, abs=1e-4)


def test_a_rank_that_fails_leaves_no_other_waiting(zoo: Zoo) -> None:
    with ranks(zoo["llama"].folder, 2) as engine:
        engine.engines[1]._decoder._mlp = None
        with pytest.raises(Exception, match=r"NoneType|BrokenBarrier|^$"):
            alone(engine, (1, 2, 3), 2)
