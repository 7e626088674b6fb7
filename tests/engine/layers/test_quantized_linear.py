"""int8 and fp8 weights with torch's operators, against transformers' models with equally rounded matrices."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.engine import load_decoder
from inflight.engine.engine import ModelEngine
from inflight.engine.layers import quantized_linear
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.grouped_linear import GroupedLinear
from inflight.engine.layers.quantized_linear import (
    Products,
    QuantizedLinear,
    find_int8_product,
    quantize_float8,
)
from inflight.engine.layers.torch_sink import TorchSink
from inflight.engine.quantize import quantize_matrix
from inflight.errors import ConfigError
from inflight.models.decoder_weights import PlainWeights
from tests.engine.driver import Driver, alone, load_engine
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CPU = torch.device("cpu")
KINDS = ["int8", "fp8"]
MOST = {"int8": 127.0, "fp8": 448.0}


def rounded(kind: str, values: Tensor) -> Tensor:
    """Return float32 rows [..., n] rounded to the format, with a scale for each row."""
    scales = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / MOST[kind]
    levels = values / scales
    levels = levels.round() if kind == "int8" else levels.to(torch.float8_e4m3fn).float()
    return levels * scales


def rounded_oracle(model: ZooModel, kind: str) -> Any:
    """Return transformers' model; its linear layers have rounded weights, and for fp8 rounded inputs."""
    oracle = copy.deepcopy(model.oracle)
    for module in oracle.modules():
        weight = getattr(module, "weight", None)
        is_conv = type(module).__name__ == "Conv1D"  # of gpt2: [in, out]
        if not (isinstance(module, nn.Linear) or is_conv) or weight is None:
            continue
        exact = weight.detach().T if is_conv else weight.detach()
        levels = rounded(kind, exact)
        module.weight = nn.Parameter((levels.T if is_conv else levels).contiguous())
        if kind == "fp8":
            module.register_forward_pre_hook(lambda _, inputs: (rounded("fp8", inputs[0]), *inputs[1:]))
    return oracle


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines compute in float32, so that only the quantization differs from the oracle."""
    monkeypatch.setattr(load_decoder, "computed_dtype", lambda config, model: torch.float32)


def weights_of(engine: ModelEngine) -> PlainWeights:
    decoder = engine.runner.decoder
    assert isinstance(decoder, Decoder)
    return decoder.weights


def load_quantized(model: ZooModel, kind: str, **changes: Any) -> ModelEngine:
    engine = load_engine(model.folder, dtype=kind, kernels="torch", **changes)
    assert isinstance(weights_of(engine).layers[0].qkv, QuantizedLinear)
    return engine


@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "llama-gqa-tied", "qwen3", "gpt2"], ["llama-gqa-tied", "gpt2"])
)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_the_dequantized_weights(
    zoo: Zoo, case: str, kind: str, in_float32: None
) -> None:
    """An fp8 input that differs by 1e-7 may be rounded to the next level: its row may then exceed 1e-4."""
    model = zoo[case]
    row = alone(load_quantized(model, kind), model.prompt(30), 12)
    oracle = rounded_oracle(model, kind)
    exact = oracle(torch.tensor([row.tokens])).logits[0][29:-1]
    errors = (torch.stack(row.logits) - exact).abs().amax(-1)
    if kind == "int8":
        assert errors.max() <= 1e-4
    else:
        assert errors.median() <= 0.05 * exact.std() and errors.max() <= 0.3 * exact.std()
    unrounded = model.logits(row.tokens)[29:-1]
    assert (unrounded - exact).abs().max() > 3 * errors.max(), "rounding is what is seen"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(48, 64), (33, 50), (1, 16), (16, 7)])
def test_a_product_is_that_of_the_dequantized_weight(kind: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    weight[0] *= 100
    linear = TorchSink(torch.float32, CPU, kind).linear(weight.clone(), bias)
    assert isinstance(linear, QuantizedLinear) and linear.dtype is torch.float32
    torch.testing.assert_close(linear.dequantized(), rounded(kind, weight), rtol=1e-6, atol=1e-6)
    x = torch.randn(9, shape[1], generator=generator)
    x[3] = 0
    taken = rounded("fp8", x) if kind == "fp8" else x
    expected = F.linear(taken.double(), linear.dequantized().double(), bias.double()).float()
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear(x[4:5]), expected[4:5], rtol=1e-5, atol=1e-4)
    assert linear(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_nan_does_not_affect_other_rows(kind: str) -> None:
    linear = TorchSink(torch.bfloat16, CPU, kind).linear(torch.randn(32, 64).bfloat16())
    x = torch.randn(6, 64).bfloat16()
    expected = linear(x)
    x[2, 5], x[4, 0] = torch.nan, torch.inf
    found = linear(x)
    assert found[2].isnan().all()
    for row in (0, 1, 3, 5):
        assert torch.equal(found[row], expected[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", with_all(["llama-gqa", "mixtral"], ["mixtral"]))
def test_tokens_do_not_depend_on_the_batch(zoo: Zoo, case: str, kind: str, in_float32: None) -> None:
    model = zoo[case]
    engine = load_quantized(model, kind)
    prompts = [model.prompt(5 + 6 * number, number) for number in range(4)]
    singles = [alone(engine, prompt, 6).generated for prompt in prompts]
    driver = Driver(engine)
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step({row: len(row.tokens) for row in rows})
    for _ in range(5):
        driver.step(generation=rows)
    assert [row.generated for row in rows] == singles


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3"])
def test_experts_are_quantized_but_not_routers_and_latent_projections(zoo: Zoo, case: str, kind: str) -> None:
    """Every expert's matrix is quantized; routers and the inner projections of latent attention are not."""
    model = zoo[case]
    weights = weights_of(load_quantized(model, kind))
    stacks = [layer.experts for layer in weights.layers if layer.experts is not None]
    assert stacks
    for experts in stacks:
        assert isinstance(experts.up, QuantizedLinear) and isinstance(experts.down, QuantizedLinear)
        assert experts.up.weight.dim() == 3 and experts.up.weight.element_size() == 1
        assert experts.router.weight.dtype.is_floating_point
        one = experts.up.at(1)
        assert isinstance(one, QuantizedLinear)
        assert torch.equal(one.dequantized(), experts.up.dequantized()[1])
    for layer in weights.layers:
        assert layer.latent is None or layer.latent.kv_up.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_8_bit_operator_weights_are_multiplied_as_float32(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, x = torch.randn(64, 128), torch.randn(7, 128)
    expected = TorchSink(torch.float32, CPU, kind).linear(weight.clone())(x)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not here\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    monkeypatch.setattr(quantized_linear, "find_int8_product", lambda device: refuse)
    with caplog.at_level(logging.WARNING):
        found = TorchSink(torch.float32, CPU, kind).linear(weight.clone())(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert f"{kind} matrices of 64 x 128 are converted to float32 for every product" in caplog.text
    assert caplog.text.rstrip().endswith("not here")


def test_an_8_bit_operator_with_wrong_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = quantized_linear.dequantizing_product

    def last_outputs_first(*given: Tensor) -> Tensor:
        return right(*given).roll(1, 1)

    weight, x = torch.randn(64, 128), torch.randn(7, 128)
    for tried, is_used in ((last_outputs_first, False), (lambda *given: right(*given), True)):
        caplog.clear()
        monkeypatch.setattr(quantized_linear, "find_int8_product", lambda device, tried=tried: tried)
        linear = TorchSink(torch.float32, CPU, "int8").linear(weight.clone())
        assert isinstance(linear, QuantizedLinear) and (linear.product is tried) == is_used
        assert ("its results of 1 rows are wrong by" in caplog.text) != is_used
        torch.testing.assert_close(linear(x), F.linear(x, rounded("int8", weight)), rtol=1e-5, atol=1e-4)


def test_a_missing_triton_package_is_logged_for_int8_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU a missing package is logged; on a CPU the package is not needed."""
    gpu = torch.device("cuda")
    assert find_int8_product(CPU) is None and find_int8_product(gpu) is not None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_int8_product(gpu) is None
    levels, scales = torch.zeros((4, 8), dtype=torch.int8), torch.ones(4)
    for device, is_said in ((CPU, False), (gpu, True)):
        product = Products(torch.bfloat16, device).find(levels, scales)
        assert product is quantized_linear.dequantizing_product
        assert ("triton is not installed" in caplog.text) == is_said


def test_a_processor_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Products, "_try", lambda *_: "only for later ones")
    monkeypatch.setattr(torch, "eye", lambda count, device: torch.ones(count, count))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(
        ConfigError, match=r"dtype is fp8, which torch .* does not multiply on Some GPU \(only"
    ):
        TorchSink(torch.bfloat16, torch.device("cuda"), "fp8")
    TorchSink(torch.bfloat16, torch.device("cuda"), "int8")


def test_fp8_is_refused_for_compiled_layers_and_computed_by_torch(zoo: Zoo) -> None:
    with pytest.raises(
        ConfigError,
        match=r"kernels is native, .*: compiled layers do not support fp8",
    ):
        load_engine(zoo["llama"].folder, dtype="fp8", kernels="native")
    assert load_engine(zoo["llama"].folder, dtype="fp8").kernels == "torch"


@pytest.mark.parametrize(
    ("shape", "is_by_row"), [((80, 1008), True), ((80, 1000), False), ((50, 1008), False), ((16, 16), True)]
)
@pytest.mark.parametrize("weight_dtype", ["fp8", None])
def test_a_gpu_that_multiplies_float8_does_not_get_other_shapes(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], is_by_row: bool, weight_dtype: str | None
) -> None:
    """Matrices of other shapes are unpacked inside the kernel instead of being converted for every product."""
    monkeypatch.setattr(Products, "why_no_float8", "")
    sink = TorchSink(torch.bfloat16, CPU, weight_dtype)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stored = quantize_matrix(weight, "fp8")
    linear = sink.linear(weight if weight_dtype else stored)
    assert type(linear) is (QuantizedLinear if is_by_row else GroupedLinear)
    x = torch.randn((3, shape[1]), generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = x.float() @ weight.T
    assert (linear(x).float() - exact).square().mean().sqrt() / exact.std() < 0.06


def test_float8_maps_a_rows_maximum_to_the_largest_level() -> None:
    values = torch.tensor([[0.0, 0.0], [1.0, -3.0], [1e-20, 2e-20], [3e38, 1e38]])
    levels, scales = quantize_float8(values)
    assert levels.float().abs().amax(1).tolist() == [0.0, 448.0, 448.0, 448.0]
    torch.testing.assert_close(levels.float() * scales[:, None], values, rtol=0.07, atol=0)
    assert quantized_linear.quantize_float8(values[1:2])[1].item() == pytest.approx(3 / 448)
