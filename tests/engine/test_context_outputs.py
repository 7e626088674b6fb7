"""Logits and log probabilities of a prompt's own positions, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.core.request.request import OutputOptions
from inflight.engine.engine import ModelEngine
from tests.engine.driver import Driver, Row, alone, load_engine
from tests.engine.kernels import by_default_and
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

CASES = ["llama-gqa", "mistral-window", "gpt2"]
pytestmark = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(by_default_and(["llama-gqa"], CASES), [("llama-gqa", "torch"), ("mistral-window", None)]),
)
BOTH = OutputOptions(return_context_logits=True, return_prompt_log_probs=True)


def small_slices(engine: ModelEngine) -> ModelEngine:
    engine.runner.context_outputs._slice_rows = 7
    return engine


@pytest.fixture
def model(zoo: Zoo, case: str) -> ZooModel:
    return zoo[case]


@pytest.fixture
def engine(model: ZooModel, kernels: str | None) -> ModelEngine:
    return small_slices(load_engine(model.folder, kernels=kernels))


def logits_of(row: Row) -> torch.Tensor:
    data = b"".join(details.logits for details in row.context)
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy()).view(-1, VOCAB_SIZE)


def log_probs_of(row: Row) -> torch.Tensor:
    return torch.tensor([value for details in row.context for value in details.log_probs])


def assert_context(row: Row, model: ZooModel) -> None:
    prompt = row.tokens[: row.prompt_length]
    logits = model.logits(prompt)
    torch.testing.assert_close(logits_of(row), logits, rtol=0, atol=1e-4)
    expected = logits.log_softmax(dim=-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs_of(row), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 8, 13, 30])
def test_every_chunk_returns_its_rows(model: ZooModel, engine: ModelEngine, chunk: int) -> None:
    driver = Driver(engine)
    row = driver.start(model.prompt(30), output=BOTH)
    driver.generate(row, 3, chunk)
    assert len(row.context) == -(-30 // chunk)
    assert_context(row, model)
    assert row.generated == model.greedy(model.prompt(30), 3)


def test_only_requested_outputs_are_returned(model: ZooModel, engine: ModelEngine) -> None:
    driver = Driver(engine)
    logits = driver.start(model.prompt(12), output=OutputOptions(return_context_logits=True))
    log_probs = driver.start(model.prompt(13), output=OutputOptions(return_prompt_log_probs=True))
    neither = driver.start(model.prompt(14), output=OutputOptions(return_log_probs=True))
    output = driver.step({neither: 14, log_probs: 13, logits: 12})
    assert set(output.context) == {logits.slot, log_probs.slot}
    assert (len(logits_of(logits)), log_probs_of(logits).tolist()) == (12, [])
    assert (log_probs.context[0].logits, len(log_probs_of(log_probs))) == (b"", 12)


def test_rows_after_the_prompt_are_left_out(model: ZooModel, engine: ModelEngine) -> None:
    """Rows of drafts, and of tokens generated before a pause, give no context outputs."""
    prompt = model.prompt(20)
    generated = alone(engine, prompt, 8).generated
    driver = Driver(engine)
    row = driver.start(prompt, output=BOTH)
    driver.step({row: 9})
    driver.step({row: 11}, drafts={row: tuple(generated[:4])})
    assert row.num_accepted == 4
    assert_context(row, model)

    resumed = driver.start([*prompt, *generated], prompt_length=20, output=BOTH)
    driver.step({resumed: 25})
    assert_context(resumed, model)


def test_logits_are_computed_only_for_rows_that_are_sampled_or_asked_for(
    model: ZooModel, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are computed for rows that are sampled or requested, a slice at a time, and for no others."""
    driver = Driver(engine)
    asking = driver.start(model.prompt(20), output=OutputOptions(return_prompt_log_probs=True))
    plain, generating = (driver.start(model.prompt(length)) for length in (21, 22))
    driver.step({generating: 22})
    sizes = []
    make_logits, forward_to_logits = engine.runner.decoder.logits, engine.runner.decoder.forward_to_logits

    def spy(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return make_logits(hidden, rows)

    def spy_on_all(*arguments: Any) -> torch.Tensor:
        noted = len(sizes)
        logits = forward_to_logits(*arguments)
        if len(sizes) == noted:  # compiled code computes them itself
            sizes.append(len(logits))
        return logits

    monkeypatch.setattr(engine.runner.decoder, "logits", spy)
    monkeypatch.setattr(engine.runner.decoder, "forward_to_logits", spy_on_all)
    driver.step({plain: 21}, [generating])
    assert sizes == [2]
    driver.step({asking: 20}, [generating, plain])
    assert sizes == [2, 7, 7, 6, 3]


def test_a_failed_batch_leaves_no_context_outputs(
    model: ZooModel, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(engine)
    victim = driver.start(model.prompt(20), output=BOTH)
    batch = driver.batch({victim: 20})
    pending = engine.forward(batch)
    with monkeypatch.context() as patch:
        patch.setattr(engine.sampler, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.decode(batch, pending)
    driver.release(victim)
    newcomer = driver.start(model.prompt(5, 1))
    assert newcomer.slot == victim.slot
    assert driver.step({newcomer: 5}).context == {}
