"""Products of compiled layers with 4-bit and 8-bit weights in groups, compared with the dequantized weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.engine.cpu.library import load_library
from inflight.engine.cpu.packing import PackedLinear, Packer, gated_order
from inflight.engine.cpu.structs import Handle, LayerStruct, NormStruct, ShapeStruct
from inflight.models.levels import FLOAT4, GroupedMatrix, Levels
from tests.engine.cpu.targets import on_every_target
from tests.engine.kernels import needs_native

pytestmark = [needs_native, on_every_target, pytest.mark.usefixtures("target")]


def draw(outputs: int, inputs: int, size: int, seed: int = 0) -> GroupedMatrix:
    """Return levels with 16-bit scales and zero points of 0 to 16."""
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // size

    def numbers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most + 1, shape, generator=generator, dtype=torch.uint8)

    scales = torch.rand(outputs, groups, generator=generator).add(0.1).half().float()
    return GroupedMatrix(
        numbers(15, outputs, inputs), scales, numbers(16, outputs, groups).short(), size, None, 4
    )


def draw_floats(outputs: int, inputs: int, seed: int = 0) -> GroupedMatrix:
    """Return 4-bit floats in groups of 32, with powers of 2 as scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    powers = torch.randint(-6, 3, (outputs, inputs // 32), generator=generator)
    return GroupedMatrix(values, torch.exp2(powers.float()), None, 32, None, 4, is_float4=True)


def draw_bytes(outputs: int, inputs: int, size: int, seed: int = 0) -> GroupedMatrix:
    """Return int8 levels in groups with float32 scales, as Q8_0 and Q6_K have them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, inputs // size, generator=generator) + 0.1
    return GroupedMatrix(values, scales, None, size, None, 8)


def make_packer() -> Packer:
    return Packer(load_library("bfloat16", int8=True), torch.bfloat16, int8=False, num_threads=2)


def make_handle(packer: Packer, hidden: int) -> Handle:
    values = {"hidden": hidden, "heads": 1, "kv_heads": 1, "head_dim": 2, "tokens_per_block": 2}
    values |= {"num_threads": packer.num_threads, "logits_scale": 1.0}
    return Handle(packer.library, ShapeStruct(**values), (LayerStruct * 1)())


def multiply(packer: Packer, packed: PackedLinear, x: Tensor) -> Tensor:
    """Multiply x [rows, inputs] bfloat16 by a packed matrix: [rows, columns] float32."""
    handle = make_handle(packer, x.shape[1])
    out = torch.empty(len(x), packed.struct.columns)
    rows = torch.arange(len(x))
    data = x.contiguous().data_ptr(), rows.data_ptr(), len(x), out.data_ptr()
    assert packer.library.logits(handle, ctypes.byref(NormStruct()), ctypes.byref(packed.struct), *data)
    return out


def rounded(x: Tensor, size: int, order: Tensor | None = None) -> Tensor:
    """Round x as the product does: to int8 levels with a scale for each row and group; return it in float64."""
    x = x.float() if order is None else x.float()[:, order]
    groups = x.unflatten(1, (-1, size))
    most = groups.abs().amax(2, keepdim=True)
    factors = (
        torch.full_like(most, 127) / most
    )  # 127 / most would give another number: torch computes a reciprocal
    levels = (groups * torch.where(most > 0, factors, 0)).round()
    result = (levels.double() * (most / 127).double()).flatten(1)
    return result if order is None else torch.empty_like(result).index_copy_(1, order, result)


@pytest.mark.parametrize(
    ("outputs", "inputs", "size"),
    [(64, 128, 32), (40, 96, 32), (32, 256, 128), (33, 72, 8), (70, 48, 48), (5, 52, 52), (32, 8192, 128)],
)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 12, 13, 33])
def test_products_are_those_of_the_dequantized_weights(
    outputs: int, inputs: int, size: int, num_rows: int
) -> None:
    matrix, packer = draw(outputs, inputs, size), make_packer()
    x = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, : size // 2] = 0
    found = multiply(packer, packer.linear(matrix, None), x)
    expected = rounded(x, size) @ matrix.dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())
    exact = x.double() @ matrix.dequantized().double().T
    error = (found - exact).square().mean().sqrt()
    assert 0 < error < 0.02 * exact.square().mean().sqrt(), "what rounding activations costs"


@pytest.mark.parametrize(
    ("outputs", "inputs", "size"),
    [(64, 128, 32), (40, 96, 32), (33, 72, 8), (70, 48, 16), (32, 256, 128), (32, 8192, 32)],
)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 12, 13, 33])
def test_products_with_8_bits_in_groups_are_those_of_the_dequantized_weights(
    outputs: int, inputs: int, size: int, num_rows: int
) -> None:
    matrix, packer = draw_bytes(outputs, inputs, size), make_packer()
    x = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(packer, packer.linear(matrix, None), x)
    expected = rounded(x, size) @ matrix.dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_groups_of_8_bits_keep_every_bit_of_their_scales() -> None:
    """A product with one input of 1 is a level times a scale, rounded once."""
    matrix, packer = draw_bytes(64, 32, 8), make_packer()
    found = multiply(packer, packer.linear(matrix, None), torch.eye(32).bfloat16())
    torch.testing.assert_close(found.T, matrix.dequantized(), rtol=2**-22, atol=0)


@pytest.mark.parametrize(("outputs", "inputs", "size"), [(70, 96, 32), (40, 72, 8), (33, 48, 24)])
@pytest.mark.parametrize("count", [3, 200])
def test_columns_of_8_bits_in_groups_are_unpacked(outputs: int, inputs: int, size: int, count: int) -> None:
    """Up to 128 are unpacked on the caller's thread."""
    check_columns(outputs, inputs, size, count)


def check_columns(outputs: int, inputs: int, size: int, count: int) -> None:
    """Compare columns that are unpacked as rows with the dequantized ones."""
    matrix, packer = draw_bytes(outputs, inputs, size), make_packer()
    packed = packer.linear(matrix, None)
    ids = torch.randint(0, outputs, (count,), generator=torch.Generator().manual_seed(1))
    found = torch.full((count, inputs), torch.nan, dtype=torch.bfloat16)
    where = ids.data_ptr(), count, found.data_ptr()
    packer.library.unpack_rows(make_handle(packer, inputs), ctypes.byref(packed.struct), *where)
    assert torch.equal(found, matrix.dequantized()[ids].bfloat16())


@pytest.mark.parametrize(
    "others", [(), (3,), (40,)], ids=["all equal", "another in column 3", "another in column 40"]
)
def test_products_with_equal_or_different_zero_points_are_exact(others: tuple[int, ...]) -> None:
    """A panel whose zero points are all 8 is corrected by a shift, any other panel by a product."""
    matrix, packer = draw(64, 256, 128), make_packer()
    zeros = torch.full_like(matrix.zeros, 8)
    for column in others:
        zeros[column, 1] = 11
    matrix = replace(matrix, zeros=zeros)
    x = torch.randn(13, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(packer, packer.linear(matrix, None), x)
    expected = rounded(x, 128) @ matrix.dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (40, 96), (5, 32), (32, 8192)])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 12, 13, 33])
