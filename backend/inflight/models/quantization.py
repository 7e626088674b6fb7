"""Reads from config.json how a checkpoint's weights are quantized.

Supported are FP8 (DeepSeek's and transformers' `fp8`, `fbgemm_fp8`, ModelOpt), compressed-tensors, AWQ, GPTQ, and
the types of a GGUF file in the folder made for it (`inflight.gguf`). The tensors themselves show which modules are
quantized, in how many bits and in which groups (`quantized_tensors.py`); this module reads the other properties of
the format. MXFP4 as `quant_method` occurs in stacked experts only (`stacked_experts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.gguf.folder import is_gguf
from inflight.json_values import is_list, is_object
from inflight.models.neutral_keys import ANY, refuse_unread

_KEY = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_BLOCKS, _MODELOPT_BLOCK = "FP8_PB_WO", (128, 128)  # the file does not state the size of blocks
_FLOAT4_GROUPS = {"group": 32, "tensor_group": 16}  # MXFP4 and NVFP4
_INSTEAD = (
    "take the unquantized checkpoint (--dtype int8 or fp8 quantizes it here), or one in FP8, AWQ, GPTQ or "
    "compressed-tensors"
)
_EXCLUDED = "-:"  # begins GPTQModel's rules for modules that are not quantized
_REFUSED = {
    "bitsandbytes": "bitsandbytes' formats need its own kernels",
    "torchao": "torchao stores tensors of its own classes",
    "gguf": "GGUF is llama.cpp's file format",
}
_CT_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint's weights.

    Attributes:
        method: The value of `quant_method`: fp8, fbgemm_fp8, compressed-tensors, modelopt, awq, gptq, mxfp4, gguf.
        block: Number of rows and columns that share a scale; None: scales are not per block.
        zero_offset: For GPTQ: added to a stored zero point.
        group_size: For AWQ and GPTQ: number of inputs in a group; the last group may be smaller. None: not stated.
        has_order: For GPTQ: whether a group's inputs need not be side by side; then a tensor has each
            input's group.
        is_symmetric: For GPTQ: whether all zero points are the middle of the range.
        is_of_stacks: Whether only stacked experts, in one tensor per layer, are quantized (`stacked_experts.py`).
    """

    method: str
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    group_size: int | None = None
    has_order: bool = False
    is_symmetric: bool = False
    is_of_stacks: bool = False


def read_quantization(config: ConfigFile, own: tuple[str, ...] = ()) -> Quantization | None:
    """Read a checkpoint's quantization from config.json or ModelOpt's own file; return None if it is not
    quantized.

    Args:
        config: The contents of config.json.
        own: Methods that are supported only for this family's stacked experts.

    Raises:
        ConfigError: The quantization is not supported; the message names alternatives.
    """
    for key in ("compression_config", "quantization"):
        if config.has(key):
            raise config.error(key, f"no such key: {_INSTEAD}")
    if config.has(_KEY):
        section = config.child(_KEY)
    elif (file := config.path.with_name(_MODELOPT_FILE)).exists():
        section = ConfigFile.load(file).child("quantization")
        return _read_modelopt(section)
    else:
        return None
    method = section.text_or_none("quant_method")
    if method in own:
        # The tensors themselves show which modules are quantized.
        section.texts("modules_to_not_convert")
        section.boolean("dequantize", False)
        refuse_unread(section)
        return Quantization(method, is_of_stacks=True)
    if method == "gguf" and is_gguf(config.path.parent):
        return Quantization(method)
    if method in _REFUSED:
        raise section.error("quant_method", f"a method that is read here: {_REFUSED[method]}; {_INSTEAD}")
    read = _READERS.get(method or "")
    if read is None:
        expected = ", ".join([*_READERS, *own])
        raise section.error("quant_method", f"one of {expected}; {_INSTEAD}")
    return read(section)


def _read_fp8(section: ConfigFile) -> Quantization:
    _expect(section, "fmt", (None, "e4m3", "float8_e4m3fn"))
    block = _block(section, "weight_block_size", section.value("weight_block_size"))
    _refuse_unread(
        section,
        "activation_scheme",
        "scale_fmt",
        "modules_to_not_convert",
        "dequantize",
        "activation_scale_ub",
    )
    return Quantization("fp8", block)


