from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from dataclasses import replace

import pytest

from inflight.config import SchedulingConfig
from inflight.core.request.request import IterationInput, OutputOptions
from inflight.core.request.response import RequestEnding, Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import StepFailed, Unavailable, Unsupported
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S, Inbox, delta, make_request, make_result


@pytest.fixture
def notified() -> list[None]:
    return []


@pytest.fixture
def client(notified: list[None]) -> LocalEngineClient:
    return LocalEngineClient(DESCRIPTION, lambda: notified.append(None))


def test_requests_are_handed_out_in_order_under_new_ids(client, notified) -> None:
    ids = [client.submit(make_request((prompt,)), Inbox()).request_id for prompt in (5, 6, 7)]
    assert ids == [1, 2, 3]
    assert len(notified) == 3
    assert client.get_inference_requests(0) == []
    taken = client.get_inference_requests(2) + client.get_inference_requests(-1)
    assert [(r.request_id, r.input_token_ids) for r in taken] == [(1, (5,)), (2, (6,)), (3, (7,))]
    assert client.get_inference_requests(-1) == []


def test_responses_reach_their_request_until_the_final_one(client) -> None:
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        client.submit(make_request(), inbox)
    for response in (delta(1, 10), delta(2, 20), delta(1, 11, final=True), delta(1, 12, final=True)):
        client.send_response(response)
    assert inboxes[0].tokens == [10, 11]
    assert inboxes[0].final() == delta(1, 11, final=True)
    assert inboxes[1].tokens == [20]


def test_stopping_a_queued_request_keeps_it_from_the_batcher(client, notified) -> None:
    inbox = Inbox()
    handle = client.submit(make_request(), inbox)
    handle.stop(StopReason.TIMED_OUT)
    handle.stop()
    assert len(notified) == 2
    assert client.get_inference_requests(-1) == []
    assert client.poll_stop_signals() == []
    result = inbox.final().result
    assert (result.finish_reasons, result.output_token_ids) == ((FinishReason.TIMED_OUT,), ((),))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(beam_width=2)])
def test_stopping_a_queued_request_answers_as_the_scheduler_does(client, streaming, sampling) -> None:
    output = OutputOptions(
        return_log_probs=True,
        num_top_log_probs=1,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=not (streaming and sampling.uses_beams),
        return_perf_metrics=True,
    )
    request = make_request((5, 6), streaming=streaming, sampling=sampling, output=output)
    inbox = Inbox()
    client.submit(request, inbox).stop()
    client.get_inference_requests(-1)
    config = SchedulingConfig(max_num_tokens=64, enable_kv_cache_reuse=False)
    scheduler = Scheduler(config, EngineLimits(1000, 256, 4, 16, 4))
    arrived = replace(
        request, request_id=1, arrival_time_ns=inbox.final().result.perf_metrics.arrival_time_ns
    )
    (expected,) = scheduler.accept(IterationInput(1, 1, (arrived,), (StopSignal(1),)))
    assert inbox.responses == [expected]


def test_stopping_a_queued_request_ends_every_sequence(client) -> None:
    inbox = Inbox()
    request = make_request(sampling=SamplingConfig(num_return_sequences=3))
    client.submit(request, inbox).stop()
    client.get_inference_requests(-1)
    inbox.final()
    assert [response.sequence_index for response in inbox.responses] == [0, 1, 2]
    assert all(response.result.is_sequence_final for response in inbox.responses)


@pytest.mark.parametrize(("returned", "rows"), [(None, 4), (2, 2)])
def test_stopping_a_queued_beam_search_answers_every_returned_beam(
    client, returned: int | None, rows: int
) -> None:
    inbox = Inbox()
    request = make_request(sampling=SamplingConfig(beam_width=4, num_return_sequences=returned))
    client.submit(request, inbox).stop()
    client.get_inference_requests(-1)
    assert inbox.final().result.num_output_tokens == (0,) * rows