def test_products_with_4_bit_floats_are_those_of_the_dequantized_weights(
    outputs: int, inputs: int, num_rows: int
) -> None:
    matrix, packer = draw_floats(outputs, inputs), make_packer()
    x = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(packer, packer.linear(matrix, None), x)
    expected = rounded(x, 32) @ matrix.dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_every_4_bit_float_is_right_with_every_scale() -> None:
    """value = float * 2 ** (scale - 127), where that is finite and a normal float32 number."""
    scales = torch.arange(253, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()[:, None]
    values = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 2)
    packer = make_packer()
    packed = packer.linear(GroupedMatrix(values, scales, None, 32, None, 4, is_float4=True), None)
    found = multiply(packer, packed, torch.eye(32).bfloat16()).double().T
    powers = 2.0 ** (torch.arange(len(scales), dtype=torch.float64) - 127)
    exact = torch.tensor(FLOAT4, dtype=torch.float64).repeat(2) * powers[:, None]
    is_normal = exact.abs() >= torch.finfo(torch.float32).tiny
    torch.testing.assert_close(found[is_normal], exact[is_normal], rtol=1e-6, atol=0)
    assert (found[exact == 0] == 0).all() and (found - exact)[~is_normal].abs().max() < 1e-38


def test_a_nan_scale_gives_nan() -> None:
    """MXFP4's last scale is NaN."""
    matrix, packer = draw_floats(40, 64), make_packer()
    matrix.scales[3, 1] = torch.nan
    found = multiply(packer, packer.linear(matrix, None), torch.ones(2, 64).bfloat16())
    assert found[:, 3].isnan().all() and found[:, :3].isfinite().all() and found[:, 4:].isfinite().all()


