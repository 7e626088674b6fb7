"""Checkpoint tensors → DecoderWeights: checked against the DecoderConfig first, then read and fused.

Every tensor is copied once, from the mapped file straight into its place on the device, so that a load needs no
more memory than the model, and the file may be replaced afterwards. A long load says how far it is: by a bar on
stderr for people, by one log line for everybody else.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Generic

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_config import DecoderConfig
from inflight.models.decoder_weights import (
    DecoderWeights,
    HeadT,
    LayerT,
    LayerWeights,
    Linear,
    Norm,
    PlainWeights,
)
from inflight.models.families import WeightNames
from inflight.models.registry import DTYPES, ModelDescription
from inflight.models.sharding import Part, Range, Shard

_LM_HEAD = "lm_head"
_UNTIED = "%s: tie_word_embeddings is true, but %s and %s differ: the output projection is the latter"
_PATIENCE_S = 1.0  # a shorter load says nothing of itself
_logger = logging.getLogger(__name__)


class Finisher(ABC, Generic[LayerT, HeadT]):
    """Says what is kept of a model's layers and of its output projection once they are read.

    Attributes:
        keeps_tied_embedding: Whether an embedding is kept that is the output projection's matrix too.
    """

    keeps_tied_embedding = True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor of a layer, not initialized."""
        return torch.empty(shape, dtype=dtype, device=device)

    @abstractmethod
    def layer(self, layer: LayerWeights) -> LayerT:
        """What is kept instead of a layer."""

    @abstractmethod
    def head(self, head: Linear) -> HeadT:
        """What is kept instead of the output projection."""


class _AsRead(Finisher[LayerWeights, Linear]):
    def layer(self, layer: LayerWeights) -> LayerWeights:
        return layer

    def head(self, head: Linear) -> Linear:
        return head


_AS_READ = _AsRead()
_Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor of the checkpoint that has so many `rows`, and the `ranges` of them that are wanted."""

    name: str
    rows: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """One tensor of the result: rows of checkpoint tensors on top of each other.

    Attributes:
        parts: Whose rows.
        columns: How many the checkpoint has; None for vectors.
        kept: Which of the columns are wanted.
        transposed: Whether the checkpoint has columns for rows.
    """

    parts: tuple[_Rows, ...]
    columns: int | None
    kept: Range = (0, 0)
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(end - begin for part in self.parts for begin, end in part.ranges)
        return (rows,) if self.columns is None else (rows, self.kept[1] - self.kept[0])

    def stored_shape(self, rows: int) -> tuple[int, ...]:
        """Shape in the file of a part with `rows` rows."""
        if self.columns is None:
            return (rows,)
        return (self.columns, rows) if self.transposed else (rows, self.columns)

    def wanted(self, stored: Tensor, rows: Range) -> Tensor:
        """These rows of a stored tensor, without the columns that are not wanted."""
        if self.columns is None:
            return stored[slice(*rows)]
        return (stored.T if self.transposed else stored)[slice(*rows), slice(*self.kept)]


def tensor_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of the model has, in the order in which they are read, and their shapes."""
    return _stored_shapes(_specs(model.decoder, model.names, model.names.base, Part.whole(model.decoder)))


def stored_dtype(model: ModelDescription) -> torch.dtype:
    """What the checkpoint's weights are stored as. ConfigError if there are none."""
    with Checkpoint(model.folder) as checkpoint:
        base = _base(model, checkpoint)
        model = _tied_as_stored(model, base, checkpoint)
        expected = _specs(model.decoder, model.names, base, Part.whole(model.decoder))
        _check(checkpoint, model, base, expected)
        return _stored_dtype(model.decoder, checkpoint, expected[0])


def load_weights(
    model: ModelDescription,
    dtype: torch.dtype | None,
    device: torch.device,
    part: Part | None = None,
) -> PlainWeights:
    """Read the model's weights onto `device` as `dtype`; None: the checkpoint's.

    Of a part only what it holds is read, but the whole checkpoint is checked: all ranks say what does not fit.

    Raises:
        ConfigError: Files are missing or damaged, or tensors are missing, unexpected, wrongly shaped or quantized.
    """
    return load_finished_weights(model, dtype, device, part or Part.whole(model.decoder), _AS_READ)


