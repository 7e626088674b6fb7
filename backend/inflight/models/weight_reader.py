"""Reads the tensors of a plan out of an open checkpoint, into what a `Finisher` makes of each.

Every tensor is copied once, from the mapped file straight into its place on the device, and what becomes of a
projection is made as soon as it is read: a load needs no more memory than what is kept and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

import torch
from torch import Tensor

from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_weights import (
    DecoderWeights,
    ExpertWeights,
    LatentWeights,
    Layer,
    LayerT,
    Linear,
    LinearT,
    Norm,
)
from inflight.models.finisher import Finisher
from inflight.models.levels import GroupedMatrix, stack_rows
from inflight.models.weight_plan import (
    DecoderPlan,
    ExpertsPlan,
    LatentPlan,
    LayerPlan,
    LinearPlan,
    NormPlan,
    StackPlan,
    TensorPlan,
)


class _NotKept(Exception):
    """One of a layer's experts is not quantized as the first one is."""


class WeightReader(Generic[LayerT, LinearT]):
    """Reads weights.

    Args:
        checkpoint: Has all tensors that plans ask for.
        dtype: Of tensors whose plans have none.
        device: Where they go.
        finisher: Says what is kept of projections and layers.
        advance: Called with the bytes of each tensor that has been read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        finisher: Finisher[LayerT, LinearT],
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._finisher, self._advance = finisher, advance

    def read(self, plan: DecoderPlan) -> DecoderWeights[LayerT, LinearT]:
        """The weights of a part of a model, as the finisher makes them."""
        embedding = position_embedding = final_norm = lm_head = None
        if plan.embedding is not None:
            embedding = self._plain(plan.embedding)
        if plan.position_embedding is not None:
            position_embedding = self._plain(plan.position_embedding)
        if plan.final_norm is not None:
            table = embedding if plan.lm_head is None else self._plain(plan.lm_head)
            assert table is not None, "a plan of the last stage has the one or the other"
            lm_head = self._finisher.head(Linear(table))
            if plan.lm_head is None and not self._finisher.keeps_tied_embedding:
                embedding = None
            del table
            final_norm = self._norm(plan.final_norm, self._plain)
        layers = tuple(self._finisher.layer(self._layer(layer)) for layer in plan.layers)
        return DecoderWeights(embedding, position_embedding, layers, final_norm, lm_head)

    def _layer(self, plan: LayerPlan) -> Layer[LinearT]:
        return Layer(
            qkv=self._projection(plan.qkv),
            latent=None if plan.latent is None else self._latent(plan.latent),
            up=None if plan.up is None else self._projection(plan.up),
            down=None if plan.down is None else self._projection(plan.down),
            experts=None if plan.experts is None else self._experts(plan.experts),
            attention_norm=self._norm_or_none(plan.attention_norm),
            query_norm=self._norm_or_none(plan.query_norm),
            key_norm=self._norm_or_none(plan.key_norm),
            output=self._projection(plan.output),
            attention_post_norm=self._norm_or_none(plan.attention_post_norm),
            mlp_norm=self._norm_or_none(plan.mlp_norm),
            mlp_post_norm=self._norm_or_none(plan.mlp_post_norm),
            sinks=self._vector(plan.sinks),
        )

    def _latent(self, plan: LatentPlan) -> LatentWeights:
        return LatentWeights(
            query_norm=self._norm_or_none(plan.query_norm),
            query_up=None if plan.query_up is None else self._linear(plan.query_up),
            kv_norm=self._norm(plan.kv_norm, self._tensor),
            kv_up=self._linear(plan.kv_up),
        )

    def _experts(self, plan: ExpertsPlan) -> ExpertWeights[LinearT]:
        return ExpertWeights(
            router=self._linear(plan.router),
            up=self._stack(plan.up),
            down=self._stack(plan.down),
            shared_gate=None if plan.shared_gate is None else self._linear(plan.shared_gate),
            choice_bias=self._vector(plan.choice_bias),
        )

    # ------------------------------------------------------------------ what finishers keep

    def _projection(self, plan: LinearPlan) -> LinearT:
        matrix = self._kept_levels(plan.weight)
        if matrix is None:
            return self._finisher.linear(self._linear(plan), plan.is_gated)
        found = self._finisher.keep_levels(matrix, self._vector(plan.bias), plan.is_gated)
        self._release(plan.weight)
        return found

    def _stack(self, plan: StackPlan) -> LinearT:
        shape, bias = (len(plan.matrices), *plan.matrices[0].shape), self._vector(plan.bias)
        bias = None if bias is None else bias.view(shape[:2])
        if (kept := self._stacked_levels(plan, shape, bias)) is not None:
            return kept
        return self._finisher.stack(map(self._tensor, plan.matrices), shape, bias, plan.is_gated)

    def _stacked_levels(self, plan: StackPlan, shape: tuple[int, ...], bias: Tensor | None) -> LinearT | None:
        first = self._kept_levels(plan.matrices[0], is_stack=True)
        if first is None:
            return None

        def each() -> Iterator[GroupedMatrix]:
            for index, of_expert in enumerate(plan.matrices):
                matrix = first if index == 0 else self._kept_levels(of_expert, is_stack=True)
                if matrix is None or matrix.form != first.form:
                    raise _NotKept
                yield matrix
                self._release(of_expert)

        try:
            return self._finisher.keep_stacked_levels(each(), shape, bias, plan.is_gated)
        except _NotKept:
            name = plan.matrices[0].parts[0].name
            self._finisher.note_unpacked(name, "experts that are not all quantized alike")
            return None

    def _kept_levels(self, plan: TensorPlan, is_stack: bool = False) -> GroupedMatrix | None:
        """The levels of a matrix that is kept as the checkpoint has it; None of any other."""
        if not self._finisher.keeps_levels:
            return None
        matrix = self._levels(plan)
        if matrix is not None and (reason := self._finisher.why_unpacked(matrix, is_stack)):
            self._finisher.note_unpacked(plan.parts[0].name, reason)
            return None
        return matrix

    # ------------------------------------------------------------------ tensors as they are

    def _linear(self, plan: LinearPlan) -> Linear:
        return Linear(self._tensor(plan.weight), self._vector(plan.bias))

    def _norm_or_none(self, plan: NormPlan | None) -> Norm | None:
        return None if plan is None else self._norm(plan, self._tensor)

    def _norm(self, plan: NormPlan, read: Callable[[TensorPlan], Tensor]) -> Norm:
        weight = read(plan.weight)
        if plan.offset:
            weight = weight.float() + plan.offset
        return Norm(weight, None if plan.bias is None else read(plan.bias))

    def _vector(self, plan: TensorPlan | None) -> Tensor | None:
        return None if plan is None else self._tensor(plan)

    def _tensor(self, plan: TensorPlan) -> Tensor:
        """A tensor of a layer."""
        return self._fill(plan, self._finisher.empty(plan.shape, plan.dtype or self._dtype, self._device))

    def _plain(self, plan: TensorPlan) -> Tensor:
        """A tensor outside layers."""
        return self._fill(plan, torch.empty(plan.shape, dtype=plan.dtype or self._dtype, device=self._device))

    def _fill(self, plan: TensorPlan, tensor: Tensor) -> Tensor:
        start = 0
        for part in plan.parts:
            stored = self._checkpoint.read(part.name)
            for rows in part.ranges:
                end = start + rows[1] - rows[0]
                tensor[start:end].copy_(plan.wanted(stored, rows))
                start = end
            self._checkpoint.release_pages(stored)
        self._advance(tensor.nbytes)
        return tensor

    def _levels(self, plan: TensorPlan) -> GroupedMatrix | None:
        """The levels of a matrix; None if it is not quantized, or its parts do not go together."""
        levels, names = self._checkpoint.levels, [part.name for part in plan.parts]
        are_quantized = [name in levels for name in names]
        if plan.transposed or not all(are_quantized):
            if any(are_quantized):
                self._finisher.note_unpacked(names[0], "what is multiplied with it is not quantized")
            return None
        found: list[GroupedMatrix] = []
        for part in plan.parts:
            whole = levels[part.name].read()
            found += [whole.part(rows, plan.kept).grouped() for rows in part.ranges]
        if (matrix := stack_rows(found)) is None:
            reason = "others that are multiplied with it are quantized otherwise"
            self._finisher.note_unpacked(names[0], reason)
        return matrix

    def _release(self, plan: TensorPlan) -> None:
        """Let the pages of levels go that have been used."""
        for part in plan.parts:
            self._checkpoint.levels[part.name].release()
        self._advance(plan.num_bytes(self._dtype))
