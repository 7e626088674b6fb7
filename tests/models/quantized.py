"""Quantized checkpoints of the zoo's models, and transformers' models with the dequantized weights.

Formats with a compressor in compressed-tensors' library are written and dequantized by it. Other formats are
written here by their published layouts, and dequantized from the levels before these are packed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.zoo import ZooModel

Parts = dict[str, Tensor]
Quantize = Callable[[Tensor, torch.Generator], tuple[Parts, Tensor]]
"""Quantizes a matrix [outputs, inputs]; returns the module's tensors, and the dequantized matrix."""

PROJECTIONS = ("_proj", "_with_mqa", "query_key_value", "dense", "_h_to_4h", "_4h_to_h", "fc1", "fc2")
"""Suffixes of layers' matrices, except routers, and except gpt2's, which are stored transposed."""

FLOAT8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of 8 consecutive ones, in each 4 bits of a word, from the lowest bits on."""


@dataclass(frozen=True)
class Format:
    """A quantization format as in config.json."""

    config: dict[str, Any]
    quantize: Quantize
    file: str | None = None  # file of the quantization config, if not config.json
    multiple: int = 1  # sizes of quantized matrices are multiples of this


def write(
    model: ZooModel,
    folder: Path,
    format: Format,
    skipped: tuple[str, ...] = (),
    dtype: str | None = None,
) -> ZooModel:
    """Write a checkpoint whose projections, except `skipped`, are quantized; return it with an oracle.

    `dtype`: dtype stated in config.json; None: the model's.
    """
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors: Parts = {}
    plain: Parts = {}
    for name, tensor in load_file(model.folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_projection = module.endswith(PROJECTIONS) or ".experts." in name
        is_fit = tensor.dim() == 2 and not any(size % format.multiple for size in tensor.shape)
        if not (is_projection and is_fit) or module.endswith(skipped or ("\0",)):
            tensors[name] = plain[name] = tensor
            continue
        parts, stands_for = format.quantize(tensor.float(), generator)
        plain[name] = stands_for.contiguous()
        tensors |= {f"{module}.{kind}": part.contiguous() for kind, part in parts.items()}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    own = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others do not support float64
    oracle = type(model.oracle).from_pretrained(folder, dtype=torch.float32, **own).eval()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if format.file is None:
        config["quantization_config"] = format.config
    else:
        (folder / format.file).write_text(
            json.dumps({"producer": {"name": "x"}, "quantization": format.config})
        )
    if dtype is not None:
        config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        config["dtype"] = dtype
    path.write_text(json.dumps(config))
    return ZooModel(folder, oracle)


def compressed(format: str, compressor: Any, **weights: Any) -> Format:
    """Return a format of compressed-tensors, written by its own library."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        if args.strategy == "block":
            block_rows, block_columns = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -columns % block_columns, 0, -rows % block_rows))
            blocks = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        elif args.strategy == "tensor":
            low, high = weight.amin()[None], weight.amax()[None]
        else:
            groups = weight.unflatten(1, (-1, args.group_size or columns))
            low, high = groups.amin(2), groups.amax(2)
        scales, zeros = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        parts = compressor.compress(state, scheme)
        return parts, compressor.decompress(dict(parts), scheme)["weight"]

    return Format(_config_of(format, args), quantize)


def nvfp4() -> Format:
    """Return NVFP4 of compressed-tensors, written by its own library, whose dequantization rounds to bfloat16.

    The dequantized matrix is computed here without that rounding.
    """
    weights = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=FLOAT8, zp_dtype=FLOAT8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        largest = 6 * 448 / weight.abs().max()[None]
        groups = weight.unflatten(1, (-1, 16))
        scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), weights, global_scale=largest)
        state = {
            "weight": weight,
            "weight_scale": scales,
            "weight_zero_point": zeros,
            "weight_global_scale": largest,
        }
        parts = NVFP4PackedCompressor.compress(state, scheme)
        floats = unpack_fp4_from_uint8(parts["weight_packed"], *weight.shape, torch.float32)
        factors = parts["weight_scale"].float() / largest
        rounded = NVFP4PackedCompressor.decompress(dict(parts), scheme)["weight"]
        stands_for = floats * factors.repeat_interleave(16, 1)
        torch.testing.assert_close(rounded.float(), stands_for, rtol=2**-7, atol=0)
        return parts | {"input_global_scale": torch.tensor([7.0])}, stands_for

    return Format(_config_of("nvfp4-pack-quantized", weights), quantize, multiple=16)


