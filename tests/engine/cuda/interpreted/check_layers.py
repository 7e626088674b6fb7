"""Kernels between a layer's products, interpreted: the same results as torch's operators, for all sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.engine import load_decoder
from inflight.engine.attention.by_kernels import KernelAttention
from inflight.engine.attention.gathering import by_plain_products
from inflight.engine.cuda import row_kernels
from inflight.engine.cuda.kernels import (
    attention,
    layers,
    linear_attention,
    peaks,
    product,
    short_convolution,
)
from inflight.engine.cuda.kernels import quantize as float8_kernel
from inflight.engine.cuda.kernels.launching import launch
from inflight.engine.cuda.kernels.linear_attention import PIECE
from inflight.engine.cuda.kernels.peaks import KernelRowKernels
from inflight.engine.cuda.row_kernels import check_peaks_of, find_row_kernels
from inflight.engine.kv_cache import KvCache
from inflight.engine.kv_quantization import FP8_LEVELS, INT8_LEVELS, KvQuantization
from inflight.engine.layers import kernel_operations, layer_check, quantized_linear
from inflight.engine.layers.kernel_operations import (
    ACTIVATION,
    ADD_NORM,
    HEADS,
    LINEAR_ATTENTION,
    SHORT_CONVOLUTION,
    KernelLayerOperations,
)
from inflight.engine.layers.layer_check import (
    IsOff,
    check_operations,
    find_operations,
)
from inflight.engine.layers.layer_operations import LayerOperations
from inflight.engine.layers.quantized_linear import find_float8_quantizer, float8_reference, quantize_float8
from inflight.engine.packing import pack
from inflight.engine.quantize import quantize_int8
from inflight.engine.recurrent.operations import BY_TORCH
from inflight.models import DecoderConfig, read_model_description
from inflight.models.rope_config import RopeConfig
from inflight.models.sharding import Part
from inflight.sampling.nan_check import Peaks, find_peaks
from inflight.sampling.row_kernels import RowKernels
from tests.engine.driver import Driver, alone, load_engine
from tests.engine.paging import load_paged
from tests.models.zoo import Zoo

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-2}


def shapes() -> Iterator[Any]:
    """Yield parameters of a test: changes of a decoder, the dtype, and the quantization of the KV cache."""
    draw, changes = random.Random(0), {}
    for _ in range(14):
        kv_heads, head_dim = draw.choice([1, 2, 3]), draw.choice([8, 24, 64, 80])
        changes = {
            "num_heads": kv_heads * draw.choice([1, 2, 4, 7]),
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "ropes": (RopeConfig(1e4, partial_factor=draw.choice([0.5, 1.0])),) * 3,
            "hidden_size": draw.choice([7, 64, 100, 2048]),
            "intermediate_size": draw.choice([5, 64, 1500]),
            "activation": draw.choice(["silu", "gelu", "gelu_tanh", "relu"]),
            "qk_norm": draw.choice([None, "heads"]),
        }
        yield pytest.param(changes, draw.choice([torch.float32, torch.float16]), None)
    for name, quantization in (("int8", INT8_LEVELS), ("fp8", FP8_LEVELS)):
        yield pytest.param(changes, torch.float32, quantization, id=name)


def decoder_of(zoo: Zoo, case: str = "llama-gqa", **changes: Any) -> DecoderConfig:
    return replace(read_model_description(zoo[case].folder).decoder, **changes)


@pytest.mark.parametrize(("changes", "dtype", "quantization"), list(shapes()))
def test_results_are_those_of_torchs_operators(
    zoo: Zoo,
    changes: Any,
    dtype: torch.dtype,
    quantization: KvQuantization | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inflight.engine.layers.layer_check._ROWS", (1, 9))
    monkeypatch.setattr("inflight.engine.layers.layer_check._TOLERANCE", BOUNDS[dtype])
    decoder = decoder_of(zoo, **changes)
    operations = KernelLayerOperations(decoder)
    assert operations.parts == {ADD_NORM, HEADS, ACTIVATION}
    check_operations(operations, LayerOperations(decoder), dtype, CPU, quantization)


@pytest.mark.parametrize("quantization", [INT8_LEVELS, FP8_LEVELS])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 30.0])
def test_heads_are_rounded_to_8_bits_as_by_torch(
    zoo: Zoo, quantization: KvQuantization, spread: float
) -> None:
    """Rounding is bitwise torch's for numbers of all magnitudes, zeros and NaN."""
    decoder = replace(decoder_of(zoo, head_dim=24), num_layers=1)
    kv_heads, rows = decoder.num_kv_heads, 40
    draw = torch.Generator().manual_seed(3)
    sizes = torch.exp(spread * torch.randn((rows, 2 * kv_heads, 24), generator=draw).clamp(-0.3, 0.3))
    numbers = torch.randn(sizes.shape, generator=draw) * sizes
    numbers[1], numbers[2, 0, 3], numbers[3, 1, 4] = 0, torch.nan, -torch.inf
    keys, values = numbers.split(kv_heads, dim=1)
    queries = torch.zeros(rows, decoder.num_heads, 24)
    places = torch.randperm(rows, generator=draw)
    caches = [KvCache(decoder, 5, 8, torch.float32, CPU, quantization) for _ in range(2)]
    caches[0].write(0, places, keys, values)
    given = torch.cat((queries, keys, values), dim=1), decoder.num_heads, None, 1e-5, None, places
    layers.rotate_and_write(*given, caches[1].tokens(0), caches[1].scales(0))
    for expected, found in zip(caches[0].tokens(0), caches[1].tokens(0), strict=True):
        assert torch.equal(expected, found) and expected.count_nonzero() > rows
    for expected, found in zip(caches[0].scales(0) or (), caches[1].scales(0) or (), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert caches[1].gather(0, torch.arange(5))[0][places[2], 0].isnan().all()


def with_one_wrong_number(function: Any) -> Any:
    """Wrap a function so that one number of its first result is wrong."""

    def changed(*arguments: Any) -> Any:
        results = function(*arguments)
        first = results if isinstance(results, Tensor) else results[0]
        first[-1, -1] += 0.3
        return results

    return changed


@pytest.mark.parametrize("name", ["add_norm", "rotate_and_write", "gated_activation"])
def test_a_load_detects_each_wrong_or_raising_kernel(
    zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.engine.layers.layer_check._ROWS", (3,))
    decoder = decoder_of(zoo)
    given = KernelLayerOperations(decoder), LayerOperations(decoder), torch.float32, CPU
    check_operations(*given)
    monkeypatch.setattr(kernel_operations, name, with_one_wrong_number(getattr(layers, name)))
    with pytest.raises(IsOff, match=r"of 3 rows is wrong by 0\.3"):
        check_operations(*given)
    monkeypatch.setattr(kernel_operations, name, lambda *_: 1 / 0)
    with pytest.raises(IsOff, match="division"):
        check_operations(*given)


def test_the_check_at_load_reads_what_a_kernel_stores_in_the_cache(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.engine.layers.layer_check._ROWS", (3,))
    decoder = decoder_of(zoo)

    def misplace(*arguments: Any) -> Any:
        *others, places, caches, scales = arguments
        return layers.rotate_and_write(*others, (places + 1) % 3, caches, scales)

    monkeypatch.setattr(kernel_operations, "rotate_and_write", misplace)
    for quantization in (None, INT8_LEVELS, FP8_LEVELS):
        given = KernelLayerOperations(decoder), LayerOperations(decoder), torch.float32, CPU, quantization
        with pytest.raises(IsOff, match=r"keys in the cache, .* of 3 rows"):
            check_operations(*given)


def test_a_wrong_kernel_alone_is_left_out_and_logged(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU simulates a GPU that kernels are chosen for."""
    decoder, gpu = decoder_of(zoo), torch.device("cuda")
    monkeypatch.setattr(layer_check, "_ROWS", (3,))
    for module, name in ((layer_check, "check_operations"), (row_kernels, "check_peaks_of")):
        on_the_cpu = partial(
            lambda check, *given: check(*(CPU if each == gpu else each for each in given)),
            getattr(module, name),
        )
        monkeypatch.setattr(module, name, on_the_cpu)
    found = find_operations(decoder, torch.float32, gpu)
    assert isinstance(found, KernelLayerOperations) and found.parts == {ADD_NORM, HEADS, ACTIVATION}
    assert isinstance(find_row_kernels(300, gpu), KernelRowKernels) and not caplog.records

    monkeypatch.setattr(kernel_operations, "add_norm", with_one_wrong_number(layers.add_norm))
    monkeypatch.setattr(kernel_operations, "gated_activation", lambda *_: 1 / 0)
    monkeypatch.setattr(peaks, "find_peaks", lambda logits: Peaks(logits[:, 0], logits[:, 0].long()))
    found = find_operations(decoder, torch.float32, gpu)
    assert isinstance(found, KernelLayerOperations) and found.parts == {HEADS}
    assert type(find_row_kernels(300, gpu)) is RowKernels
    first, second, third = caplog.messages
    assert "kernel for activation is not used" in first and "division" in first
    assert "kernel for sum and norm is not used" in second and "wrong by 0.3" in second
    assert "kernel for the highest logit is not used" in third


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("llama-gqa", {ADD_NORM, HEADS, ACTIVATION}),
        ("qwen3", {ADD_NORM, HEADS, ACTIVATION}),
        ("gemma2", {ADD_NORM, HEADS, ACTIVATION}),
        ("gpt2", {ADD_NORM, HEADS}),
        ("granite", {HEADS, ACTIVATION}),
        ("gpt-oss", {ADD_NORM, HEADS}),
        ("deepseek-v3", {ADD_NORM, ACTIVATION}),
    ],
)
def test_tokens_equal_those_of_the_model(zoo: Zoo, case: str, parts: set[str]) -> None:
    """Parts for which there is a kernel use it; the others use torch."""
    model = zoo[case]
    operations = KernelLayerOperations(decoder_of(zoo, case))
    assert operations.parts == parts
    attention = by_plain_products(decoder_of(zoo, case))
    driver = Driver(
        load_paged(model.folder, attention=attention, operations=operations, row_kernels=KernelRowKernels())
    )
    rows = [driver.start(model.prompt(5 + 4 * number, number)) for number in range(2)]
    driver.step({rows[0]: 5})
    driver.step({rows[1]: 9}, rows[:1])
    for _ in range(5):
        driver.step(generation=rows)
    for row in rows:
        assert row.generated == model.greedy(row.tokens[: row.prompt_length], len(row.generated))


@pytest.mark.parametrize("case", ["qwen3.5", "granite-hybrid", "kimi-linear", "lfm2"])
def test_tokens_of_recurrent_layers_equal_those_of_the_model(
    zoo: Zoo, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two chunks beside another sequence's generation."""
    monkeypatch.setattr(load_decoder, "find_operations", lambda held, *_: KernelLayerOperations(held))
    model = zoo[case]
    engine = load_engine(model.folder, dtype="float32", kernels="torch", max_num_sequences=2)
    parts = engine.runner.decoder._operations.parts
    assert SHORT_CONVOLUTION in parts and (LINEAR_ATTENTION in parts or case == "lfm2")
    driver = Driver(engine)
    rows = [driver.start(model.prompt(length, length)) for length in (5, 2 * PIECE + 7)]
    driver.step({rows[0]: 5})
    driver.step({rows[1]: PIECE + 3}, rows[:1])
    driver.step({rows[1]: PIECE + 4}, rows[:1])
    for _ in range(4):
        driver.step(generation=rows)
    for row in rows:
        assert row.generated == model.greedy(row.tokens[: row.prompt_length], len(row.generated))


class Launches(TorchDispatchMode):
    """Counts a GPU's launches: our kernels, and torch's operators except views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._is_inside = False
        for module in (attention, layers, product):
            monkeypatch.setattr(module, "launch", self._launch)

    def _launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        self.names.append(kernel.fn.__name__)
        self._is_inside = True
        launch(kernel, *arguments, **constants)
        self._is_inside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in function._schema.returns]
        is_view = all(alias is not None and not alias.is_write for alias in returned)
        if not (self._is_inside or is_view or "empty" in str(function)):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("with_kernels", "count"), [(True, 10), (False, 17)])
def test_a_layer_takes_the_documented_number_of_launches(
    zoo: Zoo, with_kernels: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count a layer's kernel launches, as the difference that one layer makes.

    In float32; in half precision torch's rotation has two more, for conversions.
    """
    model = zoo["llama-gqa"]
    decoder = decoder_of(zoo)
    totals = []
    for num_layers in (1, 2):
        engine = load_paged(
            model.folder,
            attention=KernelAttention(decoder),
            operations=KernelLayerOperations(decoder) if with_kernels else None,
            part=Part(Part.whole(decoder).shard, (0, num_layers), True, True),
        )
        driver = Driver(engine)
        row = driver.start(model.prompt(5))
        driver.step({row: 5})
        packed = pack(driver.batch({}, [row]), engine.runner.slots)
        with torch.inference_mode(), Launches(monkeypatch) as launches:
            engine.runner.decoder.forward(packed, engine.runner.cache)
        totals.append(len(launches.names))
    assert totals[1] - totals[0] == count


@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(3, 16, 24), (2, 128, 128), (4, 12, 40)])
@pytest.mark.parametrize("num_tokens", [1, 2, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE - 3])
@pytest.mark.parametrize("has_beta", [False, True])
def test_linear_attention_equals_that_of_torch(
    heads: int, key_dim: int, value_dim: int, num_tokens: int, has_beta: bool
) -> None:
    draw = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    keys = torch.nn.functional.normalize(normal(num_tokens, heads, key_dim), dim=-1)
    keys[num_tokens // 2 :] = keys[0]  # equal keys make the triangular system as hard as it can be
    queries, values = normal(num_tokens, heads, key_dim), normal(num_tokens, heads, value_dim)
    beta = torch.rand((num_tokens, heads), generator=draw) if has_beta else None
    log_decay = -normal(num_tokens, heads).abs()
    by_dimension = -normal(num_tokens, heads, key_dim).abs()
    state, states = normal(heads, key_dim, value_dim), normal(num_tokens, heads, key_dim, value_dim)
    for kernel, function, given in (
        (linear_attention.scan, BY_TORCH.scan, (log_decay, beta, state)),
        (linear_attention.step, BY_TORCH.step, (log_decay, beta, states)),
        (linear_attention.step, BY_TORCH.step, (by_dimension, beta, states)),
    ):
        found = kernel(queries, keys, values, *given)
        expected = function(queries, keys, values, *given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("columns", "width"), [(7, 1), (200, 3), (129, 4), (128, 5)])
@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(1, 2), (1, 16), (1, 50), (5, 1), (3, 3)])
def test_short_convolutions_equal_those_of_torch(
    num_sequences: int, num_tokens: int, columns: int, width: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(num_tokens)
    rows = torch.randn((num_sequences, num_tokens, columns + 9), generator=draw).to(dtype)
    states = torch.randn((num_sequences, width - 1, columns), generator=draw).to(dtype)
    weights = torch.randn((columns, width), generator=draw)
    for bias in (None, torch.randn(columns, generator=draw)):
        given = rows[..., 4 : columns + 4], states, weights, bias
        found, new_states = short_convolution.convolve(*given)
        expected, expected_states = BY_TORCH.convolve(*given)
        assert found.dtype == dtype and torch.equal(new_states, expected_states)
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUNDS[dtype])


def test_a_load_detects_a_wrong_short_convolution(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.engine.layers.layer_check._ROWS", (3,))
    decoder = decoder_of(zoo, "lfm2")
    convolve = short_convolution.convolve
    given = LayerOperations(decoder), torch.float32, CPU
    check_operations(KernelLayerOperations(decoder), *given)
    monkeypatch.setattr(short_convolution, "convolve", lambda *each: convolve(*each[:3], None))
    with pytest.raises(IsOff, match="short convolution of a prompt of 3 rows is wrong"):
        check_operations(KernelLayerOperations(decoder), *given)


@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097, 20_000])
def test_peaks_are_the_first_highest_logits(size: int) -> None:
    check_peaks_of(KernelRowKernels(), size, CPU)
    logits = torch.randint(0, 50, (7, size)).float()
    found, expected = peaks.find_peaks(logits), find_peaks(logits)
    assert torch.equal(found.highest, expected.highest)
    assert found.tokens.tolist() == np.argmax(logits.numpy(), axis=-1).tolist(), "of equal ones the first"
    assert len(peaks.find_peaks(logits[:0]).tokens) == 0


