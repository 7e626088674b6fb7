"""Quantize matrices in the formats of published checkpoints, to write quantized checkpoints with random weights.

Values are rounded to the nearest level. Calibration would choose other levels, but the same file format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from math import gcd
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  bare PathLike
from torch import Tensor

Parts = dict[str, Tensor]
_GROUP_SIZE = 128
_BLOCK = 128
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # index of the output in each 4 bits of a word, lowest bits first
_MIN_SCALE = 1e-12  # smallest scale
_FLOAT4_BORDERS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_NOT_MXFP4 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

MXFP4 = "mxfp4"
"""The format of gpt-oss's stacked experts. All other formats are for single projection matrices."""


def quantize_weights(
    format: str, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[Parts, dict[str, object]]:
    """Return the tensors of a checkpoint with quantized projections, and its `quantization_config`.

    Args:
        format: A key of `FORMATS`, or `MXFP4`.
        weights: Weights by name. Names of projections end in `_proj.weight`; stacked experts are
            `….experts.gate_up_proj` and `….experts.down_proj`, with shape [experts, inputs, outputs].
        dtype: Dtype of the scales.
    """
    if format == MXFP4:
        return _quantize_stacks(weights)
    matrices = {name for name in weights if name.endswith("_proj.weight")}
    if not matrices:
        raise ValueError(
            f"there is no matrix to quantize to {format}: expected names that end in _proj.weight"
        )
    size = gcd(_GROUP_SIZE, *(weights[name].shape[1] for name in matrices))
    make, describe = FORMATS[format]
    tensors: Parts = {}
    for name, weight in weights.items():
        if name in matrices:
            module = name.removesuffix("weight")
            parts = make(weight.float(), size, dtype)
            tensors |= {module + kind: part.contiguous() for kind, part in parts.items()}
        else:
            tensors[name] = weight
    return tensors, describe(size)


def quantize_checkpoint(source: Path, target: Path, format: str) -> Path:
    """Quantize the checkpoint in the folder `source` into the folder `target`, and return `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights, described = quantize_weights(format, load_file(source / "model.safetensors"), dtype)
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": described}, indent=2))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def _quantize_stacks(weights: Mapping[str, Tensor]) -> tuple[Parts, dict[str, object]]:
    """Quantize stacks of experts' matrices to MXFP4, as in published gpt-oss; other weights are unchanged."""
    tensors: Parts = {}
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            matrices = weight.float().transpose(1, 2).contiguous()
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = _mxfp4(matrices)
        else:
            tensors[name] = weight
    if len(tensors) == len(weights):
        raise ValueError(f"there is no stack of experts to quantize to {MXFP4}: expected a model of gpt-oss")
    return tensors, {"quant_method": MXFP4, "modules_to_not_convert": _NOT_MXFP4}


def _mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [..., n * 32] numbers to MXFP4: uint8 [..., n, 16], two floats per byte, and exponents [..., n].

    Exponents are stored plus 127. A block's exponent is the exponent of its largest number minus the
    exponent of 6, the largest 4-bit float.
    """
    blocks = torch.unflatten(weight, -1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp_min(2.0**-120).log2().floor() - 2
    scaled = blocks / exponents.exp2()[..., None]
    codes = torch.bucketize(scaled.abs(), torch.tensor(_FLOAT4_BORDERS)) | (scaled < 0).long() << 3
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8).contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def _in_groups(
    weight: Tensor, size: int, dtype: torch.dtype, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels 0 to 15 [outputs, inputs], and zero points and scales [outputs, groups of `size` inputs]."""
    groups = torch.unflatten(weight, 1, (-1, size))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
    scales = scales.clamp_min(_MIN_SCALE).to(dtype).float()
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    levels = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return levels.flatten(1), zeros, scales


def _words(numbers: Tensor) -> Tensor:
    """Pack 4-bit numbers [rows, n] into int32 [rows, n / 8], lowest bits first."""
    shifts = 4 * torch.arange(8, dtype=torch.int64)
    words = (torch.unflatten(numbers.long(), 1, (-1, 8)) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _awq(weight: Tensor, size: int, dtype: torch.dtype) -> Parts:
    levels, zeros, scales = _in_groups(weight, size, dtype, symmetric=False)

    def pack(numbers: Tensor) -> Tensor:
        return _words(torch.unflatten(numbers.T, 1, (-1, 8))[..., _AWQ_ORDER].flatten(1))

    return {"qweight": pack(levels), "qzeros": pack(zeros), "scales": scales.T.to(dtype)}


def _gptq(weight: Tensor, size: int, dtype: torch.dtype) -> Parts:
    levels, zeros, scales = _in_groups(weight, size, dtype, symmetric=True)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // size
    qzeros = _words(zeros.T - 1)
    return {"qweight": _words(levels).T, "qzeros": qzeros, "scales": scales.T.to(dtype), "g_idx": groups}


def _int4(weight: Tensor, size: int, dtype: torch.dtype) -> Parts:
    levels, _, scales = _in_groups(weight, size, dtype, symmetric=True)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _words(levels), "weight_scale": scales.to(dtype), "weight_shape": shape}


def _int8(weight: Tensor, size: int, dtype: torch.dtype) -> Parts:
    scales = (weight.abs().amax(1, keepdim=True) / 127.5).clamp_min(_MIN_SCALE).to(dtype)
    levels = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": levels, "weight_scale": scales}


def _fp8(weight: Tensor, size: int, dtype: torch.dtype) -> Parts:
    rows, columns = (-(-length // _BLOCK) for length in weight.shape)
    filled = torch.zeros(rows * _BLOCK, columns * _BLOCK)
    filled[: weight.shape[0], : weight.shape[1]] = weight
    scales = (filled.view(rows, _BLOCK, columns, _BLOCK).abs().amax((1, 3)) / 448).clamp_min(_MIN_SCALE)
    of_each = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    levels = (weight / of_each[: weight.shape[0], : weight.shape[1]]).to(torch.float8_e4m3fn)
    return {"weight": levels, "weight_scale_inv": scales}


def _compressed(format: str, **weights: object) -> dict[str, object]:
    weights |= {"type": "int", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FORMATS: dict[
    str, tuple[Callable[[Tensor, int, torch.dtype], Parts], Callable[[int], dict[str, object]]]
] = {
    "awq": (
        _awq,
        lambda size: {
            "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm",
        },
    ),
    "gptq": (
        _gptq,
        lambda size: {
            "quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": False,
            "checkpoint_format": "gptq",
        },
    ),
    "int4": (
        _int4,
        lambda size: _compressed("pack-quantized", num_bits=4, strategy="group", group_size=size),
    ),
    "int8": (_int8, lambda _: _compressed("int-quantized", num_bits=8, strategy="channel")),
    "fp8": (
        _fp8,
        lambda _: {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
    ),
}  # fmt: skip
"""The formats for `--quantize`: AWQ, GPTQ, compressed-tensors' int4 and int8, and DeepSeek's float8 in blocks."""
