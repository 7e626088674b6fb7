"""Ids in flight: duplicates, stops, cancellation, and when entries are forgotten."""

from __future__ import annotations

import threading

import pytest

from inflight.core.ports import SendResponseCallback
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason
from inflight.errors import AlreadyExists, Cancelled, InvalidArgument, Unavailable
from inflight.serving.in_flight import Arrival, Ending, InFlight, InFlightRequest
from tests.tensors.factories import make_request
from tests.triton.factories import FakeEngineClient, make_entry
from tests.triton.fake_pb_utils import ResponseSender


def ignore(response: Response) -> None:
    """Ignore a response."""


def make_in_flight(client: FakeEngineClient | None = None) -> tuple[InFlight, FakeEngineClient]:
    client = client or FakeEngineClient()
    return InFlight(client), client


def start(in_flight: InFlight, request_id: str = "", sender: ResponseSender | None = None) -> InFlightRequest:
    entry = make_entry(request_id, sender)
    in_flight.start(entry, [make_request()], ignore)
    return entry


def start_batch(in_flight: InFlight, size: int, request_id: str = "") -> InFlightRequest:
    entry = make_entry(request_id)
    in_flight.start(entry, [make_request() for _ in range(size)], ignore)
    return entry


def finish(in_flight: InFlight, entry: InFlightRequest) -> list[Arrival | None]:
    return [in_flight.find_arrival(engine_id, is_final=True) for engine_id in entry.engine_ids]


def test_an_entry_is_found_by_the_engines_id_until_it_is_finished() -> None:
    in_flight, client = make_in_flight()
    entry = start(in_flight, "a")
    (engine_id,) = entry.engine_ids
    assert engine_id == client.last_id
    assert in_flight.find_arrival(engine_id, is_final=False) == Arrival(entry, 0, is_last=False)
    assert in_flight.find_arrival(engine_id, is_final=True) == Arrival(entry, 0, is_last=True)
    assert in_flight.find_arrival(engine_id, is_final=False) is None
    assert in_flight.find_arrival(engine_id, is_final=True) is None


def test_a_batch_is_finished_with_its_last_prompt() -> None:
    in_flight, _ = make_in_flight()
    entry = start_batch(in_flight, 3, "a")
    first, second, third = entry.engine_ids
    assert in_flight.find_arrival(second, is_final=True) == Arrival(entry, 1, is_last=False)
    assert in_flight.find_arrival(first, is_final=True) == Arrival(entry, 0, is_last=False)
    with pytest.raises(AlreadyExists):
        start(in_flight, "a")
    assert in_flight.find_arrival(third, is_final=False) == Arrival(entry, 2, is_last=False)
    assert in_flight.find_arrival(third, is_final=True) == Arrival(entry, 2, is_last=True)
    start(in_flight, "a")


def test_stop_and_cancel_reach_every_prompt() -> None:
    in_flight, client = make_in_flight(FakeEngineClient(answers_stops=False))
    stopped, cancelled = start_batch(in_flight, 2, "a"), start_batch(in_flight, 2, "b")
    in_flight.stop("a")
    in_flight.cancel(cancelled)
    ids = (*stopped.engine_ids, *cancelled.engine_ids)
    assert client.stopped == [(engine_id, StopReason.CANCELLED) for engine_id in ids]


def test_an_abandoned_batch_ends_its_prompts_and_is_forgotten() -> None:
    in_flight, client = make_in_flight(FakeEngineClient(answers_stops=False))
    entry = start_batch(in_flight, 3, "a")
    in_flight.find_arrival(entry.engine_ids[1], is_final=True)
    in_flight.abandon(entry)
    assert [engine_id for engine_id, _ in client.stopped] == [entry.engine_ids[0], entry.engine_ids[2]]
    assert finish(in_flight, entry) == [None] * 3
    start(in_flight, "a")
    assert len(in_flight.stop_admitting()) == 1


