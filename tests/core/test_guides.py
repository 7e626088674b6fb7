"""Requests whose guides are not ready: they hold no resources, and no other request waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.batch_manager.inputs import OwnInputs
from inflight.core.request.guide import Guide, GuideEvent, GuideKind
from inflight.core.request.request import IterationInput
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.scheduler import Scheduler
from inflight.errors import InvalidArgument, Unavailable, Unsupported
from tests.core.factories import make_request, make_scheduler

GUIDE = Guide(GuideKind.REGEX, "a+")


def guided(request_id: int, **changes):
    return replace(make_request(request_id), guide=GUIDE, **changes)


def accept(scheduler: Scheduler, *requests, guides=(), stops=(), now_ns=0):
    return scheduler.accept(IterationInput(0, now_ns, tuple(requests), tuple(stops), tuple(guides)))


def test_other_requests_run_while_a_guide_is_compiled():
    scheduler = make_scheduler()
    accept(scheduler, guided(1), make_request(2))
    assert not scheduler.can_only_wait
    batch = scheduler.schedule()
    assert [start.request.request_id for start in batch.starts] == [2]
    state = scheduler.state()
    assert [(each.request_id, "guide" in each.why) for each in state.waiting] == [(1, True)]
    assert scheduler.stats(batch).num_waiting_requests == 1


def test_a_held_request_starts_when_its_guide_is_ready():
    scheduler = make_scheduler()
    accept(scheduler, guided(1))
    assert scheduler.can_only_wait
    assert scheduler.schedule() is None
    assert accept(scheduler, guides=[GuideEvent(1)]) == []
    (start,) = scheduler.schedule().starts
    assert start.token_ids == start.request.input_token_ids, "a guide is told what was generated before"


def test_a_known_guide_is_ready_at_once():
    scheduler = make_scheduler()
    accept(scheduler, guided(1), guides=[GuideEvent(1)])
    assert len(scheduler.schedule().starts) == 1


def test_a_guide_that_fails_ends_only_its_request():
    scheduler = make_scheduler()
    accept(scheduler, guided(1), guided(2))
    (response,) = accept(scheduler, guides=[GuideEvent(1, "INVALID_ARG", "guided_decoding_guide is wrong")])
    assert (response.request_id, response.is_final) == (1, True)
    assert (
        isinstance(response.error, InvalidArgument)
        and str(response.error) == "guided_decoding_guide is wrong"
    )
    assert scheduler.num_active == 1
    assert accept(scheduler, guides=[GuideEvent(1), GuideEvent(7)]) == [], "of requests that are not there"


def test_a_held_request_can_be_cancelled_and_can_time_out():
    scheduler = make_scheduler()
    accept(scheduler, guided(1), guided(2, allotted_time_ms=5), now_ns=1)
    (cancelled,) = accept(scheduler, stops=[StopSignal(1, StopReason.CANCELLED)])
    assert cancelled.result.finish_reasons == (FinishReason.CANCELLED,)
    assert scheduler.next_deadline_ns == 5_000_001
    (late,) = accept(scheduler, now_ns=6_000_000)
    assert late.result.finish_reasons == (FinishReason.TIMED_OUT,)
    assert scheduler.num_active == 0 and not scheduler.can_only_wait
    assert accept(scheduler, guides=[GuideEvent(1), GuideEvent(2)]) == []


def test_one_sequence_of_a_held_request_can_be_cancelled():
    scheduler = make_scheduler()
    sampling = replace(make_request(1).sampling, num_return_sequences=2, top_p=1.0)
    accept(scheduler, guided(1, sampling=sampling))
    accept(scheduler, stops=[StopSignal(1, StopReason.CANCELLED, 0)])
    assert scheduler.schedule() is None
    accept(scheduler, guides=[GuideEvent(1)])
    (start,) = scheduler.schedule().starts
    assert start.sequence_index == 1


def test_requests_that_wait_for_guides_count_as_queued():
    scheduler = make_scheduler(max_queue_size=1, max_num_sequences=1)
    accept(scheduler, guided(1), guided(2))
    (refused,) = accept(scheduler, guided(3))
    assert isinstance(refused.error, Unavailable)


def test_a_rebuilt_scheduler_keeps_holding_requests():
    scheduler = make_scheduler()
    accept(scheduler, guided(1), make_request(2), make_request(3))
    scheduler.schedule()
    scheduler.recover(Unavailable("a defect"), 1)
    assert [each.request_id for each in scheduler.state().waiting if "guide" in each.why] == [1]
    accept(scheduler, guides=[GuideEvent(1)])
    assert 1 in [each.request_id for each in scheduler.state().waiting]
    scheduler.fail_all(Unavailable("the end"))
    assert scheduler.num_active == 0


class Compiler:
    """A fake compiler that returns the given events."""

    def __init__(self):
        self.asked = []
        self.forgotten = []

    def submit(self, request_id, guide, origin=None):
        self.asked.append((request_id, guide))

    def events(self):
        return tuple(GuideEvent(request_id) for request_id, _ in self.asked)

    def forget(self, request_id):
        self.forgotten.append(request_id)


def test_the_input_of_an_iteration_has_the_results_of_guides():
    scheduler, compiler = make_scheduler(), Compiler()
    inputs = OwnInputs(scheduler, lambda room: (guided(1), make_request(2)), None, lambda: 0, None, compiler)
    assert inputs.next().guides == (GuideEvent(1),)
    assert compiler.asked == [(1, GUIDE)]


def test_guides_of_requests_that_have_ended_are_forgotten():
    scheduler, compiler, new = make_scheduler(), Compiler(), [guided(1), guided(2)]
    inputs = OwnInputs(scheduler, lambda room: tuple(new), None, lambda: 0, None, compiler)
    scheduler.accept(inputs.next())
    new.clear()
    accept(scheduler, stops=[StopSignal(1, StopReason.CANCELLED)])
    new.append(guided(1))
    inputs.next()
    assert compiler.forgotten == [1], "before the next request of that number"
    assert [request_id for request_id, _ in compiler.asked] == [1, 2, 1]


def test_without_a_tokenizer_a_guide_is_refused_by_name():
    inputs = OwnInputs(make_scheduler(), lambda room: (guided(1),), None, lambda: 0, None)
    (event,) = inputs.next().guides
    assert event.error_kind == Unsupported.code
    assert "guided_decoding_guide_type" in event.error and "tokenizer_dir" in event.error


@pytest.mark.parametrize(
    ("guide", "message"),
    [(Guide(GuideKind.JSON, "{}"), "left out"), (Guide(GuideKind.REGEX), "is required"), (GUIDE, None)],
)
def test_guide_types_require_or_refuse_a_text(guide, message):
    request = replace(make_request(1), guide=guide)
    if message is None:
        request.validate(make_scheduler().limits)
        return
    with pytest.raises(InvalidArgument, match=message):
        request.validate(make_scheduler().limits)


def test_wait_times_and_failures_of_guides_are_counted():
    scheduler = make_scheduler()
    accept(scheduler, guided(1), guided(2), now_ns=1_000_000_000)
    events = [GuideEvent(1), GuideEvent(2, "INVALID_ARG", "guided_decoding_guide is wrong")]
    accept(scheduler, guides=events, now_ns=1_500_000_000)
    metrics = scheduler.metrics()
    assert metrics.guides == {"ready": 1, "failed": 1}
    assert (metrics.guide_wait.num_observations, metrics.guide_wait.total) == (1, pytest.approx(0.5))
