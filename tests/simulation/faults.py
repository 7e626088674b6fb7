"""Faults to plant in the core, one at a time: each takes a MonkeyPatch, and is a mistake that one could make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import inflight.core.block_keys as block_keys
import inflight.core.scheduler as scheduler_module
from inflight.core.admission import Admission
from inflight.core.batch import BeamMove, ModelOutput, ScheduledBatch
from inflight.core.block_heap import BlockHeap
from inflight.core.block_keys import ROOT_SCOPE
from inflight.core.block_pool import BlockPool
from inflight.core.capacity_scheduler import GuaranteedNoEvict, MaxUtilization
from inflight.core.deadlines import Deadlines
from inflight.core.isolation import Isolation
from inflight.core.kv_cache_manager import KvCacheManager
from inflight.core.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.micro_batch_scheduler import MicroBatchScheduler
from inflight.core.prefix_identity import PrefixIdentity
from inflight.core.recovery import Recovery
from inflight.core.running import Running
from inflight.core.scheduler import Scheduler
from inflight.core.slots import Slots
from inflight.core.waiting_queue import WaitingQueue

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- what blocks are found by


def unchained_block_hash(patch: Patch) -> None:
    chained = block_keys.block_digest
    patch.setattr(block_keys, "block_digest", lambda parent, *ids: chained(ROOT_SCOPE, *ids))


def colliding_digests(patch: Patch) -> None:
    digest = block_keys.block_digest
    patch.setattr(block_keys, "block_digest", lambda *args: bytes([digest(*args)[0] & 7]) * 16)


def identity_ignored(patch: Patch) -> None:
    patch.setattr(PrefixIdentity, "scope", lambda identity, root: root)


def lora_task_id_ignored(patch: Patch) -> None:
    scope = PrefixIdentity.scope
    patch.setattr(
        PrefixIdentity,
        "scope",
        lambda identity, root: scope(dataclasses.replace(identity, lora_task_id=None), root),
    )


def extra_ids_ignored(patch: Patch) -> None:
    digest = block_keys.block_digest
    patch.setattr(block_keys, "block_digest", lambda parent, tokens, extra_ids=(): digest(parent, tokens))


def prefix_not_waited_for(patch: Patch) -> None:
    match_prefix = KvCacheManager.match_prefix

    def promise_nothing(*args):
        return dataclasses.replace(match_prefix(*args), is_promised=False)

    patch.setattr(KvCacheManager, "match_prefix", promise_nothing)


# ---------------------------------------------------------------------- who has which block


def missing_reference_count(patch: Patch) -> None:
    share = BlockPool.share

    def share_without_counting(pool: BlockPool, block_ids) -> None:
        share(pool, [block_id for block_id in block_ids if not pool.is_held(block_id)])

    patch.setattr(BlockPool, "share", share_without_counting)


def held_block_evicted(patch: Patch) -> None:
    share = BlockPool.share

    def share_and_leave_in_the_queue(pool: BlockPool, block_ids) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockHeap, "discard", lambda *_: None)
            share(pool, block_ids)

    patch.setattr(BlockPool, "share", share_and_leave_in_the_queue)


def parents_evicted_before_children(patch: Patch) -> None:
    def as_if_all_were_leaves(pool: BlockPool, content) -> tuple[int, ...]:
        return (0, content.retention.priority, content.age)

    patch.setattr(BlockPool, "_eviction_key", as_if_all_were_leaves)


def wrong_block_boundary(patch: Patch) -> None:
    publish = KvCacheManager.publish

    def publish_one_token_early(kv_cache, key, token_ids, num_computed_tokens) -> None:
        publish(kv_cache, key, token_ids, min(num_computed_tokens + 1, len(token_ids)))

    patch.setattr(KvCacheManager, "publish", publish_one_token_early)


def pause_without_free(patch: Patch) -> None:
    leave = Running.leave

    def leave_and_keep_blocks(running: Running, llm_request: LlmRequest) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if llm_request.state is RequestState.RUNNING:
                inner.setattr(KvCacheManager, "release", lambda *_: None)
            leave(running, llm_request)

    patch.setattr(Running, "leave", leave_and_keep_blocks)


def freed_while_in_flight(patch: Patch) -> None:
    drain = Scheduler._drain

    def drain_at_once(scheduler: Scheduler, llm_request: LlmRequest):
        llm_request.num_scheduled_tokens = 0
        return drain(scheduler, llm_request)

    patch.setattr(Scheduler, "_drain", drain_at_once)


def missing_copy_on_write(patch: Patch) -> None:
    grow_beams = KvCacheManager.grow_beams

    def write_into_shared_blocks(kv_cache: KvCacheManager, key: int, num_tokens: int):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "is_held_once", lambda pool, block_id: True)
            return grow_beams(kv_cache, key, num_tokens)

    patch.setattr(KvCacheManager, "grow_beams", write_into_shared_blocks)


# ---------------------------------------------------------------------- what the device is told


def copy_of_nothing(patch: Patch) -> None:
    """The beam gets a block of its own, but not what was in it."""
    _change_batches(patch, lambda batch: dataclasses.replace(batch, block_copies=()))


def move_to_the_wrong_parent(patch: Patch) -> None:
    def swapped(batch: ScheduledBatch) -> ScheduledBatch:
        parents = [move.parent_slot for move in batch.moves]
        moves = (
            BeamMove(move.slot, parent, move.token_id)
            for move, parent in zip(batch.moves, parents[1:] + parents[:1])
        )
        return dataclasses.replace(batch, moves=tuple(moves))

    _change_batches(patch, swapped)


def only_the_prompt_looked_back_at(patch: Patch) -> None:
    """A resumed sequence's penalties would forget what it had generated."""
    _change_starts(patch, lambda start: {"token_ids": start.token_ids[: start.request.prompt_length]})


