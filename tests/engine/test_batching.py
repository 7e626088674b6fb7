"""A row's tokens do not depend on other rows in its batch, on its context's chunks, or on shared blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.attention.gathering import GatheringAttention
from inflight.engine.engine import ModelEngine
from tests.engine.driver import TOKENS_PER_BLOCK, Driver, Row, alone, load_engine
from tests.engine.kernels import by_default_and
from tests.models.zoo import Zoo
from tests.tiers import with_all

CASES = ["llama-gqa", "mistral-window", "qwen2-window", "gpt2"]
every_case = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(["llama-gqa", "mistral-window"], CASES),
        [("mistral-window", None), ("gpt2", None), ("mistral-window", "torch")],
    ),
)
"""By default with windows on both kernels, and with other positions."""
SAMPLING = SamplingConfig(temperature=1.3, top_k=20, top_p=0.9, random_seed=7)


@pytest.fixture
def engine(zoo: Zoo, case: str, kernels: str | None) -> ModelEngine:
    return load_engine(zoo[case].folder, kernels=kernels)


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 200, (length,), generator=generator).tolist())


def _assert_same(row: Row, other: Row) -> None:
    count = min(len(row.logits), len(other.logits))
    assert row.generated[:count] == other.generated[:count]
    torch.testing.assert_close(
        torch.stack(row.logits[:count]), torch.stack(other.logits[:count]), rtol=0, atol=1e-4
    )


@every_case
def test_rows_that_join_at_different_iterations_have_the_tokens_they_have_alone(engine: ModelEngine) -> None:
    options = [{}, {"sampling": SAMPLING}, {"sampling": SAMPLING, "sequence_index": 1}, {}, {}]
    prompts = [_prompt(length, seed) for seed, length in enumerate((30, 3, 3, 61, 17))]
    driver = Driver(engine)
    first, second, third, fourth, fifth = (
        driver.start(prompt, **option) for prompt, option in zip(prompts, options, strict=True)
    )
    driver.step({first: 30})
    driver.step({second: 3, third: 3, fourth: 20}, [first])
    driver.step({fourth: 21}, [third, first, second])
    driver.step({fifth: 17, fourth: 20}, [second, first, third])
    for _ in range(25):
        driver.step(generation=[fifth, first, fourth, third, second])

    rows = (first, second, third, fourth, fifth)
    for row, prompt, option in zip(rows, prompts, options, strict=True):
        _assert_same(row, alone(engine, prompt, 25, **option))
    assert second.generated != third.generated, "sequences of one request draw different numbers"


@every_case
@pytest.mark.parametrize("chunk", with_all([1, 7, TOKENS_PER_BLOCK, 33], [7, 33]))
def test_chunked_context_gives_the_tokens_of_whole_context(engine: ModelEngine, chunk: int) -> None:
    prompt = _prompt(50, seed=3)
    driver = Driver(engine)
    row = driver.start(prompt, SAMPLING)
    driver.generate(row, 10, chunk)
    _assert_same(row, alone(engine, prompt, 10, sampling=SAMPLING))


@every_case
def test_shared_prefix_blocks_give_the_same_tokens_as_own_blocks(engine: ModelEngine) -> None:
    prefix, tails = _prompt(4 * TOKENS_PER_BLOCK, seed=1), (_prompt(5, seed=2), _prompt(9, seed=3))
    driver = Driver(engine)
    owner = driver.start((*prefix, *tails[0]))
    driver.step({owner: len(owner.tokens)})
    sharer = driver.start((*prefix, *tails[1]), shared_blocks=owner.blocks[:4])
    driver.step({sharer: len(tails[1])}, [owner])
    for _ in range(12):
        driver.step(generation=[owner, sharer])

    _assert_same(owner, alone(engine, (*prefix, *tails[0]), 12))
    _assert_same(sharer, alone(engine, (*prefix, *tails[1]), 12))


@every_case
def test_shared_blocks_may_come_iterations_before_the_first_chunk(engine: ModelEngine) -> None:
    """A started request whose context has to wait gets its shared blocks at once."""
    prefix = _prompt(2 * TOKENS_PER_BLOCK, seed=1)
    driver = Driver(engine)
    owner = driver.start((*prefix, 5))
    driver.step({owner: len(owner.tokens)})
    sharer = driver.start((*prefix, 6, 7), shared_blocks=owner.blocks[:2])
    batch = driver.batch({}, [owner])
    told = type(batch)(
        batch.iteration,
        starts=batch.starts,
        new_blocks=(*batch.new_blocks, (sharer.slot, tuple(sharer.blocks))),
        generation_slots=batch.generation_slots,
    )
    sharer.num_told = 2
    engine.decode(told, engine.forward(told))
    driver.generate(sharer, 5)
    _assert_same(sharer, alone(engine, (*prefix, 6, 7), 5))


@every_case
def test_released_slots_and_blocks_are_reused(engine: ModelEngine) -> None:
    driver = Driver(engine)
    driver.free_blocks = driver.free_blocks[:8]
    driver.free_slots = [0]
    for seed, length in enumerate((40, 3, 58, 9)):
        row = driver.start(_prompt(length, seed))
        driver.generate(row, 5)
        _assert_same(row, alone(engine, _prompt(length, seed), 5))
        driver.release(row)
        driver.free_blocks.reverse()


@every_case
def test_a_paused_sequence_continues_with_the_same_tokens(engine: ModelEngine) -> None:
    prompt = _prompt(12, seed=5)
    driver = Driver(engine)
    row = driver.start(prompt, SAMPLING)
    driver.generate(row, 6)
    driver.release(row)
    resumed = driver.start(row.tokens, SAMPLING, prompt_length=len(prompt))
    driver.generate(resumed, 14)
    assert resumed.generated == alone(engine, prompt, 14, sampling=SAMPLING).generated


@every_case
def test_an_overflow_in_a_block_affects_no_other_sequence(engine: ModelEngine) -> None:
    """A masked key has weight 0, and 0 times NaN is NaN."""
    prompt = _prompt(11, seed=6)
    clean = alone(engine, prompt, 12)
    (cache,) = engine.runner.cache._blocks
    with torch.inference_mode():
        cache[:, :, :-1] = torch.nan  # all but the null block
    _assert_same(alone(engine, prompt, 12), clean)


@every_case
def test_a_failed_batch_does_not_affect_other_sequences(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(engine)
    survivor = driver.start(_prompt(10, seed=8))
    driver.generate(survivor, 3)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    victim = driver.start(_prompt(20, seed=9))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.decoder, "forward_to_logits", fail)
        with pytest.raises(RuntimeError):
            driver.step({victim: 20})
    driver.release(victim)
    newcomer = driver.start(_prompt(20, seed=10))
    driver.step({newcomer: 20}, [survivor])
    for _ in range(4):
        driver.step(generation=[newcomer, survivor])

    _assert_same(survivor, alone(engine, _prompt(10, seed=8), 8))
    _assert_same(newcomer, alone(engine, _prompt(20, seed=10), 5))


@every_case
def test_a_row_without_a_block_is_refused(engine: ModelEngine) -> None:
    driver = Driver(engine)
    row = driver.start(_prompt(TOKENS_PER_BLOCK, seed=0))
    driver.step({row: TOKENS_PER_BLOCK})
    batch = driver.batch({}, [])
    short = type(batch)(batch.iteration, generation_slots=(row.slot,))
    with pytest.raises(ValueError, match=f"slot {row.slot} has 1 blocks of 8 tokens, too few for position 8"):
        engine.forward(short)


def test_a_batch_over_the_limit_is_refused(zoo: Zoo) -> None:
    driver = Driver(load_engine(zoo["llama"].folder, max_num_tokens=16))
    with pytest.raises(ValueError, match="max_num_tokens is 16"):
        driver.step({driver.start(_prompt(17, seed=0)): 17})


def test_rows_are_grouped_by_similar_lengths(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row must not make many short rows of the batch read padding of its length."""
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, max_num_sequences=8, kernels="torch")
    lengths = (200, 190, 6, 4, 3, 3, 2)
    driver = Driver(engine)
    rows = [driver.start(_prompt(length, seed)) for seed, length in enumerate(lengths)]
    driver.step({row: len(row.tokens) for row in rows})
    sizes = []

    prepare = GatheringAttention.prepare

    def spy(*arguments: Any) -> Any:
        metadata = prepare(*arguments)
        sizes.extend([group.end - group.begin for group in each.generation] for each in metadata.values())
        return metadata

    monkeypatch.setattr(GatheringAttention, "prepare", spy)
    for _ in range(4):
        driver.step(generation=rows[::-1])

    assert sizes == [[2, 5]] * 4
    for row in rows:
        assert row.generated == model.greedy(tuple(row.tokens[: row.prompt_length]), 5)


def test_an_engine_may_be_closed_twice(zoo: Zoo) -> None:
    engine = load_engine(zoo["llama"].folder)
    engine.close()
    engine.close()
    assert engine.eos_token_ids == (2,)
