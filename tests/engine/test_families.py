"""Every family compared with transformers: logits and greedy tokens, in float32."""

from __future__ import annotations

import pytest
import torch

from tests.engine.driver import Driver, alone, load_engine
from tests.engine.kernels import by_default_and
from tests.engine.test_every_family import CASE_OF, OF_KNOWN_COMPONENTS
from tests.models.zoo import Zoo
from tests.models.zoo_configs import CASES
from tests.tiers import examples, with_all

NUM_TOKENS = examples(40, all=64)
"""More than the windows of all families."""
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(CASES, CASES),
        [
            *((case, None) for case in CASE_OF.values() if case not in OF_KNOWN_COMPONENTS),
            ("gemma4-moe", None),
            ("gemma4-shared", None),
            ("llama-gqa", "torch"),
            ("gpt2", "torch"),
        ],
    ),
)
def test_greedy_tokens_and_logits_are_those_of_transformers(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    prompt = model.prompt(27)

    row = alone(load_engine(model.folder, kernels=kernels), prompt, NUM_TOKENS)

    assert row.generated == model.greedy(prompt, NUM_TOKENS)
    assert len(set(row.generated)) > NUM_TOKENS // 8, "the model repeats itself and would hide mistakes"
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    with_all(
        ["llama-rope-yarn", "mistral-window", "qwen2-window", "qwen3", "llama4", "gpt2"],
        ["mistral-window", "gpt2"],
    ),
)
def test_logits_after_every_prompt_token_are_those_of_transformers(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    prompt = model.prompt(40)
    driver = Driver(load_engine(model.folder, kernels=kernels))
    logits = []
    for length in range(1, len(prompt) + 1):
        row = driver.start(prompt[:length])
        driver.step({row: length})
        logits += row.logits
        driver.release(row)

    torch.testing.assert_close(torch.stack(logits), model.logits(prompt), rtol=0, atol=TOLERANCE)


def test_the_last_position_of_the_model_can_be_computed(zoo: Zoo, kernels: str | None) -> None:
    model = zoo["gpt2"]
    engine = load_engine(model.folder, kernels=kernels)
    prompt = model.prompt(engine.limits.max_sequence_length - 1)

    row = alone(engine, prompt, 2)

    torch.testing.assert_close(
        torch.stack(row.logits), model.logits(row.tokens[:-1])[-2:], rtol=0, atol=TOLERANCE
    )
