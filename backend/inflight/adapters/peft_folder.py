"""PEFT folders (adapter_config.json, adapter_model.safetensors or .bin) as rows of `lora_weights`.

`models/families/` has the names of linear layers. B is multiplied by the adapter's scale, so that no later
code needs alphas. DoRA's magnitudes are divided by the norms of the rows of W + B A, for which the model's weights
are read, one layer at a time and only layers that the adapter changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from inflight.adapters.lora_modules import (
    FUSED_MODULES,
    PROJECTIONS,
    RECURRENT_INPUTS,
    Module,
    ModuleSize,
    module_sizes,
    name_layer,
)
from inflight.adapters.peft_config import CONFIG_FILE, PeftConfig
from inflight.core.request.adapter import LoraWeights, Matrix, RawBuffer
from inflight.errors import InvalidArgument
from inflight.json_values import is_object
from inflight.models.checkpoint import Checkpoint
from inflight.models.families import FAMILIES, FUSED_LLAMA_NAMES, WeightNames, bases_in_multimodal
from inflight.models.families.family import AttentionNames
from inflight.models.fitting import fitted
from inflight.models.registry import ModelDescription

_SAFETENSORS, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_ROLE = re.compile(r"\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?$")
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class _AdaptedLayer:
    """A linear layer, by its name in the base model, like `model.layers.0.self_attn.q_proj`.

    `base` is the part of the name before the layers, which differs between text models and multimodal models.
    """

    name: str
    base: str
    module: Module
    layer: int


@dataclass(frozen=True, slots=True)
class _PeftRow:
    """The matrices of one linear layer in a folder: A [rank, in], B [out, rank], magnitudes [out]."""

    place: _AdaptedLayer
    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def read_peft_folder(
    folder: Path, model: ModelDescription | None = None, dtype: str | None = None
) -> LoraWeights:
    """Read an adapter saved by PEFT.

    Args:
        folder: Contains adapter_config.json, and adapter_model.safetensors or adapter_model.bin.
        model: The adapter's model. None: names of any family are accepted, shapes are not checked, and DoRA
            is refused.
        dtype: Type of the result: float32, float16 or bfloat16; None: the stored type, or if there are
            several, one that can represent all values.

    Returns:
        A row for each linear layer, by layer and module.

    Raises:
        InvalidArgument: A file is missing or damaged, a tensor does not fit, or rows cannot express a field
            of adapter_config.json; the message names the file, tensor or field.
    """
    config = PeftConfig.load(folder)
    rows = _rows(_read_tensors(folder), model)
    for row in rows:
        _check_row(row, config)
    if model is not None:
        _check_model(rows, config, model)
    target = getattr(torch, dtype) if dtype else _widest([row.a for row in rows] + [row.b for row in rows])
    with ExitStack() as closing:
        norms = None
        if config.use_dora:
            if model is None:
                raise InvalidArgument(
                    f"{CONFIG_FILE}: use_dora is True, and the magnitudes of rows are relative to the model's own "
                    "weights: give the model too (convert_lora --model CHECKPOINT)"
                )
            checkpoint = closing.enter_context(Checkpoint(model.folder))
            norms = _Norms(checkpoint, fitted(model, checkpoint).names)
        return _packed([_numbers(row, config, norms, target) for row in rows], rows, target)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    name = next((name for name in (_SAFETENSORS, _PICKLED) if (folder / name).exists()), None)
    if name is None:
        raise InvalidArgument(f"found neither {_SAFETENSORS} nor {_PICKLED} next to {CONFIG_FILE}")
    try:
        # Not memory-mapped: overwriting a mapped file while it is read would end the process.
        data = (folder / name).read_bytes()
        found: Any = (
            load(data) if name == _SAFETENSORS else torch.load(BytesIO(data), "cpu", weights_only=True)
        )
    except Exception as error:  # of any class, for damaged files
        raise InvalidArgument(f"{name} cannot be read: {error}") from None
    if not (is_object(found) and all(isinstance(each, Tensor) for each in found.values())):
        raise InvalidArgument(f"{name} holds something else than tensors by name")
    return found


# ---------------------------------------------------------------------- layers of the tensors


def modules_by_name(
    names: WeightNames, *, has_attention: bool = True, has_state: bool = False, has_experts: bool = False
) -> dict[str, Module]:
    """Return the modules of a layer's linear layers, by their names in a decoder layer.

    Leaves out matrices in which queries, keys and values alternate by head, because adapters' rows have all
    queries first, then all keys, then all values.

    Args:
        names: The family's names.
        has_attention: Whether the layer has attention.
        has_state: Whether it has a recurrent part.
        has_experts: Whether it has experts, and perhaps a shared MLP, instead of an MLP.
    """
    found: dict[str, Module] = {}
    if has_state and names.recurrent is not None:
        modules = (name for name, _ in names.recurrent.product)
        found = {**dict(zip(modules, RECURRENT_INPUTS)), names.recurrent.output: Module.MAMBA_OUT_PROJ}
    if has_attention:
        found |= _attention_modules(names.attention)
    mlp = names.mlp
    if has_experts:
        if names.experts is None or names.experts.shared is None:
            return found
        mlp = names.experts.shared
    # In a gated MLP, the first one is the activation's input, as is the only one of a plain MLP.
    up = (Module.MLP_GATE_UP,) if mlp.fused else PROJECTIONS["up"][: len(mlp.up)]
    return {**found, **dict(zip(mlp.up, up, strict=True)), mlp.down: Module.MLP_4H_TO_H}


def _modules_of(model: ModelDescription, layer: int) -> dict[str, Module]:
    """Return the modules of a layer of a model, by their names in it."""
    decoder = model.decoder
    return modules_by_name(
        model.names,
        has_attention=decoder.has_attention(layer),
        has_state=decoder.has_state(layer),
        has_experts=decoder.has_experts(layer),
    )


def _attention_modules(names: AttentionNames) -> dict[str, Module]:
    output, latent = {names.output: Module.ATTN_DENSE}, names.latent
    if latent is not None:
        queries = {latent.query: Module.ATTN_Q, latent.query_down: Module.ATTN_Q_A}
        return {**queries, latent.query_up: Module.ATTN_Q_B, latent.kv_down: Module.ATTN_KV_A, **output}
    if names.qkv_by_head:
        return output
    qkv = FUSED_MODULES[Module.ATTN_QKV] if len(names.qkv) > 1 else (Module.ATTN_QKV,)
    return {**dict(zip(names.qkv, qkv, strict=True)), **output}


def all_modules_by_name(names: WeightNames) -> dict[str, Module]:
    """Return the modules of all kinds of layers, and of versions of a model that fuse some of them."""
    found = modules_by_name(names, has_state=True) | modules_by_name(names, has_experts=True)
    return found | _FUSED if len(names.mlp.up) > 1 else found


_FUSED = {
    name: module for name, module in modules_by_name(FUSED_LLAMA_NAMES).items() if module in FUSED_MODULES
}
"""Names of modules that some versions of a model fuse and its family has apart."""


def _place(
    name: str, families: Iterable[WeightNames], model: ModelDescription | None
) -> _AdaptedLayer | None:
    """Return the linear layer with this name; None if rows cannot change it.

    A name may stand for different modules in a model's layers.
    """
    for names in families:
        modules = all_modules_by_name(names)
        layers = re.escape(names.layers).replace(r"\{\}", r"(\d+)")
        bases = "|".join(map(re.escape, bases_in_multimodal(names)))
        match = re.fullmatch(f"({bases}){layers}(.+)", name)
        if match is not None and match.group(3) in modules:
            layer, below = int(match.group(2)), match.group(3)
            if model is not None and layer < model.decoder.num_layers:
                modules |= _modules_of(model, layer)
            return _AdaptedLayer(name, match.group(1), modules[below], layer)
    return None


def _rows(tensors: Mapping[str, Tensor], model: ModelDescription | None) -> list[_PeftRow]:
    families = [model.names] if model else [each.names for each in FAMILIES]
    found: dict[_AdaptedLayer, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        role = _ROLE.search(key)
        name = key[: role.start()].removeprefix(_PREFIX) if role else ""
        place = _place(name, families, model)
        if role is None or place is None:
            raise InvalidArgument(
                f"target_modules: the adapter has a tensor {key!r}, expected only lora_A and lora_B of the "
                f"layers {', '.join(sorted(_known(families)))}, which rows of lora_weights can express"
            )
        if tensor.dtype not in _DTYPES:
            raise InvalidArgument(
                f"tensor {key!r} has numbers of type {tensor.dtype}, expected {', '.join(_DTYPES.values())}"
            )
        found.setdefault(place, {})[role.group(1)] = tensor
    if not found:
        raise InvalidArgument("the adapter has no tensors, expected lora_A and lora_B of at least one layer")
    rows: list[_PeftRow] = []
    for place in sorted(found, key=lambda each: (each.layer, each.module)):
        of_place = found[place]
        for role in ("lora_A", "lora_B"):
            if role not in of_place:
                raise InvalidArgument(f"the adapter has no tensor {_PREFIX}{place.name}.{role}.weight")
        rows.append(
            _PeftRow(place, of_place["lora_A"], of_place["lora_B"], of_place.get("lora_magnitude_vector"))
        )
    return rows


def _known(families: Iterable[WeightNames]) -> set[str]:
    return {name for names in families for name in all_modules_by_name(names)}


# ---------------------------------------------------------------------- checks


def _check_row(row: _PeftRow, config: PeftConfig) -> None:
    """Raise InvalidArgument unless shapes, rank and magnitudes agree with the configuration."""
    name, rank = row.place.name, config.rank(row.place.name)
    a, b = list(row.a.shape), list(row.b.shape)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise InvalidArgument(
            f"{name}: lora_A has shape {a} and lora_B {b}, expected [rank, in] and [out, rank]"
        )
    if a[0] != rank:
        raise InvalidArgument(
            f"{name}: lora_A has shape {a}, expected {rank} rows, the rank in {CONFIG_FILE} (r, rank_pattern)"
        )
    if not config.is_target(name):
        raise InvalidArgument(
            f"{name}: the adapter has tensors of this layer, although target_modules, exclude_modules and "
            f"layers_to_transform of {CONFIG_FILE} leave it out"
        )
    if (row.magnitude is not None) != config.use_dora:
        has = "no " if row.magnitude is None else ""
        raise InvalidArgument(
            f"{name}: there is {has}lora_magnitude_vector, and use_dora is {config.use_dora}"
        )
    if row.magnitude is not None and row.magnitude.numel() != b[0]:
        raise InvalidArgument(
            f"{name}: lora_magnitude_vector has shape {list(row.magnitude.shape)}, expected [{b[0]}]"
        )


def _check_model(rows: list[_PeftRow], config: PeftConfig, model: ModelDescription) -> None:
    """Raise InvalidArgument unless shapes are the model's, and all target layers have tensors."""
    for row in rows:
        name, module, layer = row.place.name, row.place.module, row.place.layer
        if layer >= model.decoder.num_layers:
            raise InvalidArgument(f"{name}: the model has {model.decoder.num_layers} layers")
        sizes = _sizes_by_name(model, layer)
        below = name.removeprefix(row.place.base + model.names.layers.format(layer))
        if below not in sizes:
            where = name_layer(model.decoder, layer)
            raise InvalidArgument(f"{name}: lora module {module.text} not enabled for {where}")
        size = ModuleSize(row.a.shape[1], row.b.shape[0])
        if size != sizes[below]:
            expected = sizes[below]
            raise InvalidArgument(
                f"{name}: lora_A and lora_B are of a layer of {size.inner} inputs and {size.outer} outputs, "
                f"expected {expected.inner} and {expected.outer}: the adapter is for another model"
            )
    present = {(row.place.layer, row.place.module) for row in rows}
    fused = {layer for layer, module in present if module in FUSED_MODULES}
    base = rows[0].place.base
    for layer in range(model.decoder.num_layers) if config.target_modules is not None else ():
        if layer in fused:
            continue
        for below, module in _modules_of(model, layer).items():
            name = base + model.names.layers.format(layer) + below
            is_there = module in module_sizes(model.decoder, layer)
            if is_there and (layer, module) not in present and config.is_target(name):
                raise InvalidArgument(
                    f"{name}: target_modules of {CONFIG_FILE} has this layer, but the adapter has no tensors of it"
                )


