"""Products with quantized matrices unpacked inside the kernel: levels, with scales for groups of inputs.

A group's levels minus its zero point are integers, or 8-bit or 4-bit floats, which half precision represents
exactly. The kernel multiplies these unscaled values, and scales the float32 sums group by group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import launch, power_of_two

_MAX_ROWS = 64  # rows of a tile


@jit()
def _multiply(
    x: Value, values: Value, scales: Value, zeros: Value, results: Value, num_rows: Value, num_outputs: Value,
    num_inputs: Value, x_row: Value, value_row: Value, num_groups: Value, group_size: Value,
    FOUR_BITS: constexpr, FLOAT4: constexpr, FLOAT8: constexpr, HAS_ZEROS: constexpr, ROWS: constexpr,
    OUTPUTS: constexpr, INPUTS: constexpr,
):  # fmt: skip
    """Compute a tile of the results. Grid: tiles of outputs, tiles of rows.

    INPUTS divides the size of a group. With 4 bits, INPUTS consecutive bytes contain INPUTS inputs in their lower
    halves and the next INPUTS inputs in their upper halves.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    of_rows = x + rows.to(tl.int64)[:, None] * x_row
    of_outputs = values + outputs.to(tl.int64)[None, :] * value_row
    inner = tl.arange(0, INPUTS)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for begin in range(0, num_inputs, INPUTS):
        inputs = begin + inner
        is_input = inputs < num_inputs
        if FOUR_BITS:
            is_upper = (begin // INPUTS) % 2
            place = (begin // INPUTS) // 2 * INPUTS + inner
            both = tl.load(of_outputs + place[:, None], mask=is_input[:, None] & is_output[None, :], other=0)
            bits = (both.to(tl.int32) >> (4 * is_upper)) & 15
            # Twice the value is an integer: the mantissa bit, plus 2 if exponent >= 1, shifted left by
            # exponent - 1.
            if FLOAT4:
                exponent = (bits >> 1) & 3
                least = tl.where(exponent == 0, 0, 2) + (bits & 1)
                size = (least << tl.maximum(exponent - 1, 0)).to(tl.float32) * 0.5
                levels = tl.where(bits >= 8, -size, size)
            else:
                levels = bits.to(tl.float32)
        else:
            stored = tl.load(
                of_outputs + inputs[:, None], mask=is_input[:, None] & is_output[None, :], other=0
            )
            if FLOAT8:  # read as float16 of 1/256 of the value, for processors without float8
                byte = stored.to(tl.int16)
                half = ((byte & 128) << 8) | ((byte & 127) << 7)
                levels = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
            else:
                levels = stored.to(tl.float32)
        group = outputs * num_groups + begin // group_size
        if HAS_ZEROS:
            levels -= tl.load(zeros + group, mask=is_output, other=0).to(tl.float32)[None, :]
        read = tl.load(of_rows + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        product = tl.dot(read, levels.to(read.dtype), input_precision="ieee")
        scale = tl.load(scales + group, mask=is_output, other=0)
        if FLOAT4:  # a power of 2 is the exponent's bits in float32, with a special case for 0
            power = scale.to(tl.int32)
            scale = tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True)
        total += product * scale[None, :]
    target = results + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, total.to(results.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def multiply(
    x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, bits: int, tile: int
) -> Tensor:
    """Return x times a matrix, [rows, outputs] in x's dtype.

    Args:
        x: [rows, inputs], the last dimension contiguous.
        values: [outputs, inputs] int8, uint8 or float8; with 4 bits uint8 [outputs, bytes], packed as in
            `_multiply`.
        scales: [outputs, groups] float32, contiguous; float8_e8m0fnu for 4-bit floats.
        zeros: [outputs, groups] uint8, contiguous; None: all are 0.
        group_size: Number of inputs of a group.
        bits: 4 or 8.
        tile: Number of inputs multiplied at a time: a power of two >= 16 that divides `group_size`; with a single
            group, any power of two >= 16.
    """
    num_rows, num_inputs = x.shape
    num_outputs, num_groups = scales.shape
    is_float4 = scales.dtype is torch.float8_e8m0fnu
    factors = scales.view(torch.uint8) if is_float4 else scales
    is_float8 = values.dtype is torch.float8_e4m3fn
    stored = values.view(torch.uint8) if is_float8 else values
    results = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    rows = min(_MAX_ROWS, max(16, power_of_two(num_rows)))
    outputs = 32 if num_rows <= 16 else 64
    if num_rows and num_outputs:
        launch(
            _multiply, (-(-num_outputs // outputs), -(-num_rows // rows)),
            x, stored, factors, factors if zeros is None else zeros, results, num_rows, num_outputs, num_inputs,
            x.stride(0), values.stride(0), num_groups, group_size,
            FOUR_BITS=bits == 4, FLOAT4=is_float4, FLOAT8=is_float8, HAS_ZEROS=zeros is not None,
            ROWS=rows, OUTPUTS=outputs, INPUTS=tile,
        )  # fmt: skip
    return results
