"""The thread that answers: takes responses as the engine makes them and hands them to Triton.

Owns the sending of everything but refusals. A send through the Python stub costs more than the engine may wait
for, so the engine only puts responses into a mailbox; streams that have fallen behind get what waits for them
in one response, the longest-waiting first. Text is made here too. Does not know where responses come from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from inflight.core.response import Response
from inflight.endpoint.mailbox import Mailbox
from inflight.errors import Cancelled, InflightError, StepFailed, Unavailable
from inflight.triton.in_flight import Ending, InFlight, InFlightRequest
from inflight.triton.responses import ResponseBuilder

_ERROR_OF_ENDING: dict[Ending, InflightError] = {
    Ending.CLIENT_GONE: Cancelled("the request was cancelled by its client"),
    Ending.SEND_FAILED: StepFailed("a response could not be sent"),
    Ending.UNLOAD: Unavailable("the model was unloaded before the request was done"),
}


class Sender:
    """One thread, from construction to `close`."""

    def __init__(self, in_flight: InFlight, responses: ResponseBuilder, log: Callable[[str], None]) -> None:
        """Args:
        in_flight: Where the clients of responses are found.
        responses: Makes Triton's responses.
        log: Takes a line about a client that could not be answered.
        """
        self._in_flight = in_flight
        self._responses = responses
        self._log = log
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name="inflight-sender", daemon=True)
        self._thread.start()

    def put(self, response: Response) -> None:
        """Take one response from the engine; never waits."""
        self._mailbox.put(response)

    def close(self) -> None:
        """Send what waits and end the thread."""
        self._mailbox.close()
        self._thread.join()

    def _run(self) -> None:
        # One at a time: what is not taken yet goes on joining.
        while waiting := self._mailbox.get(limit=1):
            for response in waiting:
                self._deliver(response)

    def _deliver(self, response: Response) -> None:
        take = self._in_flight.finish if response.is_final else self._in_flight.find
        entry = take(response.request_id)
        if entry is None or (entry.ending is not Ending.NONE and not response.is_final):
            return
        try:
            self._send(entry, response)
        except Exception as error:
            self._give_up(entry, response, error)

    def _send(self, entry: InFlightRequest, response: Response) -> None:
        message = self._message(entry, response)
        if response.is_final:
            entry.stream.finish(message)
        else:
            entry.stream.send(message)

    def _message(self, entry: InFlightRequest, response: Response) -> Any:
        result = response.result
        if result is None:
            return self._responses.error(response.error or StepFailed("the engine gave no result"))
        if entry.ending is not Ending.NONE:
            return self._responses.error(_ERROR_OF_ENDING[entry.ending])
        text = entry.text.add(result, response.is_final) if entry.text else None
        return self._responses.outputs(result, entry.options, text)

    def _give_up(self, entry: InFlightRequest, response: Response, error: Exception) -> None:
        """A response could not be made or sent: the client gets an error, and the engine stops working for it."""
        self._log(f"request {entry.triton_id or entry.engine_id} could not be answered: {error!r}")
        if not response.is_final:
            self._in_flight.cancel(entry, Ending.SEND_FAILED)
            return
        failed = error if isinstance(error, InflightError) else StepFailed(f"response not sent: {error!r}")
        try:
            entry.stream.finish(self._responses.error(failed))
        except Exception as last:
            self._log(f"request {entry.triton_id or entry.engine_id} could not be ended: {last!r}")
