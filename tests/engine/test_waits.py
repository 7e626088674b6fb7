"""An iteration waits for the device once: when its tokens come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.attention.gathering import GATHERING
from inflight.sampling.transfer import to_host, upload
from tests.engine.driver import Driver, load_engine
from tests.engine.fake_device import DEVICE, FakeDevice
from tests.engine.paging import load_paged
from tests.models.zoo import Zoo
from tests.tiers import with_all

ONE_COPY = ["copy to the host"]
NUM_ITERATIONS = 6
"""Enough for some rows to need another block."""
SAMPLINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.7, "top_p": 1.0, "random_seed": 3},
    "top_k": {"top_k": 5, "random_seed": 4},
    "top_p": {"temperature": 0.2, "top_p": 0.8, "random_seed": 5},
    "all": {"temperature": 0.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "random_seed": 6},
}

BATCHES = [*([name] * 3 for name in SAMPLINGS), [*SAMPLINGS]]


def mixed(names: list[str]) -> list[SamplingConfig]:
    return [SamplingConfig(**SAMPLINGS[name]) for name in names]


@pytest.mark.parametrize("attention", ["in place", "gathered"])
@pytest.mark.parametrize(
    "names", with_all([pytest.param(names, id="+".join(names)) for names in BATCHES], BATCHES[-1:])
)
def test_a_generation_batch_waits_for_the_device_once(zoo: Zoo, attention: str, names: list[str]) -> None:
    """Sequences need new blocks in the batch; tokens equal the CPU's."""
    model = zoo["llama-gqa"]
    prompts = [model.prompt(5 + 4 * number, number) for number in range(len(names))]
    with FakeDevice() as device:
        gathering = GATHERING if attention == "gathered" else None
        engine = load_paged(model.folder, attention=gathering, device="meta")
        driver = Driver(engine)
        rows = [driver.start(*each) for each in zip(prompts, mixed(names), strict=True)]
        driver.step({row: len(row.tokens) for row in rows})
        for _ in range(NUM_ITERATIONS):
            batch = driver.batch({}, rows)
            device.waits.clear()
            output = engine.decode(batch, engine.forward(batch))
            assert device.waits == ONE_COPY
            for row, tokens in zip(rows, output.token_ids, strict=True):
                row.tokens += tokens
                row.num_computed += 1
        generated = [row.generated for row in rows]
    driver = Driver(load_engine(model.folder, kernels="torch"))
    rows = [driver.start(*each) for each in zip(prompts, mixed(names), strict=True)]
    driver.step({row: len(row.tokens) for row in rows})
    for _ in range(NUM_ITERATIONS):
        driver.step(generation=rows)
    assert generated == [row.generated for row in rows]


