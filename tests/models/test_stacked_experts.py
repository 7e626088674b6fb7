"""All experts of a layer in one tensor, plain or packed as MXFP4: loading, and errors that name the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from inflight.engine.layers.torch_sink import load_weights
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.decoder_config import ClampedSwiglu
from inflight.models.decoder_weights import ExpertWeights, Linear
from inflight.models.loader import num_parameters, num_weight_bytes, tensor_shapes
from inflight.models.sharding import Part, Shard
from inflight.models.stacked_experts import dequantize
from tests.models.mxfp4 import QUANTIZATION, STACKS, Tensors, pack, set_quantization
from tests.models.zoo import Zoo

CPU = torch.device("cpu")
UP, DOWN = (f"model.layers.1.{stack}" for stack in STACKS)


@pytest.fixture
def packed(zoo: Zoo, tmp_path: Path) -> tuple[Path, Tensors]:
    """A checkpoint with packed experts, and their matrices dequantized by transformers."""
    folder = tmp_path / "packed"
    shutil.copytree(zoo["gpt-oss"].folder, folder)
    return folder, pack(folder)


def _experts(folder: Path, part: Part | None = None) -> ExpertWeights[Linear]:
    """Load the experts of a part's last layer."""
    model = read_model_description(folder)
    experts = load_weights(model, torch.float32, CPU, part).layers[-1].experts
    assert experts is not None
    return experts


def _with_gate_above_up(stacked: torch.Tensor) -> torch.Tensor:
    """Rearrange [experts, ..., alternating gate and up] to [experts, inner of gate, then of up, ...]."""
    by_row = stacked.transpose(1, 2) if stacked.dim() == 3 else stacked
    return torch.cat([by_row[:, ::2], by_row[:, 1::2]], dim=1)


