"""Requests with adapters: held until the adapter is stored, started when it fits on the device."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from inflight.batch_manager.inputs import OwnInputs
from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.request.adapter import (
    AdapterEvent,
    AdapterUpdate,
    LoraRequest,
    LoraWeights,
    Matrix,
    RawBuffer,
    StoredAdapter,
)
from inflight.core.request.guide import Guide, GuideEvent, GuideKind
from inflight.core.request.request import IterationInput, Origin, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InvalidArgument, StepFailed, Unavailable, Unsupported
from inflight.testing.simulation.integrity import check_integrity
from inflight.testing.small_inputs import make_adapter
from tests.core.factories import make_limits, make_request, make_scheduler

WEIGHTS = LoraWeights(Matrix((1, 4), "float32", RawBuffer(bytes(16))), ((0, 0, 1),))


def adapted(request_id: int, task_id: int = 1, **changes) -> Request:
    return make_request(request_id, lora=LoraRequest(task_id), **changes)


def ready(*pairs: tuple[int, StoredAdapter], dropped: tuple[int, ...] = ()) -> AdapterUpdate:
    """An update that stores each adapter and gives it to the request of its pair."""
    stored = {adapter.handle: adapter for _, adapter in pairs}
    events = tuple(AdapterEvent(request_id, adapter.handle) for request_id, adapter in pairs)
    return AdapterUpdate(tuple(stored.values()), events, dropped)


def accept(
    scheduler: Scheduler,
    *requests: Request,
    adapters: AdapterUpdate | None = None,
    guides=(),
    stops=(),
    now_ns=0,
) -> list[Response]:
    update = adapters or AdapterUpdate()
    return scheduler.accept(IterationInput(0, now_ns, requests, tuple(stops), tuple(guides), update))


def update(scheduler: Scheduler, batch: ScheduledBatch) -> list[Response]:
    responses = scheduler.update(batch, ModelOutput(batch.iteration, [(5,)] * len(batch.sampled_slots())))
    check_integrity(scheduler)
    return responses


def started(batch: ScheduledBatch | None) -> list[int]:
    return [start.request.request_id for start in batch.starts] if batch else []


def loaded(batch: ScheduledBatch) -> list[tuple[int, tuple[int, ...]]]:
    return [(load.adapter.handle, load.pages) for load in batch.adapter_loads]


def why(scheduler: Scheduler) -> dict[int, str]:
    return {each.request_id: each.why for each in scheduler.state().waiting}


# ---------------------------------------------------------------------- held


def test_other_requests_run_while_an_adapter_is_fetched():
    scheduler = make_scheduler(num_adapter_pages=4)
    accept(scheduler, adapted(1), make_request(2))
    assert not scheduler.can_only_wait
    batch = scheduler.schedule()
    assert started(batch) == [2] and batch.starts[0].adapter == -1 and not batch.adapter_loads
    assert why(scheduler) == {1: "its adapter 1 (lora_task_id) is being fetched"}
    assert scheduler.stats(batch).num_waiting_requests == 1
    update(scheduler, batch)
    assert accept(scheduler, adapters=ready((1, make_adapter(7, rank=9)))) == []
    batch = scheduler.schedule()
    assert started(batch) == [1] and loaded(batch) == [(7, (0, 1))] and batch.starts[0].adapter == 0
    assert scheduler.stats(batch).adapters.num_stored == scheduler.state().adapters.num_resident == 1


def test_a_request_may_wait_for_a_guide_and_an_adapter():
    for first in ("guide", "adapter"):
        scheduler = make_scheduler(num_adapter_pages=4)
        accept(scheduler, adapted(1, guide=Guide(GuideKind.REGEX, "a+")))
        assert "guide" in why(scheduler)[1] and "adapter" in why(scheduler)[1] and scheduler.can_only_wait
        events = {"guides": [GuideEvent(1)]} if first == "guide" else {"adapters": ready((1, make_adapter()))}
        accept(scheduler, **events)
        assert scheduler.can_only_wait and first not in why(scheduler)[1] and scheduler.schedule() is None
        others = {"adapters": ready((1, make_adapter()))} if first == "guide" else {"guides": [GuideEvent(1)]}
        accept(scheduler, **others)
        assert started(scheduler.schedule()) == [1]


def test_an_adapter_that_fails_or_does_not_fit_ends_only_its_request():
    scheduler = make_scheduler(num_adapter_pages=2)
    accept(scheduler, adapted(1), adapted(2, 9), adapted(3))
    missing = AdapterEvent(1, error_kind="INVALID_ARG", error="LoRA task 1 not found in cache")
    too_large = make_adapter(9, rank=17)
    update = AdapterUpdate((too_large,), (missing, AdapterEvent(2, 9), AdapterEvent(8, 9)))
    responses = accept(scheduler, adapters=update)
    assert [(each.request_id, type(each.error)) for each in responses] == [
        (1, InvalidArgument),
        (2, InvalidArgument),
    ]
    assert str(responses[0].error) == "LoRA task 1 not found in cache"
    assert "rank 17" in str(responses[1].error)
    accept(scheduler, adapters=ready((3, make_adapter())))
    assert started(scheduler.schedule()) == [3]


def test_a_held_request_can_be_cancelled_and_can_time_out():
    scheduler = make_scheduler(num_adapter_pages=4)
    accept(scheduler, adapted(1), adapted(2, allotted_time_ms=5), now_ns=1)
    (cancelled,) = accept(scheduler, stops=[StopSignal(1, StopReason.CANCELLED)])
    assert cancelled.result.finish_reasons == (FinishReason.CANCELLED,)
    (late,) = accept(scheduler, now_ns=6_000_000)
    assert late.result.finish_reasons == (FinishReason.TIMED_OUT,)
    assert accept(scheduler, adapters=ready((1, make_adapter()), (2, make_adapter()))) == []
    assert scheduler.num_active == 0 and not scheduler.can_only_wait


def test_a_held_request_lists_its_remaining_sequences():
    scheduler = make_scheduler(num_adapter_pages=4)
    sampling = replace(make_request(1).sampling, num_return_sequences=3, top_p=1.0)
    accept(scheduler, adapted(1, sampling=sampling))
    accept(scheduler, stops=[StopSignal(1, StopReason.CANCELLED, 0)])
    waiting = scheduler.state().waiting
    assert [each.sequence_index for each in waiting] == [1, 2] and all(
        "adapter" in each.why for each in waiting
    )
    accept(scheduler, adapters=ready((1, make_adapter())))
    assert [start.sequence_index for start in scheduler.schedule().starts] == [1, 2]


def test_a_rebuilt_scheduler_holds_the_request_and_loads_adapters_again():
    scheduler = make_scheduler(num_adapter_pages=4)
    accept(
        scheduler,
        adapted(1),
        adapted(2),
        adapted(3),
        adapters=ready((2, make_adapter()), (3, make_adapter())),
    )
    batch = scheduler.schedule()
    scheduler.recover(Unavailable("a defect"), 1)
    assert "adapter" in why(scheduler)[1]
    scheduler.update(batch, ModelOutput(0, [(5,), (5,)]))
    again = scheduler.schedule()
    assert loaded(again) == loaded(batch) == [(1, (0,))]
    scheduler.fail_all(Unavailable("the end"))
    check_integrity(scheduler)
    assert scheduler.stats(None).adapters.num_used_pages == 0


# ---------------------------------------------------------------------- keys of blocks


def kv_blocks_reused(first: StoredAdapter | None, second: StoredAdapter | None) -> int:
    """Number of blocks that a request reuses from an equal one with another adapter."""
    scheduler = make_scheduler(reuse=True, num_adapter_pages=8)
    for request_id, adapter in ((1, first), (2, second)):
        request = make_request(request_id, prompt=9, new=1)
        if adapter is not None:
            request = replace(request, lora=LoraRequest(3))
        accept(scheduler, request, adapters=ready((request_id, adapter)) if adapter else None)
        assert update(scheduler, scheduler.schedule())[0].is_final
    return scheduler.kv_cache.num_reused_blocks


def test_blocks_are_shared_by_content_and_never_by_task_id():
    one = make_adapter(1)
    assert kv_blocks_reused(one, one) == 2
    assert kv_blocks_reused(one, replace(one, handle=2, task_id=77)) == 2, "the same content, stored again"
    assert kv_blocks_reused(one, replace(make_adapter(2), task_id=1)) == 0, "the same id, other content"
    assert kv_blocks_reused(one, None) == kv_blocks_reused(None, one) == 0


def test_kv_events_have_the_task_id_of_the_adapter():
    for task_id in (5, None):
        scheduler = Scheduler(SchedulingConfig(kv_event_buffer_size=9), make_limits(num_adapter_pages=8))
        adapter = replace(make_adapter(1), task_id=task_id)
        accept(scheduler, adapted(1, prompt=9), adapters=ready((1, adapter)))
        update(scheduler, scheduler.schedule())
        stored = [block for event in scheduler.take_kv_events() for block in event.stored]
        assert {block.lora_task_id for block in stored} == {task_id}


# ---------------------------------------------------------------------- room on the device


def test_a_sequence_without_room_for_its_adapter_is_overtaken():
    scheduler = make_scheduler(num_adapter_pages=1)
    one, two = make_adapter(1), make_adapter(2)
    accept(scheduler, adapted(1, new=2), adapters=ready((1, one)))
    update(scheduler, scheduler.schedule())
    accept(scheduler, adapted(2), make_request(3), adapters=ready((2, two)))
    batch = scheduler.schedule()
    assert started(batch) == [3]
    assert why(scheduler) == {2: "its adapter needs 1 page on the device, 0 free"}
    assert update(scheduler, batch)[0].request_id == 1
    batch = scheduler.schedule()
    assert started(batch) == [2] and loaded(batch) == [(2, (0,))]
    assert scheduler.stats(batch).adapters.num_evictions == 1


def test_running_and_waiting_requests_are_counted_by_adapter_name():
    """There is one page, for which the second adapter waits.

    Task ids, which clients choose, are not counted.
    """
    scheduler = make_scheduler(num_adapter_pages=1)
    one, two = make_adapter(1), make_adapter(2)
    requests = [
        make_request(i, lora=LoraRequest(name=name), new=2) for i, name in ((1, "a"), (2, "a"), (3, "b"))
    ]
    accept(scheduler, *requests, adapted(4), adapters=ready((1, one), (2, one), (3, two), (4, one)))
    batch = scheduler.schedule()
    metrics = scheduler.metrics()
    assert (metrics.running_by_adapter, metrics.waiting_by_adapter) == ({"a": 2}, {"b": 1})
    assert (metrics.adapters.num_pages, metrics.adapters.num_used_pages, metrics.adapters.num_loads) == (
        1,
        1,
        1,
    )
    update(scheduler, batch)
    update(scheduler, scheduler.schedule())
    scheduler.schedule()
    metrics = scheduler.metrics()
    assert (metrics.running_by_adapter, metrics.waiting_by_adapter) == ({"b": 1}, {})
    assert (metrics.adapters.num_stored, metrics.adapters.num_evictions) == (2, 1)


def test_a_stream_of_requests_of_one_adapter_does_not_starve_another():
    """Requests of the stream overlap, so that their adapter would never be idle."""
    scheduler = make_scheduler(num_adapter_pages=2, num_blocks=100)
    stream, other = make_adapter(1), make_adapter(2, rank=16)
    accept(scheduler, adapted(1, new=3), adapters=ready((1, stream)))
    update(scheduler, scheduler.schedule())
    accept(scheduler, adapted(100), adapters=ready((100, other)))
    for request_id in range(2, 20):
        accept(scheduler, adapted(request_id, new=3), adapters=ready((request_id, stream)))
        batch = scheduler.schedule()
        if 100 in started(batch):
            break
        update(scheduler, batch)
    assert request_id <= 5


def test_a_request_that_waits_for_pages_does_not_block_other_adapters():
    scheduler = make_scheduler(num_adapter_pages=2, num_blocks=100)
    one, two, three = map(make_adapter, (1, 2, 3))
    accept(scheduler, adapted(1, new=9), adapted(2, new=9), adapters=ready((1, one), (2, two)))
    update(scheduler, scheduler.schedule())
    late = ready((3, three), (4, one), (5, two))
    accept(scheduler, adapted(3), adapted(4), adapted(5), adapters=late)
    assert started(scheduler.schedule()) == [5], "the first adapter's page is the next that is given away"


def test_not_all_requests_that_wait_for_pages_are_examined_each_iteration():
    scheduler = make_scheduler(num_adapter_pages=1, num_blocks=1000)
    accept(scheduler, adapted(1, new=9), adapters=ready((1, make_adapter(1))))
    update(scheduler, scheduler.schedule())
    others = range(2, 202)
    accept(scheduler, *map(adapted, others), adapters=ready(*((i, make_adapter(i)) for i in others)))
    scheduler.schedule()
    assert len(scheduler._admission.considered) == 65
    assert [each.request_id for each in scheduler.state().waiting] == list(others)


def test_beams_and_siblings_share_one_adapter_and_a_pause_gives_it_back():
    scheduler = make_scheduler(
        CapacityPolicy.MAX_UTILIZATION, num_adapter_pages=2, num_blocks=5, max_num_requests=9
    )
    one, two = make_adapter(1), make_adapter(2)
    accept(scheduler, adapted(1, new=12), adapted(2, new=12), adapters=ready((1, one), (2, two)))
    batch = scheduler.schedule()
    assert started(batch) == [1, 2] and scheduler.stats(None).adapters.num_used_pages == 2
    while not (paused := [each for each in scheduler.state().waiting if each.state == "PAUSED"]):
        update(scheduler, batch)
        batch = scheduler.schedule()
    assert [each.request_id for each in paused] == [2] and scheduler.stats(None).adapters.num_used_pages == 1
    scheduler = make_scheduler(num_adapter_pages=1)
    sampling = replace(make_request(1).sampling, beam_width=2)
    accept(scheduler, adapted(3, sampling=sampling), adapters=ready((3, one)))
    (start,) = scheduler.schedule().starts
    assert start.adapter == 0 and scheduler.stats(None).adapters.num_used_pages == 1


def test_dropped_adapters_leave_the_device():
    scheduler = make_scheduler(num_adapter_pages=1)
    accept(scheduler, adapted(1, new=1), adapters=ready((1, make_adapter(1))))
    update(scheduler, scheduler.schedule())
    assert scheduler.state().adapters.num_resident == 1
    accept(scheduler, adapters=AdapterUpdate(dropped=(1,)))
    assert (scheduler.state().adapters.num_stored, scheduler.state().adapters.num_resident) == (0, 0)
    check_integrity(scheduler)


# ---------------------------------------------------------------------- failures


def test_adapters_of_a_failed_batch_are_loaded_again():
    scheduler = make_scheduler(num_adapter_pages=2)
    accept(scheduler, adapted(1), adapted(2, 2), adapters=ready((1, make_adapter(1)), (2, make_adapter(2))))
    batch = scheduler.schedule()
    scheduler.fail(batch, StepFailed("boom"))
    check_integrity(scheduler)
    assert scheduler.state().adapters.num_resident == 0
    again = scheduler.schedule()
    assert started(again) == [1] and loaded(again) == [(1, (0,))]


def test_requests_that_used_the_adapter_of_a_failed_load_begin_again():
    scheduler = make_scheduler(num_adapter_pages=2, num_micro_batches=2)
    one = make_adapter(1)
    accept(scheduler, adapted(1), adapters=ready((1, one)))
    first = scheduler.schedule()
    accept(scheduler, adapted(2), make_request(3), adapters=ready((2, one)))
    second = scheduler.schedule()
    assert started(second) == [3, 2] and not second.adapter_loads
    assert [each.request_id for each in scheduler.fail(first, StepFailed("boom"))] == [1], "it was alone"
    assert scheduler.schedule() is None, "the second comes back first"
    update(scheduler, second)
    third = scheduler.schedule()
    assert started(third) == [2] and loaded(third) == [(1, (0,))]
    assert third.context[0].start == 0 and len(third.generation_slots) == 1, "the third has kept its token"


# ---------------------------------------------------------------------- the input of an iteration


class Cache:
    """A fake adapter cache that returns the given updates."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, LoraRequest]] = []
        self.forgotten: list[int] = []

    def submit(self, request_id: int, lora: LoraRequest, origin: Origin | None = None) -> None:
        self.asked.append((request_id, lora))

    def update(self) -> AdapterUpdate:
        return ready(*((request_id, make_adapter()) for request_id, _ in self.asked))

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


