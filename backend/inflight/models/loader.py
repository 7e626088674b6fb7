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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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
from inflight.models.registry import DTYPES, ModelDescription
from inflight.models.sharding import Part, Range

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
_Make = Callable[["_TensorSpec"], Tensor]


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
    return _stored_shapes(_specs(model, Part.whole(model.decoder)))


def stored_dtype(model: ModelDescription) -> torch.dtype:
    """What the checkpoint's weights are stored as. ConfigError if there are none."""
    with Checkpoint(model.folder) as checkpoint:
        model = _as_stored(model, checkpoint)
        expected = _specs(model, Part.whole(model.decoder))
        _check(checkpoint, model, expected)
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
    with Checkpoint(model.folder) as checkpoint:
        is_tied = model.decoder.tied_embeddings
        model = _as_stored(model, checkpoint)
        if is_tied and not model.decoder.tied_embeddings:
            _logger.warning(_UNTIED, model.folder, model.names.base + model.names.embedding, _LM_HEAD)
        expected = _specs(model, Part.whole(model.decoder))
        _check(checkpoint, model, expected)
        target = dtype or _stored_dtype(model.decoder, checkpoint, expected[0])
        specs = _specs(model, part)
        sizes = [torch.Size(spec.shape).numel() * target.itemsize for spec in specs]
        with load_progress(f"Loading {model.folder.name}", sum(sizes)) as advance:

            def read(spec: _TensorSpec, empty: _Empty = _AS_READ.empty) -> Tensor:
                tensor = _read(checkpoint, spec, empty(spec.shape, target, device))
                advance(tensor.nbytes)
                return tensor

            return _Builder(model, part, read, partial(read, empty=finisher.empty)).build(finisher)


def _as_stored(model: ModelDescription, checkpoint: Checkpoint) -> ModelDescription:
    """The model with the names of this checkpoint's tensors, and its embeddings tied as transformers ties them.

    A checkpoint of a model without its output projection leaves out the prefix of all names. Where config.json
    says that the embeddings are tied and only one of the two is stored, it is both, whichever it is. Where both
    are stored, they are tied if they are equal, and are what they are otherwise.
    """
    if not any(name.startswith(model.names.base) for name in checkpoint.tensors):
        model = replace(model, names=replace(model.names, base=""))
    embedding, head = f"{model.names.base}{model.names.embedding}.weight", f"{_LM_HEAD}.weight"
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


def _specs(model: ModelDescription, part: Part) -> list[_TensorSpec]:
    specs: list[_TensorSpec] = []

    def note(spec: _TensorSpec) -> Tensor:
        specs.append(spec)
        return torch.empty(0)

    _Builder(model, part, note, note).build(_AS_READ)
    return specs


