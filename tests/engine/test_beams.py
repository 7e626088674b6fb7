"""Beams on the paged cache: they share blocks until they write, and other rows do not change their results."""

from __future__ import annotations

import pytest
import torch

from inflight.core.request.request import OutputOptions
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from tests.engine.driver import TOKENS_PER_BLOCK, Driver, load_engine
from tests.engine.kernels import by_default_and
from tests.engine.search import Search
from tests.models.zoo import Zoo
from tests.tiers import with_all

CASES = ["llama-gqa", "mistral-window", "gpt2"]
every_case = pytest.mark.parametrize(("case", "kernels"), by_default_and(["mistral-window"], CASES))
NUM_TOKENS = 14  # more than a block, and with 21 prompt tokens more than the sliding window
SAMPLED = SamplingConfig(temperature=1.3, top_k=20, top_p=0.9, random_seed=7)


def beams(width: int) -> SamplingConfig:
    return SamplingConfig(beam_width=width)


def load(zoo: Zoo, case: str, **changes: object) -> ModelEngine:
    return load_engine(zoo[case].folder, **{"max_num_sequences": 24, **changes})


def run(driver: Driver, search: Search, num_tokens: int = NUM_TOKENS, chunk: int = 1000) -> Search:
    """Run one search alone to its end."""
    row = search.row
    while row.num_computed < len(row.tokens):
        driver.step({row: min(chunk, len(row.tokens) - row.num_computed)}, searches=[search])
    for _ in range(num_tokens - 1):
        driver.step(searches=[search])
    return search


def assert_same(search: Search, other: Search) -> None:
    assert search.generated == other.generated
    scores, expected = ([beam.score for beam in s.beams] for s in (search, other))
    assert scores == pytest.approx(expected, abs=1e-3)


@every_case
@pytest.mark.parametrize("width", with_all([2, 3, 8], [3]))
def test_beams_are_those_of_transformers(zoo: Zoo, case: str, kernels: str | None, width: int) -> None:
    model = zoo[case]
    prompt = model.prompt(21)
    driver = Driver(load(zoo, case, kernels=kernels))
    search = run(driver, driver.search(prompt, beams(width)), chunk=9)

    expected = model.beams(
        prompt, NUM_TOKENS, num_beams=width, num_return_sequences=width, length_penalty=0.0
    )
    assert search.generated == [tokens for tokens, _ in expected]
    assert [beam.score for beam in search.beams] == pytest.approx([score for _, score in expected], abs=1e-3)
    assert search.num_copies > 0, "beams never parted inside a block"


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_shared_until_beams_diverge(zoo: Zoo, case: str) -> None:
    driver = Driver(load(zoo, case))
    search = run(driver, driver.search(zoo[case].prompt(2 * TOKENS_PER_BLOCK + 3), beams(4)), num_tokens=4)
    tables = [beam.blocks for beam in search.beams]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) > 1


