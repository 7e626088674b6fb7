"""LoRA adapters in an engine's pages: the rows that they affect, on one rank and on several, and failures."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from inflight.adapters.lora_modules import Module, module_sizes, rank_bytes
from inflight.engine import low_rank
from inflight.engine.adapter_pool import AdapterPool, page_bytes
from inflight.engine.engine import ModelEngine
from inflight.engine.low_rank import low_rank_layers
from inflight.models import read_model_description
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping
from tests.engine.driver import Driver, Row, load_engine
from tests.engine.fake_device import FakeDevice
from tests.engine.kernels import DEFAULT, TORCH, by_default_and
from tests.engine.lora import Adapter, make_adapter, pack_rows, stored, weights_of
from tests.engine.paging import load_paged
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

NUM_TOKENS = 16
every_kernel = pytest.mark.parametrize("kernels", [DEFAULT, TORCH])


@cache
def adapter_of(model: ZooModel, seed: int, rank: int = 8, **options: Any) -> Adapter:
    return make_adapter(model, seed, r=rank, lora_alpha=rank / 2, **options)


def generate(driver: Driver, rows: list[Row], num_tokens: int = NUM_TOKENS) -> None:
    """Generate together, from the start."""
    driver.step({row: len(row.tokens) for row in rows})
    for _ in range(num_tokens - 1):
        driver.step(generation=rows)


def assert_greedy(row: Row, model: ZooModel) -> None:
    prompt = tuple(row.tokens[: row.prompt_length])
    assert row.generated == model.greedy(prompt, len(row.generated))


# ---------------------------------------------------------------- rows


@every_kernel
def test_pages_are_reused_and_need_not_be_adjacent(zoo: Zoo, kernels: str | None) -> None:
    """An adapter of three pages replaces two others, while a third adapter's row continues."""
    model = zoo["llama-gqa"]
    driver = Driver(load_engine(model.folder, kernels=kernels))
    adapters = [adapter_of(model, 1), adapter_of(model, 2, 16), adapter_of(model, 3)]
    pages = [[4], [2, 0], [7]]
    firsts = [
        driver.put(stored(a.weights, n), p) for n, (a, p) in enumerate(zip(adapters, pages, strict=True))
    ]
    rows = [driver.start(model.prompt(9, seed), adapter=first) for seed, first in enumerate(firsts)]
    generate(driver, rows, 4)
    for row, adapter in zip(rows, adapters, strict=True):
        assert_greedy(row, adapter.oracle)
    driver.release(rows[0])
    driver.release(rows[1])
    late = adapter_of(model, 4, 20)
    row = driver.start(model.prompt(11), adapter=driver.put(stored(late.weights, 4), [0, 4, 2]))
    driver.step({row: 11}, [rows[2]])
    for _ in range(NUM_TOKENS):
        driver.step(generation=[rows[2], row])
    assert_greedy(row, late.oracle)
    assert_greedy(rows[2], adapters[2].oracle)


@every_kernel
def test_drafts_are_verified_by_the_rows_own_adapter(zoo: Zoo, kernels: str | None) -> None:
    model, prompt = zoo["llama-gqa"], zoo["llama-gqa"].prompt(13)
    adapters = [adapter_of(model, 1), adapter_of(model, 2)]
    driver = Driver(load_engine(model.folder, kernels=kernels))
    firsts = [driver.put(stored(each.weights, number)) for number, each in enumerate(adapters)]
    rows = [driver.start(prompt, adapter=first) for first in firsts] + [driver.start(prompt)]
    expected = [each.oracle.greedy(prompt, 5) for each in adapters] + [model.greedy(prompt, 5)]
    driver.step(dict.fromkeys(rows, 13))
    drafts = {row: tokens[1:4] for row, tokens in zip(rows, expected, strict=True)}
    driver.step(dict.fromkeys(rows, 1), drafts=drafts)
    assert [row.generated for row in rows] == expected and {row.num_accepted for row in rows} == {3}


