"""Experts of gpt-oss in MXFP4, which stay in 4 bits: the same results as transformers with dequantized weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from inflight.core.request.request import OutputOptions, Request
from inflight.engine.layers.grouped_linear import GroupedLinear
from inflight.engine.layers.torch_sink import TorchSink
from inflight.models.decoder_weights import ExpertWeights, Linear
from inflight.models.levels import FLOAT4, GroupedMatrix, MatrixKind
from inflight.models.loader import load_weights_into, num_weight_bytes, quantized_kinds
from inflight.models.registry import read_model_description
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels
from inflight.testing.make_model import SHAPES, make_model
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve, to_torch

PROMPT = [(7 * place) % 500 + 3 for place in range(24)]
BF16, CPU = torch.bfloat16, torch.device("cpu")
_FINITE = 253  # scales with which all 4-bit floats are finite in float32
BOUND = 0.1
"""Relative to the logits' deviation: errors of bfloat16 activations, which compiled layers round to int8."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mxfp4")
    return make_model(made, "gpt_oss", standard_deviation=0.1, quantize="mxfp4")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    own = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others do not support float64
    unpacked = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=unpacked, **own
    ).double()


@torch.inference_mode()
def logits_of(oracle: Any, tokens: list[int]) -> Tensor:
    return oracle(torch.tensor([tokens])).logits[0].float()


def experts_of(engine: Any) -> ExpertWeights[Linear]:
    return engine.runner.decoder.weights.layers[0].experts


@needs_native
def test_compiled_layers_keep_4_bits(folder: Path, oracle: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = load_engine(folder)
    assert "keep the checkpoint's format (4 in 4-bit floats)" in caplog.text
    assert engine.kernels == "native"
    (layer, _) = engine.runner.decoder._packed
    packed = [tensor.nbytes for tensor in layer.tensors if tensor.dtype is torch.uint8]
    assert sum(packed) == 8 * 3 * 64 * 128 * 18 // 32, "and two bytes for each scale"
    assert_near(engine, oracle)


def test_torchs_operators_keep_4_bits(folder: Path, oracle: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = load_engine(folder, kernels="torch")
    assert "keep the checkpoint's format (4 in 4-bit floats)" in caplog.text
    for stack in (experts_of(engine).up, experts_of(engine).down):
        assert isinstance(stack, GroupedLinear)
        count, outputs, num_bytes = stack.weight.shape
        numbers = count * outputs * 2 * num_bytes
        assert stack.weight.nbytes + stack.scales.nbytes == numbers * 17 // 32
    assert_near(engine, oracle)


def assert_near(engine: Any, oracle: Any) -> None:
    row = alone(engine, PROMPT, 8)
    exact = logits_of(oracle, row.tokens)[len(PROMPT) - 1 : -1]
    errors = (torch.stack(row.logits) - exact).square().mean(1).sqrt() / exact.std()
    assert errors.median() < BOUND, "a token near the border of two experts may go to the other one"


def test_weights_are_unpacked_to_a_given_dtype(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = load_engine(folder, dtype="bfloat16", kernels="torch")
    assert type(experts_of(engine).up) is Linear
    assert "(48 in 4-bit floats) are unpacked to bfloat16: dtype is bfloat16" in caplog.text


def test_tokens_in_float32_are_those_of_transformers(folder: Path, oracle: Any) -> None:
    description = read_model_description(folder)
    sink = TorchSink(torch.float32, CPU)
    part = Part.whole(description.decoder)
    weights = load_weights_into(sink, description, torch.float32, CPU, part, KeptLevels())
    engine = load_engine(folder, dtype="float32", kernels="torch")
    engine.runner.decoder.weights = weights
    assert isinstance(experts_of(engine).up, GroupedLinear)
    row = alone(engine, PROMPT, 24)
    exact = logits_of(oracle, row.tokens)[len(PROMPT) - 1 : -1]
    assert row.generated == exact.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_tensor_parallel_splits_mxfp4_blocks(tmp_path: Path, kernels: str | None) -> None:
    """Two ranks have 48 of the 96 inputs each: blocks of 32 become groups of 16."""
    sizes = replace(SHAPES["tiny"], ffn=96)
    made = make_model(tmp_path, "gpt_oss", sizes, standard_deviation=0.1, quantize="mxfp4")
    request = Request(90, PROMPT, 1, output=OutputOptions(return_generation_logits=True))
    with ranks(made, (2, 1), 64, 8, dtype=None, kernels=kernels) as engine:
        found = serve(engine, config_of("chunked"), [request])
    (logits,) = found.result(request).generation_logits
    exact = alone(load_engine(made, dtype="float32"), PROMPT, 1).logits[0]
    assert (to_torch(logits)[0] - exact).square().mean().sqrt() < BOUND * exact.std()


def test_num_weight_bytes_counts_4_bits_and_a_scale_for_experts(folder: Path) -> None:
    model = read_model_description(folder)
    assert quantized_kinds(model) == {MatrixKind.FLOAT4: 2 * 8 * 3}
    numbers = 2 * 8 * 3 * 64 * 128
    unpacked = num_weight_bytes(model, BF16, BF16)
    kept = num_weight_bytes(model, BF16, BF16, frozenset({MatrixKind.FLOAT4}))
    assert unpacked - kept == 2 * numbers - numbers * 17 // 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_4_bit_float_is_exact_with_every_scale(dtype: torch.dtype) -> None:
    """value = float * 2 ** (scale - 127), exactly if that is a normal number of the dtype."""
    scales = torch.arange(_FINITE, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()[:, None]
    values = torch.arange(16, dtype=torch.uint8).repeat(_FINITE, 2)
    made = TorchSink(dtype, CPU).linear(GroupedMatrix(values, scales, None, 32, None, 4, is_float4=True))
    found = made(torch.eye(32, dtype=dtype)).double()
    powers = 2.0 ** (torch.arange(_FINITE, dtype=torch.float64) - 127)
    exact = torch.tensor(FLOAT4, dtype=torch.float64).repeat(2)[:, None] * powers
    is_normal = exact.abs() >= torch.finfo(dtype).tiny
    assert torch.equal(found[is_normal], exact[is_normal])
    assert (found[exact == 0] == 0).all() and (found - exact).abs().max() < torch.finfo(dtype).tiny