def siblings_with_the_same_random_numbers(patch: Patch) -> None:
    _change_starts(patch, lambda start: {"sequence_index": 0})


def released_slots_not_told_again(patch: Patch) -> None:
    patch.setattr(Slots, "tell_again", lambda *_: None)


def _change_starts(patch: Patch, fields: Callable) -> None:
    def changed(batch: ScheduledBatch) -> ScheduledBatch:
        starts = (dataclasses.replace(start, **fields(start)) for start in batch.starts)
        return dataclasses.replace(batch, starts=tuple(starts))

    _change_batches(patch, changed)


def _change_batches(patch: Patch, change: Callable[[ScheduledBatch], ScheduledBatch]) -> None:
    schedule = Scheduler.schedule

    def schedule_wrongly(scheduler: Scheduler) -> ScheduledBatch | None:
        batch = schedule(scheduler)
        return batch and change(batch)

    patch.setattr(Scheduler, "schedule", schedule_wrongly)


# ---------------------------------------------------------------------- what a sequence remembers


def streamed_twice_after_a_pause(patch: Patch) -> None:
    pause = LlmRequest.pause

    def pause_and_forget(llm_request: LlmRequest) -> None:
        pause(llm_request)
        llm_request.num_streamed_tokens = 0

    patch.setattr(LlmRequest, "pause", pause_and_forget)


def rejected_draft_token_kept(patch: Patch) -> None:
    confirm_chunk = scheduler_module.confirm_chunk

    def confirm_every_draft(llm_request: LlmRequest, chunk, num_new_tokens: int) -> None:
        confirm_chunk(llm_request, chunk, 1 + chunk.num_draft_tokens)

    patch.setattr(scheduler_module, "confirm_chunk", confirm_every_draft)


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


# ---------------------------------------------------------------------- whose turn it is


def lower_priority_first(patch: Patch) -> None:
    first = WaitingQueue.first

    def first_of_the_last(queue: WaitingQueue) -> LlmRequest | None:
        queue._priorities.reverse()
        try:
            return first(queue)
        finally:
            queue._priorities.reverse()

    patch.setattr(WaitingQueue, "first", first_of_the_last)


