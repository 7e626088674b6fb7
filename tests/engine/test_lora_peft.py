"""LoRA adapters give PEFT's results: beside the weights and added to them, alone and mixed in a batch."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from inflight.core.request.adapter import LoraWeights
from inflight.core.request.sampling_config import SamplingConfig
from tests.engine.driver import Driver, Row, load_engine
from tests.engine.kernels import DEFAULT, TORCH
from tests.engine.lora import Adapter, lora_config, make_adapter, stored, weights_of
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import examples, with_all

CASES = [
    "llama-gqa",
    "qwen2",
    "mistral-window",
    "gpt2",
    "phi3",
    "gemma2",
    "glm4",
    "gemma3n",
    "gemma4",
    "gemma4-shared",
]
NUM_TOKENS = examples(fast=14, all=24)
CONFIGS: dict[str, dict[str, Any]] = {
    "rank-1": {"r": 1, "lora_alpha": 1},
    "rank-8": {"r": 8, "lora_alpha": 8},
    "rank-64": {"r": 64, "lora_alpha": 32},
    "rank-11": {"r": 11, "lora_alpha": 5},
    "rslora": {"r": 16, "lora_alpha": 3, "use_rslora": True},
    "dora": {"r": 8, "lora_alpha": 8, "use_dora": True},
    "patterns": {
        "r": 8,
        "lora_alpha": 4,
        "rank_pattern": {"q_proj": 1, "v_proj": 20, "down_proj": 64, "c_attn": 3, "mlp.c_proj": 33},
        "alpha_pattern": {"k_proj": 2, "gate_proj": 6, "c_fc": 5},
    },
    "some-layers": {"r": 4, "lora_alpha": 4, "layers_to_transform": [0, 2]},
}
MORE = {
    "attention-alone": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "patterns-dora": {**CONFIGS["patterns"], "use_dora": True},
}

every_kernel = pytest.mark.parametrize("kernels", [DEFAULT, TORCH])


@cache
def adapter_of(model: ZooModel, config: str, seed: int = 0) -> Adapter:
    return make_adapter(model, seed, **{**CONFIGS, **MORE}[config])


@cache
def two_adapters(model: ZooModel) -> tuple[peft.PeftModel, list[LoraWeights]]:
    """Return a PEFT model with adapter0 and adapter1, of different ranks, and their rows."""
    torch.manual_seed(5)
    found = peft.get_peft_model(deepcopy(model.oracle), lora_config(model, r=8, lora_alpha=8), "adapter0")
    found.add_adapter("adapter1", lora_config(model, r=20, lora_alpha=10))
    return found.eval(), [weights_of(found, name) for name in ("adapter0", "adapter1")]


NAMES = ["__base__", "adapter0", "adapter1"]


def assert_is(row: Row, oracle: ZooModel) -> None:
    """Compare greedy tokens, and the logits from which they were chosen, with the oracle's."""
    length = row.prompt_length
    assert row.generated == oracle.greedy(tuple(row.tokens[:length]), len(row.generated))
    assert_close(torch.stack(row.logits), oracle.logits(row.tokens)[length - 1 : -1])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare with the tolerance of PEFT's own tests."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every_kernel
@pytest.mark.parametrize("config", with_all(CONFIGS, ["rank-8", "dora", "patterns"]))
@pytest.mark.parametrize("case", with_all(CASES, ["llama-gqa"]))
def test_an_adapter_gives_pefts_tokens_and_logits(
    zoo: Zoo, case: str, config: str, kernels: str | None
) -> None:
    model = zoo[case]
    adapter = adapter_of(model, config)
    driver = Driver(load_engine(model.folder, kernels=kernels))
    row = driver.start(model.prompt(21), adapter=driver.put(stored(adapter.weights, 1)))
    driver.generate(row, NUM_TOKENS)
    assert_is(row, adapter.oracle)
    assert_is(row, adapter.merged())
    assert row.generated != model.greedy(model.prompt(21), NUM_TOKENS), "the adapter makes a difference"


@pytest.mark.parametrize(
    ("case", "config", "kernels"),
    with_all(
        [
            (case, config, kernels)
            for case, config in (
                *(("llama-gqa", config) for config in MORE),
                ("gpt-oss", "attention-alone"),
                ("ernie4.5", "patterns-dora"),
                ("falcon", "rank-8"),
                ("bloom", "dora"),
            )
            for kernels in (None, "torch")
        ],
        [
            ("llama-gqa", "attention-alone", None),
            ("llama-gqa", "patterns-dora", "torch"),
            ("gpt-oss", "attention-alone", "torch"),
            ("ernie4.5", "patterns-dora", None),
        ],
    ),
)
def test_adapters_of_some_modules_and_of_mixed_ranks_give_pefts_tokens(
    zoo: Zoo, case: str, config: str, kernels: str | None
) -> None:
    model = zoo[case]
    adapter = adapter_of(model, config)
    driver = Driver(load_engine(model.folder, kernels=kernels))
    row = driver.start(model.prompt(21), adapter=driver.put(stored(adapter.weights, 1)))
    driver.generate(row, NUM_TOKENS)
    assert_is(row, adapter.merged())


