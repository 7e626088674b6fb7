"""The compiled layers: transformers' tokens in float32, int8, and what there is on a machine without them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from inflight.engine.torch import TorchEngine, TorchEngineConfig
from inflight.engine.torch.native import library
from inflight.engine.torch.native.library import CannotBuild, load_library
from inflight.engine.torch.native.packing import quantize
from inflight.errors import ConfigError
from inflight.testing.thread_ranks import ThreadRanks
from tests.distributed.requests import CONFIG, ENGINE, answers, make_requests
from tests.engine.driver import Driver, alone, load_engine
from tests.engine.serving import Served, serve
from tests.models.zoo import CASES, Zoo

NUM_TOKENS = 64
TOLERANCE = 1e-4
# Root mean square error of the logits over their standard deviation, as in test_precision.
BFLOAT16_BOUND, INT8_BOUND = 0.08, 0.2


def _why_not() -> str:
    try:
        load_library("bfloat16", int8=True)
    except CannotBuild as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(bool(_why_not()), reason=f"no compiled code: {_why_not()}")


def _tokens(served: Served) -> list[Any]:
    return [(answer["key"], answer["tokens"]) for answer in answers(served)]


@needs_native
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_transformers(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    prompt = model.prompt(27)

    row = alone(load_engine(model.folder, kernels="native"), prompt, NUM_TOKENS)

    assert row.generated == model.greedy(prompt, NUM_TOKENS)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


@needs_native
@pytest.mark.parametrize(("windows", "num_sinks"), [((12,), 0), ((12,), 3), ((9, 1000), 0)])
@pytest.mark.parametrize("tokens_per_block", [7, 16, 32])
def test_windows_sinks_and_blocks_of_any_size(
    zoo: Zoo, windows: tuple[int, ...], num_sinks: int, tokens_per_block: int
) -> None:
    model = zoo["llama-gqa"]
    prompt = model.prompt(150)
    rows = [
        alone(
            load_engine(
                model.folder,
                kernels=kernels,
                attention_windows=windows,
                sink_token_length=num_sinks,
                tokens_per_block=tokens_per_block,
            ),
            prompt,
            20,
        )
        for kernels in ("native", "torch")
    ]
    torch.testing.assert_close(*(torch.stack(row.logits) for row in rows), rtol=0, atol=TOLERANCE)
    assert rows[0].generated == rows[1].generated


@needs_native
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "qwen3"])
def test_beams_drafts_sampling_chunks_and_pauses_are_as_with_torch(zoo: Zoo, case: str) -> None:
    served = [
        serve(
            TorchEngine.load(TorchEngineConfig(str(zoo[case].folder), **ENGINE, kernels=kernels)),
            CONFIG,
            make_requests(),
        )
        for kernels in ("native", "torch")
    ]
    assert _tokens(served[0]) == _tokens(served[1])


@needs_native
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_answer_as_one(zoo: Zoo, tp_size: int, pp_size: int) -> None:
    config = TorchEngineConfig(str(zoo["llama-gqa"].folder), **ENGINE, kernels="native")
    one = serve(TorchEngine.load(config), CONFIG, make_requests())
    several = serve(ThreadRanks(config, tp_size, pp_size), CONFIG, make_requests())
    assert _tokens(several) == _tokens(one)


@needs_native
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", BFLOAT16_BOUND), ("int8", INT8_BOUND)])
@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "qwen3", "gpt2"])
def test_error_is_bounded(zoo: Zoo, case: str, dtype: str, bound: float) -> None:
    model = zoo[case]
    prompt = model.prompt(32)

    row = alone(load_engine(model.folder, dtype=dtype, kernels="native"), prompt, 24)

    exact = model.logits(row.tokens)[len(prompt) - 1 : -1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error.item() < bound


@needs_native
def test_an_int8_row_gives_the_same_alone_and_in_a_batch(zoo: Zoo) -> None:
    """To the bit: its scale is its own, and its sums are whole numbers."""
    model = zoo["llama-gqa"]
    prompts = [model.prompt(length, seed=length) for length in (40, 23, 31)]
    engine = load_engine(model.folder, dtype="int8", kernels="native")
    of_one = [alone(load_engine(model.folder, dtype="int8", kernels="native"), p, 12) for p in prompts]
    driver = Driver(engine)
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step({row: len(prompt) for row, prompt in zip(rows, prompts)})
    for _ in range(11):
        driver.step(generation=rows)
    for row, single in zip(rows, of_one):
        assert row.generated == single.generated
        assert torch.equal(torch.stack(row.logits), torch.stack(single.logits))


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    levels, scales = quantize(weight)
    assert levels.dtype == torch.int8 and levels.abs().max() == 127
    assert torch.all((levels * scales[:, None] - weight).abs() <= scales[:, None] / 2 + 1e-7)


def test_a_machine_without_a_compiler_serves_on_torch(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(dtype: str, int8: bool = False) -> None:
        raise CannotBuild("there is no C++ compiler")

    monkeypatch.setattr("inflight.engine.torch.load_decoder.load_library", refuse)
    with caplog.at_level(logging.WARNING):
        row = alone(load_engine(zoo["llama"].folder, kernels=None), zoo["llama"].prompt(9), 4)
    assert row.generated == zoo["llama"].greedy(zoo["llama"].prompt(9), 4)
    assert ["there is no C++ compiler" in record.getMessage() for record in caplog.records] == [True]
    for changes in ({"kernels": "native"}, {"dtype": "int8"}):
        with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler"):
            load_engine(zoo["llama"].folder, **{"kernels": None, **changes})


def test_a_processor_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_processor_flags", lambda: library._NEEDED)
    with pytest.raises(CannotBuild, match="the processor lacks avx512_bf16"):
        load_library("bfloat16")
    with pytest.raises(CannotBuild, match="not in float16"):
        load_library("float16")
