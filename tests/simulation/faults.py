"""Faults to plant in the core, one at a time: plausible mistakes, as functions of a MonkeyPatch."""

from __future__ import annotations

import pytest

from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.outcomes import Outcomes
from inflight.core.recover.recovery import Isolation, Recovery
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ScheduledBatch
from tests.simulation.faults_of_adapters import FAULTS_OF_ADAPTERS, FAULTS_OF_ADAPTERS_IN_PIPELINES
from tests.simulation.faults_of_batches import (
    copy_of_nothing,
    move_to_the_wrong_parent,
    only_the_prompt_looked_back_at,
    rejected_draft_token_kept,
    released_slots_not_told_again,
    siblings_with_the_same_random_numbers,
    streamed_twice_after_a_pause,
    table_rows_drafted,
    tokens_not_read_by_the_draft_head,
    tokens_of_void_rows_kept,
)
from tests.simulation.faults_of_blocks import (
    colliding_digests,
    extra_ids_ignored,
    freed_while_in_flight,
    held_block_evicted,
    identity_ignored,
    missing_copy_on_write,
    missing_reference_count,
    parents_evicted_before_children,
    pause_without_free,
    prefix_not_waited_for,
    table_ignored,
    unchained_block_hash,
    wrong_block_boundary,
)
from tests.simulation.faults_of_turns import (
    all_ended_at_once,
    all_in_one_micro_batch,
    beams_counted_apart,
    chunking_policy_ignored,
    clients_take_no_turns,
    deadline_ignored,
    deadline_too_early,
    first_started_paused,
    full_queue_ignored,
    last_come_first_served,
    lower_priority_first,
    micro_batches_without_numbers,
    nobody_ended_behind_the_first,
    not_waited_for_before_a_pause,
    nothing_left_for_free_stages,
    oldest_always_first,
    sampled_on_device_untold,
    sampled_on_device_whoever_it_is,
    started_although_to_end,
    static_batch_joined,
    token_not_waited_for,
    unused_share_kept,
)

Patch = pytest.MonkeyPatch


def faulty_cleared(patch: Patch) -> None:
    failed = Isolation.failed

    def nobody_is_faulty(isolation: Isolation, request_ids, was_alone: bool) -> None:
        failed(isolation, request_ids, was_alone)

    patch.setattr(Isolation, "failed", nobody_is_faulty)


def first_suspect_ended(patch: Patch) -> None:
    patch.setattr(Isolation, "failed", lambda isolation, request_ids, was_alone: request_ids[0])


def all_tried_together(patch: Patch) -> None:
    def one_set(isolation: Isolation, request_ids, was_alone: bool) -> int | None:
        isolation._drop(request_ids)
        if len(request_ids) == 1 and was_alone:
            return request_ids[0]
        isolation._sets.appendleft(tuple(request_ids))
        return None

    patch.setattr(Isolation, "failed", one_set)


def blamed_for_what_failed_before(patch: Patch) -> None:
    """Plant a fault: rows of void batches after a failed one count against their requests."""
    judge = Recovery.judge

    def judge_void_rows(recovery: Recovery, batch: ScheduledBatch, error):
        for llm_request in recovery._running.sequences:
            llm_request.is_void = False
        return judge(recovery, batch, error)

    patch.setattr(Recovery, "judge", judge_void_rows)


def faulty_blocks_still_found(patch: Patch) -> None:
    patch.setattr(KvCacheManager, "unpublish", lambda *_: None)


def failed_rows_overlooked(patch: Patch) -> None:
    patch.setattr(Outcomes, "_check_failure", lambda *_: None)


def failed_row_ends_its_sequence_alone(patch: Patch) -> None:
    """Plant a fault: a failed row ends its sequence, and the siblings go on."""

    def fail(outcomes: Outcomes, llm_request: LlmRequest, error: Exception) -> list[Response]:
        return outcomes.endings.finish(llm_request, FinishReason.CANCELLED, outcomes.now_ns)

    patch.setattr(Outcomes, "_fail", fail)


FAULTS = (
    unchained_block_hash,
    colliding_digests,
    identity_ignored,
    table_ignored,
    extra_ids_ignored,
    prefix_not_waited_for,
    missing_reference_count,
    held_block_evicted,
    parents_evicted_before_children,
    wrong_block_boundary,
    pause_without_free,
    freed_while_in_flight,
    missing_copy_on_write,
    copy_of_nothing,
    move_to_the_wrong_parent,
    only_the_prompt_looked_back_at,
    siblings_with_the_same_random_numbers,
    released_slots_not_told_again,
    table_rows_drafted,
    tokens_not_read_by_the_draft_head,
    streamed_twice_after_a_pause,
    rejected_draft_token_kept,
    tokens_of_void_rows_kept,
    lower_priority_first,
    last_come_first_served,
    clients_take_no_turns,
    unused_share_kept,
    full_queue_ignored,
    all_ended_at_once,
    nobody_ended_behind_the_first,
    started_although_to_end,
    deadline_ignored,
    deadline_too_early,
    static_batch_joined,
    chunking_policy_ignored,
    first_started_paused,
    faulty_cleared,
    first_suspect_ended,
    all_tried_together,
    blamed_for_what_failed_before,
    faulty_blocks_still_found,
    sampled_on_device_whoever_it_is,
    sampled_on_device_untold,
    not_waited_for_before_a_pause,
    failed_rows_overlooked,
    failed_row_ends_its_sequence_alone,
    *FAULTS_OF_ADAPTERS,
)

FAULTS_OF_PIPELINES = (
    token_not_waited_for,
    all_in_one_micro_batch,
    nothing_left_for_free_stages,
    beams_counted_apart,
    oldest_always_first,
    micro_batches_without_numbers,
    freed_while_in_flight,
    *FAULTS_OF_ADAPTERS_IN_PIPELINES,
)
