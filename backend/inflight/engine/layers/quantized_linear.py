"""Linear layers with int8 or float8 weights on the device, for torch's operators.

Every row of a weight has a float32 scale, computed when the matrix is read from the checkpoint. int8 weights are
multiplied with activations that are not quantized, on a GPU by a kernel in Triton's language. For float8,
activations are quantized, with a scale per row, and torch's own operator multiplies. Each product is tried once
per shape when the model is loaded; if its results are wrong on the device, weights are converted to the
activations' dtype for every product.

Created on the loading thread; the layers are called on the loop thread.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.engine.quantize import FLOAT8, RowQuantizer, quantize_float8
from inflight.models.decoder_weights import Linear
from inflight.shared_constants import MIN_SCALE

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of x [rows, in], levels [out, in] and scales [out] float32, which returns the product [rows, out] in
x's dtype."""

FLOAT8_MULTIPLE = 16
"""GPUs multiply float8 matrices whose numbers of outputs and inputs are multiples of this."""

_log = logging.getLogger(__name__)
_TRIED_ROWS = (1, 17, 33, 65, 129)
_TRIED_OUTPUTS = 64
# Relative to the largest result: bfloat16 has errors of 0.004, and a wrong operator has much larger ones.
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear(Linear):
    """A `Linear` whose `weight` is int8 or float8_e4m3fn levels: row i stands for weight[i] * scales[i].

    It may also be a stack of experts, with an additional first axis on weight, scales and bias.

    Attributes:
        scales: [out] float32.
        computed: Data type of inputs and outputs.
        product: Computes the matrix product.
    """

    scales: Tensor
    computed: torch.dtype
    product: Product

    @property
    def dtype(self) -> torch.dtype:
        return self.computed

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight, self.scales)
        return y if self.bias is None else y.add_(self.bias)

    def at(self, index: int) -> Linear:
        bias = None if self.bias is None else self.bias[index]
        return replace(self, weight=self.weight[index], scales=self.scales[index], bias=bias)

    def dequantized(self) -> Tensor:
        """Return the dequantized weight, float32."""
        return self.weight.float() * self.scales[..., None]