def _sizes_by_name(model: ModelDescription, layer: int) -> dict[str, ModuleSize]:
    """Return the sizes of a layer's modules by their names, also of those that some versions of the model fuse."""
    names, sizes, found = model.names, module_sizes(model.decoder, layer), _modules_of(model, layer)
    if not model.decoder.has_experts(layer) and len(names.mlp.up) > 1:
        found |= _FUSED
    return {name: sizes[module] for name, module in found.items() if module in sizes}


# ---------------------------------------------------------------------- numbers


def _numbers(row: _PeftRow, config: PeftConfig, norms: _Norms | None, dtype: torch.dtype) -> Tensor:
    """Return a row of `lora_weights`, without padding."""
    b = row.b.float() * config.scale(row.place.name)
    parts = [row.a, b]
    if norms is not None:
        assert row.magnitude is not None, "checked"
        parts.append(row.magnitude.float().reshape(-1) / norms.of(row.place, row.a.float(), b))
    if row.place.module is Module.MLP_GATE_UP:
        # The converter's order: the factor first, then the activation's input.
        half = b.shape[0] // 2
        parts[1:] = [torch.cat((each[half:], each[:half])) for each in parts[1:]]
    numbers = torch.cat([each.to(dtype).reshape(-1) for each in parts])
    if not numbers.isfinite().all():
        raise InvalidArgument(
            f"{row.place.name}: the adapter has numbers that {_DTYPES[dtype]} cannot hold, or none"
        )
    return numbers