def test_plain_stacks_are_split(zoo: Zoo) -> None:
    found = _experts(zoo["gpt-oss"].folder)
    mlp = zoo["gpt-oss"].oracle.model.layers[-1].mlp
    expected = mlp.experts
    assert torch.equal(found.up.weight, _with_gate_above_up(expected.gate_up_proj))
    assert torch.equal(found.up.bias, _with_gate_above_up(expected.gate_up_proj_bias))
    assert torch.equal(found.down.weight, expected.down_proj.transpose(1, 2))
    assert torch.equal(found.down.bias, expected.down_proj_bias)
    assert torch.equal(found.router.weight, mlp.router.weight)
    assert torch.equal(found.router.bias, mlp.router.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_dequantized_mxfp4_equals_transformers(dtype: torch.dtype) -> None:
    """Every pair of 4-bit floats with every scale, including scales without finite results."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    found = dequantize(blocks, scales).to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found.signbit(), expected.signbit())


def test_packed_experts_are_unpacked(packed: tuple[Path, Tensors]) -> None:
    folder, expected = packed
    found = _experts(folder)
    assert torch.equal(
        found.up.weight, _with_gate_above_up(expected["model.layers.2.mlp.experts.gate_up_proj"])
    )
    assert torch.equal(found.down.weight, expected["model.layers.2.mlp.experts.down_proj"].transpose(1, 2))


def test_each_rank_has_its_slices_of_packed_experts(packed: tuple[Path, Tensors]) -> None:
    """Only the first rank has the biases that are added once."""
    folder, _ = packed
    whole = _experts(folder)
    first, second = (_experts(folder, Part(Shard(2, rank), (0, 3))) for rank in (0, 1))
    gates, ups = (
        torch.cat(halves, 1) for halves in zip(first.up.weight.chunk(2, 1), second.up.weight.chunk(2, 1))
    )
    assert torch.equal(torch.cat([gates, ups], 1), whole.up.weight)
    assert torch.equal(torch.cat([first.down.weight, second.down.weight], 2), whole.down.weight)
    assert torch.equal(first.down.bias, whole.down.bias) and second.down.bias is None
    assert whole.up.bias.shape == (6, 2 * 96) and second.up.bias.shape == (6, 96)


def test_the_size_of_weights_counts_unpacked_experts(packed: tuple[Path, Tensors], zoo: Zoo) -> None:
    plain, here = (read_model_description(folder) for folder in (zoo["gpt-oss"].folder, packed[0]))
    both = torch.bfloat16, torch.bfloat16
    assert num_weight_bytes(here, *both) == num_weight_bytes(plain, *both)
    assert "model.layers.2.mlp.experts.5.up_proj.bias" in tensor_shapes(plain)


def _change(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], Tensors]:
    def edit(tensors: Tensors) -> Tensors:
        changed = change(tensors.pop(name))
        return tensors if changed is None else {**tensors, name: changed}

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_change(f"{UP}_blocks", lambda _: None), f"missing {UP}_blocks"),
        (_change(f"{UP}_scales", lambda _: None), f"missing {UP}_scales"),
        (_change(f"{DOWN}_bias", lambda _: None), f"missing {DOWN}_bias"),
        (
            _change(f"{UP}_blocks", lambda blocks: blocks[..., :8].contiguous()),
            f"tensor '{UP}_blocks' has shape [6, 192, 2, 8], expected [6, 192, 2, 16]",
        ),
        (
            _change(f"{DOWN}_scales", lambda scales: scales[:5].clone()),
            f"tensor '{DOWN}_scales' has shape [5, 64, 3], expected [6, 64, 3]",
        ),
        (
            _change(f"{DOWN}_blocks", lambda blocks: blocks.to(torch.int8)),
            f"tensor '{DOWN}_blocks' has dtype I8, expected U8",
        ),
        (
            _change(f"{DOWN}_scales", lambda scales: scales.float()),
            f"tensor '{DOWN}_scales' has dtype float32, expected U8",
        ),
        (lambda tensors: {**tensors, UP: torch.ones(6, 64, 192)}, f"unexpected {UP}"),
    ],
)
def test_malformed_packing_is_refused_by_name(
    packed: tuple[Path, Tensors], edit: Callable[[Tensors], Tensors], message: str
) -> None:
    file = packed[0] / "model.safetensors"
    save_file(edit(load_file(file)), file)
    with pytest.raises(ConfigError) as error:
        _experts(packed[0])
    assert message in str(error.value) and str(packed[0]) in str(error.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_change(UP, lambda _: None), f"missing {UP}"),
        (
            _change(UP, lambda up: up[:, :32].clone()),
            f"tensor '{UP}' has shape [6, 32, 192], expected [6, 64, 1",
        ),
        (
            _change(DOWN, lambda down: down.to(torch.uint8)),
            f"tensor '{DOWN}' has dtype U8, expected float32 or b",
        ),
    ],
)
def test_malformed_stacks_are_refused_by_name(
    zoo: Zoo, tmp_path: Path, edit: Callable[[Tensors], Tensors], message: str
) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(zoo["gpt-oss"].folder, folder)
    save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        _experts(folder)
    assert message in str(error.value)


def test_columns_of_packed_experts_must_be_whole_blocks(zoo: Zoo, tmp_path: Path) -> None:
    """A padded block would have numbers without a meaning."""
    folder = tmp_path / "edited"
    shutil.copytree(zoo["gpt-oss"].folder, folder)
    pack(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 72'))
    with pytest.raises(ConfigError, match="a multiple of 32 columns instead of 72"):
        _experts(folder)


@pytest.mark.parametrize(
    ("case", "quantization", "message"),
    [
        ("gpt-oss", {**QUANTIZATION, "quant_method": "hqq"}, "modelopt, awq, gptq, mxfp4; take"),
        ("gpt-oss", {}, "modelopt, awq, gptq, mxfp4; take"),
        ("gpt-oss", "mxfp4", "expected a JSON object"),
        ("gpt-oss", {**QUANTIZATION, "group_size": 16}, "'quantization_config.group_size' is 16"),
        ("mixtral", QUANTIZATION, "is 'mxfp4', expected one of fp8, fbgemm_fp8"),
    ],
)
def test_other_quantizations_are_refused(
    zoo: Zoo, tmp_path: Path, case: str, quantization: Any, message: str
) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(zoo[case].folder, folder)
    set_quantization(folder, quantization)
    with pytest.raises(ConfigError, match="quantization_config") as error:
        read_model_description(folder)
    assert message in str(error.value)


def test_the_published_gpt_oss_has_the_tensors_of_transformers(tmp_path: Path) -> None:
    """config.json of openai/gpt-oss-20b; its tensors are compared with those of transformers' model."""
    num_layers = 24
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": QUANTIZATION,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model_description(tmp_path)
    assert model.decoder.sliding_windows == (128, None) * (num_layers // 2)
    assert model.decoder.max_positions == 131072
    assert model.decoder.clamped_swiglu == ClampedSwiglu(alpha=1.702, limit=7.0)
    with torch.device("meta"):
        published = GptOssForCausalLM(AutoConfig.from_pretrained(tmp_path))
    total, active = num_parameters(model)
    assert total == published.num_parameters()
    of_experts = sum(p.numel() for layer in published.model.layers for p in layer.mlp.experts.parameters())
    assert active == total - of_experts * 28 // 32