def test_a_batch_is_refused_as_a_whole() -> None:
    """Requests of the batch that the engine has already taken must not run on."""

    class FullClient(FakeEngineClient):
        def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
            if len(self.submitted) == 2:
                raise Unavailable("full")
            return super().submit(request, on_response)

    in_flight, client = make_in_flight(FullClient())
    with pytest.raises(Unavailable, match="full"):
        start_batch(in_flight, 3, "a")
    assert [engine_id for engine_id, _ in client.stopped] == list(client.submitted)
    assert [in_flight.find_arrival(engine_id, is_final=True) for engine_id in client.submitted] == [
        None,
        None,
    ]
    assert in_flight.stop_admitting() == ()


def test_one_sequence_of_one_prompt_may_be_stopped_by_a_stop_string() -> None:
    in_flight, client = make_in_flight(FakeEngineClient(answers_stops=False))
    entry = start_batch(in_flight, 2)
    entry.handles[1].stop(StopReason.STOP_WORDS, 3)
    assert client.stopped == [(entry.engine_ids[1], StopReason.STOP_WORDS, 3)]


def test_an_id_in_flight_is_refused_and_the_first_request_continues() -> None:
    in_flight, client = make_in_flight()
    first = start(in_flight, "a")
    with pytest.raises(AlreadyExists, match=r"^requestId a is already in progress, request is ignored\.$"):
        start(in_flight, "a")
    assert len(client.submitted) == 1 and not client.stopped
    assert in_flight.find_arrival(first.engine_ids[0], is_final=False) is not None


def test_an_id_may_be_used_again_after_its_final_response() -> None:
    in_flight, _ = make_in_flight()
    finish(in_flight, start(in_flight, "a"))
    start(in_flight, "a")


def test_the_id_of_a_gone_client_may_be_reused() -> None:
    in_flight, client = make_in_flight()
    sender = ResponseSender()
    first = start(in_flight, "a", sender)
    sender.cancelled = True
    second = start(in_flight, "a")
    assert client.stopped == [(first.engine_ids[0], StopReason.CANCELLED)]
    assert first.ending is Ending.CLIENT_GONE
    finish(in_flight, first)
    with pytest.raises(AlreadyExists):
        start(in_flight, "a")
    in_flight.stop("a")
    assert client.stopped[-1] == (second.engine_ids[0], StopReason.CANCELLED)


def test_the_id_of_a_cancelled_request_may_be_reused_without_asking() -> None:
    in_flight, client = make_in_flight()
    sender = ResponseSender()
    in_flight.cancel(start(in_flight, "a", sender))
    start(in_flight, "a")
    assert sender.times_asked == 0 and len(client.stopped) == 1


def test_requests_without_an_id_are_not_limited() -> None:
    in_flight, _ = make_in_flight()
    assert len({start(in_flight).engine_ids for _ in range(3)}) == 3


def test_a_request_stopped_by_id_has_a_normal_last_response() -> None:
    in_flight, client = make_in_flight()
    entry = start(in_flight, "a")
    in_flight.stop("a")
    assert client.stopped == [(entry.engine_ids[0], StopReason.CANCELLED)]
    assert entry.ending is Ending.NONE


def test_stop_of_an_unknown_id_is_ignored() -> None:
    in_flight, client = make_in_flight()
    in_flight.stop("nobody")
    assert not client.stopped


def test_stop_without_an_id_is_refused() -> None:
    in_flight, _ = make_in_flight()
    start(in_flight)
    with pytest.raises(InvalidArgument, match=r"^Cannot send stop request without specifying a request_id$"):
        in_flight.stop("")


def test_a_request_cancelled_twice_is_stopped_once() -> None:
    in_flight, client = make_in_flight()
    entry = start(in_flight)
    in_flight.cancel(entry)
    in_flight.cancel(entry, Ending.UNLOAD)
    assert client.stopped == [(entry.engine_ids[0], StopReason.CANCELLED)]
    assert entry.ending is Ending.CLIENT_GONE


def test_nothing_is_registered_when_the_engine_refuses() -> None:
    in_flight, client = make_in_flight(FakeEngineClient(refusal=Unavailable("full")))
    with pytest.raises(Unavailable, match="full"):
        start(in_flight, "a")
    client.refusal = None
    start(in_flight, "a")


