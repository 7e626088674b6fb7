"""Ids in flight: duplicates, stops, cancellation, and what is forgotten when."""

from __future__ import annotations

import threading

import pytest

from inflight.core.ports import SendResponseCallback
from inflight.core.request import Request
from inflight.core.response import Response
from inflight.core.stop import StopReason
from inflight.errors import AlreadyExists, InvalidArgument, Unavailable
from inflight.testing.fake_pb_utils import ResponseSender
from inflight.triton.in_flight import Ending, InFlight, InFlightRequest
from tests.triton.factories import FakeEngineClient, make_entry, make_request


def ignore(response: Response) -> None:
    """Takes a response that no test looks at."""


def make_in_flight(client: FakeEngineClient | None = None) -> tuple[InFlight, FakeEngineClient]:
    client = client or FakeEngineClient()
    return InFlight(client), client


def start(in_flight: InFlight, triton_id: str = "", sender: ResponseSender | None = None) -> InFlightRequest:
    entry = make_entry(triton_id, sender)
    in_flight.start(entry, make_request(), ignore)
    return entry


def test_an_entry_is_found_by_the_engines_id_until_it_is_finished() -> None:
    in_flight, client = make_in_flight()
    entry = start(in_flight, "a")
    assert entry.engine_id == client.last_id
    assert in_flight.find(entry.engine_id) is entry
    assert in_flight.finish(entry.engine_id) is entry
    assert in_flight.find(entry.engine_id) is None
    assert in_flight.finish(entry.engine_id) is None


def test_an_id_in_flight_is_refused_and_the_first_one_goes_on() -> None:
    in_flight, client = make_in_flight()
    first = start(in_flight, "a")
    with pytest.raises(AlreadyExists, match=r"^requestId a is already in progress, request is ignored\.$"):
        start(in_flight, "a")
    assert len(client.submitted) == 1 and not client.stopped
    assert in_flight.find(first.engine_id) is first


def test_an_id_may_be_used_again_after_its_final_response() -> None:
    in_flight, _ = make_in_flight()
    in_flight.finish(start(in_flight, "a").engine_id)
    start(in_flight, "a")


def test_an_id_whose_client_is_gone_gives_way() -> None:
    in_flight, client = make_in_flight()
    sender = ResponseSender()
    first = start(in_flight, "a", sender)
    sender.cancelled = True
    second = start(in_flight, "a")
    assert client.stopped == [(first.engine_id, StopReason.CANCELLED)]
    assert first.ending is Ending.CLIENT_GONE
    in_flight.finish(first.engine_id)
    with pytest.raises(AlreadyExists):
        start(in_flight, "a")
    in_flight.stop("a")
    assert client.stopped[-1] == (second.engine_id, StopReason.CANCELLED)


def test_an_id_that_is_being_cancelled_gives_way_without_asking_again() -> None:
    in_flight, client = make_in_flight()
    sender = ResponseSender()
    in_flight.cancel(start(in_flight, "a", sender))
    start(in_flight, "a")
    assert sender.times_asked == 0 and len(client.stopped) == 1


def test_any_number_without_an_id() -> None:
    in_flight, _ = make_in_flight()
    assert len({start(in_flight).engine_id for _ in range(3)}) == 3


def test_stop_by_id_leaves_the_last_response_a_normal_one() -> None:
    in_flight, client = make_in_flight()
    entry = start(in_flight, "a")
    in_flight.stop("a")
    assert client.stopped == [(entry.engine_id, StopReason.CANCELLED)]
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


def test_cancel_stops_once() -> None:
    in_flight, client = make_in_flight()
    entry = start(in_flight)
    in_flight.cancel(entry)
    in_flight.cancel(entry, Ending.UNLOAD)
    assert client.stopped == [(entry.engine_id, StopReason.CANCELLED)]
    assert entry.ending is Ending.CLIENT_GONE


def test_nothing_is_registered_when_the_engine_refuses() -> None:
    in_flight, client = make_in_flight(FakeEngineClient(refusal=Unavailable("full")))
    with pytest.raises(Unavailable, match="full"):
        start(in_flight, "a")
    client.refusal = None
    start(in_flight, "a")


def test_a_response_before_submit_returns_finds_its_entry() -> None:
    """The engine's thread may be faster than ours: whoever looks then waits for the registration."""
    found: list[InFlightRequest | None] = []
    lookers: list[threading.Thread] = []

    class FastClient(FakeEngineClient):
        def submit(self, request: Request, on_response: SendResponseCallback) -> int:
            engine_id = super().submit(request, on_response)
            lookers.append(threading.Thread(target=lambda: found.append(in_flight.find(engine_id))))
            lookers[0].start()
            return engine_id

    in_flight = InFlight(FastClient())
    entry = start(in_flight)
    lookers[0].join()
    assert found == [entry]


def test_waiting_ends_with_the_first_request_and_at_close() -> None:
    in_flight, _ = make_in_flight()
    seen: list[tuple[InFlightRequest, ...]] = []
    waiter = threading.Thread(target=lambda: seen.append(in_flight.wait_for_requests()))
    waiter.start()
    entry = start(in_flight)
    waiter.join()
    assert seen == [(entry,)]
    in_flight.finish(entry.engine_id)
    closing = threading.Thread(target=lambda: seen.append(in_flight.wait_for_requests()))
    closing.start()
    assert in_flight.close() == ()
    closing.join()
    assert seen[-1] == ()


def test_closed_takes_nothing_more() -> None:
    in_flight, _ = make_in_flight()
    entry = start(in_flight)
    assert in_flight.close() == (entry,)
    with pytest.raises(Unavailable, match="unloaded"):
        start(in_flight)