def test_requests_have_their_time_of_arrival(client) -> None:
    for _ in range(2):
        client.submit(make_request(), Inbox())
    first, second = client.get_inference_requests(-1)
    assert 0 < first.arrival_time_ns <= second.arrival_time_ns


def test_stopping_a_running_request_sends_a_stop_signal(client) -> None:
    handle = client.submit(make_request(), Inbox())
    client.get_inference_requests(-1)
    handle.stop(StopReason.STOP_WORDS)
    (signal,) = client.poll_stop_signals()
    assert replace(signal, requested_ns=0) == StopSignal(handle.request_id, StopReason.STOP_WORDS)
    assert client.poll_stop_signals() == []


def test_a_stop_signal_has_its_time(client) -> None:
    """The time is of the same clock as the request's arrival."""
    handle = client.submit(make_request(), Inbox())
    (request,) = client.get_inference_requests(-1)
    before = time.monotonic_ns()
    handle.stop()
    (signal,) = client.poll_stop_signals()
    assert request.arrival_time_ns <= before <= signal.requested_ns <= time.monotonic_ns()


def test_stopping_an_unknown_or_answered_request_does_nothing(client, notified) -> None:
    handle = client.submit(make_request(), Inbox())
    client.get_inference_requests(-1)
    client.send_response(delta(handle.request_id, final=True))
    handle.stop()
    client.stop(99, StopReason.CANCELLED)
    assert client.poll_stop_signals() == []
    assert len(notified) == 1


def test_fail_all_answers_each_request_once(client) -> None:
    queued, running, stopped, done = (Inbox() for _ in range(4))
    client.submit(make_request(), running)
    client.submit(make_request(), done)
    client.get_inference_requests(-1)
    client.send_response(delta(2, 5, final=True))
    client.submit(make_request(), queued)
    client.submit(make_request(), stopped).stop()

    client.fail_all(StepFailed("gone"))
    client.close()

    for inbox in (queued, running, stopped):
        assert str(inbox.final().error) == "gone"
    assert done.final().error is None
    assert client.get_inference_requests(-1) == []
    for call in (client.describe, lambda: client.submit(make_request(), Inbox())):
        with pytest.raises(Unavailable, match="gone"):
            call()


def test_refuse_leaves_the_requests_in_flight_alone(client) -> None:
    inbox = Inbox()
    handle = client.submit(make_request(), inbox)
    client.refuse(Unavailable("shutting down"))
    with pytest.raises(Unavailable, match="shutting down"):
        client.submit(make_request(), Inbox())
    assert len(client.get_inference_requests(-1)) == 1
    client.send_response(delta(handle.request_id, 5, final=True))
    client.close()
    assert inbox.final().error is None


def test_a_callback_that_raises_does_not_affect_other_requests(client, caplog) -> None:
    def broken(response: Response) -> None:
        raise RuntimeError("front end bug")

    client.submit(make_request(), broken)
    with caplog.at_level(logging.ERROR):
        client.send_response(delta(1, 5))
        client.fail_all(Unavailable("gone"))
    assert caplog.text.count("failed to take a response") == 2


def test_a_callback_may_stop_and_submit_requests(client) -> None:
    ids = []

    def again(response: Response) -> None:
        client.stop(1, StopReason.CANCELLED)
        ids.append(client.submit(make_request(), Inbox()).request_id)

    client.submit(make_request(), again)
    client.send_response(delta(1, 5, final=True))
    assert ids == [2]


