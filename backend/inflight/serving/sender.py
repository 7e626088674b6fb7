"""The thread that answers: takes responses as the engine makes them and hands them to their clients.

Owns the sending of everything but refusals and what needs no engine. A send may cost more than the engine may wait
for, so the engine only puts responses into a delivery; streams that have fallen behind, as they do where the model
computes on all processors, get what waits for them in one response, the longest-waiting first. Text is made here
too. Does not know where responses come from, nor the clients' protocol.
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
from inflight.serving.background import give_way
from inflight.serving.in_flight import Arrival, Ending, InFlight, error_of_ending
from inflight.serving.response_size import ResponseBudget

_log = logging.getLogger(__name__)


class ResponseMaker(Protocol):
    """Makes a protocol's responses, which `ClientStream.send` and `finish` take."""

    def outputs(self, outputs: Sequence[Output]) -> Any:
        """One response with all these outputs."""
        ...

    def tensor_sizes(self, response: Any) -> Iterable[tuple[str, int]]:
        """Tell (name, bytes) of all in a response that takes shared memory on its way; see `response_size`."""
        ...


class Sender:
    """Sends on one thread, from construction to `close`.

    Args:
        in_flight: Where the clients of responses are found.
        responses: Makes the responses of the clients' protocol.
        budget: Knows whether there is room for a response, and gets it back when a request has been answered.
        stream_interval: How many tokens a streamed response waits for, `Delivery`'s `interval`.
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
        # One at a time: what still waits goes on joining.
        self._delivery: Delivery[Response] = Delivery(limit=1, interval=stream_interval)
        self._thread = threading.Thread(target=self._run, name="inflight-sender", daemon=True)
        self._thread.start()

    def put(self, response: Response) -> None:
        """Queue one response of the engine's; never waits."""
        self._delivery.put(response)

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait until all that was put here has been sent, for `timeout_s` at most; returns whether it has.

        What `stream_interval` holds back does not count. Any thread.
        """
        return self._delivery.wait_until_sent(timeout_s)

    def close(self) -> None:
        """Send what waits and end the thread."""
        self._delivery.close()
        self._thread.join()

    def _run(self) -> None:
        give_way()
        self._delivery.run(self._deliver_all)

    def _deliver_all(self, responses: Sequence[Response]) -> None:
        for response in responses:
            self._deliver(response)

    def _deliver(self, response: Response) -> None:
        arrival = self._in_flight.arrive(response.request_id, response.is_final)
        if arrival is None:
            return
        if response.result is None and not arrival.is_last:
            # One prompt of a batch has failed: so has the request, and the others work for nobody.
            self._in_flight.abandon(arrival.entry)
            arrival = replace(arrival, is_last=True)
        if arrival.entry.ending is not Ending.NONE and not arrival.is_last:
            return
        try:
            self._send(arrival, response)
        except Exception as error:  # whatever making or sending it raises, other clients are still answered
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
        """Make a response of the clients' protocol; None if there is nothing to send yet."""
        entry = arrival.entry
        outputs = entry.reply.add(arrival.batch_index, result, arrival.is_last)
        if not result.is_sequence_final and entry.reply.has_just_stopped:
            entry.handles[arrival.batch_index].stop(StopReason.STOP_WORDS, result.sequence_index)
        return self._responses.outputs(outputs) if outputs else None

    def _give_up(self, arrival: Arrival, error: Exception) -> None:
        """Answer with an error because a response could not be made or sent, and stop the request."""
        entry = arrival.entry
        _log.debug("request %s could not be answered: %r", entry, error)
        failed = error if isinstance(error, InflightError) else unexpected("response not sent", error)
        if not arrival.is_last:
            entry.send_failure = failed
            self._in_flight.cancel(entry, Ending.SEND_FAILED)
            return
        try:
            entry.stream.fail(failed)
        except Exception as last:  # whatever it is, nothing is left to tell this client
            _log.debug("request %s could not be ended: %r", entry, last)
