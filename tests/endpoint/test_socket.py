"""Front ends and an engine at the two ends of a socket; the batcher is played by the test."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.endpoint import frames
from inflight.endpoint.client import SocketEngineClient, drain_engine
from inflight.endpoint.server import EndpointServer
from inflight.errors import InvalidArgument, NotStarted, StepFailed, Unavailable
from tests.commands import eventually
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S, Batcher, Inbox, make_request, make_result

# -------------------------------------------------------------------- messages


def test_the_description_crosses_the_socket(front_end) -> None:
    assert front_end.describe() == DESCRIPTION


def test_a_request_arrives_as_it_was_sent(front_end, batcher) -> None:
    sampling = SamplingConfig(temperature=0.5, top_k=40, top_p=0.9, random_seed=2**64 - 1)
    request = make_request((7, 8), new=9, end_ids=(2, 3), pad_id=0, sampling=sampling)
    front_end.submit(request, Inbox())
    taken = batcher.take()
    assert taken.request_id == 1
    assert taken.arrival_time_ns > 0
    assert replace(taken, arrival_time_ns=0) == Request(1, (7, 8), 9, True, (2, 3), 0, sampling)


def test_a_response_too_large_to_be_sent_ends_only_its_request(front_end, batcher, monkeypatch) -> None:
    large, small = Inbox(), Inbox()
    front_end.submit(make_request(), large)
    front_end.submit(make_request(), small)
    first, second = batcher.take(), batcher.take()
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    batcher.answer(first, *range(1000), final=False)
    assert isinstance(large.final().error, StepFailed)
    assert "too large" in str(large.final().error)
    assert batcher.stops(1) == {StopSignal(first.request_id)}
    batcher.answer(second, 5)
    assert small.final().error is None


def test_large_logits_arrive_between_small_responses(front_end, batcher) -> None:
    inboxes = [Inbox() for _ in range(3)]
    for inbox in inboxes:
        front_end.submit(make_request(), inbox)
    logits = FloatTensor((2, 1 << 20), bytes(range(256)) * (1 << 15))
    for position, request in enumerate([batcher.take() for _ in inboxes]):
        result = make_result(position, reason=FinishReason.LENGTH, generation_logits=(logits,))
        if position == 1:
            batcher.client.send_response(Response(request.request_id, result, is_final=True))
        else:
            batcher.answer(request, position)
    assert [inbox.final().result.output_token_ids for inbox in inboxes] == [((0,),), ((1,),), ((2,),)]
    assert inboxes[1].final().result.generation_logits == (logits,)


def test_responses_arrive_in_order_and_end_with_one_final(front_end, batcher) -> None:
    inbox = Inbox()
    front_end.submit(make_request(), inbox)
    request = batcher.take()
    for token in range(100):
        batcher.answer(request, token, final=False)
    batcher.answer(request, 100)
    assert inbox.final().result.finish_reasons == (FinishReason.LENGTH,)
    assert inbox.tokens == list(range(101))


def test_an_error_arrives_as_its_class(front_end, batcher) -> None:
    inbox = Inbox()
    handle = front_end.submit(make_request(), inbox)
    error = InvalidArgument("too long")
    batcher.client.send_response(Response(batcher.take().request_id, error=error, is_final=True))
    final = inbox.final()
    assert (final.request_id, type(final.error), str(final.error)) == (
        handle.request_id,
        InvalidArgument,
        "too long",
    )


def test_each_of_several_front_ends_gets_only_its_own_responses(server, batcher, path) -> None:
    clients = [SocketEngineClient(path) for _ in range(2)]
    inboxes = [Inbox(), Inbox()]
    ids = [
        client.submit(make_request((n,)), inbox).request_id
        for n, (client, inbox) in enumerate(zip(clients, inboxes))
    ]
    assert ids == [1, 1]  # each has its own count
    for request in (batcher.take(), batcher.take()):
        batcher.answer(request, 10 + request.input_token_ids[0])
    assert [inbox.final().result.output_token_ids for inbox in inboxes] == [((10,),), ((11,),)]
    for client in clients:
        client.close()


# -------------------------------------------------------------------- stopping


def test_a_stop_reaches_the_batcher_with_its_reason(front_end, batcher) -> None:
    handle = front_end.submit(make_request(), Inbox())
    request = batcher.take()
    handle.stop(StopReason.STOP_WORDS)
    front_end.stop(12345, StopReason.CANCELLED)
    assert batcher.stops(1) == {StopSignal(request.request_id, StopReason.STOP_WORDS)}


def test_a_stop_while_queued_ends_the_request(front_end, batcher) -> None:
    queued, next_one = Inbox(), Inbox()
    front_end.submit(make_request(), queued).stop()
    front_end.submit(make_request((99,)), next_one)
    # Frames keep their order, so the first request is gone when the second is there.
    while len(batcher.client._queue) != 1 or 2 not in batcher.client._queue:
        assert batcher._work.acquire(timeout=PATIENCE_S)
    assert batcher.take().input_token_ids == (99,)
    assert queued.final().result.finish_reasons == (FinishReason.CANCELLED,)


def test_requests_of_a_front_end_that_disconnects_are_stopped(server, batcher, path) -> None:
    leaving, staying = SocketEngineClient(path), SocketEngineClient(path)
    inboxes = [Inbox() for _ in range(3)]
    for inbox in inboxes:
        leaving.submit(make_request(), inbox)
    taken = [batcher.take() for _ in inboxes]
    kept = Inbox()
    staying.submit(make_request(), kept)
    last = batcher.take()

    leaving.close()
    assert batcher.stops(3) == {StopSignal(request.request_id, StopReason.CANCELLED) for request in taken}
    for inbox in inboxes:
        assert isinstance(inbox.final().error, Unavailable)
    batcher.answer(taken[0], 5)  # the socket is closed
    batcher.answer(last, 6)
    assert kept.final().error is None
    staying.close()


# -------------------------------------------------------------------- ending


def test_each_request_gets_one_unavailable_when_the_engine_disconnects(
    front_end, server, batcher, path
) -> None:
    running, answered = Inbox(), Inbox()
    front_end.submit(make_request(), running)
    batcher.take()
    front_end.submit(make_request(), answered)
    batcher.answer(batcher.take(), 5)
    assert answered.final().error is None
    server.close()
    assert isinstance(running.final().error, Unavailable)
    with pytest.raises(Unavailable, match="cannot be reached"):
        front_end.submit(make_request(), Inbox())
    with pytest.raises(Unavailable):
        front_end.describe()
    assert not Path(path).exists()


def test_responses_sent_before_the_end_still_arrive(front_end, server, batcher) -> None:
    inboxes = [Inbox() for _ in range(200)]
    for inbox in inboxes:
        front_end.submit(make_request(), inbox)
    for request in [batcher.take() for _ in inboxes]:
        batcher.answer(request, *range(1000))
    server.close()
    for inbox in inboxes:
        assert inbox.final().error is None


def test_a_batcher_that_dies_answers_requests_over_the_socket(front_end, batcher) -> None:
    running = Inbox()
    front_end.submit(make_request(), running)
    batcher.take()
    batcher.client.fail_all(Unavailable("the generation loop died"))
    assert str(running.final().error) == "the generation loop died"
    late = Inbox()
    front_end.submit(make_request(), late)
    assert isinstance(late.final().error, Unavailable)


def test_a_front_end_connects_to_an_engine_that_starts_later_or_again(batcher, path, caplog) -> None:
    caplog.set_level("INFO", "inflight.endpoint")
    client = SocketEngineClient(path)
    for _ in range(2):
        with pytest.raises(NotStarted, match="cannot be reached") as away:
            client.submit(make_request(), Inbox())
        assert "engine.sock" not in str(away.value)  # logged once
    assert caplog.text.count(f"waiting for the engine, which will listen at {path}") == 1
    ids = []
    for _ in range(2):
        server = EndpointServer(batcher.client, path)
        inbox = Inbox()
        ids.append(client.submit(make_request(), inbox).request_id)
        batcher.answer(batcher.take(), 5)
        assert inbox.final().error is None
        server.close()
        # A request that is sent before the client notices the end may be lost, and gets Unavailable.
        assert eventually(lambda: client._connection.ended)
    assert len(set(ids)) == 2 and "no engine" not in caplog.text
    for _ in range(2):
        with pytest.raises(Unavailable, match="cannot be reached") as ended:
            client.submit(make_request(), Inbox())
        assert not isinstance(ended.value, NotStarted)
    assert caplog.text.count(f"no engine at {path}: ") == 1
    client.close()


def test_a_request_on_an_ended_connection_is_sent_over_the_next(path) -> None:
    """The reader, which would detect the end, is busy with a response."""
    batchers, busy, let_go = [Batcher(), Batcher()], threading.Event(), threading.Event()
    first = EndpointServer(batchers[0].client, path)
    front_end = SocketEngineClient(path)

    def take(response: Response) -> None:
        busy.set()
        let_go.wait(PATIENCE_S)

    front_end.submit(make_request(), take)
    batchers[0].answer(batchers[0].take(), 1, final=False)
    assert busy.wait(PATIENCE_S)
    first.close()
    second = EndpointServer(batchers[1].client, path)
    inbox = Inbox()
    front_end.submit(make_request(), inbox)
    batchers[1].answer(batchers[1].take(), 2)
    assert inbox.final().result.output_token_ids == ((2,),)
    let_go.set()
    front_end.close()
    second.close()


def test_closing_is_idempotent_and_final(front_end, server) -> None:
    front_end.describe()
    for _ in range(2):
        front_end.close()
        server.close()
    with pytest.raises(Unavailable):
        front_end.submit(make_request(), Inbox())


def test_a_callback_may_submit_stop_and_close(front_end, batcher) -> None:
    second, closed = Inbox(), threading.Event()

    def again(response: Response) -> None:
        front_end.submit(make_request(), second).stop()
        front_end.close()
        closed.set()

    front_end.submit(make_request(), again)
    batcher.answer(batcher.take(), 5)
    assert closed.wait(PATIENCE_S)
    assert isinstance(second.final().error, Unavailable)


def test_every_request_of_many_threads_is_answered_across_a_restart(path) -> None:
    batcher = Batcher()
    client = SocketEngineClient(path)
    inboxes: list[Inbox] = []
    refused = []

    def submit_many() -> None:
        for _ in range(100):
            inbox = Inbox()
            try:
                client.submit(make_request(), inbox)
                inboxes.append(inbox)
            except Unavailable as error:
                refused.append(error)

    for _ in range(3):
        server = EndpointServer(batcher.client, path)
        threads = [threading.Thread(target=submit_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            batcher.answer(batcher.take(), 5)
        server.close()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    client.close()
    assert len(inboxes) + len(refused) == 1200
    for inbox in inboxes:
        inbox.final()


# -------------------------------------------------------------------- the server ends


def test_a_supervisor_is_notified_when_all_requests_are_answered(batcher, path) -> None:
    server = EndpointServer(batcher.client, path, batcher.client.drain)
    front_end = SocketEngineClient(path)
    inbox = Inbox()
    front_end.submit(make_request(), inbox)
    request = batcher.take()
    told: list[bool] = []
    supervisor = threading.Thread(target=lambda: told.append(drain_engine(path, PATIENCE_S)))
    supervisor.start()
    batcher.answer(request, 5)
    supervisor.join(PATIENCE_S)
    assert told == [True]
    assert inbox.final().result.output_token_ids == ((5,),)
    front_end.close()
    server.close()


def test_draining_without_an_engine_ends_at_once(path) -> None:
    assert drain_engine(path, 1.0) is False


def test_requests_of_a_connection_that_the_engine_gives_up_are_not_reported_as_cancelled(
    front_end, batcher, monkeypatch
) -> None:
    def stop(request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        result = make_result(reason=FinishReason.CANCELLED)
        batcher.client.send_response(Response(request_id, result, is_final=True))

    monkeypatch.setattr(batcher.client, "stop", stop)
    inboxes = [Inbox() for _ in range(20)]
    for inbox in inboxes:
        front_end.submit(make_request(), inbox)
        batcher.take()
    front_end._connection._socket.sendall(bytes([255] * frames.LENGTH_BYTES))  # too long a message
    assert all(isinstance(inbox.final().error, Unavailable) for inbox in inboxes)
