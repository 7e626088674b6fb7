"""The sender thread, which takes the engine's responses and sends them to their clients.

It sends all responses except refusals and answers that need no engine, and detokenizes texts. A send may
take longer than the engine can wait, so the engine only puts responses into a delivery. If a stream falls
behind, as with a model that computes on all processors, its waiting responses are merged; the streams that
have waited longest are served first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.stop import StopReason
from inflight.endpoint.delivery import Delivery
from inflight.errors import InflightError, StepFailed, unexpected
from inflight.prompt import Output
from inflight.serving.background import lower_priority
from inflight.serving.in_flight import Arrival, Ending, InFlight, error_of_ending
from inflight.serving.response_size import ResponseBudget

_log = logging.getLogger(__name__)


class ResponseMaker(Protocol):
    """Makes a protocol's responses, for `ClientStream.send` and `ClientStream.finish`."""

    def make_response(self, outputs: Sequence[Output]) -> Any:
        """Return one response with all these outputs."""
        ...

    def tensor_sizes(self, response: Any) -> Iterable[tuple[str, int]]:
        """Return (name, bytes) of each part of a response that uses shared memory; see `response_size`."""
        ...


class Sender:
    """Sends responses on a thread of its own, from construction to `close`.

    Args:
        in_flight: Registry of requests in flight, with their clients.
        responses: Makes responses of the clients' protocol.
        budget: Checks before a send that there is enough shared memory; reserved memory is released after the
            answer.
        stream_interval: Number of tokens in each streamed response, the `interval` of `Delivery`.
    """

    def __init__(
        self,
        in_flight: InFlight,
        responses: ResponseMaker,
        budget: ResponseBudget,
        stream_interval: int = 1,
    ) -> None:
        self._in_flight = in_flight
        self._responses = responses
        self._budget = budget
        # One response at a time is taken, so that the waiting responses can still be merged.
        self._delivery: Delivery[Response] = Delivery(limit=1, interval=stream_interval)
        self._thread = threading.Thread(target=self._run, name="inflight-sender", daemon=True)
        self._thread.start()

    def put(self, response: Response) -> None:
        """Queue one response from the engine; never blocks."""
        self._delivery.put(response)

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until all queued responses are sent; return whether they are.

        Responses held back by `stream_interval` do not count. Any thread.
        """
        return self._delivery.wait_until_sent(timeout_s)

    def close(self) -> None:
        """Send the waiting responses and end the thread."""
        self._delivery.close()
        self._thread.join()

    def _run(self) -> None:
        lower_priority()
        self._delivery.run(self._deliver_all)

    def _deliver_all(self, responses: Sequence[Response]) -> None:
        for response in responses:
            self._deliver(response)

    def _deliver(self, response: Response) -> None:
        arrival = self._in_flight.find_arrival(response.request_id, response.is_final)
        if arrival is None:
            return
        if response.result is None and not arrival.is_last:
            # One failed prompt fails the whole request: end its other prompts.
            self._in_flight.abandon(arrival.entry)
            arrival = replace(arrival, is_last=True)
        if arrival.entry.ending is not Ending.NONE and not arrival.is_last:
            return
        try:
            self._send(arrival, response)
        except Exception as error:  # whatever the error, other clients must still be answered
            self._give_up(arrival, error)
        if arrival.is_last:
            self._budget.release(arrival.entry.ticket)

    def _send(self, arrival: Arrival, response: Response) -> None:
        entry, stream = arrival.entry, arrival.entry.stream
        if response.result is None:
            error = response.error or StepFailed("the engine gave no result")
            stream.fail(error.with_names(entry.shown_name))
            return
        if entry.ending is not Ending.NONE:
            stream.fail(entry.send_failure or error_of_ending(entry.ending))
            return
        message = self._message(arrival, response.result)
        if message is None:
            if arrival.is_last:
                stream.finish()
            return
        with self._budget.sending(arrival.entry.ticket, self._responses.tensor_sizes(message)):
            if arrival.is_last:
                stream.finish(message)
            else:
                stream.send(message)

    def _message(self, arrival: Arrival, result: SequenceResult) -> Any:
        """Return a response in the client's protocol; None if there is nothing to send yet."""
        entry = arrival.entry
        outputs = entry.reply.add(arrival.batch_index, result, arrival.is_last)
        if not result.is_sequence_final and entry.reply.has_just_stopped:
            entry.handles[arrival.batch_index].stop(StopReason.STOP_WORDS, result.sequence_index)
        return self._responses.make_response(outputs) if outputs else None

    def _give_up(self, arrival: Arrival, error: Exception) -> None:
        """Stop a request because a response could not be made or sent, and answer it with an error."""
        entry = arrival.entry
        _log.debug("request %s could not be answered: %r", entry, error, extra=entry.log_extra)
        failed = error if isinstance(error, InflightError) else unexpected("response not sent", error)
        if not arrival.is_last:
            entry.send_failure = failed
            self._in_flight.cancel(entry, Ending.SEND_FAILED)
            return
        try:
            entry.stream.fail(failed)
        except Exception as last:  # whatever the error, this client cannot be answered
            _log.debug("request %s could not be ended: %r", entry, last, extra=entry.log_extra)
