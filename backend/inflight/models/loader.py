"""Checkpoint tensors → DecoderWeights: checked against the DecoderConfig first, then read and fused.

Every tensor is copied once, from the mapped file straight into its place on the device, and what becomes of a
projection is made as soon as it is read: a load needs no more memory than what is kept and one tensor. The file
may be replaced afterwards. A long load says how far it is (`inflight.progress`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Generic

import torch
from torch import Tensor

from inflight.checkpoint_config import DTYPES
from inflight.errors import ConfigError
from inflight.hub import checkpoint_name
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_config import ExpertsConfig, LatentAttention
from inflight.models.decoder_weights import (
    DecoderWeights,
    ExpertWeights,
    LatentWeights,
    Layer,
    LayerT,
    Linear,
    LinearT,
    Norm,
    PlainWeights,
)
from inflight.models.finisher import AsRead, Finisher, NotRead
from inflight.models.levels import GroupedMatrix, Kind, stack_rows
from inflight.models.quantized_tensors import unpack_quantized
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part, Range
from inflight.models.stacked_experts import unstack_experts
from inflight.progress import load_progress

_UNTIED = "%s: tie_word_embeddings is true, but %s and %s differ: the output projection is the latter"
_logger = logging.getLogger(__name__)


class _NotKept(Exception):
    """One of a layer's experts is not quantized as the first one is."""


_AS_READ = AsRead()
_Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
_Make = Callable[["_TensorSpec"], Tensor]
_MakeLevels = Callable[["_TensorSpec"], GroupedMatrix | None]


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
        dtype: What it is kept as, whatever the model is; None: as the model.
    """

    parts: tuple[_Rows, ...]
    columns: int | None
    kept: Range = (0, 0)
    transposed: bool = False
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(end - begin for part in self.parts for begin, end in part.ranges)
        return (rows,) if self.columns is None else (rows, self.kept[1] - self.kept[0])

    def stored_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a part in the file."""
        if self.columns is None:
            return (rows,)
        return (self.columns, rows) if self.transposed else (rows, self.columns)

    def wanted(self, stored: Tensor, rows: Range) -> Tensor:
        """The given rows of a stored tensor, without the columns that are not kept."""
        if self.columns is None:
            return stored[slice(*rows)]
        return (stored.T if self.transposed else stored)[slice(*rows), slice(*self.kept)]


def tensor_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of the model has, in the order in which they are read, and their shapes.

    Experts that checkpoints have in one tensor count as one each.
    """
    return _stored_shapes(_specs(model, Part.whole(model.decoder)))


def check_weights(model: ModelDescription) -> None:
    """Raise ConfigError unless the checkpoint has the model's tensors, by its files' headers: no weight is read.

    The message names a tensor that is missing, one too many or of another shape, and its file.
    """
    with Checkpoint(model.folder) as checkpoint:
        _fitted(model, checkpoint)


def stored_dtype(model: ModelDescription) -> torch.dtype:
    """The dtype of the checkpoint's weights. ConfigError if there are none."""
    with Checkpoint(model.folder) as checkpoint:
        return _stored_dtype(_fitted(model, checkpoint), checkpoint)


def quantized_kinds(model: ModelDescription) -> Counter[Kind]:
    """Count the checkpoint's quantized matrices of each format, by its files' headers."""
    if model.quantization is None:
        return Counter()
    with Checkpoint(model.folder) as checkpoint:
        _fitted(model, checkpoint)
        return Counter(levels.kind for levels in checkpoint.levels.values())


def num_weight_bytes(
    model: ModelDescription, dtype: torch.dtype, linear_dtype: torch.dtype, kept: Set[Kind] = frozenset()
) -> int:
    """Bytes of all the model's weights. ConfigError if the checkpoint does not hold them.

    Args:
        model: What the checkpoint is expected to hold.
        dtype: Of embeddings and vectors.
        linear_dtype: Of the matrices that are multiplied with. An embedding that is the output projection's matrix
            too is there twice if the types differ.
        kept: Which of the quantized matrices stay as the checkpoint has them.
    """
    with Checkpoint(model.folder) as checkpoint:
        model = _untied(_fitted(model, checkpoint), checkpoint)
        levels, tensors = checkpoint.levels, checkpoint.tensors
        of_levels = {name: tensors[name].level_bytes or 0 for name in levels if levels[name].kind in kept}
    specs = _specs(model, Part.whole(model.decoder))
    whole = [spec for spec in specs if all(part.name in of_levels for part in spec.parts)]
    num_kept = sum(of_levels[part.name] for spec in whole for part in spec.parts)
    specs = [spec for spec in specs if spec not in whole]
    names = model.names
    looked_up = {f"{names.base}{name}.weight" for name in (names.embedding, names.position_embedding)}
    linear = [spec for spec in specs if spec.columns is not None and spec.parts[0].name not in looked_up]
    others = [spec for spec in specs if spec not in linear]
    if model.decoder.tied_embeddings and linear_dtype != dtype:
        linear.append(specs[0])
    return num_kept + _num_bytes(linear, linear_dtype) + _num_bytes(others, dtype)