@pytest.mark.parametrize(
    "matrix",
    [draw(64, 256, 64), draw_floats(64, 256), draw_bytes(64, 256, 32)],
    ids=["int4", "float4", "int8"],
)
def test_a_row_does_not_depend_on_other_rows(matrix: GroupedMatrix) -> None:
    packer = make_packer()
    packed = packer.linear(matrix, None)
    x = torch.randn(29, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = multiply(packer, packed, x)
    for row in (0, 12, 28):
        assert torch.equal(multiply(packer, packed, x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("draw", [draw, draw_bytes])
def test_products_with_permuted_inputs_are_those_of_the_dequantized_weights(
    draw: Callable[[int, int, int], GroupedMatrix],
) -> None:
    matrix, packer = draw(48, 96, 32), make_packer()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(packer, packer.linear(replace(matrix, order=order), None), x)
    expected = rounded(x, 32, order) @ replace(matrix, order=order).dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("draw", [draw, draw_bytes])
def test_gate_and_up_are_interleaved(draw: Callable[[int, int, int], GroupedMatrix]) -> None:
    matrix, packer = draw(2 * 40, 64, 32), make_packer()
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(packer, packer.linear(matrix, None, is_gated=True), x)
    expected = rounded(x, 32) @ matrix.dequantized().double().T
    order = gated_order(80)
    expected = torch.where(order >= 0, expected[:, order.clamp_min(0)], 0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_scales_of_float32_are_kept_but_for_their_last_bits() -> None:
    matrix, packer = draw(32, 64, 32), make_packer()
    matrix = replace(matrix, scales=matrix.scales * (1 + 2.0**-20))
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(packer, packer.linear(matrix, None), x)
    expected = rounded(x, 32) @ matrix.dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("draw", [draw, draw_bytes])
def test_rows_with_nan_give_nan(draw: Callable[[int, int, int], GroupedMatrix]) -> None:
    matrix, packer = draw(32, 64, 32), make_packer()
    x = torch.zeros(3, 64).bfloat16()
    x[1, 40] = torch.nan
    found = multiply(packer, packer.linear(matrix, None), x)
    assert found[1].isnan().all() and found[[0, 2]].eq(0).all()


def test_int8_levels_are_unchanged() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-128, 128, (70, 100), generator=generator, dtype=torch.int8)
    matrix = GroupedMatrix(values, torch.rand(70, 1, generator=generator) + 0.1, None, 100, None, 8)
    packer = make_packer()
    x = torch.randn(5, 100, generator=generator).bfloat16()
    found = multiply(packer, packer.linear(matrix, None), x)
    expected = rounded(x, 100) @ matrix.dequantized().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_quantization_groups_cut_by_a_rank_become_smaller() -> None:
    """A rank has the inputs from 48 on, of groups of 32."""
    whole = draw(16, 96, 32)
    levels = Levels(whole.values, whole.scales, whole.zeros, None, 4)
    part = levels.part((2, 12), (48, 96)).grouped()
    assert part.group_size == 16 and part.order is None and part.shape == (10, 48)
    assert torch.equal(part.dequantized(), whole.dequantized()[2:12, 48:])
    shuffled = torch.arange(96).remainder(3)
    found = Levels(whole.values, whole.scales, whole.zeros, shuffled, 4)
    assert torch.equal(found.grouped().dequantized(), found.dequantized())
    assert found.grouped().group_size == 32 and found.grouped().order is not None
