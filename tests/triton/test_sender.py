"""The sender thread: order, merging, one final response per request, and clients that cannot be answered."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopReason
from inflight.errors import StepFailed, Unavailable
from inflight.serving.completion_text import CompletionText
from inflight.serving.in_flight import Ending, InFlight, InFlightRequest
from inflight.serving.reply import Reply
from inflight.serving.response_size import ResponseBudget
from inflight.serving.sender import Sender
from inflight.text.stop_strings import StopStrings
from inflight.triton.responses import ResponseBuilder
from tests.tensors.factories import make_prompt, make_request
from tests.triton.factories import FakeEngineClient, make_entry, make_reply, make_response
from tests.triton.fake_pb_utils import FakePbUtils, InferenceResponse, ResponseSender, Sent, TritonError
from tests.triton.letters import letter_tokenizer


class CountingBudget(ResponseBudget):
    """Records the released tickets, and refuses sends while `is_full` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[int] = []
        self.is_full = False

    @contextmanager
    def sending(self, ticket: int, sizes: Iterable[tuple[str, int]]) -> Iterator[None]:
        if self.is_full and list(sizes):  # an error has no tensors
            raise Unavailable("no room for it any more")
        yield

    def release(self, ticket: int) -> None:
        self.released.append(ticket)


class Desk:
    """A sender between a fake engine and fake clients."""

    def __init__(self) -> None:
        self.client = FakeEngineClient()
        self.in_flight = InFlight(self.client)
        self.budget = CountingBudget()
        self.tickets = itertools.count(1)
        self.sender = Sender(self.in_flight, ResponseBuilder(FakePbUtils()), self.budget)

    def start(
        self, stream: ResponseSender, client_request_id: str = "", reply: Reply | None = None, size: int = 1
    ) -> InFlightRequest:
        entry = make_entry(client_request_id, stream, reply)
        entry.ticket = next(self.tickets)
        self.in_flight.start(entry, [make_request()] * size, self.sender.put)
        return entry

    def respond(
        self, entry: InFlightRequest, ids: list[int], reason: FinishReason | None = None, index: int = 0
    ) -> None:
        self.client.respond(make_response(entry.engine_ids[index], ids, reason))


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.sender.close()


def ids_of(sent: list[Sent]) -> list[int]:
    tokens: list[int] = []
    for one in sent:
        assert one.response is not None
        tokens += one.response.arrays()["output_ids"].ravel().tolist()
    return tokens


def code_of(sent: Sent) -> int | None:
    error = sent.response.error() if sent.response else None
    return error.code() if error else None


def test_tokens_arrive_in_order_and_the_last_response_is_final(desk: Desk) -> None:
    stream = ResponseSender()
    entry = desk.start(stream)
    for token in range(5):
        desk.respond(entry, [token])
    desk.respond(entry, [5], FinishReason.LENGTH)
    sent = stream.wait_final()
    assert ids_of(sent) == [0, 1, 2, 3, 4, 5]
    assert [one.is_final for one in sent] == [False] * (len(sent) - 1) + [True]
    last = sent[-1].response
    assert last is not None and last.arrays()["finish_reason"].tolist() == [[b"LENGTH"]]


