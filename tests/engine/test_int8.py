"""int8 weights: their rounding, and that torch's operators use the same rounded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.core.request.request import OutputOptions, Request
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.engine import ModelEngine
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.quantized_linear import QuantizedLinear
from inflight.engine.layers.torch_sink import load_weights
from inflight.engine.quantize import quantize_int8
from inflight.load_model import load_model
from inflight.models import read_model_description
from inflight.models.decoder_weights import Linear
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import by_default_and, needs_native
from tests.engine.ranks import assert_same, ranks
from tests.engine.serving import config_of, serve, to_torch
from tests.engine.serving import load as load_small
from tests.models.zoo import Zoo
from tests.tiers import with_all
from tests.triton.factories import make_parameters


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    levels, scales = quantize_int8(weight)
    assert levels.dtype == torch.int8 and levels.abs().max() == 127
    assert torch.all((levels * scales[:, None] - weight).abs() <= scales[:, None] / 2 + 1e-7)


def _assert_rounded(is_: Linear, was: Linear) -> None:
    levels, scales = quantize_int8(was.weight)
    assert isinstance(is_, QuantizedLinear)
    assert torch.equal(is_.weight, levels) and torch.equal(is_.scales, scales)


@pytest.mark.parametrize("case", ["llama-gqa", "llama-gqa-tied", "gpt2"])
def test_int8_with_torch_rounds_every_matrix_and_nothing_else(zoo: Zoo, case: str) -> None:
    description = read_model_description(zoo[case].folder)
    before = load_weights(description, torch.bfloat16, torch.device("cpu"))
    after = load_engine(zoo[case].folder, dtype="int8", kernels="torch").runner.decoder.weights
    for old, new in zip(before.layers, after.layers, strict=True):
        for name in ("qkv", "output", "up", "down"):
            was, is_ = getattr(old, name), getattr(new, name)
            _assert_rounded(is_, was)
            assert (was.bias is None and is_.bias is None) or torch.equal(was.bias, is_.bias)
        assert torch.equal(new.attention_norm.weight, old.attention_norm.weight)
    _assert_rounded(after.lm_head, before.lm_head)
    assert torch.equal(after.embedding, before.embedding), "what is looked up is not multiplied"


@needs_native
@pytest.mark.parametrize("case", ["llama-gqa", "llama-gqa-tied", "qwen3", "gpt2"])
def test_both_kernels_are_nearer_to_each_other_than_to_the_model(zoo: Zoo, case: str) -> None:
    """Both round the weights in the same way; only compiled code also rounds activations, with an error of
    similar size."""
    model = zoo[case]
    prompt = model.prompt(40)
    rows = [
        alone(load_engine(model.folder, dtype="int8", kernels=kernels), prompt, 1)
        for kernels in ("native", "torch")
    ]
    native, rounded = (row.logits[0] for row in rows)
    exact = model.logits(prompt)[-1]
    assert (native - rounded).square().mean() < 2 * (rounded - exact).square().mean()


@pytest.mark.parametrize(
    "topology", with_all([pytest.param((2, 1), id="tp2"), pytest.param((1, 2), id="pp2")], [(2, 1)])
)
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    with_all(by_default_and(["int8", "fp8"], ["int8", "fp8"]), [("int8", None), ("fp8", "torch")]),
)
def test_ranks_serve_quantized_weights(
    zoo: Zoo, topology: tuple[int, int], dtype: str, kernels: str | None
) -> None:
    """Stages have one rank's results; ranks that share a layer round their parts with scales of their own."""
    from tests.engine.test_ranks import _some_of_everything

    model = zoo["llama-gqa"]
    described = Request(90, model.prompt(30), 1, output=OutputOptions(return_generation_logits=True))
    requests = [described, *_some_of_everything(model)[: 1 if kernels == "torch" or dtype == "fp8" else None]]
    with ranks(model.folder, topology, 64, 8, dtype=dtype, kernels=kernels) as engine:
        many = serve(engine, config_of("chunked"), requests)
    one = serve(load_small(model.folder, 64, 8, dtype=dtype, kernels=kernels), config_of("chunked"), requests)
    assert many.responses.keys() == one.responses.keys()
    exact = model.logits(described.input_token_ids)[-1]
    (logits,) = many.result(described).generation_logits
    assert (to_torch(logits)[0] - exact).square().mean().sqrt() < (
        0.15 if dtype == "int8" else 0.5
    ) * exact.std()
    if topology == (1, 2):
        assert_same(many, one)


def _load(zoo: Zoo, **parameters: Any) -> tuple[ModelEngine, str]:
    model = load_model(make_parameters(gpt_model_path=str(zoo["llama"].folder), **parameters), "", None)
    return model.engine, model.dtype


@needs_native
def test_parameters_choose_what_computes_the_layers(zoo: Zoo) -> None:
    engine, dtype = _load(zoo)
    assert isinstance(engine.runner.decoder, NativeDecoder)
    assert dtype == "float32", "the checkpoint's"
    for kernels, decoder in (("native", NativeDecoder), ("torch", Decoder)):
        engine, dtype = _load(zoo, kernels=kernels, dtype="int8")
        assert isinstance(engine.runner.decoder, decoder)
        assert (dtype, engine.dtype) == ("int8", "bfloat16")
