"""Faults to plant: in batches for the device, and in a sequence's record of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import inflight.core.outcomes as outcomes
import inflight.core.schedule.batch_builder as batch_builder
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.batch import BeamMove, ModelOutput, ScheduledBatch
from inflight.core.schedule.running import Slots
from inflight.core.scheduler import Scheduler

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- batches for the device


def copy_of_nothing(patch: Patch) -> None:
    """Plant a fault: the beam gets a block of its own without the copied content."""
    change_batches(patch, lambda batch: dataclasses.replace(batch, block_copies=()))


def move_to_the_wrong_parent(patch: Patch) -> None:
    def swapped(batch: ScheduledBatch) -> ScheduledBatch:
        parents = [move.parent_slot for move in batch.moves]
        moves = (
            BeamMove(move.slot, parent, move.token_id)
            for move, parent in zip(batch.moves, parents[1:] + parents[:1])
        )
        return dataclasses.replace(batch, moves=tuple(moves))

    change_batches(patch, swapped)


def only_the_prompt_looked_back_at(patch: Patch) -> None:
    """Plant a fault: a resumed sequence's penalties ignore its generated tokens."""
    _change_starts(patch, lambda start: {"token_ids": start.token_ids[: start.request.prompt_length]})


def siblings_with_the_same_random_numbers(patch: Patch) -> None:
    _change_starts(patch, lambda start: {"sequence_index": 0})


def released_slots_not_told_again(patch: Patch) -> None:
    patch.setattr(Slots, "release_again", lambda *_: None)


def tokens_not_read_by_the_draft_head(patch: Patch) -> None:
    """Plant a fault: a head guesses tokens after some that it has not read."""
    change_batches(patch, lambda batch: dataclasses.replace(batch, head_slots=batch.head_slots[:-1]))


def table_rows_drafted(patch: Patch) -> None:
    """Plant a fault: prompt lookup drafts rows of a prompt table."""
    patch.setattr(batch_builder, "takewhile", lambda _, draft: draft)


def _change_starts(patch: Patch, fields: Callable) -> None:
    def changed(batch: ScheduledBatch) -> ScheduledBatch:
        starts = (dataclasses.replace(start, **fields(start)) for start in batch.starts)
        return dataclasses.replace(batch, starts=tuple(starts))

    change_batches(patch, changed)


def change_batches(patch: Patch, change: Callable[[ScheduledBatch], ScheduledBatch]) -> None:
    schedule = Scheduler.schedule

    def schedule_wrongly(scheduler: Scheduler) -> ScheduledBatch | None:
        batch = schedule(scheduler)
        return batch and change(batch)

    patch.setattr(Scheduler, "schedule", schedule_wrongly)


# ---------------------------------------------------------------------- records of outputs


def streamed_twice_after_a_pause(patch: Patch) -> None:
    pause = LlmRequest.pause

    def pause_and_forget(llm_request: LlmRequest) -> None:
        pause(llm_request)
        llm_request.num_streamed_tokens = 0

    patch.setattr(LlmRequest, "pause", pause_and_forget)


def rejected_draft_token_kept(patch: Patch) -> None:
    confirm_chunk = outcomes.confirm_chunk

    def confirm_every_draft(llm_request: LlmRequest, chunk, num_new_tokens: int) -> None:
        confirm_chunk(llm_request, chunk, 1 + chunk.num_draft_tokens)

    patch.setattr(outcomes, "confirm_chunk", confirm_every_draft)


def tokens_of_void_rows_kept(patch: Patch) -> None:
    update = Scheduler.update

    def update_all(scheduler: Scheduler, batch: ScheduledBatch, output: ModelOutput, now_ns: int = 0):
        owners = dict(scheduler._running.slots.owners)
        void = [
            (owners[slot], tokens)
            for slot, tokens in zip(batch.sampled_slots(), output.token_ids)
            if slot in owners and owners[slot].is_void
        ]
        responses = update(scheduler, batch, output, now_ns)
        for llm_request, tokens in void:
            llm_request.tokens.extend(tokens)
        return responses

    patch.setattr(Scheduler, "update", update_all)