def test_requests_of_many_threads_are_all_answered() -> None:
    wake = threading.Event()
    client = LocalEngineClient(DESCRIPTION, wake.set)
    inboxes = [[Inbox() for _ in range(50)] for _ in range(4)]
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            assert wake.wait(PATIENCE_S)
            wake.clear()
            for request in client.get_inference_requests(-1):
                client.send_response(delta(request.request_id, 1))
                client.send_response(delta(request.request_id, final=True))
            client.poll_stop_signals()

    def front_end(mine: list[Inbox]) -> None:
        for inbox, stops in zip(mine, itertools.cycle([True, False])):
            handle = client.submit(make_request(), inbox)
            if stops:
                handle.stop()

    threads = [threading.Thread(target=front_end, args=(mine,)) for mine in inboxes]
    threads.append(threading.Thread(target=loop))
    for thread in threads:
        thread.start()
    for inbox in itertools.chain(*inboxes):
        inbox.final()
    over.set()
    wake.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_draining_waits_for_requests_in_flight_and_refuses_new_ones(client) -> None:
    inbox = Inbox()
    client.submit(make_request(), inbox)
    client.get_inference_requests(-1)
    draining = threading.Thread(target=client.drain, args=(PATIENCE_S,))
    draining.start()
    client.send_response(delta(1, 10, final=True))
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert inbox.final() == delta(1, 10, final=True)
    with pytest.raises(Unavailable, match="shutting down"):
        client.submit(make_request(), Inbox())


def test_requests_longer_than_the_drain_end_with_unavailable(client) -> None:
    running, waiting = Inbox(), Inbox()
    client.submit(make_request(), running)
    client.get_inference_requests(-1)
    client.submit(make_request(), waiting)
    draining = threading.Thread(target=client.drain, args=(0.0,))
    draining.start()
    while not (signals := client.poll_stop_signals()):
        pass
    assert [signal.request_id for signal in signals] == [1]
    cancelled = make_result(reason=FinishReason.CANCELLED, is_sequence_final=True)
    client.send_response(Response(1, cancelled, is_final=True))
    client.get_inference_requests(-1)
    while not waiting.finished.is_set():
        client.get_inference_requests(-1)
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert isinstance(running.final().error, Unavailable)
    assert isinstance(waiting.final().error, Unavailable)


def test_a_drain_ends_a_request_of_several_sequences_with_one_error(client) -> None:
    inbox = Inbox()
    client.submit(make_request(), inbox)
    client.get_inference_requests(-1)
    draining = threading.Thread(target=client.drain, args=(0.0,))
    draining.start()
    while not client.poll_stop_signals():
        pass
    for index in (1, 0):
        ended = make_result(reason=FinishReason.CANCELLED, sequence_index=index, is_sequence_final=True)
        client.send_response(Response(1, ended, is_final=index == 0))
    draining.join(PATIENCE_S)
    assert isinstance(inbox.final().error, Unavailable)
    assert len(inbox.responses) == 1


def test_the_state_counts_queued_and_unanswered_requests() -> None:
    asked: list[float] = []

    def read_state(timeout_s: float) -> str:
        asked.append(timeout_s)
        return '{"iteration": 7}'

    client = LocalEngineClient(DESCRIPTION, lambda: None, read_state)
    for _ in range(3):
        client.submit(make_request(), Inbox())
    client.get_inference_requests(1)
    assert json.loads(client.state(2.5)) == {
        "queued_requests": 2,
        "unanswered_requests": 3,
        "batcher": {"iteration": 7},
    }
    assert asked == [2.5]


def test_a_batcher_that_does_not_answer_is_unavailable() -> None:
    def read_state(timeout_s: float) -> str:
        raise Unavailable(f"no iteration ended in {timeout_s} s")

    with pytest.raises(Unavailable, match=r"no iteration ended in 0\.5 s"):
        LocalEngineClient(DESCRIPTION, lambda: None, read_state).state(0.5)


def test_a_batcher_may_have_no_state(client) -> None:
    with pytest.raises(Unsupported, match="does not report its state"):
        client.state(1.0)