class Products:
    """Finds the fastest correct product for int8 and float8 matrices with a scale per row.

    Args:
        computed: Data type of activations.
        device: The model's device.
    """

    def __init__(self, computed: torch.dtype, device: torch.device) -> None:
        self._computed, self._device = computed, device
        self._found: dict[tuple[torch.dtype, torch.Size], Product] = {}
        self._quantize: RowQuantizer = quantize_float8  # of activations

    @cached_property
    def why_no_float8(self) -> str:
        """The reason why the device does not multiply float8; empty if it does."""
        if self._device.type != "cuda":
            return "only GPUs do"
        probe = quantize_float8(torch.eye(FLOAT8_MULTIPLE, device=self._device))
        reason = self._try(self._float8_product, *probe)
        if not reason:
            self._quantize = find_float8_quantizer(self._device, self._computed)
        return reason

    def find(self, levels: Tensor, scales: Tensor) -> Product:
        """Return the product for matrices of this shape and dtype."""
        form = levels.dtype, levels.shape
        if form not in self._found:
            self._found[form] = self._find(levels, scales)
        return self._found[form]

    def _find(self, levels: Tensor, scales: Tensor) -> Product:
        """Return the first product that is correct on this device."""
        reasons: list[str] = []
        for product in self._fast_products(levels.dtype):
            if reason := self._try(product, levels, scales):
                reasons.append(reason)
            else:
                return product
        if reasons or self._device.type != "cpu":
            _log.warning(
                "%s matrices of %d x %d are converted to %s for every product, which is slower: the product "
                "of quantized matrices cannot be used here: %s",
                FP8 if levels.dtype is FLOAT8 else INT8,
                *levels.shape,
                str(self._computed).removeprefix("torch."),
                reasons[-1] if reasons else "the package triton is not installed",
            )
        return _reference(levels.dtype)

    def _fast_products(self, dtype: torch.dtype) -> list[Product]:
        """Return the fast products for levels of a dtype, the fastest first."""
        if dtype is not FLOAT8:
            found = find_int8_product(self._device)
            return [] if found is None else [found]
        if self._device.type == "cpu" or importlib.util.find_spec("triton") is None:
            return [self._float8_product]
        return [self._float8_product_of_any_rows, self._float8_product]

    def _float8_product_of_any_rows(self, x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
        """Multiply few rows by a kernel in Triton's language, and more by torch's operator."""
        from inflight.engine.cuda.kernels.product import FEW_ROWS, float8_product  # imports triton

        if len(x) > FEW_ROWS:
            return self._float8_product(x, levels, scales)
        rounded, row_scales = self._quantize(x)
        return float8_product(rounded, row_scales, levels, scales, x.dtype)

    def _float8_product(self, x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
        rounded, row_scales = self._quantize(x)
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]  the only float8 product
            rounded, levels.t(), scale_a=row_scales[:, None], scale_b=scales[None], out_dtype=x.dtype
        )

    def _try(self, product: Product, levels: Tensor, scales: Tensor) -> str:
        """Return the reason why a product cannot be used for such a matrix; empty if it can. The trial computes
        the matrix's first and last outputs."""
        reference = _reference(levels.dtype)
        count, inner = levels.shape
        tried = torch.arange(count, device=self._device)
        tried = torch.cat([tried[:_TRIED_OUTPUTS], tried[-_TRIED_OUTPUTS:]])
        generator = torch.Generator().manual_seed(0)
        for rows in _TRIED_ROWS if count else ():  # a rank may have no part of the vocabulary
            x = torch.randn((rows, inner), generator=generator).to(self._device, self._computed)
            try:
                found = product(x, levels, scales)[:, tried].float()
            except Exception as error:  # an unsupported kernel may raise anything
                return str(error).split("\n")[0]
            exact = reference(x.float(), levels.view(torch.int8)[tried].view(levels.dtype), scales[tried])
            error = (found - exact).abs().max().item()
            if not error <= _TOLERANCE * exact.abs().max().item():
                return f"its results of {rows} rows are wrong by {error:.3g}"
        return ""


def dequantizing_product(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """A `Product` by a matrix product in x's dtype, which represents every int8 level exactly."""
    return (F.linear(x, levels.to(x.dtype)).float() * scales).to(x.dtype)


def float8_reference(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """A `Product` that quantizes x as for the hardware's float8 product, and multiplies in float32."""
    rounded, row_scales = quantize_float8(x)
    return (F.linear(rounded.float(), levels.float()) * row_scales[:, None] * scales).to(x.dtype)


def find_int8_product(device: torch.device) -> Product | None:
    """Return the kernel in Triton's language; None on a CPU, or if the package `triton` is not installed."""
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return None
    from inflight.engine.cuda.kernels.product import int8_product  # imports triton

    return int8_product


def find_float8_quantizer(device: torch.device, dtype: torch.dtype) -> RowQuantizer:
    """Return a kernel that quantizes to float8 in one launch; `quantize_float8`, with seven, if it is not
    correct."""
    if importlib.util.find_spec("triton") is None:
        return quantize_float8
    from inflight.engine.cuda.kernels import quantize as kernels  # imports triton

    draw = torch.Generator(device).manual_seed(0)
    for shape in ((1, 4096), (65, 7), (3, 2048)):
        x = torch.randn(shape, generator=draw, device=device).to(dtype)
        x[-1, 0] = 1000
        expected = quantize_float8(x)
        try:
            found = kernels.quantize_float8(x, MIN_SCALE)
            is_right = all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
            reason = "" if is_right else f"its results of {shape[0]} rows differ"
        except Exception as error:  # an unsupported kernel may raise anything
            reason = str(error).split("\n")[0]
        if reason:
            _log.warning(
                "the kernel for float8 quantization is not used, torch's operators replace it: %s", reason
            )
            return quantize_float8
    return partial(kernels.quantize_float8, min_scale=MIN_SCALE)


def _reference(dtype: torch.dtype) -> Product:
    return float8_reference if dtype is FLOAT8 else dequantizing_product