@every_kernel
def test_a_reused_slot_has_no_adapter(zoo: Zoo, kernels: str | None) -> None:
    model = zoo["llama-gqa"]
    driver = Driver(load_engine(model.folder, kernels=kernels))
    first = driver.start(model.prompt(9), adapter=driver.put(stored(adapter_of(model, 1).weights, 1)))
    generate(driver, [first], 3)
    driver.release(first)
    second = driver.start(model.prompt(9))
    assert second.slot == first.slot
    generate(driver, [second])
    assert_greedy(second, model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_adapters_in_half_precision_are_near_those_of_float32(zoo: Zoo, dtype: str) -> None:
    """With int8 and fp8, the reference model has rounded matrices; adapters are not rounded."""
    model = zoo["llama-gqa"]
    adapter = adapter_of(model, 1)
    engine = load_engine(model.folder, dtype=dtype, kernels="torch")
    driver = Driver(engine)
    rows = [driver.start(model.prompt(30), adapter=driver.put(stored(adapter.weights, 1)))]
    rows.append(driver.start(model.prompt(30)))
    generate(driver, rows, 20)
    errors = []
    for row, oracle in zip(rows, (adapter.oracle, model), strict=True):
        exact = oracle.logits(row.tokens)[29:-1]
        errors.append((torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std())
    assert errors[0] < max(0.15, 1.5 * errors[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_weights_may_have_any_float_type(zoo: Zoo, dtype: torch.dtype) -> None:
    """The engine computes with the adapter as rounded to the dtype."""
    model = zoo["gpt2"]
    oracle = adapter_of(model, 3).oracle
    rounded = make_adapter(
        model, 3, r=8, lora_alpha=8
    )  # a scale of 1, so that rounding B is the same as rounding its tensor
    with torch.no_grad():
        for name, parameter in rounded.oracle.oracle.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.to(dtype))
    driver = Driver(load_engine(model.folder, kernels="torch"))
    weights = weights_of(rounded.oracle.oracle, dtype=dtype)
    row = driver.start(model.prompt(9), adapter=driver.put(stored(weights, 1)))
    generate(driver, [row])
    assert_greedy(row, rounded.oracle)
    assert row.generated != oracle.greedy(model.prompt(9), NUM_TOKENS)


# ---------------------------------------------------------------- several ranks


@pytest.mark.parametrize("config", with_all(["plain", "dora"], ["plain"]))
@pytest.mark.parametrize(
    "topology",
    with_all(
        [pytest.param(sizes, id=name) for name, sizes in {**TOPOLOGIES, "tp4": (4, 1)}.items()], [(2, 2)]
    ),
)
@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(["llama-gqa", "gpt2"], ["llama-gqa", "gpt2"]), [("llama-gqa", "torch"), ("gpt2", None)]
    ),
)
def test_ranks_with_slices_of_adapters_give_pefts_tokens(
    zoo: Zoo, case: str, topology: tuple[int, int], config: str, kernels: str | None
) -> None:
    """Slices of fused and row-parallel modules, key heads that several ranks hold, layers of other stages."""
    model = zoo[case]
    adapters = [adapter_of(model, 1, use_dora=config == "dora"), adapter_of(model, 2, 12)]
    with ranks(model.folder, topology, kernels=kernels) as engine:
        driver = RanksDriver(engine)
        firsts = [driver.put(stored(each.weights, number)) for number, each in enumerate(adapters)]
        rows = [driver.start(model.prompt(9, 1), adapter=first) for first in firsts]
        rows.append(driver.start(model.prompt(12)))
        generate(driver, rows)
    for row, oracle in zip(rows, [*(each.oracle for each in adapters), model], strict=True):
        assert_greedy(row, oracle)


@pytest.mark.parametrize("fault", ["columns of A", "rows of B", "key rows", "layers"])
def test_a_planted_slice_of_the_wrong_rank_is_detected(zoo: Zoo, fault: str) -> None:
    """Checks that the test above can fail."""
    model, right = zoo["llama-gqa"], low_rank._slice
    adapter = adapter_of(model, 1)

    def wrong(module: Module, whole: Any, decoder: Any, shard: Any) -> tuple[int, int]:
        begin, end = right(module, whole, decoder, shard)
        is_hit = {
            "columns of A": module in (Module.ATTN_DENSE, Module.MLP_4H_TO_H),
            "rows of B": module in (Module.MLP_H_TO_4H,),
            "key rows": module in (Module.ATTN_K,),
        }.get(fault, False)
        width = end - begin
        return (width - begin, 2 * width - begin) if is_hit else (begin, end)

    topology = (1, 2) if fault == "layers" else (2, 1)
    with ranks(model.folder, topology, kernels="torch") as engine:
        if fault == "layers":
            last = engine.stages[1].runner.decoder.adapters
            assert last._part.layers == (2, 3)
            last._part = Part(last._part.shard, (1, 2))
        with mock.patch.object(low_rank, "_slice", wrong):
            driver = RanksDriver(engine)
            row = driver.start(model.prompt(9), adapter=driver.put(stored(adapter.weights, 1)))
            generate(driver, [row])
    assert row.generated != adapter.oracle.greedy(model.prompt(9), NUM_TOKENS)


class RanksDriver(Driver):
    """Drives ranks as one engine; the ranks keep the logits."""

    def step(self, chunks: Any = None, generation: Any = (), **options: Any) -> Any:
        batch = self.batch(chunks or {}, generation)
        output = self.engine.decode(batch, self.engine.forward(batch))
        for row, tokens in zip((*(chunks or {}), *generation), output.token_ids, strict=True):
            row.num_computed = len(row.tokens)
            row.tokens += tokens
        return output


# ---------------------------------------------------------------- memory


def test_page_bytes_is_the_memory_that_a_page_takes_on_each_rank(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    outputs = sum(size.outer for module, size in module_sizes(decoder, 0).items() if module.text not in FUSED)
    magnitudes = 3 * outputs * 2
    assert page_bytes(decoder, 8, torch.bfloat16) == 8 * rank_bytes(decoder, 2) + magnitudes
    for mapping in (Mapping(2, 1, 1), Mapping(1, 3, 2)):
        part = Part.from_mapping(mapping, decoder)
        held = part.held_config(decoder)
        pool = AdapterPool(decoder, part, 5, 8, torch.float32, torch.device("cpu"))
        memory = pool._memory.nbytes + pool._magnitudes[:-1].nbytes
        assert memory == 5 * page_bytes(held, 8, torch.float32)
        assert len(pool.layers) == held.num_layers


FUSED = ("attn_qkv", "mlp_gate_up")


def test_an_adapter_of_more_ranks_than_its_pages_is_refused(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    driver = Driver(load_engine(model.folder, kernels="torch"))
    row = driver.start(model.prompt(5), adapter=driver.put(stored(adapter_of(model, 2, 16).weights, 1), [3]))
    with pytest.raises(ValueError, match="rank 16 is more than 1 pages of 8 ranks hold"):
        driver.step({row: 5})


@every_kernel
def test_a_row_with_a_missing_adapter_is_refused(zoo: Zoo, kernels: str | None) -> None:
    """An adapter that was never loaded, or was removed because another took one of its pages."""
    model = zoo["llama-gqa"]
    driver = Driver(load_engine(model.folder, kernels=kernels))
    row = driver.start(model.prompt(5), adapter=3)
    with pytest.raises(ValueError, match="page 3"):
        driver.step({row: 5})
    driver = Driver(load_engine(model.folder, kernels=kernels))
    row = driver.start(
        model.prompt(5), adapter=driver.put(stored(adapter_of(model, 2, 16).weights, 1), [3, 4])
    )
    generate(driver, [row], 2)
    driver.put(stored(adapter_of(model, 1).weights, 2), [4])
    with pytest.raises(ValueError, match="page 3"):
        driver.step(generation=[row])


@every_kernel
@pytest.mark.parametrize("where", ["A", "B"])
def test_an_adapter_with_nan_affects_no_other_row(zoo: Zoo, where: str, kernels: str | None) -> None:
    assert_contained(load_engine(zoo["llama-gqa"].folder, kernels=kernels), zoo["llama-gqa"], where)


def assert_contained(engine: ModelEngine, model: ZooModel, where: str) -> None:
    """Check that an adapter with a number that is not finite affects only its own row."""
    good = adapter_of(model, 1)
    size = module_sizes(read_model_description(model.folder).decoder, 0)[Module.MLP_4H_TO_H]
    a, b = torch.ones(4, size.inner), torch.ones(size.outer, 4)
    (a if where == "A" else b)[1, 2] = torch.inf
    bad = pack_rows([(Module.MLP_4H_TO_H, 0, a, b, None)])
    driver = Driver(engine)
    firsts = [driver.put(stored(each, number)) for number, each in enumerate((good.weights, bad))]
    rows = [driver.start(model.prompt(9, 1), adapter=first) for first in (*firsts, -1)]
    batch = driver.batch(dict.fromkeys(rows, 9))
    logits = driver.engine.forward(batch).result
    assert not logits[1].isfinite().any()
    for index, oracle in ((0, good.oracle), (2, model)):
        expected = oracle.logits(model.prompt(9, 1))[-1]
        torch.testing.assert_close(logits[index], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
def test_a_layer_gets_the_adapters_of_its_rows(zoo: Zoo, case: str) -> None:
    """All modules of adapters: the slices of all ranks together are the whole matrices."""
    model = zoo[case]
    decoder = read_model_description(model.folder).decoder
    weights = adapter_of(model, 1, use_dora=True).weights
    whole = low_rank_layers(weights, decoder, Part.whole(decoder))
    for mapping in (Mapping(2, 1, 0), Mapping(2, 1, 1)):
        part = Part.from_mapping(mapping, decoder)
        for index, modules in low_rank_layers(weights, decoder, part).items():
            for module, found in modules.items():
                all_of_it = whole[index][module]
                assert found.rank == all_of_it.rank == 8
                assert _halves(found, all_of_it, module, mapping.tp_rank)


def _halves(found: low_rank.LowRank, whole: low_rank.LowRank, module: Module, rank: int) -> bool:
    assert whole.magnitude is not None and found.magnitude is not None
    if module in (Module.ATTN_DENSE, Module.MLP_4H_TO_H):
        a = whole.a.chunk(2, dim=1)[rank]
        return (
            torch.equal(found.a, a)
            and torch.equal(found.b, whole.b)
            and torch.equal(found.magnitude, whole.magnitude)
        )
    return (
        torch.equal(found.a, whole.a)
        and torch.equal(found.b, whole.b.chunk(2)[rank])
        and torch.equal(found.magnitude, whole.magnitude.chunk(2)[rank])
    )


# ---------------------------------------------------------------- a device


@pytest.mark.parametrize("use_dora", [False, True])
def test_neither_adapters_nor_loading_them_make_the_host_wait(zoo: Zoo, use_dora: bool) -> None:
    model = zoo["llama-gqa"]
    adapters = [adapter_of(model, 1, use_dora=use_dora), adapter_of(model, 2, 12)]
    with FakeDevice() as device:
        driver = Driver(load_paged(model.folder, device="meta", num_adapter_pages=8))
        rows = [driver.start(model.prompt(9))]
        for number in range(8):
            if number < 2:
                page = driver.put(stored(adapters[number].weights, number))
                rows.append(driver.start(model.prompt(9, number), adapter=page))
            chunks = {row: 9 for row in rows if not row.num_computed}
            batch = driver.batch(chunks, [row for row in rows if row.num_computed])
            device.waits.clear()
            output = driver.engine.decode(batch, driver.engine.forward(batch))
            assert device.waits == ["copy to the host"]
            by_slot = dict(zip(batch.sampled_slots(), output.token_ids, strict=True))
            for row in rows:
                row.num_computed = len(row.tokens)
                row.tokens += by_slot[row.slot]
    for row, oracle in zip(rows, [model, *(each.oracle for each in adapters)], strict=True):
        assert_greedy(row, oracle)
