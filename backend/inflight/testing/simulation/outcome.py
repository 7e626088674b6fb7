"""The outcome of a run: its responses, and how often it reached the situations that the tests want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch


@dataclass
class RunOutcome:
    """The responses and counters of one scenario, filled in while it runs.

    Attributes:
        responses: By request id, in order.
        errors: Number of failed requests, by Triton's code.
        reasons: Finish reasons of outputs, counting each beam.
        final_iterations: By request id, the iteration of its final response.
        sequence_ends: The iteration of a sequence's final result.
        refused: Requests refused because the queue was full.
        adapters: By request id, the digest of its adapter.
        without_adapter: By request id, the iteration in which its adapter failed, and the code of the error with
            which the request ends therefore.
        convicted: Requests that had to end with an error because an iteration or a row failed.
        started: (request id, sequence index), in order of their first start.
        reused, missed: Full blocks that a (request id, sequence index) found in the cache, or did not.
        copied: Blocks of which only the beginning was found, and copied.
        num_exact_reuses: Starts whose number of reused blocks was certain.
        num_from_snapshots: Starts from a snapshot of recurrent state.
        num_divided_contexts: Iterations in which the chunking policy made a difference.
        num_full_pipelines: Iterations with a batch in every stage of several.
        num_ahead: Batches that began while the one before was in flight, on a device that overlaps
            iterations.
        num_shared_generations: Batches that left ready sequences for other stages.
        num_mixed_batches: Batches with beams of several widths, or with beams beside other rows in
            generation.
        num_adapter_loads, num_adapter_evictions: Adapters put on the device, and taken off it to make room.
        num_adapter_waits: Iterations in which a sequence began to wait for adapter pages.
        num_divided_endings: Iterations that left pending endings for the next one.
    """

    responses: dict[int, list[Response]] = field(default_factory=dict[int, list[Response]])
    errors: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    final_iterations: dict[int, int] = field(default_factory=dict[int, int])
    sequence_ends: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    refused: set[int] = field(default_factory=set[int])
    adapters: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    without_adapter: Mapping[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    convicted: set[int] = field(default_factory=set[int])
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reused: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    missed: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    copied: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    num_iterations: int = 0
    num_failed_iterations: int = 0
    num_pauses: int = 0
    num_exact_reuses: int = 0
    num_from_snapshots: int = 0
    num_divided_contexts: int = 0
    num_full_pipelines: int = 0
    num_ahead: int = 0
    num_shared_generations: int = 0
    num_chunks: int = 0
    num_copies: int = 0
    num_lookups: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_mixed_batches: int = 0
    max_rows: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_adapter_waits: int = 0
    num_divided_endings: int = 0

    def record(self, iteration: int, responses: list[Response]) -> None:
        """Record the responses of an iteration."""
        for response in responses:
            earlier = self.responses.setdefault(response.request_id, [])
            assert not (earlier and earlier[-1].is_final), "a response after the final one"
            earlier.append(response)
            if response.error is not None:
                self.errors[response.error.code] += 1
            if response.result is not None and response.result.is_sequence_final:
                self.reasons.update(response.result.finish_reasons)
                self.sequence_ends[response.request_id, response.sequence_index] = iteration
            if response.is_final:
                self.final_iterations[response.request_id] = iteration

    def count(self, batch: ScheduledBatch) -> None:
        """Count the kinds of rows in a batch."""
        self.num_chunks += sum(not chunk.is_last for chunk in batch.context)
        self.num_copies += len(batch.block_copies)
        self.max_rows = max(self.max_rows, batch.num_rows)
        widths = {len(group.slots) for group in batch.beam_groups if len(group.slots) > 1}
        others = set(batch.generation_slots).difference(*(group.slots for group in batch.beam_groups))
        self.num_mixed_batches += len(widths) > 1 or bool(widths and others)

    def count_drafts(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Count the accepted and refused tokens of a batch's drafts."""
        chunks = {chunk.slot: chunk for chunk in batch.context if chunk.num_draft_tokens}
        for slot, tokens in zip(batch.sampled_slots(), output.token_ids, strict=True):
            if (chunk := chunks.get(slot)) is not None:
                self.num_lookups += chunk.is_generation
                self.num_accepted += len(tokens) - 1
                self.num_rejected += chunk.num_draft_tokens - len(tokens) + 1