@every_case
def test_searches_of_any_width_and_sampling_rows_share_batches(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model, engine = zoo[case], load(zoo, case, kernels=kernels)
    widths, prompts = (2, 5, 3), [model.prompt(length, length) for length in (13, 24, 7)]
    alone = []
    for width, prompt in zip(widths, prompts, strict=True):
        driver = Driver(engine)
        alone.append(run(driver, driver.search(prompt, beams(width))))
    driver = Driver(engine)
    sampled = driver.start(model.prompt(10, 9), SAMPLED)
    driver.generate(sampled, 12 + NUM_TOKENS)
    expected = sampled.generated

    driver = Driver(engine)
    sampled = driver.start(model.prompt(10, 9), SAMPLED)
    first, second, third = (
        driver.search(prompt, beams(width)) for width, prompt in zip(widths, prompts, strict=True)
    )
    driver.step({sampled: 10, first.row: 13}, searches=[first])
    for _ in range(5):
        driver.step(generation=[sampled], searches=[first])
    driver.step({second.row: 20, third.row: 7}, [sampled], searches=[third, second, first])
    driver.step({second.row: 4}, [sampled], searches=[first, third, second])
    for _ in range(NUM_TOKENS - 2):
        unfinished = [s for s in (third, second, first) if len(s.generated[0]) < NUM_TOKENS]
        driver.step(generation=[sampled], searches=unfinished)
    run(driver, second, 2)

    for search, other in zip((first, second, third), alone, strict=True):
        assert_same(search, other)
    assert sampled.generated == expected[: len(sampled.generated)]


@every_case
def test_a_copied_block_may_be_overwritten_in_the_same_batch(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    """Another copy, a clearing or new keys may overwrite the copied block: all reads precede all writes."""
    engine, model = load(zoo, case, kernels=kernels), zoo[case]
    prompts = [model.prompt(length, length) for length in (11, 20)]
    alone = []
    for prompt in prompts:
        driver = Driver(engine)
        alone.append(run(driver, driver.search(prompt, beams(4))))
    driver = Driver(engine)
    searches = [driver.search(prompt, beams(4)) for prompt in prompts]
    for search in searches:
        search.copies_all = True
    driver.step({searches[0].row: 11, searches[1].row: 20}, searches=searches)
    for seed in range(NUM_TOKENS - 1):
        passing = driver.start(model.prompt(9, seed))
        driver.step({passing: 9}, searches=searches)
        driver.release(passing)
    for search, expected in zip(searches, alone, strict=True):
        assert_same(search, expected)


def test_a_search_may_wait_while_others_run(zoo: Zoo) -> None:
    """Its beams get their slots several iterations after its context was computed."""
    engine, model = load(zoo, "llama-gqa"), zoo["llama-gqa"]
    driver = Driver(engine)
    expected = run(driver, driver.search(model.prompt(20), beams(3)))
    driver = Driver(engine)
    search, other = driver.search(model.prompt(20), beams(3)), driver.start(model.prompt(9, 1))
    driver.step({search.row: 20}, searches=[search])
    driver.step({other: 9})
    driver.step(generation=[other])
    run(driver, search)
    assert_same(search, expected)


def test_log_probs_of_candidates_equal_those_of_the_model(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    driver = Driver(load(zoo, "llama-gqa"))
    output = OutputOptions(return_log_probs=True)
    search = run(driver, driver.search(model.prompt(20), beams(4), output=output))
    for beam in search.beams:
        log_probs = model.logits(beam.tokens).log_softmax(dim=-1)[19:-1]
        expected = log_probs.gather(1, torch.tensor(beam.tokens[20:])[:, None]).sum().item()
        assert beam.log_prob == pytest.approx(expected, abs=1e-3)
        assert beam.score == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_beam_scores_in_half_precision_are_near_those_of_the_model(zoo: Zoo, dtype: str) -> None:
    """Tokens may differ in near-ties; the found tokens' scores are correct within the dtype's error."""
    model = zoo["llama-gqa"]
    driver = Driver(load(zoo, "llama-gqa", dtype=dtype))
    search = run(driver, driver.search(model.prompt(20), beams(4)))
    assert len({tuple(tokens) for tokens in search.generated}) == 4
    for beam in search.beams:
        log_probs = model.logits(beam.tokens).log_softmax(dim=-1)[19:-1]
        expected = log_probs.gather(1, torch.tensor(beam.tokens[20:])[:, None]).sum().item()
        assert beam.score == pytest.approx(expected, abs={"bfloat16": 1.5, "float16": 0.2}[dtype])


def test_a_failed_batch_does_not_affect_other_searches(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = load(zoo, "llama-gqa"), zoo["llama-gqa"]
    driver = Driver(engine)
    expected = run(driver, driver.search(model.prompt(20), beams(3)))
    driver = Driver(engine)
    survivor, victim = (driver.search(model.prompt(20, seed), beams(3)) for seed in (0, 5))
    driver.step({survivor.row: 20, victim.row: 20}, searches=[survivor, victim])
    driver.step(searches=[survivor, victim])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.decoder, "forward_to_logits", fail)
        with pytest.raises(RuntimeError):
            driver.step(searches=[victim])
    run(driver, survivor, NUM_TOKENS - 1)
    assert_same(survivor, expected)