def load_finished_weights(
    model: ModelDescription,
    dtype: torch.dtype | None,
    device: torch.device,
    part: Part,
    finisher: Finisher[LayerT, HeadT],
) -> DecoderWeights[LayerT, HeadT]:
    """As `load_weights`, but each layer, and the output projection, is given to `finisher` once it is read.

    What that returns is kept instead, so that no more than one layer is there twice.
    """
    whole = Part.whole(model.decoder)
    with Checkpoint(model.folder) as checkpoint:
        base = _base(model, checkpoint)
        is_tied = model.decoder.tied_embeddings
        model = _tied_as_stored(model, base, checkpoint)
        if is_tied and not model.decoder.tied_embeddings:
            _logger.warning(_UNTIED, model.folder, base + model.names.embedding, _LM_HEAD)
        expected = _specs(model.decoder, model.names, base, whole)
        _check(checkpoint, model, base, expected)
        target = dtype or _stored_dtype(model.decoder, checkpoint, expected[0])
        specs = _specs(model.decoder, model.names, base, part)
        sizes = [torch.Size(spec.shape).numel() * target.itemsize for spec in specs]
        with LoadProgress(f"Loading {model.folder.name}", sum(sizes)) as progress:

            def read(spec: _TensorSpec, empty: _Empty = _AS_READ.empty) -> Tensor:
                tensor = _read(checkpoint, spec, empty(spec.shape, target, device))
                progress.advance(tensor.nbytes)
                return tensor

            read_in_layer = partial(read, empty=finisher.empty)
            return _build(model.decoder, model.names, base, part, read, read_in_layer, finisher)


def _base(model: ModelDescription, checkpoint: Checkpoint) -> str:
    """The prefix of tensor names; a checkpoint of a model without its output projection leaves it out."""
    return model.names.base if any(name.startswith(model.names.base) for name in checkpoint.tensors) else ""


def _tied_as_stored(model: ModelDescription, base: str, checkpoint: Checkpoint) -> ModelDescription:
    """The model with its embeddings tied as transformers ties those of such a checkpoint.

    Where config.json says that they are tied and only one of the two is stored, it is both, whichever it is. Where
    both are stored, they are tied if they are equal, and are what they are otherwise.
    """
    embedding, head = f"{base}{model.names.embedding}.weight", f"{_LM_HEAD}.weight"
    if not model.decoder.tied_embeddings or head not in checkpoint.tensors:
        return model
    if embedding not in checkpoint.tensors:
        checkpoint.rename(head, embedding)
    elif not _is_same(checkpoint, embedding, head):
        return replace(model, decoder=replace(model.decoder, tied_embeddings=False))
    return model


