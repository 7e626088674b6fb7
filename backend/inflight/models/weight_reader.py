"""Reads a model's tensors from an open checkpoint and converts them with a `Sink`.

Every tensor is copied once, from the mapped file to its place on the device, and each projection is converted
as soon as it is read: a load needs no more memory than the converted model and one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic

import torch
from torch import Tensor

from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import (
    AltUpWeights,
    DecoderWeights,
    DraftHeadWeights,
    ExpertNorms,
    ExpertWeights,
    LatentWeights,
    LaurelWeights,
    Layer,
    LayerInputWeights,
    LayerT,
    Linear,
    LinearT,
    Norm,
    StreamWeights,
    TokenInputWeights,
)
from inflight.models.levels import GroupedMatrix, stack_rows
from inflight.models.recurrent import RecurrentWeights
from inflight.models.sink import KeptLevels, Sink, is_small_head
from inflight.models.weight_sources import (
    AltUpSources,
    DecoderSources,
    DraftHeadSources,
    ExpertNormSources,
    ExpertSources,
    LatentSources,
    LaurelSources,
    LayerInputSources,
    LayerSources,
    LinearSource,
    NormSource,
    RecurrentSources,
    StackSource,
    StreamSources,
    TensorSource,
    TokenInputSources,
    XieluSources,
)


class _NotKept(Exception):
    """The exception for an expert whose quantization differs from the first expert's of its layer."""