class _Builder:
    """Walks over a part of a model, asking `make` for each of its tensors, `make_in_layer` for those of layers."""

    def __init__(self, model: ModelDescription, part: Part, make: _Make, make_in_layer: _Make) -> None:
        self._decoder, self._names, self._part = model.decoder, model.names, part
        self._make, self._make_in_layer = make, make_in_layer

    def build(self, finisher: Finisher[LayerT, HeadT]) -> DecoderWeights[LayerT, HeadT]:
        """The part's weights, as `finisher` makes them."""
        decoder, part, base = self._decoder, self._part, self._names.base
        vocabulary = part.shard.split(decoder.vocab_size)
        embedding, position_embedding, final_norm, lm_head = None, None, None, None
        if part.is_first_stage:
            embedding = self._matrix(base + self._names.embedding, decoder.vocab_size, vocabulary)
            if decoder.rope is None:
                positions = decoder.max_positions
                name = base + self._names.position_embedding
                position_embedding = self._matrix(name, positions, (0, positions))
        # Before the layers, so that a matrix is not there twice when they are there too.
        if part.is_last_stage:
            table = embedding if decoder.tied_embeddings else None
            if table is None:
                name = base + self._names.embedding if decoder.tied_embeddings else _LM_HEAD
                table = self._matrix(name, decoder.vocab_size, vocabulary)
            lm_head = finisher.head(Linear(table))
            if decoder.tied_embeddings and not finisher.keeps_tied_embedding:
                embedding = None
            del table
            final_norm = self._norm(base + self._names.final_norm, decoder.hidden_size, self._make)
        layers = tuple(finisher.layer(self._layer(index)) for index in range(*part.layers))
        return DecoderWeights(embedding, position_embedding, layers, final_norm, lm_head)

    def _matrix(self, name: str, rows: int, kept: Range) -> Tensor:
        hidden = self._decoder.hidden_size
        return self._make(_TensorSpec((_Rows(f"{name}.weight", rows, (kept,)),), hidden, (0, hidden)))

    def _layer(self, index: int) -> LayerWeights:
        decoder, names, shard = self._decoder, self._names, self._part.shard
        prefix = names.base + names.layers.format(index)

        def norm(module: str, size: int) -> Norm:
            return self._norm(prefix + module, size, self._make_in_layer)

        hidden, inner = decoder.hidden_size, decoder.intermediate_size
        queries, keys = shard.query_rows(decoder), (decoder.kv_size, shard.kv_rows(decoder))
        wide = (inner, shard.split(inner))
        qkv, up = ((decoder.query_size, queries), keys, keys), (wide, wide) if decoder.gated_mlp else (wide,)
        return LayerWeights(
            attention_norm=norm(names.attention_norm, hidden),
            qkv=self._column_parallel(prefix, names.qkv, qkv, decoder.qkv_bias),
            query_norm=norm(names.query_norm, decoder.head_dim) if decoder.qk_norm else None,
            key_norm=norm(names.key_norm, decoder.head_dim) if decoder.qk_norm else None,
            output=self._row_parallel(
                prefix + names.output, decoder.query_size, queries, decoder.output_bias
            ),
            mlp_norm=norm(names.mlp_norm, hidden),
            up=self._column_parallel(prefix, names.up, up, decoder.mlp_bias),
            down=self._row_parallel(prefix + names.down, inner, wide[1], decoder.mlp_bias),
        )

    def _column_parallel(
        self, prefix: str, modules: tuple[str, ...], rows: tuple[tuple[int, Range], ...], bias: bool
    ) -> Linear:
        """`rows`: of each of the fused projections all there are, and this shard's."""

        def parts(kind: str) -> tuple[_Rows, ...]:
            fused, *others = modules
            if others:
                pairs = zip(modules, rows, strict=True)
                return tuple(_Rows(f"{prefix}{m}.{kind}", count, (own,)) for m, (count, own) in pairs)
            starts = accumulate((count for count, _ in rows), initial=0)
            own = tuple((start + begin, start + end) for start, (_, (begin, end)) in zip(starts, rows))
            return (_Rows(f"{prefix}{fused}.{kind}", sum(count for count, _ in rows), own),)

        hidden = self._decoder.hidden_size
        return self._linear(parts("weight"), hidden, (0, hidden), parts("bias") if bias else None)

    def _row_parallel(self, name: str, columns: int, own: Range, bias: bool) -> Linear:
        hidden = self._decoder.hidden_size
        weight, vector = (_Rows(f"{name}.{kind}", hidden, ((0, hidden),)) for kind in ("weight", "bias"))
        return self._linear((weight,), columns, own, (vector,) if bias else None)

    def _linear(
        self, weight: tuple[_Rows, ...], columns: int, kept: Range, bias: tuple[_Rows, ...] | None
    ) -> Linear:
        make = self._make_in_layer
        matrix = make(_TensorSpec(weight, columns, kept, self._names.transposed))
        return Linear(matrix, None if bias is None else make(_TensorSpec(bias, None)))

    def _norm(self, name: str, size: int, make: _Make) -> Norm:
        def vector(kind: str) -> Tensor:
            return make(_TensorSpec((_Rows(f"{name}.{kind}", size, ((0, size),)),), None))

        return Norm(vector("weight"), vector("bias") if self._decoder.norm == "layer" else None)


def _check(checkpoint: Checkpoint, model: ModelDescription, specs: list[_TensorSpec]) -> None:
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


@contextmanager
def load_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Around a load of `total_bytes`; gives a function that counts bytes as loaded.

    The bar appears once the load has taken a second, and only on a terminal. Without one, a load that took that
    long is logged when it is done.
    """
    started, done = time.monotonic(), 0
    bar: Progress | None = None

    def advance(num_bytes: int) -> None:
        nonlocal bar, done
        done += num_bytes
        if bar is None and sys.stderr.isatty() and time.monotonic() - started > _PATIENCE_S:
            bar = _show_bar(title, total_bytes)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
        elapsed = time.monotonic() - started
        if bar is None and elapsed > _PATIENCE_S:
            _logger.info("%s: %.2f GB in %.1f s", title, done / 1e9, elapsed)
    finally:
        if bar is not None:
            bar.stop()


def _show_bar(title: str, total_bytes: int) -> Progress:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(title, total=total_bytes)
    bar.start()
    return bar
