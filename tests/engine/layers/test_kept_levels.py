"""Quantized checkpoints whose weights stay quantized: logits are near those of the dequantized weights.

Weights are exact. Compiled layers round the inputs of products to int8, and the output projection; torch's
operators round only to the dtype.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.core.request.request import OutputOptions, Request
from inflight.engine.cpu import library
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.engine import ModelEngine
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.grouped_linear import GroupedLinear, pack, unpack
from inflight.engine.layers.torch_sink import TorchSink
from inflight.models.decoder_weights import Linear
from inflight.models.levels import GroupedMatrix
from inflight.models.loader import load_weights_into, num_weight_bytes, quantized_kinds
from inflight.models.registry import read_model_description
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels
from inflight.ranks.topology import Mapping
from inflight.testing.make_model import make_model
from inflight.testing.quantize import FORMATS as WRITTEN
from tests.engine.driver import Driver, alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.merged import LLAMA, make_adapter
from tests.engine.ranks import assert_same, ranks
from tests.engine.serving import config_of, serve, to_torch
from tests.engine.serving import load as load_served
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo import make_model as make_zoo_model
from tests.tiers import with_all

BOUND = 0.2
"""Relative to the logits' deviation; bfloat16 alone causes half of this error, and 4 bits five times as much."""
ELEMENT, INT8, INT4, GROUPED_INT8 = 0, 1, 2, 4
KEPT = {
    "ct-int8": INT8, "ct-int8-tensor": INT8, "ct-int4": INT4, "ct-int4-channel": INT4, "ct-int4-zeros": INT4,
    "ct-int4-act-order": INT4, "awq": INT4, "awq-one-group": INT4, "gptq": INT4, "gptq-one-group": INT4,
    "gptq-zeros": INT4, "gptq-act-order": INT4, "gptq-v2": INT4, "gptq-8": GROUPED_INT8,
    "ct-packed-int8": GROUPED_INT8, "ct-nvfp4": GROUPED_INT8, "modelopt-nvfp4": GROUPED_INT8,
}  # fmt: skip


