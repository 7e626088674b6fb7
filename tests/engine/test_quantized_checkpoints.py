"""Quantized checkpoints, loaded as they are: results equal transformers' with the dequantized weights."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from inflight.core.request.request import Request
from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint
from inflight.models.loader import check_weights
from inflight.models.registry import read_model_description
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve
from tests.models.quantized import FORMATS, awq, gptq, write
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

Copy = Callable[[str, Path], None]


@pytest.fixture(scope="module")
def copy(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Copies a checkpoint of a format, which is written once, into a folder."""
    written: dict[str, Path] = {}

    def copy_into(name: str, folder: Path) -> None:
        if name not in written:
            written[name] = write(zoo["llama-gqa"], tmp_path_factory.mktemp(name), FORMATS[name]).folder
        shutil.copytree(written[name], folder, dirs_exist_ok=True)

    return copy_into


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_dequantized_weights(zoo: Zoo, tmp_path: Path, name: str) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name])
    for kernels in ("torch", None):
        row = alone(load_engine(tmp_path, dtype="float32", kernels=kernels), model.prompt(20), 6)
        assert row.generated == model.greedy(model.prompt(20), 6)
        exact = model.logits(row.tokens)[19:-1]
        torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)
    rounding = (zoo["llama-gqa"].logits(row.tokens)[19:-1] - exact).abs().max()
    assert rounding > 1e-3, "the quantization is seen"


@pytest.mark.parametrize(
    "name", with_all(["fp8-block", "ct-int4-zeros", "awq", "gptq-act-order"], ["gptq-act-order"])
)
@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_ranks_split_quantized_weights(
    zoo: Zoo, tmp_path: Path, name: str, topology: tuple[int, int]
) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name])
    requests = [Request(number, model.prompt(9 + number, number), 8) for number in range(3)]
    with ranks(tmp_path, topology) as engine:
        served = serve(engine, config_of("chunked"), requests)
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 8)


@pytest.mark.parametrize(
    "case",
    with_all(
        ["mixtral", "qwen3-moe", "deepseek-v3", "phi3", "qwen2", "glm4", "ernie4.5", "arcee"],
        ["mixtral", "deepseek-v3", "phi3"],
    ),
)
@pytest.mark.parametrize("name", with_all(["fp8-tensor", "ct-int8", "gptq-one-group"], ["gptq-one-group"]))
def test_quantized_checkpoints_of_other_families_give_the_models_tokens(
    zoo: Zoo, tmp_path: Path, case: str, name: str
) -> None:
    """Experts, latent attention, fused projections, biases; routers are not quantized."""
    model = write(zoo[case], tmp_path, FORMATS[name], skipped=(".gate",))
    row = alone(load_engine(tmp_path, dtype="float32"), model.prompt(12), 6)
    assert row.generated == model.greedy(model.prompt(12), 6)
    exact = model.logits(row.tokens)[11:-1]
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"),
    with_all(
        itertools.product(["awq", "gptq", "gptq-zeros"], [36, 64]),
        [("awq", 36), ("gptq", 64), ("gptq-zeros", 36)],
    ),
)
def test_the_last_group_may_be_shorter(zoo: Zoo, tmp_path: Path, name: str, size: int) -> None:
    """Has no GPTQ group index; two equal groups of 96 inputs would have 48 inputs each."""
    made = awq(size) if name == "awq" else gptq(4, size, name == "gptq", False, None)
    model = write(zoo["llama-gqa"], tmp_path, made)
    tensors = load_file(tmp_path / "model.safetensors")
    without = {key: tensor for key, tensor in tensors.items() if not key.endswith(".g_idx")}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    for kernels in (None, "torch"):
        row = alone(load_engine(tmp_path, dtype="float32", kernels=kernels), model.prompt(20), 4)
        exact = model.logits(row.tokens)[19:-1]
        torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