def _is_same(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors have equal values; of two data types they count as different."""
    if checkpoint.tensors[one].dtype != checkpoint.tensors[other].dtype:
        return False
    tensors = checkpoint.read(one), checkpoint.read(other)
    try:
        return torch.equal(*tensors)
    finally:
        for tensor in tensors:
            checkpoint.release_pages(tensor)


def _specs(decoder: DecoderConfig, names: WeightNames, base: str, part: Part) -> list[_TensorSpec]:
    specs: list[_TensorSpec] = []

    def note(spec: _TensorSpec) -> Tensor:
        specs.append(spec)
        return torch.empty(0)

    _build(decoder, names, base, part, note, note, _AS_READ)
    return specs


def _build(
    decoder: DecoderConfig,
    names: WeightNames,
    base: str,
    part: Part,
    make: Callable[[_TensorSpec], Tensor],
    make_in_layer: Callable[[_TensorSpec], Tensor],
    finisher: Finisher[LayerT, HeadT],
) -> DecoderWeights[LayerT, HeadT]:
    """Walk over the model, asking `make` for each of the part's tensors, `make_in_layer` for those of layers."""
    hidden = decoder.hidden_size

    def matrix(name: str, rows: int, kept: Range) -> Tensor:
        return make(_TensorSpec((_Rows(f"{name}.weight", rows, (kept,)),), hidden, (0, hidden)))

    vocabulary = part.shard.split(decoder.vocab_size)
    embedding, position_embedding, final_norm, lm_head = None, None, None, None
    if part.is_first_stage:
        embedding = matrix(base + names.embedding, decoder.vocab_size, vocabulary)
        if decoder.rope is None:
            positions = decoder.max_positions
            position_embedding = matrix(base + names.position_embedding, positions, (0, positions))
    if part.is_last_stage:  # before the layers, so that a matrix is not there twice when they are there too
        table = embedding if decoder.tied_embeddings else None
        if table is None:
            name = base + names.embedding if decoder.tied_embeddings else _LM_HEAD
            table = matrix(name, decoder.vocab_size, vocabulary)
        lm_head = finisher.head(Linear(table))
        if decoder.tied_embeddings and not finisher.keeps_tied_embedding:
            embedding = None
        del table
        final_norm = _build_norm(decoder, base + names.final_norm, hidden, make)
    layers = tuple(
        finisher.layer(
            _build_layer(decoder, names, base + names.layers.format(index), part.shard, make_in_layer)
        )
        for index in range(*part.layers)
    )
    return DecoderWeights(embedding, position_embedding, layers, final_norm, lm_head)


def _build_layer(
    decoder: DecoderConfig,
    names: WeightNames,
    prefix: str,
    shard: Shard,
    make: Callable[[_TensorSpec], Tensor],
) -> LayerWeights:
    hidden, inner = decoder.hidden_size, decoder.intermediate_size

    def column_parallel(modules: tuple[str, ...], rows: tuple[tuple[int, Range], ...], bias: bool) -> Linear:
        """`rows`: of each of the fused projections all there are, and this shard's."""

        def parts(kind: str) -> tuple[_Rows, ...]:
            fused, *others = modules
            if others:
                pairs = zip(modules, rows, strict=True)
                return tuple(_Rows(f"{prefix}{m}.{kind}", count, (own,)) for m, (count, own) in pairs)
            starts = accumulate((count for count, _ in rows), initial=0)
            own = tuple((start + begin, start + end) for start, (_, (begin, end)) in zip(starts, rows))
            return (_Rows(f"{prefix}{fused}.{kind}", sum(count for count, _ in rows), own),)

        weight = make(_TensorSpec(parts("weight"), hidden, (0, hidden), names.transposed))
        return Linear(weight, make(_TensorSpec(parts("bias"), None)) if bias else None)

    def row_parallel(module: str, columns: int, own: Range, bias: bool) -> Linear:
        weight, vector = (
            _Rows(f"{prefix}{module}.{kind}", hidden, ((0, hidden),)) for kind in ("weight", "bias")
        )
        matrix = make(_TensorSpec((weight,), columns, own, names.transposed))
        return Linear(matrix, make(_TensorSpec((vector,), None)) if bias else None)

    def norm(module: str, size: int) -> Norm:
        return _build_norm(decoder, prefix + module, size, make)

    queries, keys = shard.query_rows(decoder), (decoder.kv_size, shard.kv_rows(decoder))
    wide = (inner, shard.split(inner))
    return LayerWeights(
        attention_norm=norm(names.attention_norm, hidden),
        qkv=column_parallel(names.qkv, ((decoder.query_size, queries), keys, keys), decoder.qkv_bias),
        query_norm=norm(names.query_norm, decoder.head_dim) if decoder.qk_norm else None,
        key_norm=norm(names.key_norm, decoder.head_dim) if decoder.qk_norm else None,
        output=row_parallel(names.output, decoder.query_size, queries, decoder.output_bias),
        mlp_norm=norm(names.mlp_norm, hidden),
        up=column_parallel(names.up, (wide, wide) if decoder.gated_mlp else (wide,), decoder.mlp_bias),
        down=row_parallel(names.down, inner, wide[1], decoder.mlp_bias),
    )


def _build_norm(decoder: DecoderConfig, name: str, size: int, make: Callable[[_TensorSpec], Tensor]) -> Norm:
    def vector(kind: str) -> Tensor:
        return make(_TensorSpec((_Rows(f"{name}.{kind}", size, ((0, size),)),), None))

    return Norm(vector("weight"), vector("bias") if decoder.norm == "layer" else None)


def _check(checkpoint: Checkpoint, model: ModelDescription, base: str, specs: list[_TensorSpec]) -> None:
    expected = _stored_shapes(specs)
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


def _stored_shapes(specs: list[_TensorSpec]) -> dict[str, tuple[int, ...]]:
    return {part.name: spec.stored_shape(part.rows) for spec in specs for part in spec.parts}


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _stored_dtype(decoder: DecoderConfig, checkpoint: Checkpoint, first: _TensorSpec) -> torch.dtype:
    return getattr(torch, decoder.dtype or checkpoint.tensors[first.parts[0].name].dtype)


def _read(checkpoint: Checkpoint, spec: _TensorSpec, tensor: Tensor) -> Tensor:
    """Fill `tensor` with what `spec` wants of the checkpoint, and return it."""
    start = 0
    for part in spec.parts:
        stored = checkpoint.read(part.name)
        for rows in part.ranges:
            end = start + rows[1] - rows[0]
            tensor[start:end].copy_(spec.wanted(stored, rows))
            start = end
        checkpoint.release_pages(stored)
    return tensor


class LoadProgress:
    """Context manager around a load of `total_bytes`.

    The bar appears once the load has taken a second, and only on a terminal. Without one, a load that took that
    long is logged when it is done.
    """

    def __init__(self, title: str, total_bytes: int) -> None:
        """Show nothing yet."""
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> LoadProgress:
        self._start = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed = time.monotonic() - self._start
        if self._bar is not None:
            self._bar.stop()
        elif error is None and elapsed > _PATIENCE_S:
            _logger.info("%s: %.2f GB in %.1f s", self._title, self._done / 1e9, elapsed)

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as loaded."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif sys.stderr.isatty() and time.monotonic() - self._start > _PATIENCE_S:
            self._bar = self._show()

    def _show(self) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task(self._title, total=self._total, completed=self._done)
        bar.start()
        return bar