def make_inputs(scheduler: Scheduler, new: list[Request], cache: Cache | None) -> OwnInputs:
    return OwnInputs(scheduler, lambda room: tuple(new), None, lambda: 0, None, adapters=cache)


def test_weights_are_passed_to_the_adapter_cache_only():
    scheduler, cache = make_scheduler(num_adapter_pages=1), Cache()
    lora = LoraRequest(1, weights=WEIGHTS)
    new = [replace(make_request(1), lora=lora), make_request(2)]
    inputs = make_inputs(scheduler, new, cache).next()
    assert cache.asked == [(1, lora)]
    assert [request.lora for request in inputs.new_requests] == [LoraRequest(1), None]
    assert inputs.adapters == ready((1, make_adapter()))


def test_adapters_of_requests_that_have_ended_are_forgotten():
    scheduler, cache, new = make_scheduler(num_adapter_pages=1), Cache(), [adapted(1), adapted(2)]
    inputs = make_inputs(scheduler, new, cache)
    scheduler.accept(inputs.next())
    new.clear()
    accept(scheduler, stops=[StopSignal(1, StopReason.CANCELLED)])
    new.append(adapted(1))
    inputs.next()
    assert cache.forgotten == [1], "before the next request of that number"
    assert [request_id for request_id, _ in cache.asked] == [1, 2, 1]