def test_a_response_before_submit_returns_finds_its_entry() -> None:
    """The engine's thread may be faster than this one: `arrive` then waits for the registration."""
    found: list[Arrival | None] = []
    lookers: list[threading.Thread] = []

    class FastClient(FakeEngineClient):
        def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
            handle = super().submit(request, on_response)
            arrive = lambda: found.append(in_flight.find_arrival(handle.request_id, is_final=False))  # noqa: E731
            lookers.append(threading.Thread(target=arrive))
            lookers[0].start()
            return handle

    in_flight = InFlight(FastClient())
    entry = start(in_flight)
    lookers[0].join()
    assert found == [Arrival(entry, 0, is_last=False)]


def test_waiting_ends_with_the_first_request_and_at_close() -> None:
    in_flight, _ = make_in_flight()
    seen: list[tuple[InFlightRequest, ...]] = []
    waiter = threading.Thread(target=lambda: seen.append(in_flight.wait_for_requests()))
    waiter.start()
    entry = start(in_flight)
    waiter.join()
    assert seen == [(entry,)]
    finish(in_flight, entry)
    closing = threading.Thread(target=lambda: seen.append(in_flight.wait_for_requests()))
    closing.start()
    assert in_flight.stop_admitting() == ()
    closing.join()
    assert seen[-1] == ()


def test_a_closed_front_end_admits_no_request() -> None:
    in_flight, _ = make_in_flight()
    entry = start(in_flight)
    assert in_flight.stop_admitting() == (entry,)
    with pytest.raises(Unavailable, match="unloaded"):
        start(in_flight)


# -------------------------------------------------------------------- before the engine has the request


def register(
    in_flight: InFlight, request_id: str = "", sender: ResponseSender | None = None
) -> InFlightRequest:
    entry = make_entry(request_id, sender)
    in_flight.register(entry)
    return entry


def test_a_registered_id_is_in_flight_until_it_is_withdrawn() -> None:
    in_flight, client = make_in_flight()
    entry = register(in_flight, "a")
    for refused in (register, start):
        with pytest.raises(AlreadyExists):
            refused(in_flight, "a")
    assert in_flight.wait_for_requests() == (entry,)
    in_flight.withdraw(entry)
    assert not client.submitted
    start(in_flight, "a")


def test_a_registered_request_starts() -> None:
    in_flight, client = make_in_flight()
    entry = register(in_flight, "a")
    in_flight.start(entry, [make_request()], ignore)
    assert in_flight.wait_for_requests() == (entry,)
    assert in_flight.find_arrival(client.last_id, is_final=True) == Arrival(entry, 0, is_last=True)


def test_a_stop_before_the_start_ends_it_when_it_starts() -> None:
    in_flight, client = make_in_flight(FakeEngineClient(answers_stops=False))
    entry = register(in_flight, "a")
    in_flight.stop("a")
    assert client.stopped == []
    in_flight.start(entry, [make_request(), make_request()], ignore)
    assert client.stopped == [(engine_id, StopReason.CANCELLED) for engine_id in entry.engine_ids]
    assert entry.ending is Ending.NONE


def test_a_request_that_is_cancelled_before_the_start_never_starts() -> None:
    in_flight, client = make_in_flight()
    entry = register(in_flight, "a")
    in_flight.cancel(entry)
    with pytest.raises(Cancelled):
        in_flight.start(entry, [make_request()], ignore)
    assert not client.submitted


def test_the_id_of_a_client_gone_before_the_start_may_be_reused() -> None:
    in_flight, client = make_in_flight()
    sender = ResponseSender()
    gone = register(in_flight, "a", sender)
    sender.cancelled = True
    start(in_flight, "a")
    with pytest.raises(Cancelled):
        in_flight.start(gone, [make_request()], ignore)
    in_flight.withdraw(gone)
    with pytest.raises(AlreadyExists):
        start(in_flight, "a")
    assert len(client.submitted) == 1


def test_a_registered_entry_does_not_start_once_closed() -> None:
    in_flight, client = make_in_flight()
    entry = register(in_flight)
    assert in_flight.stop_admitting() == (entry,)
    with pytest.raises(Unavailable):
        in_flight.start(entry, [make_request()], ignore)
    assert not client.submitted
