"""Reads LoRA adapters from folders on this machine as the arrays `lora_weights` and `lora_config` of requests.

A folder is either written by PEFT (adapter_config.json, adapter_model.safetensors), or has the two files of a
converter. Each row of `lora_weights` has A [rank, in], then B [out, rank] multiplied by the adapter's scale, then
zeros; its row of `lora_config` has module id, layer, rank, and 1 if it has magnitudes (DoRA). All tensors of a
PEFT folder become rows; the server checks whether they fit the model. Plain functions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inflight_client.lora_modules import MLP_GATE_UP, MODULE_IDS

LoraType = Literal["float16", "float32", "bfloat16"]

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
_HONOURED = """
    peft_type r lora_alpha use_rslora use_dora rank_pattern alpha_pattern target_modules exclude_modules
    layers_to_transform layers_pattern init_lora_weights bias
"""
_HARMLESS = """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config
    lora_dropout fan_in_fan_out ensure_weight_tying megatron_core qalora_group_size
    loftq_config eva_config corda_config lora_ga_config
"""
HONOURED = frozenset(_HONOURED.split())
HARMLESS = frozenset(_HARMLESS.split())
"""Fields of adapter_config.json that are used, and those that have no effect on a saved adapter."""
_CHANGES_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")
_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A multimodal model has the prefix `language_model.` before or after `model.`.
_KEY = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<name>(?:(?:model\.)?language_model\.)?(?:model\.|transformer\.)?(?:layers|h)\.(?P<layer>\d+)\.(?P<module>.+))"
    r"\.(?P<role>lora_A|lora_B)(?:\.weight)?"
)
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def load_lora(folder: Path | str, dtype: LoraType = "float16") -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Read an adapter into the form of a request.

    Args:
        folder: A folder with the converter's two files, or else PEFT's.
        dtype: The type that the server declares for `lora_weights`: float16 for FP16, float32 for FP32, bfloat16
            for BF16.

    Returns:
        weights: [1, rows, width] of that type; bfloat16 as float32 values that bfloat16 can represent, which is
        what tritonclient takes for BF16. config: [1, rows, 3 or 4].

    Raises:
        ValueError: A file is missing or damaged, rows cannot express the adapter, or a value does not fit the
            type.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_FILE).exists():
        weights, config = (_load_array(folder / name) for name in (WEIGHTS_FILE, CONFIG_FILE))
        if weights.dtype.kind == "V":
            weights = _from_bfloat16(weights.view("<u2"))
        return _cast(weights, dtype, WEIGHTS_FILE), config.astype(np.int32)
    return _convert(folder, dtype)


def convert_lora(folder: Path | str, out: Path | str, dtype: LoraType = "float16") -> None:
    """Convert a PEFT folder's adapter to the two files in `out`, bfloat16 as two raw bytes per value.

    Raises:
        ValueError: See `load_lora`; also if `out` cannot be written.
    """
    weights, config = _convert(Path(folder), dtype)
    if dtype == "bfloat16":
        weights = (weights.view("<u4") >> 16).astype("<u2").view("V2")
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        np.save(out / WEIGHTS_FILE, weights)
        np.save(out / CONFIG_FILE, config)
    except OSError as error:
        raise ValueError(f"out is {str(out)!r}, where no file can be written: {error.strerror}") from error


# ---------------------------------------------------------------------- PEFT folders


def _convert(folder: Path, dtype: LoraType) -> tuple[NDArray[Any], NDArray[np.int32]]:
    fields = _read_fields(folder)
    rows, config = [], []
    for (layer, module), (name, parts) in sorted(
        _by_layer(_read_safetensors(folder / _PEFT_WEIGHTS)).items()
    ):
        a, b = parts.get("lora_A"), parts.get("lora_B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            shapes = {role: list(part.shape) for role, part in parts.items()}
            raise ValueError(f"{name} has {shapes}, expected lora_A [rank, in] and lora_B [out, rank]")
        b = b * np.float32(_scale(fields, name, len(a)))
        if module == MLP_GATE_UP:  # the checkpoint has gate first, and rows have up first
            b = np.concatenate((b[len(b) // 2 :], b[: len(b) // 2]))
        rows.append(_cast(np.concatenate((a.ravel(), b.ravel())), dtype, name))
        config.append((module, layer, len(a), 0))
    weights = np.zeros((1, len(rows), max(map(len, rows))), rows[0].dtype)
    for target, row in zip(weights[0], rows):
        target[: len(row)] = row
    return weights, np.array([config], np.int32)


def _by_layer(
    tensors: Mapping[str, NDArray[np.float32]],
) -> dict[tuple[int, int], tuple[str, dict[str, NDArray[np.float32]]]]:
    """Return the name, lora_A and lora_B of each linear layer, keyed by layer and module id."""
    layers: dict[tuple[int, int], tuple[str, dict[str, NDArray[np.float32]]]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match["module"] not in MODULE_IDS:
            raise ValueError(
                f"target_modules: the adapter has a tensor {key!r}, expected only lora_A and lora_B of the "
                f"layers {', '.join(MODULE_IDS)}, which rows of lora_weights can express"
            )
        place = int(match["layer"]), MODULE_IDS[match["module"]]
        layers.setdefault(place, (match["name"], {}))[1][match["role"]] = tensor
    if not layers:
        raise ValueError("the adapter has no tensors, expected lora_A and lora_B of at least one layer")
    return layers


def _read_fields(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises ValueError, naming the field, for a value that rows cannot express."""
    try:
        fields = json.loads((folder / _PEFT_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {_PEFT_CONFIG}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{_PEFT_CONFIG} holds a {type(fields).__name__}, expected a JSON object")

    def error(field: str, expected: str) -> ValueError:
        return ValueError(f"{_PEFT_CONFIG}: {field} is {fields.get(field)!r}, expected {expected}")

    if fields.get("peft_type") != "LORA":
        raise error("peft_type", "'LORA'")
    if fields.get("bias", "none") != "none":
        raise error("bias", "'none'")
    if fields.get("use_dora"):
        raise error(
            "use_dora", "false: DoRA needs the model's weights, convert with scripts/convert_lora --model"
        )
    if str(fields.get("init_lora_weights")).lower().startswith(_CHANGES_MODEL):
        raise error("init_lora_weights", "one that leaves the model's own weights as they are")
    for field, value in fields.items():
        if field not in HONOURED | HARMLESS and value not in (None, False, "", [], {}):
            raise error(field, "nothing there: a row of lora_weights cannot express it")
    return fields


def _scale(fields: Mapping[str, Any], name: str, rank: int) -> float:
    """Return the factor of B A in a linear layer.

    Raises ValueError if its rank is not the one stated in the fields.
    """
    expected = _by_pattern(fields.get("rank_pattern"), name, fields.get("r", 8))
    if rank != expected:
        raise ValueError(
            f"{name} has rank {rank}, and it is {expected} by r and rank_pattern of {_PEFT_CONFIG}"
        )
    alpha = _by_pattern(fields.get("alpha_pattern"), name, fields.get("lora_alpha", 8))
    return alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, or the end of it after a dot."""
    matching = (value for each, value in (patterns or {}).items() if re.match(rf"(.*\.)?({each})$", name))
    return next(matching, default)


def _read_safetensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return all tensors of a file as float32. The format: 8 bytes of length, a JSON header, the data."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; scripts/convert_lora reads adapter_model.bin too") from None
    found: dict[str, NDArray[np.float32]] = {}
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = info["data_offsets"]
                array = np.frombuffer(data[begin + first : begin + last], _STORED[info["dtype"]])
                array = array.reshape(info["shape"])
                found[name] = _from_bfloat16(array) if info["dtype"] == "BF16" else array.astype(np.float32)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as safetensors of floats: {error!r}") from None
    return found


# ---------------------------------------------------------------------- numbers


def _load_array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing beside the other of the two files") from None


def _from_bfloat16(halves: NDArray[Any]) -> NDArray[np.float32]:
    """Convert bfloat16 values, given as their bits, [...] of 16 bits."""
    return (halves.astype("<u4") << 16).view("<f4")


def _cast(numbers: NDArray[Any], dtype: LoraType, name: str) -> NDArray[Any]:
    """Convert to a type, rounding to nearest, ties to even. Raises ValueError if a value does not fit."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            bits = np.ascontiguousarray(numbers, "<f4").view("<u4").astype("<u8")
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            result = rounded.astype("<u4").view("<f4")
        else:
            result = numbers.astype(dtype)
    if not (np.isfinite(numbers).all() and np.isfinite(result).all()):
        raise ValueError(f"{name}: the adapter has numbers that {dtype} cannot hold, or none")
    return result