def test_an_idle_loop_passes_adapter_updates_to_other_ranks():
    """An adapter may be unloaded while no request is active, and every rank has a copy of it."""
    shared: list[tuple[IterationInput, bool]] = []
    ranks = Mock(share=lambda inputs, are_asleep: shared.append((inputs, are_asleep)))
    scheduler, cache = make_scheduler(num_adapter_pages=1), Mock(update=Mock(return_value=AdapterUpdate()))
    inputs = OwnInputs(scheduler, lambda room: (), None, lambda: 0, ranks, adapters=cache)
    assert not inputs.next().adapters and not shared, "nothing is new"
    cache.update.return_value = AdapterUpdate(dropped=(7,))
    assert shared == [(inputs.next(), True)] and shared[0][0].adapters.dropped == (7,)


def test_without_a_cache_an_adapter_is_refused_by_name():
    scheduler = make_scheduler(num_adapter_pages=1)
    inputs = make_inputs(
        scheduler, [replace(make_request(1), lora=LoraRequest(1, weights=WEIGHTS))], None
    ).next()
    assert inputs.new_requests[0].lora == LoraRequest(1)
    (response,) = scheduler.accept(inputs)
    assert isinstance(response.error, Unsupported) and "lora_task_id" in str(response.error)


@pytest.mark.parametrize(
    ("lora", "num_pages", "error", "message"),
    [
        (LoraRequest(1), 0, Unsupported, "lora_task_id: this engine takes no LoRA adapters"),
        (LoraRequest(), 1, InvalidArgument, "lora_task_id must be set for LoRA inference"),
        (LoraRequest(name="a", weights=WEIGHTS), 1, InvalidArgument, "lora_task_id must be set"),
        (LoraRequest(1, name="a"), 1, InvalidArgument, "lora_task_id and lora_name .* send one of them"),
        (LoraRequest(name="a", path="b"), 1, InvalidArgument, "lora_name and lora_path"),
        (
            LoraRequest(1 << 64),
            1,
            InvalidArgument,
            r"lora_task_id must be in \[0, 2\*\*64\), got 18446744073709551616",
        ),
        (LoraRequest(-1), 1, InvalidArgument, "got -1"),
        (LoraRequest(0), 1, None, ""),
        (LoraRequest((1 << 64) - 1, weights=WEIGHTS), 1, None, ""),
        (LoraRequest(path="b"), 1, None, ""),
    ],
)
def test_missing_conflicting_and_out_of_range_adapters_are_refused(
    lora: LoraRequest, num_pages: int, error, message: str
):
    request, limits = replace(make_request(1), lora=lora), make_scheduler(num_adapter_pages=num_pages).limits
    if error is None:
        request.validate(limits)
        return
    with pytest.raises(error, match=message):
        request.validate(limits)