def test_an_iteration_gets_a_bounded_number_of_sequences(client) -> None:
    def submit(count: int, num_tokens: int = 1) -> int:
        sampling = SamplingConfig(num_return_sequences=count, top_k=2)
        request = replace(make_request((5,) * num_tokens), sampling=sampling)
        return client.submit(request, Inbox()).request_id

    sizes = [(200, 1), (56, 1), (1, 1), (1000, 1), (100, 1), (100, 1024), (100, 1)]
    ids = [submit(*size) for size in sizes]
    taken = []
    while requests := client.get_inference_requests(-1):
        taken.append([request.request_id for request in requests])
    assert taken == [ids[:2], ids[2:3], ids[3:4], ids[4:5], ids[5:6], ids[6:]]


def test_responses_of_stopped_queued_requests_are_split_over_iterations(client, notified) -> None:
    inboxes = [Inbox() for _ in range(600)]
    for inbox in inboxes:
        client.submit(make_request(), inbox).stop()
    counts = []
    while True:
        notified.clear()
        assert client.get_inference_requests(-1) == []
        counts.append(sum(inbox.finished.is_set() for inbox in inboxes))
        if not notified:
            break
    assert counts == [256, 512, 600], "the loop is told that there is more"


class FakeReceipts:
    """The engine's part of receipts, known when the test says so."""

    def __init__(self) -> None:
        self.is_ready = False
        self.error: Unavailable | None = None
        self.num_prepared = 0

    def prepare(self) -> None:
        self.num_prepared += 1

    def part(self, adapter_digest: bytes) -> str:
        if self.error is not None:
            raise self.error
        return f"part {adapter_digest.hex()}"


WITH_RECEIPT = OutputOptions(return_receipt=True)


@pytest.fixture
def receipts() -> FakeReceipts:
    return FakeReceipts()


@pytest.fixture
def making(receipts: FakeReceipts) -> LocalEngineClient:
    """A client of an engine that makes receipts."""
    return LocalEngineClient(DESCRIPTION, lambda: None, receipts=receipts)


def test_requests_for_receipts_wait_for_the_digests_and_others_do_not(making, receipts) -> None:
    making.submit(make_request(), Inbox())
    assert receipts.num_prepared == 0
    making.submit(make_request(output=WITH_RECEIPT), Inbox())
    making.submit(make_request(), Inbox())
    assert receipts.num_prepared == 1
    assert [request.request_id for request in making.get_inference_requests(-1)] == [1, 3]
    assert making.get_inference_requests(-1) == []
    receipts.is_ready = True
    assert [request.request_id for request in making.get_inference_requests(-1)] == [2]


def test_the_last_response_has_the_engines_part_of_the_receipt(making, receipts) -> None:
    receipts.is_ready = True
    inbox, plain = Inbox(), Inbox()
    making.submit(make_request(output=WITH_RECEIPT), inbox)
    making.submit(make_request(), plain)
    for request_id in (1, 2):
        making.send_response(delta(request_id, 5))
        making.send_response(
            replace(delta(request_id, 6, final=True), ending=RequestEnding(adapter_digest=b"\x05"))
        )
    assert [response.result.receipt for response in inbox.responses] == [None, "part 05"]
    assert [response.result.receipt for response in plain.responses] == [None, None]


def test_a_request_for_a_receipt_that_is_stopped_in_the_queue_has_none(making, receipts) -> None:
    inbox = Inbox()
    making.submit(make_request(output=WITH_RECEIPT), inbox).stop()
    making.get_inference_requests(-1)
    assert (inbox.final().result.receipt, inbox.final().error) == (None, None)


def test_without_digests_a_request_for_a_receipt_fails(making, receipts) -> None:
    receipts.is_ready, receipts.error = True, Unavailable("no receipts: config.json was changed")
    inbox = Inbox()
    making.submit(make_request(output=WITH_RECEIPT), inbox)
    making.send_response(delta(1, 6, final=True))
    assert str(inbox.final().error) == "no receipts: config.json was changed"


def test_an_engine_without_receipts_refuses_requests_for_them(client) -> None:
    with pytest.raises(Unsupported, match="this engine makes no receipts"):
        client.submit(make_request(output=WITH_RECEIPT), Inbox())
