"""Faults to plant: in the order of starts, in micro-batches, and in iterations that overlap."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import inflight.core.scheduler as scheduler_module
from inflight.config import ChunkingPolicy, SchedulingConfig
from inflight.core.endings import Deadlines, Endings, PendingEndings
from inflight.core.request.llm_request import LlmRequest, RequestGroup
from inflight.core.request.response import Response
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.capacity_scheduler import GuaranteedNoEvict, MaxUtilization
from inflight.core.schedule.micro_batch_scheduler import MicroBatchScheduler
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.core.scheduler import Scheduler
from tests.simulation.faults_of_batches import change_batches

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- order of starts


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


def overtaken_without_bound(patch: Patch) -> None:
    may_overtake = WaitingQueue.may_overtake
    patch.setattr(WaitingQueue, "may_overtake", lambda queue, first, _: may_overtake(queue, first, 1 << 62))


def unused_share_kept(patch: Patch) -> None:
    serve = WaitingQueue._serve
    patch.setattr(WaitingQueue, "_serve", lambda queue, client, tokens: serve(queue, client, max(0, tokens)))


def full_queue_ignored(patch: Patch) -> None:
    patch.setattr(Admission, "check_queue", lambda *_: None)


def all_ended_at_once(patch: Patch) -> None:
    end_some = PendingEndings.end_some

    def end_all(pending: PendingEndings, endings: Endings, most: int, now_ns: int) -> list[Response]:
        return end_some(pending, endings, 1 << 62, now_ns)

    patch.setattr(PendingEndings, "end_some", end_all)


def nobody_ended_behind_the_first(patch: Patch) -> None:
    add = PendingEndings.add

    def add_one(pending: PendingEndings, *args: Any, **fields: Any) -> None:
        if not pending:
            add(pending, *args, **fields)

    patch.setattr(PendingEndings, "add", add_one)


def started_although_to_end(patch: Patch) -> None:
    add = PendingEndings.add

    def add_only(pending: PendingEndings, group: RequestGroup, *args: Any, **fields: Any) -> None:
        add(pending, group, *args, **fields)
        group.is_to_end = False

    patch.setattr(PendingEndings, "add", add_only)


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

    def init_for_first_come_first_served(
        micro_batch: MicroBatchScheduler, config: SchedulingConfig, *args
    ) -> None:
        policy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
        init(micro_batch, dataclasses.replace(config, context_chunking_policy=policy), *args)

    patch.setattr(MicroBatchScheduler, "__init__", init_for_first_come_first_served)


def first_started_paused(patch: Patch) -> None:
    decide_growth = MaxUtilization.decide_growth

    def plan_from_the_other_end(capacity: MaxUtilization, running, kv_cache):
        return decide_growth(capacity, list(reversed(running)), kv_cache)

    patch.setattr(MaxUtilization, "decide_growth", plan_from_the_other_end)


# ---------------------------------------------------------------------- micro-batches


def token_not_waited_for(patch: Patch) -> None:
    """Plant a fault: sequences count as ready while their last token is in flight."""
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
    change_batches(patch, lambda batch: dataclasses.replace(batch, micro_batch_id=0))


# ---------------------------------------------------------------------- iterations that overlap


def sampled_on_device_whoever_it_is(patch: Patch) -> None:
    patch.setattr(Scheduler, "_samples_on_device", lambda scheduler, _: scheduler._overlaps_iterations)


def sampled_on_device_untold(patch: Patch) -> None:
    change_batches(patch, lambda batch: dataclasses.replace(batch, samples_on_device=False))


def not_waited_for_before_a_pause(patch: Patch) -> None:
    decide_growth = MaxUtilization.decide_growth

    def plan_as_if_there_were_enough(capacity: MaxUtilization, running, kv_cache):
        return dataclasses.replace(decide_growth(capacity, running, kv_cache), is_short=False)

    patch.setattr(MaxUtilization, "decide_growth", plan_as_if_there_were_enough)
