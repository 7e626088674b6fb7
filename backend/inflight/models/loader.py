"""Checkpoint tensors → DecoderWeights: checked against the DecoderConfig first, then read and fused.

Every tensor is copied once, from the mapped file straight into its place on the device, so that a load needs no
more memory than the model, and the file may be replaced afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_config import DecoderConfig
from inflight.models.decoder_weights import DecoderWeights, LayerWeights, Linear, Norm
from inflight.models.progress import LoadProgress
from inflight.models.registry import DTYPES, ModelDescription
from inflight.models.weight_names import WeightNames

_LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """One tensor of the result: checkpoint tensors, by name and number of rows, on top of each other.

    `columns` is None for vectors. `transposed` says that the checkpoint has columns for rows.
    """

    parts: tuple[tuple[str, int], ...]
    columns: int | None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(size for _, size in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)

    def stored_shape(self, rows: int) -> tuple[int, ...]:
        """Shape in the file of a part with `rows` rows."""
        if self.columns is None:
            return (rows,)
        return (self.columns, rows) if self.transposed else (rows, self.columns)


def load_weights(model: ModelDescription, dtype: torch.dtype | None, device: torch.device) -> DecoderWeights:
    """Read the model's weights onto `device` as `dtype`; None: the checkpoint's.

    Raises:
        ConfigError: Files are missing or damaged, or tensors are missing, unexpected, wrongly shaped or quantized.
    """
    with Checkpoint(model.folder) as checkpoint:
        specs: list[_TensorSpec] = []

        def note(spec: _TensorSpec) -> Tensor:
            specs.append(spec)
            return torch.empty(0)

        base = model.names.base if any(n.startswith(model.names.base) for n in checkpoint.tensors) else ""
        _build(model.decoder, model.names, base, note)
        _check(checkpoint, model, base, specs)
        target = dtype or _stored_dtype(model.decoder, checkpoint, specs[0])
        sizes = [torch.Size(spec.shape).numel() * target.itemsize for spec in specs]
        with LoadProgress(f"Loading {model.folder.name}", sum(sizes)) as progress:

            def read(spec: _TensorSpec) -> Tensor:
                tensor = _read(checkpoint, spec, target, device)
                progress.advance(tensor.nbytes)
                return tensor

            return _build(model.decoder, model.names, base, read)


def _build(
    decoder: DecoderConfig, names: WeightNames, base: str, make: Callable[[_TensorSpec], Tensor]
) -> DecoderWeights:
    """Walk over the whole model, asking `make` for each of its tensors."""
    hidden = decoder.hidden_size

    def matrix(name: str, rows: int) -> Tensor:
        return make(_TensorSpec(((f"{name}.weight", rows),), hidden))

    embedding = matrix(base + names.embedding, decoder.vocab_size)
    position_embedding = None
    if decoder.rope is None:
        position_embedding = matrix(base + names.position_embedding, decoder.max_positions)
    layers = tuple(
        _build_layer(decoder, names, base + names.layers.format(index), make)
        for index in range(decoder.num_layers)
    )
    final_norm = _build_norm(decoder, base + names.final_norm, hidden, make)
    lm_head = embedding if decoder.tied_embeddings else matrix(_LM_HEAD, decoder.vocab_size)
    return DecoderWeights(embedding, position_embedding, layers, final_norm, Linear(lm_head))


def _build_layer(
    decoder: DecoderConfig, names: WeightNames, prefix: str, make: Callable[[_TensorSpec], Tensor]
) -> LayerWeights:
    hidden, inner = decoder.hidden_size, decoder.intermediate_size

    def linear(modules: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
        if len(modules) == 1:
            rows = (sum(rows),)

        def parts(kind: str) -> tuple[tuple[str, int], ...]:
            return tuple(
                (f"{prefix}{module}.{kind}", size) for module, size in zip(modules, rows, strict=True)
            )

        weight = make(_TensorSpec(parts("weight"), columns, names.transposed))
        return Linear(weight, make(_TensorSpec(parts("bias"), None)) if bias else None)

    def norm(module: str, size: int) -> Norm:
        return _build_norm(decoder, prefix + module, size, make)

    qkv_rows = (decoder.query_size, decoder.kv_size, decoder.kv_size)
    up_rows = (inner, inner) if decoder.gated_mlp else (inner,)
    return LayerWeights(
        attention_norm=norm(names.attention_norm, hidden),
        qkv=linear(names.qkv, qkv_rows, hidden, decoder.qkv_bias),
        query_norm=norm(names.query_norm, decoder.head_dim) if decoder.qk_norm else None,
        key_norm=norm(names.key_norm, decoder.head_dim) if decoder.qk_norm else None,
        output=linear((names.output,), (hidden,), decoder.query_size, decoder.output_bias),
        mlp_norm=norm(names.mlp_norm, hidden),
        up=linear(names.up, up_rows, hidden, decoder.mlp_bias),
        down=linear((names.down,), (hidden,), inner, decoder.mlp_bias),
    )


def _build_norm(decoder: DecoderConfig, name: str, size: int, make: Callable[[_TensorSpec], Tensor]) -> Norm:
    weight = make(_TensorSpec(((f"{name}.weight", size),), None))
    return Norm(
        weight, make(_TensorSpec(((f"{name}.bias", size),), None)) if decoder.norm == "layer" else None
    )


def _check(checkpoint: Checkpoint, model: ModelDescription, base: str, specs: list[_TensorSpec]) -> None:
    expected = {name: spec.stored_shape(rows) for spec in specs for name, rows in spec.parts}
    missing = [name for name in expected if name not in checkpoint.tensors]
    ignored = model.names.ignored + ((f"{_LM_HEAD}.weight",) if model.decoder.tied_embeddings else ())
    unexpected = [
        name for name in checkpoint.tensors if name not in expected and not name.endswith(ignored or ("\0",))
    ]
    if missing or unexpected:
        raise ConfigError(
            f"{checkpoint.folder}: the weights do not fit config.json: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )
    for name, shape in expected.items():
        info = checkpoint.tensors[name]
        where = f"{checkpoint.folder / info.file}: tensor {name!r}"
        if info.shape != shape:
            raise ConfigError(
                f"{where} has shape {list(info.shape)}, expected {list(shape)} from config.json"
            )
        if info.dtype not in DTYPES:
            raise ConfigError(f"{where} has dtype {info.dtype}, expected one of {', '.join(DTYPES)}")


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _stored_dtype(decoder: DecoderConfig, checkpoint: Checkpoint, first: _TensorSpec) -> torch.dtype:
    return getattr(torch, decoder.dtype or checkpoint.tensors[first.parts[0][0]].dtype)


def _read(checkpoint: Checkpoint, spec: _TensorSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=dtype, device=device)
    start = 0
    for name, rows in spec.parts:
        part = checkpoint.read(name)
        tensor[start : start + rows].copy_(part.T if spec.transposed and part.dim() == 2 else part)
        start += rows
    return tensor