def modelopt_nvfp4() -> Format:
    """Return NVFP4 of ModelOpt: other names, and a factor in place of the divisor of scales."""
    compressed = nvfp4()

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        parts, _ = compressed.quantize(weight, generator)
        factor = 1 / parts["weight_global_scale"][0]
        packed, scales = parts["weight_packed"], parts["weight_scale"]
        floats = unpack_fp4_from_uint8(packed, *weight.shape, torch.float32)
        own = {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": factor,
            "input_scale": torch.tensor(0.5),
        }
        return own, floats * (scales.float() * factor).repeat_interleave(16, 1)

    config = MODELOPT | {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    return Format(config, quantize, "hf_quant_config.json", multiple=16)


def _config_of(format: str, weights: QuantizationArgs) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights.model_dump(mode="json"), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "version": "0.20.0",
    }


def scaled(
    config: dict[str, Any], kind: str, shape: str, file: str | None = None, block: tuple[int, int] = (48, 40)
) -> Format:
    """Return float8 with one scale, one per row, or one per block; a "4d block" is ModelOpt's shape of scales."""

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        scales = torch.empty(weight.shape)
        step = {"tensor": (rows, columns), "row": (1, columns)}.get(shape, block)
        stored = torch.empty(-(-rows // step[0]), -(-columns // step[1]))
        for row in range(0, rows, step[0]):
            for column in range(0, columns, step[1]):
                own = slice(row, row + step[0]), slice(column, column + step[1])
                scale = weight[own].abs().max() / 448
                scales[own] = stored[row // step[0], column // step[1]] = scale
        levels = (weight / scales).to(FLOAT8)
        parts = {"weight": levels, kind: stored[0, 0] if shape == "tensor" else stored}
        if shape == "4d block":
            parts[kind] = stored[:, None, :, None]
        if shape == "tensor":
            parts["input_scale"] = torch.tensor(0.5)
        return parts, levels.float() * scales

    return Format(config, quantize, file)


def awq(group_size: int) -> Format:
    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        size = weight.shape[1] if group_size < 0 else group_size
        levels, zeros, scales, stands_for = _in_groups(
            weight, torch.arange(weight.shape[1]) // size, 4, False
        )

        def pack(numbers: Tensor) -> Tensor:
            return _packed(numbers.reshape(len(numbers), -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4)

        parts = {"qweight": pack(levels.T), "qzeros": pack(zeros.T), "scales": scales.T.half()}
        return parts, stands_for

    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return Format(config, quantize, multiple=8)


def gptq(
    bits: int,
    group_size: int,
    is_symmetric: bool,
    act_order: bool,
    version: str | None,
    in_common: bool = True,
) -> Format:
    """Return a format of GPTQ; `in_common`: projections with the same input share its order, as calibrated."""

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        columns = weight.shape[1]
        size = columns if group_size < 0 else group_size
        order = torch.Generator().manual_seed(columns) if in_common else generator
        groups = _shuffled_groups(columns, size, order) if act_order else torch.arange(columns) // size
        levels, zeros, scales, stands_for = _in_groups(weight, groups, bits, is_symmetric)
        stored = zeros if version == "gptq_v2" else zeros - 1
        parts = {
            "qweight": _packed(levels, bits).T,
            "qzeros": _packed(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": groups.int(),
        }
        return parts, stands_for

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": is_symmetric, "desc_act": act_order,
        "damp_percent": 0.01, "true_sequential": True, "lm_head": False, "meta": {"quantizer": ["x"]},
    }  # fmt: skip
    return Format(config | ({} if version is None else {"checkpoint_format": version}), quantize, multiple=8)


def packed_act_order() -> Format:
    """Return the older compressed-tensors format with act-order, in which a group's inputs are apart."""

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        groups = _shuffled_groups(weight.shape[1], 32, torch.Generator().manual_seed(weight.shape[1]))
        levels, _, scales, stands_for = _in_groups(weight, groups, 4, True)
        shape = torch.tensor(weight.shape)
        parts = {"weight_packed": _packed(levels, 4), "weight_shape": shape, "weight_g_idx": groups}
        return parts | {"weight_scale": scales}, stands_for

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}}
    return Format(config, quantize)


def _shuffled_groups(columns: int, size: int, generator: torch.Generator) -> Tensor:
    return (torch.arange(columns) // size)[torch.randperm(columns, generator=generator)].int()


def _in_groups(
    weight: Tensor, groups: Tensor, bits: int, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return levels [outputs, inputs], zero points and scales [outputs, groups], and the dequantized matrix."""
    most = (1 << bits) - 1
    groups = groups.long()
    count = int(groups.max()) + 1
    zeros, scales = torch.empty(2, len(weight), count)
    for group in range(count):
        low, high = weight[:, groups == group].amin(1), weight[:, groups == group].amax(1)
        if is_symmetric:
            scales[:, group] = torch.maximum(-low, high) * 2 / most
            zeros[:, group] = (most + 1) // 2
        else:
            scales[:, group] = (high.clamp_min(0) - low.clamp_max(0)) / most
            zeros[:, group] = (-low.clamp_max(0) / scales[:, group]).round().clamp(1, most)
    scales = scales.half().float()
    levels = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
    stands_for = (levels - zeros[:, groups]) * scales[:, groups]
    return levels.long(), zeros.long(), scales, stands_for


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers [rows, n] into int32 words, lowest bits first: [rows, n * bits / 32]."""
    per_word = 32 // bits
    words = np.zeros((len(numbers), numbers.shape[1] // per_word), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        words[:, column // per_word] |= numbers[:, column].numpy().astype(np.uint32) << (
            bits * (column % per_word)
        )
    return torch.from_numpy(words.view(np.int32))


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
_PACK, _INT, _FLOAT = PackedQuantizationCompressor, IntQuantizationCompressor, FloatQuantizationCompressor

FORMATS = {
    "fp8-block": scaled(FP8 | {"weight_block_size": [48, 40]}, "weight_scale_inv", "block"),
    "fp8-tensor": scaled(FP8 | {"modules_to_not_convert": ["lm_head"]}, "weight_scale_inv", "tensor"),
    "fbgemm": scaled({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale", "row"),
    "modelopt": scaled({"quant_method": "modelopt"} | MODELOPT, "weight_scale", "tensor"),
    "modelopt-channel": scaled(
        {"quant_method": "modelopt"} | MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "weight_scale",
        "row",
    ),
    "modelopt-block": scaled(
        MODELOPT | {"quant_algo": "FP8_PB_WO"}, "weight_scale", "4d block", "hf_quant_config.json", (128, 128)
    ),
    "modelopt-file": scaled(MODELOPT, "weight_scale", "tensor", "hf_quant_config.json"),
    "ct-float-tensor": compressed("float-quantized", _FLOAT, num_bits=8, type="float", strategy="tensor"),
    "ct-float-channel": compressed("float-quantized", _FLOAT, num_bits=8, type="float", strategy="channel"),
    "ct-float-block": compressed(
        "float-quantized", _FLOAT, num_bits=8, type="float", strategy="block", block_structure=[48, 40]
    ),
    "ct-int8": compressed("int-quantized", _INT, num_bits=8, strategy="channel"),
    "ct-int8-tensor": compressed("int-quantized", _INT, num_bits=8, strategy="tensor"),
    "ct-int8-zeros": compressed("int-quantized", _INT, num_bits=8, strategy="channel", symmetric=False),
    "ct-int4": compressed("pack-quantized", _PACK, num_bits=4, strategy="group", group_size=32),
    "ct-int4-channel": compressed("pack-quantized", _PACK, num_bits=4, strategy="channel"),
    "ct-int4-zeros": compressed(
        "pack-quantized", _PACK, num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "ct-int4-act-order": packed_act_order(),
    "ct-packed-int8": compressed("pack-quantized", _PACK, num_bits=8, strategy="group", group_size=32),
    "ct-mxfp4": compressed(
        "mxfp4-pack-quantized",
        MXFP4PackedCompressor,
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    ),
    "ct-nvfp4": nvfp4(),
    "modelopt-nvfp4": modelopt_nvfp4(),
    "awq": awq(32),
    "awq-one-group": awq(-1),
    "gptq": gptq(4, 32, True, False, None),
    "gptq-one-group": gptq(4, -1, True, False, "gptq"),
    "gptq-zeros": gptq(4, 32, False, False, "gptq"),
    "gptq-act-order": gptq(4, 32, True, True, "gptq"),
    "gptq-v2": gptq(4, 16, False, True, "gptq_v2"),
    "gptq-any-order": gptq(4, 32, True, True, "gptq", in_common=False),
    "gptq-8": gptq(8, 32, True, True, None),
    "gptq-8-zeros": gptq(8, 32, False, True, None),
}