def _read_modelopt(section: ConfigFile) -> Quantization:
    _expect(section, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", _MODELOPT_BLOCKS, "NVFP4"))
    is_in_blocks = section.value("quant_algo") == _MODELOPT_BLOCKS
    _refuse_unread(
        section, "quant_method", "kv_cache_quant_algo", "exclude_modules", "ignore", "config_groups", "producer",
        "kv_cache_scheme", "group_size",
    )  # fmt: skip
    return Quantization("modelopt", _MODELOPT_BLOCK if is_in_blocks else None)


def _read_compressed(section: ConfigFile) -> Quantization:
    _expect(section, "format", (None, *_CT_FORMATS))
    block = None
    groups: Any = section.value("config_groups") or {}
    if not is_object(groups):
        raise section.error("config_groups", "a JSON object")
    for name in groups:
        of_group = ConfigFile(section.path, groups, f"{_KEY}.config_groups").child(name)
        _expect(of_group, "format", (None, *_CT_FORMATS))
        if not of_group.has("weights"):
            continue
        weights = of_group.child("weights")
        _expect(weights, "type", ("int", "float"))
        _expect(weights, "num_bits", (4, 8))
        if weights.value("type") == "float" and weights.value("num_bits") == 4:
            _expect(weights, "strategy", tuple(_FLOAT4_GROUPS))
            _expect(weights, "group_size", (_FLOAT4_GROUPS[weights.value("strategy")],))
            _expect(weights, "symmetric", (None, True))
        else:
            _expect(weights, "strategy", (None, "tensor", "channel", "group", "block"))
        if weights.value("strategy") == "block":
            found = _block(weights, "block_structure", _as_list(weights.value("block_structure")))
            if found is None or block not in (None, found):
                raise weights.error("block_structure", "[rows, columns], the same in all config_groups")
            block = found
    sparsity = section.value("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise section.error("sparsity_config", f"none, or format dense; {_INSTEAD}")
    if section.value("transform_config"):
        raise section.error("transform_config", f"none: transformed weights are not read; {_INSTEAD}")
    _refuse_unread(
        section, "ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version",
        "activation_scheme",
    )  # fmt: skip
    return Quantization("compressed-tensors", block)


def _read_awq(section: ConfigFile) -> Quantization:
    for key in ("bits", "w_bit"):
        _expect(section, key, (None, 4))
    for key in ("version", "format"):
        value = section.value(key)
        if value is not None and str(value).lower() != "gemm":
            raise section.error(key, "gemm, the packing that AutoAWQ writes by default")
    _expect(section, "zero_point", (None, True))
    group_size = _group_size(section, "group_size", "q_group_size")
    _refuse_unread(
        section, "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "backend",
        "modules_to_fuse", "exllama_config", "sym",
    )  # fmt: skip
    return Quantization("awq", group_size=group_size)


def _read_gptq(section: ConfigFile) -> Quantization:
    _expect(section, "bits", (4, 8))
    _expect(section, "pack_dtype", (None, "int32"))
    layouts = section.value("checkpoint_format"), section.value("format")
    layout = layouts[0] or layouts[1]
    if layout not in (None, "gptq", "gptq_v2"):
        raise section.error("checkpoint_format", f"gptq or gptq_v2; {_INSTEAD}")
    _check_dynamic(section)
    quantization = Quantization(
        "gptq",
        zero_offset=0 if layout == "gptq_v2" else 1,
        group_size=_group_size(section, "group_size"),
        has_order=section.value("desc_act") is True,
        is_symmetric=section.value("sym") is True,
    )
    _refuse_unread(
        section, "sym", "damp_percent", "damp_auto_increment", "true_sequential",
        "static_groups", "model_name_or_path", "model_file_base_name", "lm_head", "meta", "exllama_config",
        "use_exllama", "max_input_length", "use_cuda_fp16", "backend", "dataset", "tokenizer", "model_seqlen",
        "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id",
        "disable_exllama", "cache_block_outputs", "modules_in_block_to_quantize", "quantizer", "act_group_aware",
        "adapter", "method", "mse", "hyb_act",
    )  # fmt: skip
    return quantization


def _check_dynamic(section: ConfigFile) -> None:
    """Raise ConfigError unless each of GPTQModel's rules excludes modules, or is empty and changes nothing.

    Excluded modules are not quantized.
    """
    rules: Any = section.value("dynamic") or {}
    if not is_object(rules):
        raise section.error("dynamic", "an object of rules")
    others = (rule for rule, given in rules.items() if not rule.startswith(_EXCLUDED) and given != {})
    if other := next(others, None):
        raise section.error(
            "dynamic",
            f"only rules that exclude modules ({_EXCLUDED}PATTERN) or are empty: the rule {other!r} gives modules "
            f"other parameters, which are not read; {_INSTEAD}",
        )


_READERS: dict[str, Callable[[ConfigFile], Quantization]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
}


def _expect(section: ConfigFile, key: str, allowed: tuple[object, ...]) -> None:
    value = section.value(key)
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        expected = " or ".join(repr(one) for one in allowed if one is not None)
        raise section.error(key, f"{expected}; {_INSTEAD}")


def _refuse_unread(section: ConfigFile, *neutral: str) -> None:
    """Raise ConfigError for an unread key, except keys that have no effect or follow from the tensors."""
    refuse_unread(section, dict.fromkeys(neutral, ANY))


def _group_size(section: ConfigFile, *keys: str) -> int | None:
    """Return the value of the first of these keys that is a size; None for -1, which means one group of all
    inputs."""
    values = [section.value(key) for key in keys]
    return next((value for value in values if type(value) is int and value > 0), None)


def _as_list(value: object) -> object:
    """Return a block as a list; older files write it as `128x128`."""
    found = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
    return [int(found[1]), int(found[2])] if found else value


def _block(section: ConfigFile, key: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (is_list(value) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
        raise section.error(key, "two integers >= 1, rows and columns")
    return value[0], value[1]