@every_kernel
@pytest.mark.parametrize("case", with_all(CASES, ["gpt2"]))
def test_a_batch_with_base_and_two_adapters_gives_pefts_tokens(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    oracle, weights = two_adapters(model)
    prompts = [model.prompt(17, seed) for seed in range(6)]
    driver = Driver(load_engine(model.folder, kernels=kernels))
    pages = [-1, *(driver.put(stored(each, index)) for index, each in enumerate(weights))]
    rows = [driver.start(prompt, adapter=pages[index % 3]) for index, prompt in enumerate(prompts)]
    driver.step(dict.fromkeys(rows, 17))
    for _ in range(NUM_TOKENS - 1):
        driver.step(generation=rows)

    names = [NAMES[index % 3] for index in range(6)]
    with torch.inference_mode():
        generated = oracle.generate(
            input_ids=torch.tensor(prompts),
            attention_mask=torch.ones(6, 17, dtype=torch.long),
            adapter_names=names,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        logits = oracle(input_ids=generated, adapter_names=names).logits[:, 16:-1]
    assert [row.tokens for row in rows] == generated.tolist()
    for row, expected in zip(rows, logits, strict=True):
        assert_close(torch.stack(row.logits), expected)


@every_kernel
@pytest.mark.parametrize("case", with_all(CASES, ["gpt2"]))
def test_a_batch_with_base_and_two_adapters_gives_pefts_beams(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model, width, num_tokens = zoo[case], 3, 12
    oracle, weights = two_adapters(model)
    prompts = [model.prompt(13, seed) for seed in range(3)]
    driver = Driver(load_engine(model.folder, kernels=kernels, max_num_sequences=9))
    pages = [-1, *(driver.put(stored(each, index)) for index, each in enumerate(weights))]
    searches = [
        driver.search(prompt, SamplingConfig(beam_width=width), adapter=page)
        for prompt, page in zip(prompts, pages, strict=True)
    ]
    driver.step({search.row: 13 for search in searches}, searches=searches)
    for _ in range(num_tokens - 1):
        driver.step(searches=searches)

    with torch.inference_mode():
        generated = oracle.generate(
            input_ids=torch.tensor(prompts),
            attention_mask=torch.ones(3, 13, dtype=torch.long),
            adapter_names=NAMES,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=0.0,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    found = [tokens for search in searches for tokens in search.generated]
    assert found == generated[:, 13:].tolist()


def test_peft_mixes_no_adapters_with_magnitudes(zoo: Zoo) -> None:
    """PEFT is no oracle for such batches, so they are compared with each row alone."""
    model = zoo["llama-gqa"]
    oracle = make_adapter(model, use_dora=True).oracle.oracle  # not shared: the exception leaves hooks behind
    with pytest.raises(ValueError, match="DoRA"):
        oracle(input_ids=torch.tensor([model.prompt(5)]), adapter_names=["default"])


@every_kernel
@pytest.mark.parametrize("case", with_all(CASES, ["gpt2"]))
def test_every_kind_of_adapter_in_one_batch_gives_pefts_tokens(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    """Contexts run in chunks beside generation; each row equals PEFT's result for the row alone."""
    model = zoo[case]
    names = ["rank-1", "dora", None, "rank-64", "patterns", "rslora"]
    driver = Driver(load_engine(model.folder, kernels=kernels, max_num_sequences=12))
    rows, oracles = [], []
    for seed, name in enumerate(names):
        adapter = None if name is None else adapter_of(model, name)
        page = -1 if adapter is None else driver.put(stored(adapter.weights, seed))
        for length in (9 + seed, 20 + seed):
            rows.append(driver.start(model.prompt(length, length), adapter=page))
            oracles.append(model if adapter is None else adapter.oracle)
    running: list[Row] = []
    while any(len(row.generated) < NUM_TOKENS for row in rows):
        chunks = {row: min(7, len(row.tokens) - row.num_computed) for row in rows if not row.logits}
        generation = [row for row in running if len(row.generated) < NUM_TOKENS]
        driver.step(dict(list(chunks.items())[:3]), generation)
        running = [row for row in rows if row.logits]
    for row, oracle in zip(rows, oracles, strict=True):
        assert_is(row, oracle)