def last_come_first_served(patch: Patch) -> None:
    add = WaitingQueue.add

    def add_before_the_others(queue: WaitingQueue, llm_request: LlmRequest) -> None:
        add(queue, llm_request)
        request = llm_request.request
        level = queue._levels[request.priority]
        level.clients[request.client_id].move_to_end(llm_request.key, last=False)
        queue._push_turn(level, request.client_id)

    patch.setattr(WaitingQueue, "add", add_before_the_others)


def clients_take_no_turns(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "_serve", lambda *_: None)


def unused_share_kept(patch: Patch) -> None:
    serve = WaitingQueue._serve
    patch.setattr(WaitingQueue, "_serve", lambda queue, client, tokens: serve(queue, client, max(0, tokens)))


def full_queue_ignored(patch: Patch) -> None:
    patch.setattr(Admission, "check_queue", lambda *_: None)


def deadline_ignored(patch: Patch) -> None:
    patch.setattr(Deadlines, "pop_expired", lambda *_: [])


def deadline_too_early(patch: Patch) -> None:
    pop_expired = Deadlines.pop_expired

    def pop_before(deadlines: Deadlines, now_ns: int) -> list[RequestGroup]:
        return pop_expired(deadlines, now_ns + 20_000_000)

    patch.setattr(Deadlines, "pop_expired", pop_before)


def static_batch_joined(patch: Patch) -> None:
    make = scheduler_module.make_capacity_scheduler

    def make_one_that_admits_always(policy):
        capacity = make(policy)
        return GuaranteedNoEvict() if capacity.fills_batches_once else capacity

    patch.setattr(scheduler_module, "make_capacity_scheduler", make_one_that_admits_always)


def chunking_policy_ignored(patch: Patch) -> None:
    init = MicroBatchScheduler.__init__

    def init_for_first_come_first_served(micro_batch: MicroBatchScheduler, *args) -> None:
        init(micro_batch, *args[:3])

    patch.setattr(MicroBatchScheduler, "__init__", init_for_first_come_first_served)


def first_started_paused(patch: Patch) -> None:
    plan_growth = MaxUtilization.plan_growth

    def plan_from_the_other_end(capacity: MaxUtilization, running, kv_cache):
        return plan_growth(capacity, list(reversed(running)), kv_cache)

    patch.setattr(MaxUtilization, "plan_growth", plan_from_the_other_end)


# ---------------------------------------------------------------------- which micro-batch


def token_not_waited_for(patch: Patch) -> None:
    """Sequences in generation are taken for ready while their last token is on its way."""
    select = MicroBatchScheduler.select

    def select_too_early(micro_batch: MicroBatchScheduler, running, num_in_flight: int):
        generating = [r for r in running if not r.in_context and not r.needs_host]
        in_flight = [(r, r.num_scheduled_tokens) for r in generating]
        for llm_request, count in in_flight:
            llm_request.num_computed_tokens += count
            llm_request.num_scheduled_tokens = 0
        selected = select(micro_batch, running, num_in_flight)
        for llm_request, count in in_flight:
            llm_request.num_computed_tokens -= count
            llm_request.num_scheduled_tokens = count
        return selected

    patch.setattr(MicroBatchScheduler, "select", select_too_early)


def all_in_one_micro_batch(patch: Patch) -> None:
    def take_all(micro_batch: MicroBatchScheduler, ready, *_) -> list[LlmRequest]:
        return sorted(ready, key=lambda r: r.last_turn)

    patch.setattr(MicroBatchScheduler, "_share", take_all)


def nothing_left_for_free_stages(patch: Patch) -> None:
    share = MicroBatchScheduler._share

    def share_as_if_the_last(micro_batch: MicroBatchScheduler, ready, num_waiting: int, num_in_flight: int):
        return share(micro_batch, ready, num_waiting, micro_batch._num_micro_batches)

    patch.setattr(MicroBatchScheduler, "_share", share_as_if_the_last)