def num_parameters(model: ModelDescription) -> tuple[int, int]:
    """How many numbers the model's tensors have, and how many of them are there for any one token.

    A mixture sends a token to a few of a layer's experts: those of the others are left out of the second.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(model).items()}
    total, experts = sum(sizes.values()), model.decoder.experts
    if experts is None:
        return total, total
    below_layer = model.names.base + model.names.layers + model.names.expert.split("{}")[0]
    prefixes = tuple(below_layer.format(index) for index in range(model.decoder.num_layers))
    of_experts = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    return total, total - of_experts // experts.count * (experts.count - experts.num_per_token)


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
    finisher: Finisher[LayerT, LinearT],
) -> DecoderWeights[LayerT, LinearT]:
    """As `load_weights`, but each projection and each layer is given to `finisher` once it is read.

    What that returns is kept instead, so that no more than one projection is there twice.
    """
    with Checkpoint(model.folder) as checkpoint:
        model = _untied(_fitted(model, checkpoint), checkpoint)
        target = dtype or _stored_dtype(model, checkpoint)
        specs = _specs(model, part)
        with load_progress(f"Loading {checkpoint_name(model.folder)}", _num_bytes(specs, target)) as advance:

            def read(spec: _TensorSpec, empty: _Empty = _AS_READ.empty) -> Tensor:
                tensor = _read(checkpoint, spec, empty(spec.shape, spec.dtype or target, device))
                advance(tensor.nbytes)
                return tensor

            def read_levels(spec: _TensorSpec) -> GroupedMatrix | None:
                return _read_levels(checkpoint, spec, finisher) if finisher.keeps_levels else None

            def release(spec: _TensorSpec) -> None:
                for part in spec.parts:
                    checkpoint.levels[part.name].release()
                advance(_num_bytes([spec], target))

            makes = read, partial(read, empty=finisher.empty), read_levels, release
            return _Builder(model, part, *makes, finisher).build()


def _num_bytes(specs: list[_TensorSpec], dtype: torch.dtype) -> int:
    return sum(torch.Size(spec.shape).numel() * (spec.dtype or dtype).itemsize for spec in specs)


def _fitted(model: ModelDescription, checkpoint: Checkpoint) -> ModelDescription:
    """The model with the names of this checkpoint's tensors. ConfigError unless they are the model's.

    A checkpoint of a model without its output projection leaves out the prefix of all names. Where config.json
    says that the embeddings are tied and only one of the two is stored, it is both, whichever it is. Stacked
    experts get tensors of their own.
    """
    if not any(name.startswith(model.names.base) for name in checkpoint.tensors):
        model = replace(model, names=replace(model.names, base=""))
    if model.quantization is not None:
        if model.names.transposed:
            raise ConfigError(
                f"{checkpoint.folder}: its weights are quantized ({model.quantization.method}), which is not read "
                "of a family whose matrices are stored [inputs, outputs]: take the unquantized checkpoint"
            )
        if not model.quantization.is_of_stacks:
            unpack_quantized(checkpoint, model.quantization)
    unstack_experts(checkpoint, model)
    embedding, head = _vocabulary_names(model)
    if model.decoder.tied_embeddings and embedding not in checkpoint.tensors and head in checkpoint.tensors:
        checkpoint.rename(head, embedding)
    _check(checkpoint, model)
    return model


def _untied(model: ModelDescription, checkpoint: Checkpoint) -> ModelDescription:
    """The model that was fitted, its embeddings tied as transformers ties them.

    Where both are stored, they are tied if they are equal, and are what they are otherwise.
    """
    embedding, head = _vocabulary_names(model)
    if not model.decoder.tied_embeddings or head not in checkpoint.tensors:
        return model
    if _is_same(checkpoint, embedding, head):
        return model
    base = model.names.base
    _logger.warning(_UNTIED, model.folder, base + model.names.embedding, model.names.lm_head)
    return replace(model, decoder=replace(model.decoder, tied_embeddings=False))


def _vocabulary_names(model: ModelDescription) -> tuple[str, str]:
    """The tensors of the embedding and of the output projection."""
    return f"{model.names.base}{model.names.embedding}.weight", f"{model.names.lm_head}.weight"


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

    _Builder(model, part, note, note, lambda _: None, lambda _: None, NotRead()).build()
    return specs


class _Builder(Generic[LayerT, LinearT]):
    """Walks over a part of a model, asking `make` for each of its tensors, `make_in_layer` for those of layers.

    Of projections of layers `make_levels` is asked first; what it has given, `release` is told of after its use.
    """

    def __init__(
        self,
        model: ModelDescription,
        part: Part,
        make: _Make,
        make_in_layer: _Make,
        make_levels: _MakeLevels,
        release: Callable[[_TensorSpec], None],
        finisher: Finisher[LayerT, LinearT],
    ) -> None:
        self._decoder, self._names, self._part = model.decoder, model.names, part
        self._make, self._make_in_layer, self._finisher = make, make_in_layer, finisher
        self._make_levels, self._release = make_levels, release

    def build(self) -> DecoderWeights[LayerT, LinearT]:
        """The part's weights, as the finisher makes them."""
        decoder, part, base = self._decoder, self._part, self._names.base
        vocabulary = part.shard.split(decoder.vocab_size)
        embedding, position_embedding, final_norm, lm_head = None, None, None, None
        if part.is_first_stage:
            embedding = self._matrix(base + self._names.embedding, decoder.vocab_size, vocabulary)
            if decoder.learned_positions:
                positions = decoder.max_positions + decoder.position_offset
                name = base + self._names.position_embedding
                position_embedding = self._matrix(name, positions, (0, positions))
        # Before the layers, so that a matrix is not there twice when they are there too.
        if part.is_last_stage:
            table = embedding if decoder.tied_embeddings else None
            if table is None:
                name = base + self._names.embedding if decoder.tied_embeddings else self._names.lm_head
                table = self._matrix(name, decoder.vocab_size, vocabulary)
            lm_head = self._finisher.head(Linear(table))
            if decoder.tied_embeddings and not self._finisher.keeps_tied_embedding:
                embedding = None
            del table
            final_norm = self._norm(base + self._names.final_norm, decoder.hidden_size, self._make)
        layers = tuple(self._finisher.layer(self._layer(index)) for index in range(*part.layers))
        return DecoderWeights(embedding, position_embedding, layers, final_norm, lm_head)

    def _matrix(self, name: str, rows: int, kept: Range) -> Tensor:
        hidden = self._decoder.hidden_size
        return self._make(_TensorSpec((_Rows(f"{name}.weight", rows, (kept,)),), hidden, (0, hidden)))

    def _layer(self, index: int) -> Layer[LinearT]:
        decoder, names, shard = self._decoder, self._names, self._part.shard
        prefix = names.base + names.layers.format(index)

        def norm(module: str, size: int, own: Range | None = None) -> Norm | None:
            return self._norm(prefix + module, size, self._make_in_layer, own) if module else None

        hidden = decoder.hidden_size
        inner = 0 if decoder.has_experts(index) else decoder.intermediate_size
        queries, keys = shard.query_rows(decoder), (decoder.kv_size, shard.kv_rows(decoder))
        if decoder.latent is None:
            rows = (decoder.query_size, queries), keys, keys
            qkv, latent = self._column_parallel(prefix, names.qkv, rows, decoder.qkv_bias), None
        else:
            qkv, latent = self._latent(prefix, decoder.latent)
        up, down = self._mlp(prefix, names.up, names.down, inner)
        experts = None
        if decoder.experts is not None and decoder.has_experts(index):
            up, down = self._mlp(
                prefix, names.shared_up, names.shared_down, decoder.experts.shared_intermediate_size
            )
            experts = self._experts(prefix, decoder.experts)
        return Layer(
            attention_norm=norm(names.attention_norm, hidden),
            qkv=qkv,
            query_norm=self._head_norm(prefix, names.query_norm, (decoder.query_size, queries)),
            key_norm=self._head_norm(prefix, names.key_norm, keys),
            output=self._row_parallel(
                prefix + names.output,
                decoder.num_heads * decoder.output_head_dim,
                shard.head_rows(decoder, decoder.output_head_dim),
                decoder.output_bias,
            ),
            attention_post_norm=norm(names.attention_post_norm, hidden),
            mlp_norm=norm(names.mlp_norm, hidden),
            up=up,
            down=down,
            mlp_post_norm=norm(names.mlp_post_norm, hidden),
            experts=experts,
            latent=latent,
            sinks=self._sinks(prefix) if decoder.learned_sinks else None,
        )

    def _latent(self, prefix: str, config: LatentAttention) -> tuple[LinearT, LatentWeights]:
        """The projection of hidden states and the other weights of latent attention, of this shard's heads."""
        decoder, names, rank = self._decoder, self._names, config.query_rank

        def rows_of_heads(width: int) -> tuple[int, Range]:
            return decoder.num_heads * width, self._part.shard.head_rows(decoder, width)

        def of_heads(name: str, width: int, columns: int) -> Linear:
            count, own = rows_of_heads(width)
            weight = _Rows(f"{prefix}{name}.weight", count, (own,))
            return self._linear((weight,), columns, (0, columns), None)

        def norm(name: str, size: int) -> Norm:
            return self._norm(prefix + name, size, self._make_in_layer)

        queries = rows_of_heads(config.query_head_dim) if rank is None else (rank, (0, rank))
        modules = (names.query if rank is None else names.query_down, names.kv_down)
        rows = queries, (config.cached_dim, (0, config.cached_dim))
        return self._column_parallel(prefix, modules, rows, decoder.qkv_bias), LatentWeights(
            query_norm=None if rank is None else norm(names.query_down_norm, rank),
            query_up=None if rank is None else of_heads(names.query_up, config.query_head_dim, rank),
            kv_norm=norm(names.kv_down_norm, config.kv_rank),
            kv_up=of_heads(names.kv_up, config.nope_head_dim + config.value_head_dim, config.kv_rank),
        )

    def _mlp(
        self, prefix: str, up: tuple[str, ...], down: str, inner: int
    ) -> tuple[LinearT, LinearT] | tuple[None, None]:
        """Both projections of an MLP that is `inner` wide; no such MLP where that is 0."""
        if not inner:
            return None, None
        decoder, own = self._decoder, (inner, self._part.shard.split(inner))
        rows = (own, own) if decoder.gated_mlp else (own,)
        return (
            self._column_parallel(prefix, up, rows, decoder.mlp_bias, decoder.gated_mlp),
            self._row_parallel(prefix + down, inner, own[1], decoder.mlp_bias),
        )

    def _sinks(self, prefix: str) -> Tensor:
        """The learned scores of this shard's query heads."""
        count = self._decoder.num_heads
        rows = _Rows(prefix + self._names.sinks, count, (self._part.shard.split(count),))
        return self._make_in_layer(_TensorSpec((rows,), None))

    def _experts(self, prefix: str, config: ExpertsConfig) -> ExpertWeights[LinearT]:
        """A layer's router, and of the experts that this shard has its slices."""
        names, hidden, inner = self._names, self._decoder.hidden_size, config.intermediate_size
        own = self._part.shard.slice_of_experts(inner)
        held = range(*self._part.shard.experts(config.count))
        modules = [prefix + names.expert.format(index) for index in held]
        up = [tuple(_Rows(each + name, inner, (own,)) for name in names.expert_up) for each in modules]
        down = [(_Rows(each + names.expert_down, hidden, ((0, hidden),)),) for each in modules]

        def replicated(name: str, rows: int, bias: bool = False) -> Linear:
            weight, vector = (
                _Rows(f"{prefix}{name}.{kind}", rows, ((0, rows),)) for kind in ("weight", "bias")
            )
            return self._linear((weight,), hidden, (0, hidden), (vector,) if bias else None)

        def stack(
            modules: list[tuple[_Rows, ...]], columns: int, kept: Range, has_bias: bool, is_gated: bool
        ) -> LinearT:
            specs = [_TensorSpec(_named(each, "weight"), columns, kept) for each in modules]
            shape, bias = (len(specs), *specs[0].shape), None
            if has_bias:
                vectors = tuple(chain.from_iterable(_named(each, "bias") for each in modules))
                bias = self._make_in_layer(_TensorSpec(vectors, None)).view(-1, shape[1])
            if (levels := self._stacked_levels(specs, shape, bias, is_gated)) is not None:
                return levels
            return self._finisher.stack(map(self._make_in_layer, specs), shape, bias, is_gated)

        # What the ranks give is added up, and a bias is in it once.
        has_down_bias = config.has_bias and own[0] == 0
        return ExpertWeights(
            router=replicated(names.router, config.count, config.has_router_bias),
            up=stack(up, hidden, (0, hidden), config.has_bias, is_gated=True),
            down=stack(down, inner, own, has_down_bias, is_gated=False),
            shared_gate=replicated(names.shared_gate, 1) if config.has_shared_gate else None,
            choice_bias=self._choice_bias(prefix, config) if config.has_choice_bias else None,
        )

    def _stacked_levels(
        self, specs: list[_TensorSpec], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> LinearT | None:
        first = self._kept_levels(specs[0], is_stack=True)
        if first is None:
            return None

        def each() -> Iterator[GroupedMatrix]:
            for index, spec in enumerate(specs):
                matrix = first if index == 0 else self._kept_levels(spec, is_stack=True)
                if matrix is None or matrix.form != first.form:
                    raise _NotKept
                yield matrix
                self._release(spec)

        try:
            return self._finisher.keep_stacked_levels(each(), shape, bias, is_gated)
        except _NotKept:
            self._finisher.note_unpacked(specs[0].parts[0].name, "experts that are not all quantized alike")
            return None

    def _kept_levels(self, spec: _TensorSpec, is_stack: bool = False) -> GroupedMatrix | None:
        """The levels of a matrix that is kept as the checkpoint has it; None of any other."""
        matrix = self._make_levels(spec)
        if matrix is not None and (reason := self._finisher.why_unpacked(matrix, is_stack)):
            self._finisher.note_unpacked(spec.parts[0].name, reason)
            return None
        return matrix

    def _choice_bias(self, prefix: str, config: ExpertsConfig) -> Tensor:
        """Kept in float32: what it decides between may be closer together than bfloat16's steps."""
        rows = _Rows(prefix + self._names.choice_bias, config.count, ((0, config.count),))
        return self._make_in_layer(_TensorSpec((rows,), None, dtype=torch.float32))

    def _head_norm(self, prefix: str, module: str, all_heads: tuple[int, Range]) -> Norm | None:
        """The norm over each head, or over all of them: how wide they are, and which are this shard's."""
        decoder = self._decoder
        if decoder.qk_norm is None:
            return None
        size, own = (decoder.head_dim, None) if decoder.qk_norm == "heads" else all_heads
        return self._norm(prefix + module, size, self._make_in_layer, own)

    def _column_parallel(
        self,
        prefix: str,
        modules: tuple[str, ...],
        rows: tuple[tuple[int, Range], ...],
        bias: bool,
        is_gated: bool = False,
    ) -> LinearT:
        """`rows`: of each of the fused projections all there are, and this shard's."""

        def parts(kind: str) -> tuple[_Rows, ...]:
            fused, *others = modules
            if self._names.qkv_by_head and len(rows) == 3 and not others:
                return (self._rows_by_head(f"{prefix}{fused}.{kind}"),)
            if others:
                pairs = zip(modules, rows, strict=True)
                return tuple(_Rows(f"{prefix}{m}.{kind}", count, (own,)) for m, (count, own) in pairs)
            starts = accumulate((count for count, _ in rows), initial=0)
            own = tuple((start + begin, start + end) for start, (_, (begin, end)) in zip(starts, rows))
            return (_Rows(f"{prefix}{fused}.{kind}", sum(count for count, _ in rows), own),)

        hidden = self._decoder.hidden_size
        weight, vector = parts("weight"), parts("bias") if bias else None
        return self._projection(weight, hidden, (0, hidden), vector, is_gated)

    def _rows_by_head(self, name: str) -> _Rows:
        """This shard's rows of a matrix with a head's query, key and value after each other, in our order."""
        size, (first, last) = self._decoder.head_dim, self._part.shard.split(self._decoder.num_heads)
        ranges = (
            ((3 * head + kind) * size, (3 * head + kind + 1) * size)
            for kind in range(3)
            for head in range(first, last)
        )
        return _Rows(name, 3 * self._decoder.query_size, tuple(ranges))

    def _row_parallel(self, name: str, columns: int, own: Range, bias: bool) -> LinearT:
        hidden = self._decoder.hidden_size
        weight, vector = (_Rows(f"{name}.{kind}", hidden, ((0, hidden),)) for kind in ("weight", "bias"))
        return self._projection((weight,), columns, own, (vector,) if bias else None)

    def _projection(
        self,
        weight: tuple[_Rows, ...],
        columns: int,
        kept: Range,
        bias: tuple[_Rows, ...] | None,
        is_gated: bool = False,
    ) -> LinearT:
        """A layer's projection, as it is kept."""
        spec = _TensorSpec(weight, columns, kept, self._names.transposed)
        if (matrix := self._kept_levels(spec)) is not None:
            vector = None if bias is None else self._make_in_layer(_TensorSpec(bias, None))
            found = self._finisher.keep_levels(matrix, vector, is_gated)
            self._release(spec)
            return found
        return self._finisher.linear(self._linear(weight, columns, kept, bias), is_gated)

    def _linear(
        self, weight: tuple[_Rows, ...], columns: int, kept: Range, bias: tuple[_Rows, ...] | None
    ) -> Linear:
        make = self._make_in_layer
        matrix = make(_TensorSpec(weight, columns, kept, self._names.transposed))
        return Linear(matrix, None if bias is None else make(_TensorSpec(bias, None)))

    def _norm(self, name: str, size: int, make: _Make, own: Range | None = None) -> Norm:
        offset = self._decoder.norm_offset

        def vector(kind: str) -> Tensor:
            tensor = make(_TensorSpec((_Rows(f"{name}.{kind}", size, (own or (0, size),)),), None))
            return tensor.float() + offset if offset and kind == "weight" else tensor

        return Norm(vector("weight"), vector("bias") if self._decoder.norm == "layer" else None)


def _named(modules: tuple[_Rows, ...], kind: str) -> tuple[_Rows, ...]:
    """Weights or biases of modules."""
    return tuple(replace(each, name=f"{each.name}.{kind}") for each in modules)


def _check(checkpoint: Checkpoint, model: ModelDescription) -> None:
    decoder = model.decoder
    expected = _stored_shapes(_specs(model, Part.whole(decoder)))
    missing = [name for name in expected if name not in checkpoint.tensors]
    head = _vocabulary_names(model)[1]
    if decoder.tied_embeddings and head in checkpoint.tensors:
        expected[head] = (decoder.vocab_size, decoder.hidden_size)
    ignored = model.names.ignored or ("\0",)
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in expected and not name.endswith(ignored) and not _is_of_draft_layer(name, model)
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


def _is_of_draft_layer(name: str, model: ModelDescription) -> bool:
    """Whether a tensor belongs to a draft layer, one behind the model's last layer."""
    first = model.decoder.num_layers
    layers = range(first, first + model.decoder.num_draft_layers)
    return name.startswith(tuple(model.names.base + model.names.layers.format(index) for index in layers))


def _stored_shapes(specs: list[_TensorSpec]) -> dict[str, tuple[int, ...]]:
    return {part.name: spec.stored_shape(part.rows) for spec in specs for part in spec.parts}


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _stored_dtype(model: ModelDescription, checkpoint: Checkpoint) -> torch.dtype:
    """config.json's, else that of the tensor that is read first."""
    first = next(iter(_stored_shapes(_specs(model, Part.whole(model.decoder)))))
    return getattr(torch, model.decoder.dtype or checkpoint.tensors[first].dtype)


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


def _read_levels(
    checkpoint: Checkpoint, spec: _TensorSpec, finisher: Finisher[LayerT, LinearT]
) -> GroupedMatrix | None:
    """The levels of what `spec` wants; None if it is not quantized, or its parts do not go together."""
    names = [part.name for part in spec.parts]
    are_quantized = [name in checkpoint.levels for name in names]
    if spec.transposed or not all(are_quantized):
        if any(are_quantized):
            finisher.note_unpacked(names[0], "what is multiplied with it is not quantized")
        return None
    found = []
    for part in spec.parts:
        levels = checkpoint.levels[part.name].read()
        found += [levels.part(rows, spec.kept).grouped() for rows in part.ranges]
    if (matrix := stack_rows(found)) is None:
        finisher.note_unpacked(names[0], "others that are multiplied with it are quantized otherwise")
    return matrix