def test_blocks_at_the_edges_of_a_matrix_are_smaller(tmp_path: Path) -> None:
    """Blocks are 128 x 128, matrices 160 and 272 wide."""
    config = LlamaConfig(
        vocab_size=211, hidden_size=160, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=272, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    oracle = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(tmp_path / "whole")
    model = write(ZooModel(tmp_path / "whole", oracle), tmp_path / "blocks", FORMATS["modelopt-block"])
    scales = load_file(model.folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"]
    assert scales.shape == (2, 1, 3, 1)
    row = alone(load_engine(model.folder, dtype="float32"), model.prompt(12), 6)
    assert row.generated == model.greedy(model.prompt(12), 6)
    exact = model.logits(row.tokens)[11:-1]
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


def test_unquantized_modules_are_loaded_unchanged(zoo: Zoo, tmp_path: Path) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS["awq"], skipped=("layers.0.mlp.down_proj", "o_proj"))
    row = alone(load_engine(tmp_path, dtype="float32"), model.prompt(12), 6)
    assert row.generated == model.greedy(model.prompt(12), 6)


def test_modules_that_rules_of_gptq_exclude_are_loaded_unchanged(
    zoo: Zoo, tmp_path: Path, kernels: str | None
) -> None:
    """Also one of three projections that are multiplied together; empty rules change nothing."""
    skipped = ("layers.0.mlp.down_proj", "v_proj")
    model = write(zoo["llama-gqa"], tmp_path, FORMATS["gptq"], skipped, dtype="bfloat16")
    excluded = {r"-:model\.layers\.0\.mlp\.down_proj": {}, r"-:.*\.v_proj": {}}
    _change(tmp_path, dynamic={"lm_head": {}, "+:model.embed_tokens": {}, **excluded})
    row = alone(load_engine(tmp_path, dtype="float32", kernels=kernels), model.prompt(12), 6)
    assert row.generated == model.greedy(model.prompt(12), 6)
    kept = alone(load_engine(tmp_path, kernels=kernels), model.prompt(30), 20)
    exact = model.logits(kept.tokens)[29:-1]
    assert (torch.stack(kept.logits) - exact).square().mean().sqrt() / exact.std() < 0.2


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bfloat16"])
def test_quantized_checkpoints_may_be_quantized_again(zoo: Zoo, tmp_path: Path, dtype: str) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS["gptq"])
    row = alone(load_engine(tmp_path, dtype=dtype), model.prompt(30), 20)
    exact = model.logits(row.tokens)[29:-1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error < {"int8": 0.25, "fp8": 0.6, "bfloat16": 0.15}[dtype]


@needs_native
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ct-mxfp4", "keep the checkpoint's format (12 in 4-bit floats)"),
        ("ct-nvfp4", "keep the checkpoint's format (12 in 8 bits in groups of inputs)"),
    ],
)
def test_4_bit_floats_stay_quantized_in_compiled_layers(
    zoo: Zoo, tmp_path: Path, name: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        row = alone(load_engine(tmp_path), model.prompt(30), 20)
    assert said in caplog.text
    exact = model.logits(row.tokens)[29:-1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error < 0.2, "activations are rounded to int8, or to bfloat16"


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_load_reads_the_headers_once_for_its_checks_and_once_for_the_weights(
    copy: Copy, tmp_path: Path, dtype: str | None, kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read the headers of a mixture of experts takes seconds."""
    copy("gptq", tmp_path)
    opened: list[Path] = []
    describe = Checkpoint._describe

    def note(checkpoint: Checkpoint) -> Any:
        opened.append(checkpoint.folder)
        return describe(checkpoint)

    monkeypatch.setattr(Checkpoint, "_describe", note)
    load_engine(tmp_path, dtype=dtype, kernels=kernels)
    assert opened == [tmp_path, tmp_path]


def test_a_changed_file_is_checked_again(copy: Copy, tmp_path: Path) -> None:
    copy("gptq", tmp_path)
    model = read_model_description(tmp_path)
    check_weights(model)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing model\.norm\.weight"):
        check_weights(model)


def test_a_quantization_config_without_quantized_tensors_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    write(zoo["llama-gqa"], tmp_path, FORMATS["gptq"], skipped=("_proj",))
    with pytest.raises(
        ConfigError, match=r"weights are quantized \(gptq\), but there are no tensors of that format"
    ):
        check_weights(read_model_description(tmp_path))


def test_a_family_with_transposed_matrices_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    write(zoo["gpt2"], tmp_path, FORMATS["gptq"])
    with pytest.raises(ConfigError, match=r"gptq weights are not supported for families that store"):
        check_weights(read_model_description(tmp_path))


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | changes
    path.write_text(json.dumps(config))


def _float4(strategy: str, group_size: int | None) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group_size}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "awq",
            {"quant_method": "bitsandbytes"},
            "bitsandbytes' formats need its own kernels; take the unquantized",
        ),
        ("awq", {"quant_method": "torchao"}, "torchao stores tensors of its own classes; take"),
        ("awq", {"quant_method": "gguf"}, "GGUF is llama.cpp's file format; take"),
        (
            "awq",
            {"quant_method": "hqq"},
            "'hqq', expected one of fp8, fbgemm_fp8, compressed-tensors, modelopt",
        ),
        ("awq", {"version": "gemv"}, "'gemv', expected gemm"),
        ("awq", {"bits": 3}, r"bits' is 3, expected 4"),
        ("awq", {"rotated": True}, r"'quantization_config.rotated' is True, expected no such key"),
        ("gptq", {"bits": 3}, "bits' is 3, expected 4 or 8"),
        (
            "gptq",
            {"dynamic": {r"-:.*\.o_proj": {}, r"+:.*\.down_proj": {"bits": 8}}},
            r"the rule '\+:\.\*.*down_proj' gives modules other parameters",
        ),
        ("gptq", {"dynamic": {"x": {"bits": 8}}}, "the rule 'x' gives modules other parameters"),
        ("gptq", {"dynamic": {"lm_head": {}, "x": None}}, "the rule 'x' gives modules other parameters"),
        ("gptq", {"dynamic": ["x"]}, "expected an object of rules"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin', expected gptq or gptq_v2"),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ', expected 'FP8'"),
        (
            "ct-int4",
            {"format": "mxfp6-pack-quantized"},
            "format' is 'mxfp6-pack-quantized', expected 'pack-quant",
        ),
        ("ct-mxfp4", {"config_groups": _float4("group", 64)}, "weights.group_size' is 64, expected 32"),
        (
            "ct-mxfp4",
            {"config_groups": _float4("channel", None)},
            "'channel', expected 'group' or 'tensor_group'",
        ),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24"}}, "expected none, or format dense"),
        ("ct-int4", {"transform_config": {"x": 1}}, "transformed weights are not read"),
        ("fp8-block", {"fmt": "e5m2"}, "'e5m2', expected 'e4m3'"),
        ("fp8-block", {"weight_block_size": [0, 4]}, "expected two integers >= 1"),
        (
            "fp8-block",
            {"weight_block_size": [8, 8]},
            r"\[2, 3\], expected \[\] or \[64, 1\] or \[8, 12\] for a matrix",
        ),
    ],
)
def test_unsupported_quantizations_are_refused_by_their_key(
    copy: Copy, tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    copy(name, tmp_path)
    _change(tmp_path, **changes)
    with pytest.raises(ConfigError, match=said):
        check_weights(read_model_description(tmp_path))


@pytest.mark.parametrize(
    ("name", "part", "change", "said"),
    [
        ("awq", "qzeros", None, r"layers.0.mlp.down_proj is quantized, but there is no .*down_proj.qzeros"),
        ("awq", "scales", lambda scales: scales[:, :-8], r"has shape \[3, 56\], expected \['any', 64\]"),
        (
            "awq",
            "qweight",
            lambda words: words[:-40],
            r"scales' has shape \[3, 64\], expected a number of groups",
        ),
        ("awq", "qweight", lambda words: words[:-1], r"has shape \[64, 95\], expected \[64, 96\]"),
        ("gptq", "qzeros", lambda words: words[:, :-1], r"expected 8 or 16 words for 64 outputs"),
        ("gptq-act-order", "g_idx", None, r"is quantized, but there is no .*down_proj.g_idx"),
        ("gptq", "g_idx", lambda groups: groups[:-1], r"has shape \[95\], expected \[96\]"),
        ("gptq", "qweight", lambda words: words.float(), r"qweight' has dtype float32, expected I32"),
        ("ct-int4", "weight_shape", lambda shape: shape + 8, r"4 or 8 bits of each of \[72, 104\]"),
        (
            "ct-int8",
            "weight_scale",
            lambda scales: scales[:-1],
            r"weight_scale' has shape \[63, 1\], expected",
        ),
        (
            "ct-mxfp4",
            "weight_scale",
            lambda scales: scales[:, :-1],
            r"has shape \[64, 2\], expected \[64, 3\]",
        ),
        (
            "ct-mxfp4",
            "weight_packed",
            lambda packed: packed[:, :-8],
            "two inputs in a byte, a multiple of 32",
        ),
        ("ct-nvfp4", "weight_global_scale", None, r"is quantized, but there is no .*weight_global_scale"),
        ("modelopt-nvfp4", "weight_scale_2", lambda factor: factor.repeat(2), r"\[2\], expected one number"),
        ("modelopt-nvfp4", "weight", lambda packed: packed[:, :-4], "two inputs in a byte, a multiple of 16"),
        ("fp8-tensor", "weight", lambda weight: weight.float(), "dtype float32, expected F8_E4M3 or I8"),
    ],
)
def test_quantized_tensors_that_do_not_fit_are_refused_by_name(
    copy: Copy, tmp_path: Path, name: str, part: str, change: Any, said: str
) -> None:
    copy(name, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    full = f"model.layers.0.mlp.down_proj.{part}"
    stored = tensors.pop(full)
    if change is not None:
        tensors[full] = change(stored).contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=said):
        check_weights(read_model_description(tmp_path))
