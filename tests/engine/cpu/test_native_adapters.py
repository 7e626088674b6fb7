"""LoRA adapters in the compiled layers: the same results as transformers with the adapters in its weights."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.adapters.lora_modules import Module
from inflight.core.request.request import OutputOptions
from inflight.core.schedule.batch import AdapterLoad, ScheduledBatch
from inflight.engine.cpu.adapters import PackedAdapters
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.engine import ModelEngine
from tests.engine.cpu.targets import on_own_and_generic
from tests.engine.driver import Driver, Row, alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.merged import LLAMA, LLAMA_FUSED, Merged, make_adapter, modules_of
from tests.engine.ranks import ranks
from tests.models.zoo import Zoo, ZooModel
from tests.own_process import run_checks
from tests.tiers import with_all

NUM_TOKENS = 12
LOGITS = OutputOptions(return_generation_logits=True)
CASES = ["llama-gqa", "qwen2", "qwen3", "gpt2", "gpt2-inner", "llama-odd-sizes", "llama-odd-heads"]

pytestmark = [needs_native, on_own_and_generic, pytest.mark.usefixtures("target")]


def load_native(model: ZooModel, dtype: str = "float32", **changes: Any) -> ModelEngine:
    return load_engine(
        model.folder, **{"dtype": dtype, "kernels": "native", "max_num_sequences": 20, **changes}
    )


def serve(
    engine: Any, adapter: Merged | None, prompt: tuple[int, ...], chunk: int | None = None, page: int = 0
) -> Row:
    """Run `prompt` and generate some tokens with an adapter, alone on the engine; return the row."""
    driver = Driver(engine)
    first = -1 if adapter is None else driver.put(adapter.stored, (page, page + 7))
    row = driver.start(prompt, adapter=first)
    driver.generate(row, NUM_TOKENS, chunk)
    return row


def assert_as(row: Row, model: ZooModel, tolerance: float = 1e-4) -> None:
    """Compare greedy tokens and logits with the model's."""
    begin = row.prompt_length - 1
    assert row.generated == model.greedy(tuple(row.tokens[: begin + 1]), len(row.generated))
    expected = model.logits(row.tokens)[begin:-1]
    torch.testing.assert_close(
        torch.stack(row.logits), expected, rtol=1e-4, atol=tolerance
    )  # as in PEFT's tests


def assert_equal(row: Row, other: Row) -> None:
    """Compare bitwise."""
    assert row.generated == other.generated
    assert torch.equal(torch.stack(row.logits), torch.stack(other.logits))


@pytest.mark.parametrize("rank", with_all([1, 3, 8, 64], [3]))
# test_mixed_ranks_and_magnitudes_equal_merged_weights runs all cases.
@pytest.mark.parametrize("case", with_all(CASES, ["llama-gqa"]))
def test_an_adapter_of_all_modules_equals_merged_weights(zoo: Zoo, case: str, rank: int) -> None:
    model = zoo[case]
    adapter = make_adapter(model, rank)
    row = serve(load_native(model), adapter, model.prompt(27))
    assert_as(row, adapter.model)
    assert row.generated != model.greedy(model.prompt(27), NUM_TOKENS), "the adapter changes something"


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe"])
def test_an_adapter_of_attention_beside_experts_equals_merged_weights(zoo: Zoo, case: str) -> None:
    """Adapters change attention; one layer of the second model has an MLP without experts, which they do not
    change."""
    model = zoo[case]
    attention = {module: names for module, names in LLAMA.items() if names[0].startswith("self_attn")}
    adapter = make_adapter(model, 8, attention)
    row = serve(load_native(model), adapter, model.prompt(27))
    assert_as(row, adapter.model)
    assert row.generated != model.greedy(model.prompt(27), NUM_TOKENS), "the adapter changes something"


def _mixed(module: Module, layer: int) -> int:
    """Return the rank of a module in a layer: many different ranks; 0: the module is not changed."""
    return (3, 0, 8, 1, 17, 2, 64, 5)[(7 * module + 3 * layer) % 8]