CONTROLS: dict[str, dict[str, Any]] = {
    "penalties": {
        "sampling": SamplingConfig(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4)
    },
    "decaying top_p": {"sampling": SamplingConfig(top_k=9, top_p=0.9, top_p_decay=0.9, top_p_reset_id=7)},
    "min_length": {"sampling": SamplingConfig(min_length=9), "end_ids": tuple(range(0, 90, 2))},
    "allowed tokens and biases": {
        "sampling": SamplingConfig(
            allowed_token_ids=tuple(range(0, 90, 2)),
            logit_bias_ids=(4, 8, 4),
            logit_bias_values=(2.0, -1.5, 1.0),
        )
    },
    "bad words": {"bad_words": ((5,), (6, 7), *((first, 9) for first in range(90)))},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_add_no_waits(zoo: Zoo, name: str) -> None:
    """Tokens equal the CPU's."""
    model, options = zoo["llama-gqa"], CONTROLS[name]
    prompts = [model.prompt(5 + 4 * number, number) for number in range(3)]
    with FakeDevice() as device:
        driver = Driver(load_paged(model.folder, device="meta"))
        rows = [driver.start(prompt, **options) for prompt in prompts]
        rows.append(driver.start(model.prompt(8)))
        for number in range(NUM_ITERATIONS):
            chunks = {} if number else {row: len(row.tokens) for row in rows}
            batch = driver.batch(chunks, rows if number else ())
            device.waits.clear()
            output = driver.engine.decode(batch, driver.engine.forward(batch))
            assert device.waits == ONE_COPY
            for row, tokens in zip(rows, output.token_ids, strict=True):
                row.num_computed = len(row.tokens)
                row.tokens += tokens
    other = Driver(load_engine(model.folder, kernels="torch"))
    expected = [other.start(prompt, **options) for prompt in prompts]
    expected.append(other.start(model.prompt(8)))
    other.step({row: len(row.tokens) for row in expected})
    for _ in range(NUM_ITERATIONS - 1):
        other.step(generation=expected)
    assert [row.generated for row in rows] == [row.generated for row in expected]


@pytest.mark.parametrize("attention", ["in place", "gathered"])
def test_first_and_later_chunks_wait_for_the_device_once(zoo: Zoo, attention: str) -> None:
    model = zoo["llama-gqa"]
    with FakeDevice() as device:
        gathering = GATHERING if attention == "gathered" else None
        engine = load_paged(model.folder, attention=gathering, device="meta")
        driver = Driver(engine)
        rows = [driver.start(model.prompt(20, seed)) for seed in range(3)]
        for length in (9, 11):
            batch = driver.batch(dict.fromkeys(rows, length))
            device.waits.clear()
            engine.decode(batch, engine.forward(batch))
            assert device.waits == ONE_COPY[: length - 10 if length > 10 else 0]
            for row in rows:
                row.num_computed += length


def test_a_replayed_batch_waits_for_the_device_once(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    with FakeDevice() as device:
        engine = load_paged(model.folder, device="meta", capture=lambda operations: operations)
        driver = Driver(engine)
        rows = [driver.start(model.prompt(7, seed)) for seed in range(3)]
        driver.step(dict.fromkeys(rows, 7))
        batch = driver.batch({}, rows)
        device.waits.clear()
        engine.decode(batch, engine.forward(batch))
        assert device.waits == ONE_COPY


def test_a_top_p_with_many_tokens_is_drawn_again(zoo: Zoo) -> None:
    """The assumption that rows need few tokens is found wrong when the tokens arrive."""
    model = zoo["llama-gqa"]
    sampling = SamplingConfig(temperature=100.0, top_p=0.99, random_seed=8)
    with FakeDevice():
        driver = Driver(load_paged(model.folder, device="meta"))
        rows = [driver.start(model.prompt(6), sampling), driver.start(model.prompt(9))]
        driver.step({rows[0]: 6, rows[1]: 9})
        for _ in range(5):
            output = driver.engine.decode(batch := driver.batch({}, rows), driver.engine.forward(batch))
            for row, tokens in zip(rows, output.token_ids, strict=True):
                row.tokens += tokens
                row.num_computed += 1
        generated = [row.generated for row in rows]
    driver = Driver(load_engine(model.folder, kernels="torch"))
    rows = [driver.start(model.prompt(6), sampling), driver.start(model.prompt(9))]
    driver.step({rows[0]: 6, rows[1]: 9})
    for _ in range(5):
        driver.step(generation=rows)
    assert generated == [row.generated for row in rows]


def test_several_tensors_are_returned_in_one_copy() -> None:
    values = np.array([3, -1, 2**40]), np.array([0.5, np.nan], np.float32), np.array([True, False, True])
    with FakeDevice() as device:
        tensors = [upload(array, DEVICE) for array in values]
        assert device.waits == []
        found = to_host(*tensors)
        assert device.waits == ONE_COPY
    for ours, theirs in zip(found, values, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_the_fake_device_records_waits() -> None:
    with FakeDevice() as device:
        tensor = upload(np.arange(4), DEVICE)
        tensor[tensor > 1]
        tensor.nonzero()
        tensor.sum().item()
        torch.from_numpy(np.arange(4)).to(DEVICE)
        assert len(device.waits) >= 4
        with pytest.raises(RuntimeError, match="two devices"):
            tensor + torch.arange(4)
