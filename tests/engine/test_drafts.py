"""Drafts that are verified in one pass change neither the tokens nor the logits from which they are chosen."""

from __future__ import annotations

import pytest
import torch

from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from tests.engine.driver import Driver, Row, alone, load_engine
from tests.engine.kernels import by_default_and
from tests.models.zoo import Zoo
from tests.tiers import with_all

CASES = ["llama-gqa", "mistral-window", "qwen2-window", "gpt2"]
every_case = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(["llama-gqa", "mistral-window"], CASES),
        [("llama-gqa", None), ("mistral-window", "torch")],
    ),
)
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(temperature=1.3, top_k=20, top_p=0.9, random_seed=7),
}
NUM_TOKENS = 40


@pytest.fixture
def engine(zoo: Zoo, case: str, kernels: str | None) -> ModelEngine:
    return load_engine(zoo[case].folder, kernels=kernels)


@pytest.fixture
def prompt(zoo: Zoo) -> tuple[int, ...]:
    return zoo["llama"].prompt(25)


def drafts_of(right: list[int], num_right: int, num_wrong: int) -> tuple[int, ...]:
    """Return drafts of which the first are right and the others wrong."""
    wrong = right[num_right : num_right + num_wrong]
    return (*right[:num_right], *((token + 1) % 200 for token in wrong))


def assert_same(row: Row, expected: Row) -> None:
    assert row.generated == expected.generated[: len(row.generated)]
    count = len(row.logits)
    assert count == len(row.generated)
    torch.testing.assert_close(
        torch.stack(row.logits), torch.stack(expected.logits[:count]), rtol=0, atol=1e-4
    )


@every_case
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("num_right", "num_wrong"), with_all([(0, 3), (2, 4), (5, 0), (1, 1)], [(2, 4)]))
def test_drafts_after_the_context_change_no_token(
    engine: ModelEngine, prompt: tuple[int, ...], sampling: SamplingConfig, num_right: int, num_wrong: int
) -> None:
    expected = alone(engine, prompt, NUM_TOKENS, sampling=sampling)
    driver = Driver(engine)
    row = driver.start(prompt, sampling)
    driver.step({row: 11})
    driver.step({row: 14}, drafts={row: drafts_of(expected.generated, num_right, num_wrong)})
    assert row.num_accepted == num_right
    assert len(row.generated) == num_right + 1

    while len(row.generated) < NUM_TOKENS:
        driver.step(generation=[row])
    assert_same(row, expected)


@every_case
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_in_generation_change_no_token(
    engine: ModelEngine, prompt: tuple[int, ...], sampling: SamplingConfig
) -> None:
    """Right, wrong and partly right drafts across borders of blocks and windows, and iterations without drafts."""
    expected = alone(engine, prompt, NUM_TOKENS, sampling=sampling)
    driver = Driver(engine)
    row = driver.start(prompt, sampling)
    driver.step({row: len(prompt)})
    accepted = 0
    for num_right, num_wrong in ((3, 2), (0, 5), (7, 0), (0, 1), (4, 9), (1, 1)):
        driver.step(generation=[row])
        rest = expected.generated[len(row.generated) :]
        driver.step({row: 1}, drafts={row: drafts_of(rest, num_right, num_wrong)})
        accepted += num_right
        assert row.num_accepted == accepted
    assert_same(row, expected)


@every_case
def test_rows_with_and_without_drafts_share_batches(engine: ModelEngine, zoo: Zoo) -> None:
    prompts = [zoo["llama"].prompt(length, length) for length in (30, 3, 17, 26)]
    samplings = [*SAMPLINGS.values()] * 2
    expected = [
        alone(engine, prompt, NUM_TOKENS, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    driver = Driver(engine)
    rows = [driver.start(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    first, second, third, fourth = rows

    def drafts(row: Row, num_right: int, num_wrong: int) -> dict[Row, tuple[int, ...]]:
        rest = expected[rows.index(row)].generated[len(row.generated) :]
        return {row: drafts_of(rest, num_right, num_wrong)}

    driver.step({first: 30, second: 3}, drafts=drafts(first, 2, 2))
    driver.step({first: 1, third: 17}, [second], drafts(third, 1, 0))
    driver.step({second: 1, fourth: 20, third: 1}, [first], {**drafts(second, 3, 1), **drafts(third, 0, 2)})
    driver.step({fourth: 6, second: 1}, [third, first], {**drafts(fourth, 4, 1), **drafts(second, 2, 0)})
    for _ in range(10):
        driver.step(generation=[fourth, second, third, first])
    for row, alike in zip(rows, expected, strict=True):
        assert_same(row, alike)
    assert [row.num_accepted for row in rows] == [2, 5, 1, 4]


@every_case
def test_a_batch_may_be_made_before_the_previous_result_is_read(engine: ModelEngine, zoo: Zoo) -> None:
    """With two batches in flight, a row without drafts gets its last token on the device."""
    prompts = [zoo["llama"].prompt(length, length) for length in (9, 14)]
    driver = Driver(engine)
    rows = [driver.start(prompt, SAMPLINGS["sampled"]) for prompt in prompts]
    batches = [driver.batch({row: len(row.tokens) for row in rows})]
    for row in rows:
        row.num_computed = len(row.tokens)
    for _ in range(12):
        batches.append(driver.batch({}, rows))
        for row in rows:
            row.num_computed += 1
    outputs = [engine.decode(batch, engine.forward(batch)).token_ids for batch in batches]

    for number, prompt in enumerate(prompts):
        got = [output[number][0] for output in outputs]
        assert got == alone(engine, prompt, 13, sampling=SAMPLINGS["sampled"]).generated


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_drafts_in_half_precision_are_near_those_of_the_model(
    zoo: Zoo, prompt: tuple[int, ...], dtype: str
) -> None:
    """Logits of verified drafts equal those of the row alone, within the dtype's error."""
    engine = load_engine(zoo["llama-gqa"].folder, dtype=dtype)
    expected = alone(engine, prompt, 12)
    driver = Driver(engine)
    row = driver.start(prompt)
    driver.step({row: len(prompt)}, drafts={row: tuple(expected.generated[:6])})
    driver.step({row: 1}, drafts={row: tuple(expected.generated[len(row.generated) :][:4])})
    assert row.num_accepted > 0, "not even one of the tokens of a plain run was accepted"
    exact = zoo["llama-gqa"].logits(row.tokens)[len(prompt) - 1 : -1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error < {"bfloat16": 0.08, "float16": 0.01}[dtype]
