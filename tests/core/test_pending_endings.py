"""An iteration ends a bounded number of sequences for stops, deadlines and failures, and the rest later."""

from __future__ import annotations

from inflight.config import SchedulingConfig
from inflight.core.request.guide import Guide, GuideEvent, GuideKind
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.scheduler import Scheduler
from tests.core.factories import make_limits, make_request

MS = 1_000_000


def scheduler_with(requests: list[Request], most: int = 4) -> Scheduler:
    scheduler = Scheduler(SchedulingConfig(sequences_per_iteration=most), make_limits())
    assert scheduler.accept(IterationInput(0, MS, tuple(requests))) == []
    return scheduler


def finals_by_iteration(scheduler: Scheduler, first: IterationInput) -> list[list[Response]]:
    """Return the final responses of `first` and of the following iterations without new input."""
    found = [scheduler.accept(first)]
    while scheduler.num_active:
        found.append(scheduler.accept(IterationInput(len(found) + 1, first.now_ns)))
        assert found[-1], "an iteration ended nobody"
    return [[response for response in each if response.is_final] for each in found]


def ids(found: list[list[Response]]) -> list[list[int]]:
    return [[response.request_id for response in each] for each in found]


def stops_of(*request_ids: int) -> tuple[StopSignal, ...]:
    return tuple(StopSignal(each, StopReason.CANCELLED) for each in request_ids)


def several(request_id: int, count: int) -> Request:
    return make_request(request_id, sampling=SamplingConfig(num_return_sequences=count, top_k=2))


def test_a_bounded_number_of_stops_end_in_each_iteration_in_order():
    scheduler = scheduler_with([make_request(number) for number in range(1, 11)])
    found = finals_by_iteration(scheduler, IterationInput(1, 2 * MS, stops=stops_of(*range(1, 11))))
    assert ids(found) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert {r.result.finish_reasons for each in found for r in each} == {(FinishReason.CANCELLED,)}


def test_sequences_of_a_request_end_together_and_count_individually():
    scheduler = scheduler_with([several(1, 3), several(2, 9), several(3, 2), several(4, 2)])
    found = finals_by_iteration(scheduler, IterationInput(1, 2 * MS, stops=stops_of(1, 2, 3, 4)))
    assert ids(found) == [[1], [2], [3, 4]]


def test_expired_and_failed_requests_end_within_the_bound_too():
    guided = Guide(GuideKind.REGEX, "a")
    requests = [make_request(number, guide=guided) for number in range(1, 6)]
    requests += [make_request(number, allotted_time_ms=5) for number in range(6, 10)]
    scheduler = scheduler_with(requests)
    events = tuple(GuideEvent(number, "INVALID_ARG", "wrong") for number in range(1, 6))
    found = finals_by_iteration(scheduler, IterationInput(1, 100 * MS, guides=events))
    assert ids(found) == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    reasons = [r.error.code if r.error else r.result.finish_reasons[0] for each in found for r in each]
    assert reasons == ["INVALID_ARG"] * 5 + [FinishReason.TIMED_OUT] * 4


def test_the_loop_does_not_wait_while_endings_are_pending():
    requests = [make_request(number, guide=Guide(GuideKind.REGEX, "a")) for number in range(1, 7)]
    scheduler = scheduler_with(requests)
    assert scheduler.can_only_wait
    scheduler.accept(IterationInput(1, 2 * MS, stops=stops_of(*range(1, 6))))
    assert scheduler.num_active == 2 and not scheduler.can_only_wait
    scheduler.accept(IterationInput(2, 2 * MS))
    assert scheduler.num_active == 1 and scheduler.can_only_wait


def test_a_pending_ending_and_another_ending_end_a_request_once():
    scheduler = scheduler_with([make_request(number) for number in range(1, 7)])
    first = scheduler.accept(IterationInput(1, 2 * MS, stops=stops_of(*range(1, 7), 6, 5)))
    second = scheduler.accept(IterationInput(2, 2 * MS, stops=stops_of(5, 6)))
    assert [r.request_id for r in (*first, *second) if r.is_final] == [1, 2, 3, 4, 5, 6]
    assert scheduler.accept(IterationInput(3, 2 * MS)) == []


def test_a_request_with_a_pending_ending_is_not_started():
    scheduler = scheduler_with([make_request(number) for number in range(1, 8)], most=1)
    scheduler.accept(IterationInput(1, 2 * MS, stops=stops_of(*range(1, 6))))
    assert scheduler.num_active == 6
    batch = scheduler.schedule()
    assert batch is not None
    assert [sequence.request_id for sequence in scheduler.running_sequences] == [6, 7]
