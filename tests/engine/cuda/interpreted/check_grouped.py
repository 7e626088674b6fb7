"""The kernel for quantized matrices, interpreted: the same as torch's product by the dequantized ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inflight.engine.layers.grouped_linear import GroupedLinear, pack, tile_of, why_not
from inflight.engine.layers.torch_sink import TorchSink
from inflight.models.levels import FLOAT4, GroupedMatrix
from tests.engine.layers.test_kept_levels import draw

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}
SHAPES = [(40, 96, 32), (8, 96, 16), (33, 100, 100), (64, 256, 128), (70, 192, 64), (5, 48, 48)]


def module(matrix: GroupedMatrix, dtype: torch.dtype) -> GroupedLinear:
    made = TorchSink(dtype, CPU).linear(matrix)
    assert isinstance(made, GroupedLinear)
    if matrix.is_float4:  # as on a GPU
        tile = tile_of(matrix.group_size, matrix.scales.shape[1])
        made = replace(made, weight=pack(matrix.values, tile), tile=tile)
    return replace(made, has_kernel=True)


@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "int8", "uint8-zeros", "float8", "float4"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_products_are_those_of_torch(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    matrix = draw(kind, *shape, shuffled=shape[2] == 32)
    linear, generator = module(matrix, dtype), torch.Generator().manual_seed(0)
    for rows in (1, 3, 17, 70):
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        exact = F.linear(x.float(), matrix.dequantized())
        found = linear(x)
        assert found.dtype is dtype and found.shape == exact.shape
        assert (found.float() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()
    assert linear(x[:0]).shape == (0, shape[0])


def test_every_float8_is_exact() -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(16, 16)
    bits[(bits & 127) == 127] = 0  # NaN
    levels = bits.view(torch.float8_e4m3fn)
    linear = module(GroupedMatrix(levels, torch.ones(16, 1), None, 16, None, 8), torch.float32)
    assert torch.equal(linear(torch.eye(16)), levels.float().T)


def test_every_4_bit_float_is_exact_with_every_scale() -> None:
    """value = float * 2 ** (scale - 127), for all scales with which the largest float is finite."""
    count = 253
    scales = torch.arange(count, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()[:, None]
    values = torch.arange(16, dtype=torch.uint8).repeat(count, 2)
    linear = module(GroupedMatrix(values, scales, None, 32, None, 4, is_float4=True), torch.float32)
    powers = 2.0 ** (torch.arange(count, dtype=torch.float64) - 127)
    exact = torch.tensor(FLOAT4, dtype=torch.float64).repeat(2)[:, None] * powers
    assert torch.equal(linear(torch.eye(32)), exact.float())


def test_strided_rows_and_a_bias_give_torchs_product() -> None:
    linear = replace(module(draw("int4", 40, 96, 32), torch.float32), bias=torch.randn(40))
    wide = torch.randn(6, 200)
    expected = F.linear(wide[:, 3:99], linear.dequantized(), linear.bias)
    torch.testing.assert_close(linear(wide[:, 3:99]), expected, rtol=1e-5, atol=1e-4)


def test_the_check_at_load_reports_wrong_results_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = module(draw("int4", 40, 96, 32), torch.float32)
    assert why_not(linear, CPU) == ""
    from inflight.engine.cuda.kernels import grouped

    right = grouped.multiply

    def wrong(*arguments: Any) -> torch.Tensor:
        result = right(*arguments)
        result[-1, -1] += 0.1 * result.abs().max()
        return result

    monkeypatch.setattr(grouped, "multiply", wrong)
    assert "its results of 1 rows are wrong by" in why_not(linear, CPU)

    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(grouped, "multiply", broken)
    assert why_not(linear, CPU) == "out of resource: shared memory"


def test_a_wrong_grouped_kernel_is_left_out_with_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from inflight.engine.layers import torch_sink

    sink = TorchSink(torch.float32, CPU)
    monkeypatch.setattr(torch_sink, "why_not", lambda *_: "it is off")
    matrix = draw("int4", 40, 96, 32)
    one = module(matrix, torch.float32)
    sink.device = torch.device("cuda")  # no tensor of this test is on it
    assert [sink._has_kernel(matrix, one) for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert "matrices of 40 x 96 in 4 bits are unpacked by torch's operators" in record.getMessage()
    monkeypatch.setattr(torch_sink, "why_not", lambda *_: "")
    assert sink._has_kernel(draw("int8", 40, 96, 32), one)