class WeightReader(Generic[LayerT, LinearT]):
    """Reads a model's tensors from an open checkpoint, and passes each projection and layer to a sink.

    Args:
        checkpoint: The checkpoint, which has all tensors that sources name.
        dtype: Dtype of tensors whose sources do not set one.
        device: Device of the loaded tensors.
        sink: Converts projections and layers.
        kept: If set, quantized matrices are passed as levels if the sink accepts them; None: all are read
            as numbers.
        advance: Called with the number of bytes of each tensor after it is read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        sink: Sink[LayerT, LinearT],
        kept: KeptLevels | None,
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._sink, self._kept, self._advance = sink, kept, advance

    def read(self, sources: DecoderSources) -> DecoderWeights[LayerT, LinearT]:
        """Return the weights of a part of a model, as converted by the sink, without its draft head."""
        embedding = position_embedding = embedding_norm = final_norm = lm_head = None
        if sources.final_norm is not None:
            lm_head = self._kept_head(sources)
        if sources.embedding is not None and (lm_head is None or sources.lm_head is not None):
            embedding = self.plain(sources.embedding)
        if sources.position_embedding is not None:
            position_embedding = self.plain(sources.position_embedding)
        if sources.embedding_norm is not None:
            embedding_norm = self._norm(sources.embedding_norm, self.plain)
        if sources.final_norm is not None and lm_head is None:
            table = embedding if sources.lm_head is None else self.plain(sources.lm_head)
            assert table is not None, "the last stage has the output projection or the tied embedding"
            lm_head = self._sink.head(table)
            if sources.lm_head is None and not self._sink.keeps_tied_embedding:
                embedding = None
            del table
        if sources.final_norm is not None:
            final_norm = self._norm(sources.final_norm, self.plain)
        token_inputs = None if sources.token_inputs is None else self._token_inputs(sources.token_inputs)
        streams = None if sources.streams is None else self._streams(sources.streams)
        layers = tuple(self._sink.layer(self._layer(layer)) for layer in sources.layers)
        return DecoderWeights(
            embedding,
            position_embedding,
            layers,
            final_norm,
            lm_head,
            token_inputs,
            streams,
            embedding_norm,
        )

    def draft_head(self, sources: DraftHeadSources) -> DraftHeadWeights[LayerT, LinearT]:
        """Return the weights of a draft head, as converted by the sink."""
        return DraftHeadWeights(
            embedding_norm=self._norm(sources.embedding_norm, self.plain),
            hidden_norm=self._norm(sources.hidden_norm, self.plain),
            projection=self.projection(sources.projection),
            decoder=DecoderWeights(None, None, (self._sink.layer(self._layer(sources.layer)),), None, None),
            final_norm=self._norm(sources.final_norm, self.plain),
        )

    def _kept_head(self, sources: DecoderSources) -> LinearT | None:
        """Return the output projection, which may be the tied embedding, if the sink accepts its levels."""
        source = sources.lm_head or sources.embedding
        if self._kept is None or source is None or not self._sink.keeps_head:
            return None
        for name in (part.name for part in source.parts):
            info, of_file = self._checkpoint.tensors[name], self._checkpoint.levels.get(name)
            if of_file is None or not is_small_head(
                of_file.kind, info.level_bytes or 0, math.prod(info.shape)
            ):
                return None
        levels = self._levels(source)
        if levels is None or self._sink.why_unpacked(levels, is_stack=False):
            return None
        head = self._sink.head(levels)
        self._kept.heads[levels.kind] += 1
        self._release(source)
        return head

    def _token_inputs(self, sources: TokenInputSources) -> TokenInputWeights:
        return TokenInputWeights(
            embedding=self.plain(sources.embedding),
            projection=Linear(self.plain(sources.projection.weight)),
            norm=self._norm(sources.norm, self.plain),
        )

    def _streams(self, sources: StreamSources) -> StreamWeights:
        split, join = (
            None if source is None else Linear(self.plain(source.weight))
            for source in (sources.split, sources.join)
        )
        return StreamWeights(split, join)

    def _layer(self, sources: LayerSources) -> Layer[LinearT]:
        return Layer(
            input_projection=None if sources.qkv is None else self.projection(sources.qkv),
            latent=None if sources.latent is None else self._latent(sources.latent),
            up=None if sources.up is None else self.projection(sources.up),
            down=None if sources.down is None else self.projection(sources.down),
            experts=None if sources.experts is None else self._experts(sources.experts),
            attention_norm=self._norm_or_none(sources.attention_norm),
            query_norm=self._norm_or_none(sources.query_norm),
            key_norm=self._norm_or_none(sources.key_norm),
            output_projection=None if sources.output is None else self.projection(sources.output),
            attention_post_norm=self._norm_or_none(sources.attention_post_norm),
            mlp_norm=self._norm_or_none(sources.mlp_norm),
            mlp_post_norm=self._norm_or_none(sources.mlp_post_norm),
            sinks=self._vector(sources.sinks),
            head_gates=None if sources.head_gates is None else self._linear(sources.head_gates),
            recurrent=None if sources.recurrent is None else self._recurrent(sources.recurrent),
            recurrent_projections=None
            if sources.recurrent_projections is None
            else (
                self.projection(sources.recurrent_projections[0]),
                self.projection(sources.recurrent_projections[1]),
            ),
            inputs=None if sources.inputs is None else self._layer_inputs(sources.inputs),
            activation=None if sources.activation is None else self._xielu(sources.activation),
            scale=self._vector(sources.scale),
            altup=None if sources.altup is None else self._altup(sources.altup),
            laurel=None if sources.laurel is None else self._laurel(sources.laurel),
        )

    def _altup(self, sources: AltUpSources) -> AltUpWeights:
        return AltUpWeights(
            router=self._linear(sources.router),
            router_norm=self._norm(sources.router_norm, self._tensor),
            prediction=self._linear(sources.prediction),
            correction=self._linear(sources.correction),
            output_scale=self._tensor(sources.output_scale),
        )

    def _laurel(self, sources: LaurelSources) -> LaurelWeights:
        return LaurelWeights(
            down=self._linear(sources.down),
            up=self._linear(sources.up),
            norm=self._norm(sources.norm, self._tensor),
        )

    def _xielu(self, sources: XieluSources) -> Tensor:
        return torch.cat((self._tensor(sources.learned), self._tensor(sources.constants)))

    def _layer_inputs(self, sources: LayerInputSources) -> LayerInputWeights:
        return LayerInputWeights(
            gate=self._linear(sources.gate),
            output=self._linear(sources.output),
            norm=self._norm(sources.norm, self._tensor),
        )

    def _recurrent(self, sources: RecurrentSources) -> RecurrentWeights:
        """Read a recurrent layer's weights; the stored tensor of `decay` is log(-decay)."""
        decay = self._vector(sources.decay)
        return RecurrentWeights(
            conv=self._tensor(sources.conv),
            conv_bias=self._vector(sources.conv_bias),
            decay=None if decay is None else -decay.exp(),
            step_bias=self._vector(sources.step_bias),
            skip=self._vector(sources.skip),
            norm=self._vector(sources.norm),
            step_up=self._vector(sources.step_up),
            gate_up=self._vector(sources.gate_up),
        )

    def _latent(self, sources: LatentSources) -> LatentWeights:
        return LatentWeights(
            query_norm=self._norm_or_none(sources.query_norm),
            query_up=None if sources.query_up is None else self._linear(sources.query_up),
            kv_norm=self._norm(sources.kv_norm, self._tensor),
            kv_up=self._linear(sources.kv_up),
        )

    def _experts(self, sources: ExpertSources) -> ExpertWeights[LinearT]:
        return ExpertWeights(
            router=self._linear(sources.router),
            up=self._stack(sources.up),
            down=self._stack(sources.down),
            shared_gate=None if sources.shared_gate is None else self._linear(sources.shared_gate),
            choice_bias=self._vector(sources.choice_bias),
            norms=None if sources.norms is None else self._expert_norms(sources.norms),
            scales=self._vector(sources.scales),
            latent=None
            if sources.latent is None
            else (self._linear(sources.latent[0]), self._linear(sources.latent[1])),
        )

    def _expert_norms(self, sources: ExpertNormSources) -> ExpertNorms:
        return ExpertNorms(
            router=self._norm(sources.router, self._tensor),
            before=self._norm(sources.before, self._tensor),
            after=self._norm(sources.after, self._tensor),
            shared_after=self._norm(sources.shared_after, self._tensor),
        )

    # ------------------------------------------------------------------ tensors for the sink

    def projection(self, source: LinearSource) -> LinearT:
        """Return a projection as the sink converts it."""
        levels = self._kept_levels(source.weight)
        if levels is None:
            return self._sink.linear(self._tensor(source.weight), self._vector(source.bias), source.is_gated)
        found = self._sink.linear(levels, self._vector(source.bias), source.is_gated)
        self._count(levels)
        self._release(source.weight)
        return found

    def _stack(self, source: StackSource) -> LinearT:
        shape, bias = (len(source.matrices), *source.matrices[0].shape), self._vector(source.bias)
        bias = None if bias is None else bias.view(shape[:2])
        first = self._kept_levels(source.matrices[0], is_stack=True)
        if first is not None:
            try:
                found = self._sink.stack(self._each_levels(source, first), shape, bias, source.is_gated)
                self._count(first)
                return found
            except _NotKept:
                self._note_unpacked(source.matrices[0], "experts with different quantization")
        return self._sink.stack(map(self._tensor, source.matrices), shape, bias, source.is_gated)

    def _each_levels(self, source: StackSource, first: GroupedMatrix) -> Iterator[GroupedMatrix]:
        """Yield the levels of all experts, beginning with `first`; raise _NotKept if one has another form."""
        for index, of_expert in enumerate(source.matrices):
            matrix = first if index == 0 else self._kept_levels(of_expert, is_stack=True)
            if matrix is None or matrix.form != first.form:
                raise _NotKept
            yield matrix
            self._release(of_expert)

    def _kept_levels(self, source: TensorSource, is_stack: bool = False) -> GroupedMatrix | None:
        """Return the levels of a matrix that the sink accepts as levels; None for any other matrix."""
        if self._kept is None:
            return None
        matrix = self._levels(source)
        if matrix is not None and (reason := self._sink.why_unpacked(matrix, is_stack)):
            self._note_unpacked(source, reason)
            return None
        return matrix

    def _count(self, levels: GroupedMatrix) -> None:
        if self._kept is not None:
            self._kept.counts[levels.kind] += 1

    def _note_unpacked(self, source: TensorSource, reason: str) -> None:
        if self._kept is not None:
            self._kept.note_unpacked(source.parts[0].name, reason)

    # ------------------------------------------------------------------ other tensors

    def _linear(self, source: LinearSource) -> Linear:
        return Linear(self._tensor(source.weight), self._vector(source.bias))

    def _norm_or_none(self, source: NormSource | None) -> Norm | None:
        return None if source is None else self._norm(source, self._tensor)

    def norm(self, source: NormSource) -> Norm:
        """Return a norm outside the layers."""
        return self._norm(source, self.plain)

    def _norm(self, source: NormSource, read: Callable[[TensorSource], Tensor]) -> Norm:
        weight = read(source.weight)
        if source.offset:
            weight = weight.float() + source.offset
        if source.has_zero_bias:
            return Norm(weight, torch.zeros_like(weight))
        return Norm(weight, None if source.bias is None else read(source.bias))

    def _vector(self, source: TensorSource | None) -> Tensor | None:
        return None if source is None else self._tensor(source)

    def _tensor(self, source: TensorSource) -> Tensor:
        """Read a tensor of a layer, into memory that the sink allocates."""
        return self._fill(source, self._sink.empty(source.shape, source.dtype or self._dtype, self._device))

    def plain(self, source: TensorSource) -> Tensor:
        """Return a tensor outside the layers."""
        return self._fill(
            source, torch.empty(source.shape, dtype=source.dtype or self._dtype, device=self._device)
        )

    def _fill(self, source: TensorSource, tensor: Tensor) -> Tensor:
        start = 0
        for part in source.parts:
            stored = self._checkpoint.read(part.name)
            for rows in part.ranges:
                end = start + len(range(*rows))
                tensor[start:end].copy_(source.wanted(stored, rows))
                start = end
            self._checkpoint.release_pages(stored)
        self._advance(tensor.nbytes)
        return tensor

    def _levels(self, source: TensorSource) -> GroupedMatrix | None:
        """Return the levels of a matrix; None if it is not quantized, or its parts cannot be combined."""
        levels = self._checkpoint.levels
        are_quantized = [part.name in levels for part in source.parts]
        if source.transposed or not all(are_quantized):
            if any(are_quantized):
                self._note_unpacked(source, "another part of its fused matrix is not quantized")
            return None
        found: list[GroupedMatrix] = []
        for part in source.parts:
            whole = levels[part.name].read()
            found += [whole.part(rows, source.kept).grouped() for rows in part.ranges]
        if (matrix := stack_rows(found)) is None:
            self._note_unpacked(source, "other parts of its fused matrix are quantized differently")
        return matrix

    def _release(self, source: TensorSource) -> None:
        """Release the mapped pages of levels that have been used."""
        for part in source.parts:
            self._checkpoint.levels[part.name].release()
        self._advance(source.num_bytes(self._dtype))