def beams_counted_apart(patch: Patch) -> None:
    share = MicroBatchScheduler._share

    def share_rows(micro_batch: MicroBatchScheduler, ready, *counts: int) -> list[LlmRequest]:
        rows = [r for r in ready for _ in range(r.num_slots)]
        return list(dict.fromkeys(share(micro_batch, rows, *counts)))

    patch.setattr(MicroBatchScheduler, "_share", share_rows)


def oldest_always_first(patch: Patch) -> None:
    patch.setattr(MicroBatchScheduler, "_note_turn", lambda *_: None)


def micro_batches_without_numbers(patch: Patch) -> None:
    _change_batches(patch, lambda batch: dataclasses.replace(batch, micro_batch_id=0))


# ---------------------------------------------------------------------- what runs ahead


def feeding_whoever_it_is(patch: Patch) -> None:
    patch.setattr(Scheduler, "_feeds_itself", lambda scheduler, _: scheduler._runs_ahead)


def feeding_itself_untold(patch: Patch) -> None:
    _change_batches(patch, lambda batch: dataclasses.replace(batch, feeds_itself=False))


def not_waited_for_before_a_pause(patch: Patch) -> None:
    plan_growth = MaxUtilization.plan_growth

    def plan_as_if_there_were_enough(capacity: MaxUtilization, running, kv_cache):
        return dataclasses.replace(plan_growth(capacity, running, kv_cache), is_short=False)

    patch.setattr(MaxUtilization, "plan_growth", plan_as_if_there_were_enough)


# ---------------------------------------------------------------------- who is guilty


def guilty_acquitted(patch: Patch) -> None:
    failed = Isolation.failed

    def nobody_is_guilty(isolation: Isolation, request_ids, was_alone: bool) -> None:
        failed(isolation, request_ids, was_alone)

    patch.setattr(Isolation, "failed", nobody_is_guilty)


def first_suspect_condemned(patch: Patch) -> None:
    patch.setattr(Isolation, "failed", lambda isolation, request_ids, was_alone: request_ids[0])


def all_tried_together(patch: Patch) -> None:
    def one_set(isolation: Isolation, request_ids, was_alone: bool) -> int | None:
        isolation._clear(request_ids)
        if len(request_ids) == 1 and was_alone:
            return request_ids[0]
        isolation._sets.appendleft(tuple(request_ids))
        return None

    patch.setattr(Isolation, "failed", one_set)


def blamed_for_what_failed_before(patch: Patch) -> None:
    """Rows behind a failed batch fail as well, and say nothing about their requests."""
    judge = Recovery.judge

    def judge_void_rows(recovery: Recovery, batch: ScheduledBatch, error):
        for llm_request in recovery._running.sequences:
            llm_request.is_void = False
        return judge(recovery, batch, error)

    patch.setattr(Recovery, "judge", judge_void_rows)


def guilty_blocks_still_found(patch: Patch) -> None:
    patch.setattr(KvCacheManager, "distrust", lambda *_: None)


FAULTS = (
    unchained_block_hash,
    colliding_digests,
    identity_ignored,
    lora_task_id_ignored,
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
    streamed_twice_after_a_pause,
    rejected_draft_token_kept,
    tokens_of_void_rows_kept,
    lower_priority_first,
    last_come_first_served,
    clients_take_no_turns,
    unused_share_kept,
    full_queue_ignored,
    deadline_ignored,
    deadline_too_early,
    static_batch_joined,
    chunking_policy_ignored,
    first_started_paused,
    guilty_acquitted,
    first_suspect_condemned,
    all_tried_together,
    blamed_for_what_failed_before,
    guilty_blocks_still_found,
    feeding_whoever_it_is,
    feeding_itself_untold,
    not_waited_for_before_a_pause,
)

FAULTS_OF_PIPELINES = (
    token_not_waited_for,
    all_in_one_micro_batch,
    nothing_left_for_free_stages,
    beams_counted_apart,
    oldest_always_first,
    micro_batches_without_numbers,
    freed_while_in_flight,
)
