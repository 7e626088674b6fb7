"""Compiled layers for targets other than this machine's fastest: the generic one, and Arm's in an emulator.

Every kernel is tested, with `scripts/test --all` only: a library takes 20 to 40 s to compile for each target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.engine.cpu.library import load_library
from inflight.engine.cpu.packing import PackedLinear, Packer
from inflight.engine.cpu.row_kernels import NativeRowKernels
from inflight.engine.cpu.structs import Handle, LayerStruct, ShapeStruct
from inflight.engine.quantize import quantize_int8
from inflight.models.levels import GroupedMatrix
from inflight.sampling.row_kernels import RowKernels
from tests.engine.cpu.targets import on_others
from tests.engine.cpu.test_native_adapters import assert_as
from tests.engine.cpu.test_native_adapters import serve as serve_with_adapter
from tests.engine.cpu.test_native_groups import (
    check_columns,
    draw,
    draw_bytes,
    draw_floats,
    multiply,
    rounded,
)
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.merged import make_adapter
from tests.engine.pictures import Picture, expected_tokens, make_prompt, request_of
from tests.models.zoo import Zoo, ZooModel
from tests.sampling import factories
from tests.sampling.factories import Row, choose_tokens, make_request
from tests.sampling.test_apply_masks import SUBSETS
from tests.sampling.test_apply_masks import check as check_masks
from tests.tiers import with_all

pytestmark = [needs_native, pytest.mark.exhaustive, on_others, pytest.mark.usefixtures("target")]

NATIVE: dict[str, Any] = {"kernels": "native", "max_num_sequences": 3}
CASES = ["llama-gqa", "llama-odd-sizes", "gpt2", "gemma2", "mixtral", "gpt-oss"]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_packer(dtype: torch.dtype = torch.bfloat16, int8: bool = False) -> Packer:
    return Packer(
        load_library(str(dtype).removeprefix("torch."), int8=dtype is torch.bfloat16), dtype, int8, 2
    )


@pytest.mark.parametrize("case", with_all(CASES, ["llama-odd-sizes", "gpt-oss"]))
def test_tokens_in_float32_are_those_of_transformers(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    row = alone(load_engine(model.folder, dtype="float32", **NATIVE), model.prompt(33), 8)
    assert row.generated == model.greedy(model.prompt(33), 8)
    expected = model.logits(row.tokens)[row.prompt_length - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["gemma3-vision"])
def test_pictures_give_the_tokens_of_transformers(zoo: Zoo, case: str) -> None:
    """Their tokens see each other in both directions."""
    model = zoo[case]
    prompt = make_prompt(model, (5, Picture(6, 7, 1), 6, Picture(3, 3, 2), 1), 0)
    table = request_of(model, 1, prompt).prompt_table
    engine = load_engine(model.folder, dtype="float32", **NATIVE)
    row = alone(engine, prompt.token_ids, 8, prompt_table=table)
    assert row.generated == expected_tokens(model, prompt, 8)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("int8", 0.3)])
@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2"], ["llama-gqa"]))
def test_logits_in_fewer_bits_are_near_those_in_float32(
    zoo: Zoo, case: str, dtype: str, tolerance: float
) -> None:
    model = zoo[case]
    row = alone(load_engine(model.folder, dtype=dtype, **NATIVE), model.prompt(33), 1)
    (found,), expected = row.logits, model.logits(model.prompt(33))[-1]
    assert (found - expected).square().mean().sqrt() < tolerance * expected.std()


def check_rounded_cache(model: ZooModel, dtype: str, kind: str, tolerance: float) -> None:
    """Compare logits; numbers near the border of two levels may be rounded to either, so a few differ."""
    settings = {"dtype": dtype, "kv_cache_dtype": kind, "max_num_sequences": 3}
    found, expected = (
        torch.stack(alone(load_engine(model.folder, kernels=kernels, **settings), model.prompt(33), 3).logits)
        for kernels in ("native", "torch")
    )
    assert (found - expected).square().mean().sqrt() < tolerance * expected.std()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_keys_and_values_in_float32_are_read_as_with_torch(zoo: Zoo, kind: str) -> None:
    check_rounded_cache(zoo["llama-gqa"], "float32", kind, 1e-3)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_keys_and_values_are_read_as_with_torch(zoo: Zoo, kind: str) -> None:
    check_rounded_cache(zoo["llama-gqa"], "bfloat16", kind, 0.1)


GROUPED: dict[str, Callable[[int, int], GroupedMatrix]] = {
    "int4": partial(draw, size=32),
    "float4": draw_floats,
    "grouped int8": partial(draw_bytes, size=32),
}


def pack(kind: str, outputs: int, inputs: int) -> tuple[PackedLinear, Packer, Tensor]:
    """Return a random packed matrix, and the represented values in float64."""
    if kind in GROUPED:
        packer, matrix = make_packer(), GROUPED[kind](outputs, inputs)
        return packer.linear(matrix), packer, matrix.dequantized().double()
    packer = make_packer(torch.float32 if kind == "float32" else torch.bfloat16, int8=kind == "int8")
    weight = normal(outputs, inputs, seed=7).to(packer.dtype)
    if kind == "int8":
        levels, scales = quantize_int8(weight)
        return packer.linear(weight), packer, levels.double() * scales.double()[:, None]
    return packer.linear(weight), packer, weight.double()


SIZES = pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (70, 96), (5, 8192)])


def check_product(kind: str, outputs: int, inputs: int) -> None:
    packed, packer, weight = pack(kind, outputs, inputs)
    x = normal(13, inputs).to(packer.dtype)
    together = multiply(packer, packed, x)
    size = inputs if kind == "int8" else 32 if kind in GROUPED else None
    expected = (x.double() if size is None else rounded(x, size)) @ weight.T
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    for count in (1, 2, 3, 4, 5, 6, 11):
        assert torch.equal(multiply(packer, packed, x[:count]), together[:count]), "a row depends on no other"


@SIZES
def test_float32_products_are_right_for_any_number_of_rows(outputs: int, inputs: int) -> None:
    check_product("float32", outputs, inputs)


@SIZES
@pytest.mark.parametrize("kind", ["bfloat16", "int8", *GROUPED])
def test_products_in_fewer_bits_are_right_for_any_number_of_rows(
    kind: str, outputs: int, inputs: int
) -> None:
    check_product(kind, outputs, inputs)


@pytest.mark.parametrize("kind", ["int8", *GROUPED])
def test_the_largest_levels_do_not_overflow(kind: str) -> None:
    """All products have the same sign and maximum size."""
    packer = make_packer(int8=kind == "int8")
    if kind == "int8":
        weight = torch.full((32, 512), -1.0).bfloat16()
        packed, weight = packer.linear(weight), weight.double()
    else:
        matrix = GROUPED[kind](32, 512)
        matrix.values.fill_({"int4": 15, "float4": 7, "grouped int8": -128}[kind])
        if matrix.zeros is not None:
            matrix.zeros.fill_(0)
        packed, weight = packer.linear(matrix), matrix.dequantized().double()
    x = torch.full((2, 512), -3.0).bfloat16()
    x[1] = 3.0
    torch.testing.assert_close(multiply(packer, packed, x).double(), x.double() @ weight.T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [8, 24, 32])
def test_columns_of_8_bits_in_groups_are_unpacked(size: int) -> None:
    check_columns(70, 96, size, 200)


@pytest.mark.parametrize("rank", [3, 8])
def test_an_adapter_of_all_modules_equals_merged_weights(zoo: Zoo, rank: int) -> None:
    model = zoo["llama-gqa"]
    adapter = make_adapter(model, rank)
    engine = load_engine(model.folder, dtype="float32", **{**NATIVE, "max_num_sequences": 20})
    assert_as(serve_with_adapter(engine, adapter, model.prompt(27)), adapter.model)


@pytest.fixture
def row_kernels(target: str) -> RowKernels:
    code = load_library("float32")
    return NativeRowKernels(code, Handle(code, ShapeStruct(num_threads=2), (LayerStruct * 0)()))


def test_sampled_tokens_equal_those_of_torch(
    row_kernels: RowKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.02, "temperature": 1.5}]
    rows = [
        Row(
            make_request(
                (5, 6, 7), random_seed=seed, repetition_penalty=1.3, frequency_penalty=0.25, **choice
            )
        )
        for seed in range(4)
        for choice in choices
    ]
    logits = normal(len(rows), 1003) * 3
    expected = choose_tokens(logits.clone(), rows)
    monkeypatch.setattr(factories, "ROW_KERNELS", [row_kernels])
    assert choose_tokens(logits, rows) == expected
    assert len(set(expected)) > 5, "they are not all the same"


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_masked_logits_equal_those_of_torch(row_kernels: RowKernels, size: int) -> None:
    for seed, indices in enumerate(SUBSETS.values()):
        check_masks(row_kernels, size, list(indices), seed)


def test_the_highest_logits_and_their_tokens_equal_those_of_torch(row_kernels: RowKernels) -> None:
    logits = normal(40, 1003)
    logits[3, 77] = logits[3, 900] = 50.0
    logits[5, 11] = torch.nan
    logits[6] = -torch.inf
    found = row_kernels.find_peaks(logits)
    usable = torch.arange(40) != 5
    assert found.highest[5].isnan() and found.tokens[3] == 77
    assert torch.equal(found.highest[usable], logits.amax(1)[usable])
    assert torch.equal(found.tokens[usable], logits.argmax(1)[usable])