class SlowSender(ResponseSender):
    """Blocks the sender thread in its first send until the test releases it."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk
        self.behind: list[tuple[InFlightRequest, list[int], FinishReason | None]] = []

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        super().send(response, flags)
        for entry, ids, reason in self.behind:
            self.desk.respond(entry, ids, reason)
        self.behind = []


def test_waiting_responses_of_a_stream_are_merged(desk: Desk) -> None:
    slow = SlowSender(desk)
    other = ResponseSender()
    entry, second = desk.start(slow), desk.start(other)
    end = FinishReason.END_ID
    slow.behind = [
        (second, [20], None),
        (entry, [11], None),
        (second, [21], None),
        (entry, [12], None),
        (entry, [], end),
        (second, [], end),
    ]
    desk.respond(entry, [10])
    lengths = [one.response.arrays()["sequence_length"].tolist() for one in slow.wait_final() if one.response]
    assert lengths == [[[1]], [[2]]]
    assert ids_of(slow.sent) == [10, 11, 12]
    assert ids_of(other.wait_final()) == [20, 21] and len(other.sent) == 1


class BusyEngine:
    """Makes tokens for every stream during each send, for a number of sends.

    Attributes:
        sends: Stream and number of tokens of each response that was sent.
    """

    def __init__(self, desk: Desk, tokens_per_send: int, num_sends: int) -> None:
        self.desk = desk
        self.tokens_per_send = tokens_per_send
        self.num_sends = num_sends
        self.entries: list[InFlightRequest] = []
        self.sends: list[tuple[int, int]] = []
        self.num_made = 0

    def sent(self, stream: int, num_tokens: int) -> None:
        self.sends.append((stream, num_tokens))
        if len(self.sends) > self.num_sends:
            return
        for _ in range(self.tokens_per_send):
            self.num_made += 1
            for entry in self.entries:
                self.desk.respond(entry, [self.num_made])
        if len(self.sends) == self.num_sends:
            for entry in self.entries:
                self.desk.respond(entry, [], FinishReason.END_ID)


class BusySender(ResponseSender):
    """One stream of a BusyEngine."""

    def __init__(self, engine: BusyEngine, stream: int) -> None:
        super().__init__()
        self.engine = engine
        self.stream = stream

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        super().send(response, flags)
        assert response is not None
        self.engine.sent(self.stream, response.arrays()["sequence_length"].item())


@pytest.mark.parametrize("num_streams", [1, 2, 16])
@pytest.mark.parametrize("tokens_per_send", [1, 3])
def test_a_stream_waits_for_at_most_one_response_of_each_other_stream(
    desk: Desk, num_streams: int, tokens_per_send: int
) -> None:
    """The lag of a stream is bounded by the number of streams, and all streams have the same bound."""
    engine = BusyEngine(desk, tokens_per_send, num_sends=6 * num_streams)
    streams = [BusySender(engine, number) for number in range(num_streams)]
    engine.entries = [desk.start(stream) for stream in streams]
    desk.respond(engine.entries[0], [0])
    received = [ids_of(stream.wait_final()) for stream in streams]
    made = [*range(1, engine.num_made + 1)]
    assert received == [[0, *made]] + [made] * (num_streams - 1)
    order = [stream for stream, _ in engine.sends[1:]]
    assert order == [number % num_streams for number in range(len(order))]
    once_around = engine.sends[1 + num_streams : engine.num_sends]
    assert {count for _, count in once_around} == {num_streams * tokens_per_send}


def test_an_error_keeps_its_code(desk: Desk) -> None:
    stream = ResponseSender()
    entry = desk.start(stream)
    desk.client.respond(Response(entry.engine_ids[0], error=StepFailed("device lost"), is_final=True))
    assert code_of(stream.wait_final()[-1]) == TritonError.INTERNAL


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Ending.CLIENT_GONE, TritonError.CANCELLED),
        (Ending.SEND_FAILED, TritonError.INTERNAL),
        (Ending.UNLOAD, TritonError.UNAVAILABLE),
    ],
)
def test_a_request_ended_by_the_front_end_ends_with_an_error(desk: Desk, ending: Ending, code: int) -> None:
    stream = ResponseSender()
    desk.in_flight.cancel(desk.start(stream), ending)
    sent = stream.wait_final()
    assert [code_of(one) for one in sent] == [code]


def test_a_stopped_request_ends_normally(desk: Desk) -> None:
    stream = ResponseSender()
    desk.start(stream, "a")
    desk.in_flight.stop("a")
    (last,) = stream.wait_final()
    assert last.response is not None and not last.response.has_error()
    assert last.response.arrays()["finish_reason"].tolist() == [[b"CANCELLED"]]
    assert last.response.arrays()["output_ids"].shape == (1, 1, 0)


def test_a_request_cancelled_by_the_front_end_ends_with_an_error_despite_a_final_response(desk: Desk) -> None:
    """Later responses are not sent, so a normal ending would hide a gap."""
    stream = ResponseSender()
    entry = desk.start(stream)
    desk.client.answers_stops = False
    desk.in_flight.cancel(entry)
    desk.respond(entry, [8])
    desk.respond(entry, [9], FinishReason.END_ID)
    assert [code_of(one) for one in stream.wait_final()] == [TritonError.CANCELLED]


def test_the_id_is_free_when_the_final_response_arrives(desk: Desk) -> None:
    seen: list[object] = []

    class LookingSender(ResponseSender):
        def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
            seen.append(desk.in_flight.find_arrival(entry.engine_ids[0], is_final=False))
            super().send(response, flags)

    stream = LookingSender()
    entry = desk.start(stream, "a")
    desk.respond(entry, [8])
    desk.respond(entry, [], FinishReason.END_ID)
    stream.wait_final()
    assert seen[-1] is None


def test_a_request_whose_client_cannot_be_answered_is_dropped(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "inflight.serving.sender")
    stream = ResponseSender()
    stream.failures = [RuntimeError("gone")]
    entry = desk.start(stream)
    desk.respond(entry, [8])
    (last,) = stream.wait_final()
    assert last.is_final and code_of(last) == TritonError.INTERNAL
    assert desk.client.stopped == [(entry.engine_ids[0], desk.client.stopped[0][1])]
    assert len(caplog.messages) == 1 and "gone" in caplog.messages[0]


def test_a_final_response_that_cannot_be_sent_still_ends_the_request(desk: Desk) -> None:
    stream = ResponseSender()
    stream.failures = [RuntimeError("too large")]
    desk.respond(desk.start(stream), [8], FinishReason.LENGTH)
    (last,) = stream.wait_final()
    assert last.is_final and last.response is None


def test_a_failure_of_decoding_ends_one_request_only(desk: Desk) -> None:
    def fail() -> CompletionText:
        raise KeyError("no such token")

    broken, fine = ResponseSender(), ResponseSender()
    first, second = desk.start(broken, reply=make_reply(new_text=fail)), desk.start(fine)
    desk.respond(first, [8], FinishReason.LENGTH)
    desk.respond(second, [9], FinishReason.LENGTH)
    assert code_of(broken.wait_final()[-1]) == TritonError.INTERNAL
    assert ids_of(fine.wait_final()) == [9]


def two_prompts(in_one: bool = False) -> Reply:
    return make_reply(make_prompt(), make_prompt(), in_one=in_one)


def test_a_batch_ends_with_its_last_prompt(desk: Desk) -> None:
    stream = ResponseSender()
    entry = desk.start(stream, reply=two_prompts(), size=2)
    desk.respond(entry, [8], index=1)
    desk.respond(entry, [9], FinishReason.LENGTH, index=1)
    desk.respond(entry, [5], FinishReason.LENGTH, index=0)
    sent = stream.wait_final()
    indexes = [one.response.arrays()["batch_index"].item() for one in sent if one.response]
    assert indexes[-1] == 0 and set(indexes[:-1]) == {1}
    assert ids_of(sent) == [8, 9, 5]
    assert [one.is_final for one in sent] == [False] * (len(sent) - 1) + [True]


def test_a_batch_is_answered_in_one_response(desk: Desk) -> None:
    stream = ResponseSender()
    entry = desk.start(stream, reply=two_prompts(in_one=True), size=2)
    desk.respond(entry, [8, 9], FinishReason.LENGTH, index=1)
    desk.respond(entry, [5], FinishReason.END_ID, index=0)
    (sent,) = stream.wait_final()
    assert sent.response is not None
    assert sent.response.arrays()["output_ids"].tolist() == [[[5, -1]], [[8, 9]]]


@pytest.mark.parametrize("in_one", [True, False], ids=["in one", "apart"])
def test_an_error_of_one_prompt_ends_the_batch(desk: Desk, in_one: bool) -> None:
    stream = ResponseSender()
    entry = desk.start(stream, "a", two_prompts(in_one), size=2)
    desk.client.respond(Response(entry.engine_ids[1], error=StepFailed("device lost"), is_final=True))
    assert [code_of(one) for one in stream.wait_final()] == [TritonError.INTERNAL]
    desk.start(ResponseSender(), "a")
    desk.sender.close()
    assert [engine_id for engine_id, _ in desk.client.stopped] == [entry.engine_ids[0]]
    assert len(stream.sent) == 1


def test_a_cancelled_batch_ends_once(desk: Desk) -> None:
    stream = ResponseSender()
    desk.in_flight.cancel(desk.start(stream, reply=two_prompts(), size=2))
    assert [code_of(one) for one in stream.wait_final()] == [TritonError.CANCELLED]


def test_a_stop_string_stops_the_engine(desk: Desk) -> None:
    stop_strings = StopStrings(["d"])
    reply = make_reply(new_text=lambda: CompletionText(letter_tokenizer(), (), stop_strings=stop_strings))
    stream = ResponseSender()
    entry = desk.start(stream, reply=reply)
    desk.respond(entry, letter_tokenizer().encode("cde"))  # the stop makes this the final response
    sent = stream.wait_final()
    assert desk.client.stopped == [(entry.engine_ids[0], StopReason.STOP_WORDS, 0)]
    assert [one.response.arrays()["finish_reason"].item() for one in sent] == [b"STOP_WORDS"] * 2
    assert ids_of(sent) == letter_tokenizer().encode("cd")


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, None], ids=["the last", "one of a stream"])
def test_a_response_without_shared_memory_is_replaced_by_an_error(
    desk: Desk, reason: FinishReason | None
) -> None:
    """No response was sent yet, so the error can be sent in its place."""
    stream = ResponseSender()
    entry = desk.start(stream)
    desk.budget.is_full = True
    desk.respond(entry, [8], reason)
    assert [code_of(one) for one in stream.wait_final()] == [TritonError.UNAVAILABLE]


def test_the_reservation_of_a_response_is_released_once_it_is_sent(desk: Desk) -> None:
    fine, broken, batch = ResponseSender(), ResponseSender(), ResponseSender()
    broken.failures = [RuntimeError("too large")]
    desk.respond(desk.start(fine), [8], FinishReason.LENGTH)
    desk.respond(desk.start(broken), [8], FinishReason.LENGTH)
    entry = desk.start(batch, reply=two_prompts(), size=2)
    desk.client.respond(Response(entry.engine_ids[1], error=StepFailed("device lost"), is_final=True))
    desk.sender.close()
    assert desk.budget.released == [1, 2, 3]


def test_close_sends_waiting_responses() -> None:
    desk = Desk()
    streams = [ResponseSender() for _ in range(20)]
    for stream in streams:
        desk.respond(desk.start(stream), [8], FinishReason.LENGTH)
    desk.sender.close()
    assert all(len(stream.sent) == 1 for stream in streams)


def test_a_response_to_an_unknown_id_is_ignored(desk: Desk) -> None:
    desk.sender.put(make_response(12345, [1], FinishReason.END_ID))
    stream = ResponseSender()
    desk.respond(desk.start(stream), [8], FinishReason.LENGTH)
    assert np.array_equal(ids_of(stream.wait_final()), [8])