def error_of(row: Any, model: ZooModel) -> float:
    begin = row.prompt_length - 1
    exact = model.logits(row.tokens)[begin:-1]
    return ((torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()).item()


def kinds_of(engine: ModelEngine) -> set[int]:
    decoder = engine.runner.decoder
    assert isinstance(decoder, NativeDecoder) and decoder.dtype is torch.bfloat16
    names = ("qkv", "output", "up", "down")
    return {getattr(layer.struct, name).kind for layer in decoder._packed for name in names}


@needs_native
# Every kind of levels, groups, zero points and order of inputs; test_quantized_checkpoints.py reads all formats.
@pytest.mark.parametrize(
    "name",
    with_all(
        KEPT,
        [
            "ct-int8",
            "ct-int8-tensor",
            "ct-int4-channel",
            "ct-int4-zeros",
            "awq",
            "gptq-act-order",
            "gptq-v2",
            "gptq-8",
            "ct-nvfp4",
        ],
    ),
)
def test_compiled_layers_keep_quantized_weights(
    zoo: Zoo, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        engine = load_engine(tmp_path)
    assert kinds_of(engine) == {KEPT[name]} and engine.runner.decoder._lm_head.kind == INT8
    assert "quantized projections keep the checkpoint's format (12 in " in caplog.text
    assert error_of(alone(engine, model.prompt(20), 8), model) < BOUND


@needs_native
def test_float16_is_computed_in_bfloat16(zoo: Zoo, tmp_path: Path) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS["awq"], dtype="float16")
    engine = load_engine(tmp_path)
    assert kinds_of(engine) == {INT4} and engine.dtype == "bfloat16"
    assert error_of(alone(engine, model.prompt(20), 4), model) < BOUND
    assert load_engine(tmp_path, dtype="float32").dtype == "float32", "a dtype that is asked for wins"


@needs_native
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8-block", "(14 in float8 in blocks) are unpacked to bfloat16: compiled layers do not"),
        ("fbgemm", "(14 in float8 with a scale for each row) are unpacked to bfloat16"),
        ("gptq-8-zeros", "(14 in 8 bits with zero points) are unpacked to bfloat16"),
        ("gptq-any-order", "unpacked to bfloat16 (model.layers.0.self_attn.q_proj.weight): other parts"),
    ],
)
def test_formats_that_compiled_layers_do_not_keep_are_unpacked_and_logged(
    zoo: Zoo, tmp_path: Path, name: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        engine = load_engine(tmp_path)
    assert said.replace("14", str(7 * len(engine.runner.decoder._packed))) in caplog.text
    assert ELEMENT in kinds_of(engine)
    assert error_of(alone(engine, model.prompt(20), 4), model) < BOUND


@needs_native
def test_weights_are_unpacked_to_a_given_dtype(
    zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(zoo["llama-gqa"], tmp_path, FORMATS["gptq"], dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        assert kinds_of(load_engine(tmp_path, dtype="bfloat16")) == {ELEMENT}
    assert "are unpacked to bfloat16: dtype is bfloat16" in caplog.text


@pytest.mark.parametrize("kernels", [None, "torch"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantizing_quantized_weights_again_is_logged(
    zoo: Zoo, tmp_path: Path, dtype: str, kernels: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write(zoo["llama-gqa"], tmp_path, FORMATS["gptq"], dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        load_engine(tmp_path, dtype=dtype, kernels=kernels)
    said = f"in 4 bits) are unpacked to bfloat16: dtype is {dtype}, which rounds them again, by rows"
    assert caplog.text.count(said) == 1


@needs_native
@pytest.mark.parametrize(
    "case", with_all(["mixtral", "qwen3-moe", "qwen2", "phi3", "qwen3"], ["mixtral", "phi3"])
)
@pytest.mark.parametrize(
    "name", with_all(["gptq-one-group", "ct-int8", "ct-packed-int8"], ["ct-packed-int8"])
)
def test_kept_quantized_weights_of_other_families_give_the_models_tokens(
    zoo: Zoo, tmp_path: Path, case: str, name: str
) -> None:
    """A token may go to another expert where two have nearly equal scores; most do not."""
    folder, unquantized = tmp_path / "quantized", zoo[case]
    if case == "qwen3-moe":  # with experts whose 64 inputs, unlike the usual 40, make whole groups of 32
        unquantized = make_zoo_model(tmp_path / "unquantized", case, changes={"moe_intermediate_size": 64})
    model = write(unquantized, folder, FORMATS[name], skipped=(".gate",), dtype="bfloat16")
    engine = load_engine(folder)
    layers = [layer.struct for layer in engine.runner.decoder._packed]
    assert {layer.qkv.kind for layer in layers} == {KEPT[name]}
    with_experts = [layer for layer in layers if layer.router.data]
    assert bool(with_experts) == (case in ("mixtral", "qwen3-moe"))
    for layer in with_experts:
        assert layer.expert_up.kind == layer.expert_down.kind == KEPT[name] and layer.router.kind == ELEMENT
    row = alone(engine, model.prompt(20), 8)
    exact = model.logits(row.tokens)[19:-1]
    errors = (torch.stack(row.logits) - exact).square().mean(1).sqrt() / exact.std()
    assert errors.median() < (2 * BOUND if with_experts else BOUND)


@needs_native
@pytest.mark.parametrize(
    "name",
    with_all(
        ["gptq", "gptq-act-order", "ct-int4-zeros", "awq-one-group", "ct-int8", "ct-packed-int8"],
        ["gptq", "gptq-act-order", "ct-packed-int8"],
    ),
)
@pytest.mark.parametrize(
    "topology", with_all([pytest.param((2, 1), id="tp2"), pytest.param((1, 2), id="pp2")], [(2, 1)])
)
def test_tensor_parallel_splits_quantization_groups(
    zoo: Zoo, tmp_path: Path, name: str, topology: tuple[int, int]
) -> None:
    """Two ranks have 48 of 96 inputs each: groups of 32 become groups of 16; in another order none are kept."""
    from tests.engine.test_ranks import _some_of_everything

    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    described = Request(90, model.prompt(30), 1, output=OutputOptions(return_generation_logits=True))
    requests = [described, *_some_of_everything(model)]
    if topology != (1, 2):  # only the first one's results are compared
        requests = requests[:3]
    with ranks(tmp_path, topology, 64, 8, dtype=None) as engine:
        many = serve(engine, config_of("chunked"), requests)
    one = serve(load_served(tmp_path, 64, 8, dtype=None), config_of("chunked"), requests)
    assert many.responses.keys() == one.responses.keys()
    exact = model.logits(described.input_token_ids)[-1]
    (logits,) = many.result(described).generation_logits
    assert (to_torch(logits)[0] - exact).square().mean().sqrt() < BOUND * exact.std()
    if topology == (1, 2):
        assert_same(many, one)


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("name", ["gptq-act-order", "ct-int8", "ct-packed-int8"])
def test_adapters_work_beside_quantized_weights(zoo: Zoo, tmp_path: Path, name: str, kernels: str) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    adapter = make_adapter(model, 8, LLAMA, seed=1)
    driver = Driver(load_engine(tmp_path, kernels=kernels, max_num_sequences=8))
    with_it = driver.start(model.prompt(20), adapter=driver.put(adapter.stored))
    without = driver.start(model.prompt(20))
    driver.step({with_it: 20, without: 20})
    for _ in range(4):
        driver.step(generation=[with_it, without])
    assert error_of(with_it, adapter.model) < BOUND and error_of(without, model) < BOUND
    assert error_of(with_it, model) > 2 * BOUND, "the adapter is seen"


@needs_native
def test_a_row_depends_on_neither_other_rows_nor_chunks_nor_reuse(zoo: Zoo, tmp_path: Path) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS["awq"], dtype="bfloat16")
    requests = [
        Request(
            n, model.prompt(20)[:12] + model.prompt(9 + n, n), 8, output=OutputOptions(return_log_probs=True)
        )
        for n in range(5)
    ]
    found = [
        serve(load_served(tmp_path, 64, 8, dtype=None), config_of(way), requests)
        for way in ("chunked", "no-reuse")
    ]
    engine = load_served(tmp_path, 64, 8, dtype=None)
    lone = [serve(engine, config_of("no-reuse"), [each]) for each in requests]
    for request, alone_ in zip(requests, lone, strict=True):
        assert found[0].tokens(request) == found[1].tokens(request) == alone_.tokens(request)


def test_without_compiled_layers_weights_are_unpacked(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset({"fpu"}))
    monkeypatch.setenv("INFLIGHT_CPU_TARGET", "avx2")
    model = write(zoo["llama-gqa"], tmp_path, FORMATS["gptq-act-order"], dtype="float16")
    with caplog.at_level(logging.INFO):
        engine = load_engine(tmp_path)
    assert isinstance(engine.runner.decoder, Decoder) and engine.dtype == "float16"
    assert type(engine.runner.decoder.weights.layers[0].qkv) is Linear
    assert "unpacked to float16: torch's operators would unpack them for every product" in caplog.text
    assert error_of(alone(engine, model.prompt(20), 4), model) < BOUND / 2


# With torch's operators


def draw(kind: str, outputs: int, inputs: int, size: int, shuffled: bool = False) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(outputs, inputs // size, generator=generator) + 0.1
    zeros = torch.randint(0, 17, scales.shape, generator=generator).short() if "zeros" in kind else None
    levels = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if kind.startswith("int4"):
        levels &= 15
    elif kind == "int8":
        levels = levels.view(torch.int8)
    elif kind == "float8":
        levels = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
    elif kind == "float4":
        levels, scales = levels & 15, scales.log2().round().exp2()
    order = torch.randperm(inputs, generator=generator) if shuffled and kind != "float4" else None
    bits = 4 if kind.startswith(("int4", "float4")) else 8
    return GroupedMatrix(levels, scales, zeros, size, order, bits, kind == "float4")


@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "int8", "uint8-zeros", "float8", "float4"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "size"), [(40, 96, 32), (8, 96, 16), (33, 100, 100), (64, 256, 128)]
)
def test_a_module_multiplies_by_the_dequantized_matrix(
    kind: str, outputs: int, inputs: int, size: int
) -> None:
    matrix = draw(kind, outputs, inputs, size, shuffled=size == 32)
    sink = TorchSink(torch.float32, torch.device("cpu"))
    assert sink.why_unpacked(matrix, False) == ""
    bias, x = torch.randn(outputs), torch.randn(5, inputs)
    linear = sink.linear(matrix, bias)
    assert isinstance(linear, GroupedLinear) and linear.dtype is torch.float32
    assert linear.weight.nbytes <= (inputs + 127) * outputs // (2 if matrix.bits == 4 else 1)
    assert torch.equal(linear.dequantized(), matrix.dequantized())
    expected = torch.nn.functional.linear(x, matrix.dequantized(), bias)
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("inputs", "tile"), [(128, 64), (96, 32), (100, 64), (16, 16), (48, 16)])
def test_two_4_bit_levels_are_packed_into_a_byte(inputs: int, tile: int) -> None:
    levels = torch.randint(0, 16, (3, inputs), dtype=torch.uint8)
    assert torch.equal(unpack(pack(levels, tile), tile)[:, :inputs], levels)


@pytest.mark.parametrize(
    "name",
    with_all(
        [*KEPT, "fp8-tensor", "fbgemm", "gptq-8-zeros", "fp8-block"],
        ["gptq-act-order", "ct-int8", "fp8-block"],
    ),
)
def test_modules_keep_quantized_weights(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    engine = load_engine(tmp_path, kernels="torch")
    assert isinstance(engine.runner.decoder, Decoder)
    layer = engine.runner.decoder.weights.layers[0]
    kept = {type(getattr(layer, each)) for each in ("qkv", "output", "up", "down")}
    # Blocks of 40 of 96 inputs become groups of 8, which are too small for a tile.
    assert kept == ({Linear} if name == "fp8-block" else {GroupedLinear})
    assert error_of(alone(engine, model.prompt(20), 4), model) < BOUND / 2


@pytest.mark.parametrize("case", ["mixtral", "llama-gqa"])
@pytest.mark.parametrize("name", with_all(["gptq-act-order", "ct-int8", "fbgemm"], ["gptq-act-order"]))
def test_modules_in_float32_give_exact_logits(zoo: Zoo, tmp_path: Path, case: str, name: str) -> None:
    model = write(zoo[case], tmp_path, FORMATS[name], skipped=(".gate",), dtype="bfloat16")
    description = read_model_description(tmp_path)
    part, device = Part.whole(description.decoder), torch.device("cpu")
    sink = TorchSink(torch.float32, device)
    weights = load_weights_into(sink, description, torch.float32, device, part, KeptLevels())
    assert isinstance(weights.layers[0].qkv, GroupedLinear)
    if case == "mixtral":
        assert weights.layers[0].experts is not None and isinstance(
            weights.layers[0].experts.up, GroupedLinear
        )
    engine = load_engine(tmp_path, dtype="float32", kernels="torch")
    engine.runner.decoder.weights = weights
    row = alone(engine, model.prompt(12), 6)
    assert row.generated == model.greedy(model.prompt(12), 6)
    exact = model.logits(row.tokens)[11:-1]
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", with_all(["gptq", "gptq-act-order", "fbgemm"], ["gptq-act-order"]))
def test_tensor_parallel_ranks_on_torchs_operators_have_the_models_logits(
    zoo: Zoo, tmp_path: Path, name: str
) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    request = Request(90, model.prompt(30), 1, output=OutputOptions(return_generation_logits=True))
    with ranks(tmp_path, (2, 1), 64, 8, dtype=None, kernels="torch") as engine:
        found = serve(engine, config_of("chunked"), [request])
    exact = model.logits(request.input_token_ids)[-1]
    (logits,) = found.result(request).generation_logits
    assert (to_torch(logits)[0] - exact).square().mean().sqrt() < BOUND * exact.std()


# Written checkpoints, and the size of kept weights


@pytest.mark.parametrize("quantize", WRITTEN)
def test_quantized_test_checkpoints_are_close_to_the_random_weights(tmp_path: Path, quantize: str) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    make_model(plain, standard_deviation=0.1)
    make_model(made, standard_deviation=0.1, quantize=quantize)
    kinds = quantized_kinds(read_model_description(made))
    assert kinds.total() == 14

    def weights(folder: Path) -> list[Tensor]:
        layer = load_engine(folder, dtype="float32", kernels="torch").runner.decoder.weights.layers[0]
        return [getattr(layer, name).weight for name in ("qkv", "output", "up", "down")]

    for found, drawn in zip(weights(made), weights(plain), strict=True):
        error = (found - drawn).square().mean().sqrt() / drawn.std()
        assert 0 < error < (0.02 if quantize == "int8" else 0.05 if quantize == "fp8" else 0.2)


def test_num_weight_bytes_counts_quantized_weights_of_models_and_ranks(tmp_path: Path) -> None:
    make_model(tmp_path, quantize="gptq")
    model = read_model_description(tmp_path)
    matrices = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)
    unpacked = num_weight_bytes(model, torch.bfloat16, torch.bfloat16)
    kept = num_weight_bytes(model, torch.bfloat16, torch.bfloat16, frozenset(quantized_kinds(model)))
    assert matrices / 2 < kept - (unpacked - 2 * matrices) < 0.8 * matrices
    parts = [Part.from_mapping(Mapping(2, 2, rank), model.decoder) for rank in range(4)]
    both, kinds = (torch.bfloat16, torch.bfloat16), frozenset(quantized_kinds(model))
    norms = 2 * (4 * 64 + 64)  # every rank of a stage has its norms
    tied = 2 * 512 * 64  # both stages have the embedding
    assert sum(num_weight_bytes(model, *both, kinds, part) for part in parts) == kept + norms + tied
