"""Runs a model's forward passes over packed batches, with layers of torch, compiled code, transformers or
TensorRT.

The runner owns the weights, the KV cache and the slots; `inflight.sampling` chooses tokens. Loop thread. On a
GPU a forward pass waits for the device only for context outputs (or for a top-p with a top-k that keeps the
whole vocabulary). Iterations are recorded once and replayed (`cuda/iteration_graphs.py`), and the next batch is
queued while the device computes the current one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from inflight.core.ports import StageMessages
from inflight.core.schedule.batch import ContextDetails, EngineLimits, ModelOutput, ScheduledBatch
from inflight.engine.additional_outputs import AdditionalOutputs, HiddenStates, LayerOutputs, TokenRows
from inflight.engine.carried_states import CarriedStates
from inflight.engine.context_outputs import ContextOutputs
from inflight.engine.cuda.iteration_graphs import Capture, IterationGraphs, RecordedKinds
from inflight.engine.debug_tensors import DebugTensors
from inflight.engine.interfaces import BlockCache, DraftGuesser, RecordedDecoder, RunnerDecoder
from inflight.engine.memory import computing
from inflight.engine.packing import PackedBatch, pack
from inflight.engine.prompt_tables import PromptTables
from inflight.engine.rotary_tables import RotaryTables
from inflight.engine.slots import SlotTable, VoidSlots
from inflight.ranks.topology import Mapping
from inflight.sampling.transfer import upload

_logger = logging.getLogger(__name__)
_ALONE = Mapping()


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """The outputs of a forward pass of a batch.

    Attributes:
        batch: The batch that was computed, with the draft tokens that the draft head guessed.
        rows: [rows, vocab_size] float32 logits to sample from; before the last stage, hidden states.
        context: Context outputs by slot, for sequences that want them.
        additional: Additional outputs by slot, for sequences that want them.
    """

    batch: ScheduledBatch
    rows: Tensor
    context: dict[int, ContextDetails] = field(default_factory=dict[int, ContextDetails])
    additional: TokenRows = field(default_factory=dict[int, Sequence[Tensor]])


class ModelRunner:
    """Runs a model, or one rank's part of it, and owns all state of its slots between iterations.

    Implements `inflight.core.ports.Runner` for every kind of decoder, each with its own kind of KV cache.

    Args:
        decoder: Computes the layers.
        cache: The KV cache of the layers.
        limits: The limits for requests and batches.
        max_num_tokens: Maximum number of rows of a forward pass.
        mapping: This rank's position.
        capture: Records iterations; None: they are not recorded. If set, `decoder` must be a whole model with
            fixed shapes.
        debug_tensors: Records debug tensors; if set, no iteration is replayed. None: they are not recorded.
        draft_head: Guesses draft tokens; None: the model has no draft head, or the head is in the last stage.

    Attributes:
        limits: The argument of the same name.
        slots: The state of each slot.
        void_slots: Slots of failed batches.
        decoder_config: The checkpoint's configuration of the model.
        dtype: Data type of weights, activations and KV cache: float32, bfloat16 or float16.
        kernels: The implementation of the layers: "native", "torch", "transformers" or "tensorrt".
        recorded: The kinds of batches that are recorded.
    """

    def __init__(
        self,
        decoder: RunnerDecoder,
        cache: BlockCache,
        limits: EngineLimits,
        max_num_tokens: int,
        mapping: Mapping = _ALONE,
        capture: Capture | None = None,
        debug_tensors: DebugTensors | None = None,
        draft_head: DraftGuesser | None = None,
    ) -> None:
        self.limits = limits
        self.slots = slots = SlotTable(limits, cache.null_block, cache.device)
        self.void_slots = VoidSlots()
        self.decoder_config = decoder.config
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.kernels = decoder.kernels
        self.decoder = decoder
        self.cache = cache
        self._max_num_tokens = max_num_tokens
        self._draft_head = draft_head
        self._graphs = None
        if capture is not None and debug_tensors is None:
            self._graphs = _record(cast(RecordedDecoder, decoder), slots, cache, capture, max_num_tokens)
        self.recorded = RecordedKinds(()) if self._graphs is None else self._graphs.kinds
        self._is_first_stage, self._is_last_stage = mapping.is_first_stage, mapping.is_last_stage
        self._is_sampler = mapping.is_sampler
        self.additional_outputs = AdditionalOutputs(decoder.config.num_layers)
        self.context_outputs = ContextOutputs(limits.vocab_size, mapping.is_sampler, self.additional_outputs)
        self.debug_tensors = debug_tensors
        self.prompt_tables = PromptTables(
            limits.vocab_size,
            decoder.dtype,
            cache.device,
            decoder.config.hidden_size,
            mapping.is_first_stage or limits.num_added_layers > 0 or draft_head is not None,
        )
        self._carried = CarriedStates(decoder.config)
        self.rotary_tables = RotaryTables(cache.device)
        self._first_virtual_id = limits.vocab_size if limits.has_spans else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence, from the checkpoint's config files."""
        return self.decoder_config.eos_token_ids

    def run(self, batch: ScheduledBatch, messages: StageMessages | None) -> RowOutputs:
        """Apply the batch to slots and blocks, then run the packed forward pass; on a GPU, queue it.

        Args:
            batch: The batch; it must not continue in a void slot.
            messages: The messages of other pipeline stages; None: there is one stage.

        Returns:
            At the last stage, logits to sample from, in the order of `ScheduledBatch.sampled_slots`: 1 +
            num_draft_tokens rows for a chunk and one for a generation slot. Before the last stage, hidden states
            for the next stage, [batch.num_tokens, `DecoderConfig.stage_width`] in the model's dtype, without
            outputs by slot.

        Raises:
            ValueError: The batch breaks the contract: more than max_num_tokens rows, or a row without a block.
            StepFailed: The batch has failed in another stage.
        """
        try:
            return self._run(batch, messages)
        except BaseException:  # the content of the cache is unknown afterwards
            self.cache.forget(batch)
            raise

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, messages: StageMessages | None = None) -> Tensor:
        """Return the logits or hidden states of `run`, for a rank that does not sample.

        Raises:
            ValueError: See `ModelEngine.forward`.
            StepFailed: See `ModelEngine.forward`.
        """
        with self.void_slots.watch(batch), computing(batch.num_rows):
            self.void_slots.refuse(batch)
            return self.run(batch, messages).rows

    @torch.inference_mode()
    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Make the sampled tokens their slots' next inputs."""
        self.take_tokens(batch, output)

    def take_tokens(
        self, batch: ScheduledBatch, output: ModelOutput, only: Collection[int] | None = None
    ) -> None:
        """Make the sampled tokens their slots' next inputs, and apply accepted drafts, in all slots or in
        `only`."""
        self.slots.remember(batch, output, only)
        if self.cache.states is not None:
            self.cache.states.accept(batch, output, only)

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """Make the batch's slots void, as if the batch had failed on this rank."""
        self.void_slots.add(batch, since)

    def agree_on_recordings(self, min_over_ranks: Callable[[int], int]) -> None:
        """Drop recordings that another rank does not have: the ranks of a stage sum up their results row by
        row, and a replayed batch has padding rows and another order of generation rows.

        `min_over_ranks` returns the minimum of a number over all ranks.
        """
        lacking = ""
        if not min_over_ranks(len(self.recorded.generation_sizes)):
            lacking = "iterations run" if self._graphs is not None else ""
            self._graphs, self.recorded = None, RecordedKinds(())
        elif not min_over_ranks(len(self.recorded.mixed_sizes)) and self._graphs is not None:
            lacking = "iterations with chunks run" if self.recorded.mixed_sizes else ""
            self._graphs.drop_mixed()
            self.recorded = self._graphs.kinds
        if lacking:
            _logger.warning("%s without CUDA graphs, because another rank cannot record them", lacking)

    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""
        for name in (
            "decoder", "cache", "slots", "context_outputs", "additional_outputs", "prompt_tables",
            "rotary_tables", "_graphs", "_draft_head",
        ):  # fmt: skip
            vars(self).pop(name, None)

    def _run(self, batch: ScheduledBatch, messages: StageMessages | None) -> RowOutputs:
        for load in batch.adapter_loads:
            self.decoder.load_adapter(load)
        fresh_blocks = self.slots.apply(batch)
        if self.cache.states is not None:
            self.cache.states.apply(batch)
        self.prompt_tables.apply(batch)
        self.rotary_tables.apply(batch)
        self.context_outputs.apply(batch)
        self.additional_outputs.apply(batch)
        self._prepare_blocks(batch, fresh_blocks)
        self.cache.prepare(batch, self.slots.num_tokens)
        if batch.num_tokens > self._max_num_tokens:
            raise ValueError(f"batch of {batch.num_tokens} tokens, max_num_tokens is {self._max_num_tokens}")
        if batch.num_guesses:
            batch = batch.with_guesses(self._guess(batch, messages))
        computed = self._compute(batch, messages)
        self.slots.advance(batch)
        return computed

    def _guess(self, batch: ScheduledBatch, messages: StageMessages | None) -> Sequence[int]:
        """Guess draft tokens in the last stage, and send them to the earlier ones, which receive them."""
        if self._draft_head is None:
            assert messages is not None, "only a model with a draft head gets batches with guesses"
            return messages.receive_guesses()
        tokens = self._draft_head.guess(batch, self.slots, self.rotary_tables)
        if messages is not None:
            messages.send_guesses(tokens)
        return tokens

    def _compute(self, batch: ScheduledBatch, messages: StageMessages | None) -> RowOutputs:
        between = HiddenStates()
        if are_wanted := self.additional_outputs.are_wanted(batch):
            between = self.additional_outputs.between_layers(batch)
        head_slots = batch.head_slots
        if head_slots:
            between = HiddenStates(between.wanted | self._carried.layers)
        virtual = self.prompt_tables.virtual_rows(batch)
        is_special = virtual is not None or bool(between.wanted) or self.rotary_tables.have_rows_in(batch)
        if self._graphs is not None and batch.num_tokens and not is_special:
            replayed = self._graphs.forward(batch)
            if replayed is not None:
                return self._outputs(batch, *replayed, between, are_wanted)
        hidden = None
        if not self._is_first_stage and messages is not None:
            hidden = self._carried.split(messages.receive_hidden(), between)
        packed = pack(batch, self.slots, virtual, self.rotary_tables, self._first_virtual_id)
        if self.cache.states is not None:
            self.cache.states.begin(batch, packed)
        outputs = self._compute_packed(batch, packed, hidden, between, are_wanted, head_slots)
        if self.debug_tensors is not None:
            logits = outputs.rows if self._is_last_stage else None
            self.debug_tensors.write(batch.iteration, packed, logits)
        return outputs

    def _compute_packed(
        self,
        batch: ScheduledBatch,
        packed: PackedBatch,
        hidden: Tensor | None,
        between: HiddenStates,
        are_wanted: bool,
        head_slots: Sequence[int],
    ) -> RowOutputs:
        arguments = (packed, self.cache, hidden)
        if not self._is_last_stage:
            return RowOutputs(batch, self._carried.join(self.decoder.forward(*arguments, between), between))
        wants_hidden = are_wanted or any(chunk.wants_context for chunk in batch.context)
        if not head_slots and not wants_hidden:
            return RowOutputs(batch, self.decoder.forward_to_logits(*arguments))
        hidden = self.decoder.forward(*arguments, between)
        if self._draft_head is not None and head_slots:
            self._draft_head.fill(packed, head_slots, hidden, between.found)
        return self._outputs(batch, hidden, packed.sampled_rows, between, are_wanted)

    def _outputs(
        self,
        batch: ScheduledBatch,
        hidden: Tensor,
        sampled_rows: Tensor,
        between: HiddenStates,
        are_wanted: bool,
    ) -> RowOutputs:
        """Return logits of sampled rows, and other wanted outputs, from the last layer's output."""
        layers = LayerOutputs(hidden, self.decoder.normalize, between.found)
        context: dict[int, ContextDetails] = {}
        if any(chunk.wants_context for chunk in batch.context):
            context = self.context_outputs.compute(batch, layers, self.decoder.logits)
        logits = self.decoder.logits(hidden, sampled_rows)
        if not (are_wanted and self._is_sampler):
            return RowOutputs(batch, logits, context)
        additional = self.additional_outputs.of_tokens(batch, layers, sampled_rows, logits)
        return RowOutputs(batch, logits, context, additional)

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        """Copy blocks, then clear new ones: a source must not be cleared or written before it is copied."""
        device = self.cache.device
        if batch.block_copies:
            self.cache.copy(*upload(np.array(batch.block_copies), device).unbind(1))
        if not fresh_blocks:
            return
        if self.decoder.needs_cleared_blocks:
            self.cache.clear(upload(np.array(fresh_blocks), device))
        elif self._draft_head is not None:
            self._draft_head.clear(upload(np.array(fresh_blocks), device))


def _record(
    decoder: RecordedDecoder, slots: SlotTable, cache: BlockCache, capture: Capture, max_num_tokens: int
) -> IterationGraphs | None:
    started = time.monotonic()
    try:
        graphs = IterationGraphs(decoder, slots, cache, capture, max_num_tokens)
    except RuntimeError as error:  # the type of a device's errors
        _logger.warning("iterations run without CUDA graphs, because they cannot be recorded: %s", error)
        return None
    kinds, took = graphs.kinds, time.monotonic() - started
    _logger.info(
        "generation of up to %d rows, and iterations with chunks %s, in %d CUDA graphs, recorded in %.1f s",
        kinds.generation_sizes[-1],
        f"of up to {kinds.mixed_sizes[-1]}" if kinds.mixed_sizes else "not",
        graphs.count,
        took,
    )
    if graphs.adapter_ranks:
        _logger.info(
            "iterations whose LoRA adapters have more than %d ranks in total, or magnitudes (DoRA), run without "
            "CUDA graphs",
            graphs.adapter_ranks,
        )
    return graphs