def test_a_row_with_nan_has_a_nan_peak() -> None:
    logits = torch.randn(2, 9000)
    logits[0, 8191] = torch.nan
    logits[0, 17] = torch.inf
    found = peaks.find_peaks(logits)
    assert found.highest[0].isnan() and found.tokens[0] == 8191 and found.highest[1].isfinite()
    with pytest.raises(IsOff, match="tokens with the highest"):
        check_peaks_of(_LastOfEqual(), 100, CPU)


class _LastOfEqual(KernelRowKernels):
    def find_peaks(self, logits: Tensor) -> Any:
        found = super().find_peaks(logits.flip(1))
        return found._replace(tokens=logits.shape[1] - 1 - found.tokens)


@pytest.mark.parametrize("size", [7, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float8_rounding_equals_that_of_torch_for_most_numbers(size: int, dtype: torch.dtype) -> None:
    """The interpreter (triton 3.7) halves some results of rounding up to a power of two, among other errors."""
    x = torch.randn((9, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    x[3], x[4] = 0, x[4] / 1000
    levels, scales = float8_kernel.quantize_float8(x, 1e-30)
    expected, expected_scales = quantize_float8(x)
    assert torch.equal(scales, expected_scales)
    assert (levels.float() == expected.float()).float().mean() > 0.9


def test_a_rounding_kernel_with_other_levels_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert find_float8_quantizer(CPU, torch.float32) is quantize_float8, (
        "the interpreted kernel rounds differently"
    )
    assert "kernel for float8 quantization is not used" in caplog.text


def test_a_rounding_kernel_with_the_same_levels_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_kernel, "quantize_float8", lambda x, min_scale: quantize_float8(x))
    found = find_float8_quantizer(CPU, torch.float32)
    assert found is not quantize_float8 and torch.equal(found(torch.ones(2, 3))[1], torch.full((2,), 1 / 448))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs"),
    [(1, 70, 300), (16, 32, 256), (17, 33, 130), (64, 65, 7), (65, 129, 64), (129, 3, 200)],
)
def test_int8_products_are_right_at_edges_of_tiles(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Products are correct at edges of tiles, and do not read memory after a row of activations."""
    draw = torch.Generator().manual_seed(num_rows)
    levels, scales = quantize_int8(torch.randn((outputs, inputs), generator=draw))
    wide = torch.full((num_rows, inputs + 9), torch.nan, dtype=dtype)
    x = wide[:, :inputs]
    x[:] = torch.randn((num_rows, inputs), generator=draw).to(dtype)
    found = product.int8_product(x, levels, scales)
    exact = x.double() @ (levels.double() * scales.double()[:, None]).T
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert found.dtype is dtype and error < (1e-6 if dtype is torch.float32 else 1e-3)
    assert product.int8_product(x[:0], levels, scales).shape == (0, outputs)


def test_an_int8_product_takes_one_launch_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few outputs and rows, several programs share a sum, and a second launch adds the parts."""
    for num_rows, outputs, added in ((3, 40, ["_add_parts"]), (33, 40, []), (3, 8200, [])):
        x, (levels, scales) = torch.randn(num_rows, 64), quantize_int8(torch.randn(outputs, 64))
        with Launches(monkeypatch) as launches:
            product.int8_product(x, levels, scales)
        assert launches.names == ["_multiply_levels", *added]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs"),
    [(1, 70, 300), (16, 32, 512), (17, 33, 1030), (32, 8200, 40), (5, 3, 7)],
)
def test_float8_products_equal_those_of_torch(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(num_rows)
    levels, scales = quantize_float8(torch.randn((outputs, inputs), generator=draw))
    x = torch.randn((num_rows, inputs), generator=draw).to(dtype)
    found = product.float8_product(*quantize_float8(x), levels, scales, dtype)
    exact = float8_reference(x.float(), levels, scales)
    error = (found.float() - exact).abs().max() / exact.abs().max()
    assert found.dtype is dtype and error < (1e-6 if dtype is torch.float32 else 1e-3)


def test_an_int8_row_is_the_same_alone_and_among_others() -> None:
    """Rows are bitwise equal with tiles of the same number of inputs; a row with NaN does not affect others."""
    levels, scales = quantize_int8(torch.randn(40, 300))
    x = torch.randn(16, 300)
    together = product.int8_product(x, levels, scales)
    for row in (0, 7, 15):
        assert torch.equal(product.int8_product(x[row : row + 1], levels, scales)[0], together[row])
    x[3] = torch.nan
    found = product.int8_product(x, levels, scales)
    assert found[3].isnan().all() and torch.equal(found[4:], together[4:])


def test_int8_weights_use_the_kernel_and_give_torchs_tokens(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading accepts the kernel and uses it for every matrix, as on a GPU."""
    monkeypatch.setattr(quantized_linear, "find_int8_product", lambda device: product.int8_product)
    monkeypatch.setattr(load_decoder, "computed_dtype", lambda config, model: torch.float32)
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, dtype="int8", kernels="torch")
    layer = engine.runner.decoder.weights.layers[0]
    assert all(
        each.product is product.int8_product for each in (layer.qkv, layer.output, layer.up, layer.down)
    )
    monkeypatch.setattr(quantized_linear, "find_int8_product", lambda device: None)
    others = load_engine(model.folder, dtype="int8", kernels="torch")
    rows = [alone(each, model.prompt(20), 4) for each in (engine, others)]
    torch.testing.assert_close(*(torch.stack(row.logits) for row in rows), rtol=0, atol=1e-4)
    assert rows[0].generated == rows[1].generated