@pytest.mark.parametrize("case", CASES)
def test_mixed_ranks_and_magnitudes_equal_merged_weights(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    adapter = make_adapter(model, _mixed, has_magnitude=lambda module: module % 2 == 0)
    assert_as(serve(load_native(model), adapter, model.prompt(27)), adapter.model)


@pytest.mark.parametrize("module", {**LLAMA_FUSED, **LLAMA})
@pytest.mark.parametrize("has_magnitude", with_all([False, True], [True]))
def test_an_adapter_of_one_module_equals_merged_weights(
    zoo: Zoo, module: Module, has_magnitude: bool
) -> None:
    """An adapter of one module in one layer leaves all other columns unchanged."""
    model = zoo["llama-odd-sizes"]
    names = {**LLAMA_FUSED, **LLAMA}[module]
    adapter = make_adapter(model, 5, {module: names}, [1], lambda _: has_magnitude)
    assert_as(serve(load_native(model), adapter, model.prompt(27)), adapter.model)


@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "llama-odd-sizes", "llama-odd-heads"], ["llama-odd-sizes"])
)
@pytest.mark.parametrize("has_magnitude", [False, True])
def test_an_adapter_of_fused_modules_equals_merged_weights(zoo: Zoo, case: str, has_magnitude: bool) -> None:
    model = zoo[case]
    adapter = make_adapter(model, 6, LLAMA_FUSED, has_magnitude=lambda _: has_magnitude)
    assert_as(serve(load_native(model), adapter, model.prompt(27)), adapter.model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_adapter_in_16_bits_equals_merged_weights(zoo: Zoo, dtype: torch.dtype) -> None:
    model = zoo["llama-gqa"]
    adapter = make_adapter(model, dtype=dtype)
    assert_as(serve(load_native(model), adapter, model.prompt(27)), adapter.model)


@functools.cache
def _adapters(model: ZooModel) -> tuple[Merged, ...]:
    """Return three adapters that differ in everything."""
    return (
        make_adapter(model, 8),
        make_adapter(model, _mixed, seed=1, has_magnitude=lambda module: module % 2 == 0),
        make_adapter(model, 3, dict(list(modules_of(model).items())[:2]), [0, 2], seed=2),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2", "llama-odd-sizes"], ["llama-odd-sizes"]))
def test_rows_of_a_batch_are_as_each_alone(zoo: Zoo, case: str, dtype: str) -> None:
    """Chunks and generation rows, with three adapters and none, are bitwise equal in changing batches."""
    model = zoo[case]
    engine = load_native(model, dtype)
    adapters = [None, *_adapters(model)]
    prompts = [model.prompt(2 + 9 * number % 50, number) for number in range(14)]
    choices = [number * 3 % 4 for number in range(14)]
    singles = [serve(engine, adapters[which], prompt) for which, prompt in zip(choices, prompts, strict=True)]
    driver = Driver(engine)
    pages = [-1, *(driver.put(each.stored, (10 * number,)) for number, each in enumerate(adapters[1:]))]
    rows = [
        driver.start(prompt, adapter=pages[which]) for which, prompt in zip(choices, prompts, strict=True)
    ]
    late = rows[5:]
    driver.step({row: len(row.tokens) for row in rows[:5]})
    driver.step({row: 1 + len(row.tokens) // 3 for row in late if len(row.tokens) > 2}, rows[:5])
    driver.step({row: len(row.tokens) - row.num_computed for row in late}, rows[:5])
    while min(len(row.generated) for row in rows) < NUM_TOKENS:
        driver.step(
            generation=[row for row in rows if len(row.generated) < NUM_TOKENS][:: len(rows) % 2 or -1]
        )
    for row, single in zip(rows, singles, strict=True):
        assert_equal(row, single)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("chunk", with_all([1, 7, 33], [33]))  # more rows than a tile, and fewer
def test_chunks_of_a_context_give_the_logits_of_a_whole_one(zoo: Zoo, dtype: str, chunk: int) -> None:
    model = zoo["llama-gqa"]
    engine = load_native(model, dtype)
    adapter = make_adapter(model)
    prompt = model.prompt(75)
    assert_equal(serve(engine, adapter, prompt, chunk), serve(engine, adapter, prompt))


def test_long_contexts_with_different_adapters_equal_merged_weights(zoo: Zoo) -> None:
    """Contexts have more rows than a product processes at a time, so that an adapter's rows are in several
    parts."""
    model = zoo["llama-gqa"]
    engine = load_native(model, max_num_tokens=1024)
    adapters = _adapters(model)
    driver = Driver(engine)
    pages = [driver.put(each.stored, (number,)) for number, each in enumerate(adapters)]
    prompts = [model.prompt(180 + number, number) for number in range(5)]
    rows = [driver.start(prompt, adapter=[*pages, -1, pages[0]][n]) for n, prompt in enumerate(prompts)]
    driver.step({row: len(row.tokens) for row in rows})
    driver.step(generation=rows)
    for row, made in zip(rows, [*adapters, None, adapters[0]], strict=True):
        assert_as(row, model if made is None else made.model)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "qwen3", "gpt2", "llama-odd-sizes"], ["llama-gqa", "gpt2"])
)
@pytest.mark.parametrize("rank", with_all([1, 8, 64], [8]))
def test_error_in_low_precision_is_near_that_of_merged_weights(
    zoo: Zoo, tmp_path: Path, case: str, rank: int, dtype: str
) -> None:
    """Compared with the model in float32, an adapter's error is about that of merged weights in the same dtype."""
    model = zoo[case]
    adapter = make_adapter(model, rank, has_magnitude=lambda module: module is Module.MLP_4H_TO_H)
    adapter.model.oracle.save_pretrained(tmp_path)
    row = serve(load_native(model, dtype), adapter, model.prompt(27))
    merged = alone(load_native(ZooModel(tmp_path, None), dtype), model.prompt(27), NUM_TOKENS)
    bound = 2 * _relative_error(merged, adapter.model)  # their tokens differ; measured: 0.5 to 1.75 times
    assert _relative_error(row, adapter.model) < bound < 0.4


def _relative_error(row: Row, model: ZooModel) -> float:
    """Return the root mean square of the logits' errors over their standard deviation."""
    exact = model.logits(row.tokens)[row.prompt_length - 1 : -1]
    return ((torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()).item()


@pytest.mark.parametrize(
    "topology",
    with_all(
        [
            pytest.param((2, 1), id="tp2"),
            pytest.param((1, 2), id="pp2"),
            pytest.param((4, 1), id="tp4"),
            pytest.param((2, 2), id="tp2-pp2"),
        ],
        [(2, 2)],
    ),
)
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
def test_ranks_have_their_parts_of_adapters(zoo: Zoo, case: str, topology: tuple[int, int]) -> None:
    model = zoo[case]
    adapters = _adapters(model)
    with ranks(model.folder, topology, kernels="native") as engine:
        driver = Driver(engine)  # type: ignore[arg-type]
        pages = [driver.put(each.stored, (number,)) for number, each in enumerate(adapters)]
        rows = [
            driver.start(model.prompt(20 + page, page), adapter=page, output=LOGITS) for page in [*pages, -1]
        ]
        _step(driver, rows, driver.batch({row: len(row.tokens) for row in rows}))
        for _ in range(NUM_TOKENS - 1):
            _step(driver, rows, driver.batch({}, rows))
    for row, made in zip(rows, [*adapters, None], strict=True):
        assert_as(row, model if made is None else made.model)


def _step(driver: Driver, rows: list[Row], batch: ScheduledBatch) -> None:
    """Run a batch on an engine whose logits are returned with the tokens, and add both to the rows."""
    output = driver.engine.decode(batch, driver.engine.forward(batch))
    for row, tokens in zip(rows, output.token_ids, strict=True):
        row.num_computed = len(row.tokens)
        row.tokens += tokens
        row.logits += [
            torch.frombuffer(bytearray(each), dtype=torch.float32) for each in output.details[row.slot].logits
        ]


def test_an_adapter_is_removed_if_a_page_is_overwritten(zoo: Zoo) -> None:
    """An adapter is removed if any of its pages is overwritten; adapters in other pages stay."""
    model = zoo["llama-gqa"]
    engine = load_native(model)
    first, second, third = _adapters(model)
    prompt = model.prompt(20)
    singles = [serve(engine, each, prompt) for each in (first, second, third)]
    driver = Driver(engine)
    rows = [
        driver.start(prompt, adapter=driver.put(each.stored, p))
        for each, p in ((first, (5, 2)), (second, (3,)))
    ]
    driver.generate(rows[0], 4)
    rows.append(driver.start(prompt, adapter=driver.put(third.stored, (2, 7))))
    for row, single in zip(rows[1:], singles[1:], strict=True):
        driver.generate(row, NUM_TOKENS)
        assert_equal(row, single)
    with pytest.raises(ValueError, match="page 5, but no adapter begins there"):
        driver.step(generation=[rows[0]])
    driver.release(rows[0])
    again = driver.start(prompt, adapter=driver.put(first.stored, (5,)))
    driver.generate(again, NUM_TOKENS)
    assert_equal(again, singles[0])


def test_an_adapter_without_layers_of_this_stage_has_no_effect(zoo: Zoo) -> None:
    """With an adapter that has none of a pipeline stage's layers, results are bitwise those without an
    adapter."""
    model = zoo["llama-gqa"]
    engine = load_native(model)
    adapter = make_adapter(model, layers=[0])
    nothing = replace(adapter.stored.weights, config=((4, 7, 8, 0),) * len(adapter.stored.weights.config))
    stored = Merged(replace(adapter.stored, weights=nothing), model)
    assert_equal(serve(engine, stored, model.prompt(20)), alone(engine, model.prompt(20), NUM_TOKENS))


def _adapters_of(engine: ModelEngine) -> PackedAdapters:
    assert isinstance(engine.runner.decoder, NativeDecoder)
    return engine.runner.decoder._adapters


@pytest.mark.exhaustive
def test_a_lack_of_memory_for_adapters_fails_the_iteration() -> None:
    run_checks(Path(__file__).with_name("check_adapter_memory.py"), timeout_s=600)


def test_memory_of_replaced_adapters_is_reused(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    adapters = _adapters_of(load_native(model))
    for number in range(12):
        adapters.load(AdapterLoad(make_adapter(model, 8, seed=number).stored, (number % 3,)))
    assert len(adapters._memory._memories) <= 4