def _packed(numbers: list[Tensor], rows: list[_PeftRow], dtype: torch.dtype) -> LoraWeights:
    weights = torch.zeros(len(rows), max(map(len, numbers)), dtype=dtype)
    for target, each in zip(weights, numbers):
        target[: len(each)] = each
    config = tuple(
        (int(row.place.module), row.place.layer, row.a.shape[0], int(row.magnitude is not None))
        for row in rows
    )
    buffer = RawBuffer(_as_array(weights.view(torch.uint8).flatten()).data)
    return LoraWeights(Matrix((weights.shape[0], weights.shape[1]), _DTYPES[dtype], buffer), config)


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array that shares its memory."""
    return tensor.numpy()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  torch has no types


def _widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return a type that can represent the values of all tensors."""
    first, *others = {each.dtype for each in tensors}
    for each in others:
        first = torch.promote_types(first, each)
    return first


@dataclass(frozen=True, slots=True)
class _Norms:
    """Norms of the rows of W + B A, by which PEFT divides the magnitudes of DoRA."""

    checkpoint: Checkpoint
    names: WeightNames

    def of(self, place: _AdaptedLayer, a: Tensor, b: Tensor) -> Tensor:
        """Return the float32 norms [out] for a linear layer, A [rank, in] and the scaled B [out, rank]."""
        name = f"{self.names.base}{place.name.removeprefix(place.base)}.weight"
        if name not in self.checkpoint.tensors:
            raise InvalidArgument(f"use_dora needs the model's {name}, which the checkpoint does not have")
        stored = self.checkpoint.read(name)
        weight = stored.T if self.names.transposed else stored
        norms = torch.empty(len(weight))
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            merged = weight[rows].float() + b[rows] @ a
            norms[rows] = torch.linalg.vector_norm(merged, dim=1)  # pyright: ignore[reportUnknownMemberType]
        self.checkpoint.release_pages(stored)
        return norms
