"""Answers requests for the batcher's state, which may take as long as an iteration.

Owns one thread, from the first such request to `close`: execute must not wait. Those who ask while an answer is
being fetched share the next one. Does not know what the state says.
"""

from __future__ import annotations

import logging
import queue
import threading

from inflight.core.ports import EngineClient
from inflight.errors import InflightError, StepFailed
from inflight.triton.client_stream import ClientStream
from inflight.triton.responses import ResponseBuilder

TIMEOUT_S = 5.0
"""How long the loop may take to come round; then the answer says that it hangs, and where."""

_log = logging.getLogger(__name__)


class StateRequests:
    """`ask` and `close` belong to the thread that Triton calls the model on."""

    def __init__(self, client: EngineClient, responses: ResponseBuilder) -> None:
        self._client = client
        self._responses = responses
        self._streams: queue.SimpleQueue[ClientStream | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, stream: ClientStream) -> None:
        """Answer on `stream`, soon; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="inflight-state", daemon=True)
            self._thread.start()
        self._streams.put(stream)

    def close(self) -> None:
        """Answer what was asked and end the thread; quick where the client is closed already. Idempotent."""
        if self._thread is not None:
            self._streams.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (first := self._streams.get()) is not None:
            streams, is_last = self._take_more(first)
            answer = self._read()
            for one in streams:
                self._send(one, answer)
            if is_last:
                return

    def _take_more(self, first: ClientStream) -> tuple[list[ClientStream], bool]:
        """Everyone who waits, and whether the end came behind them."""
        streams = [first]
        while not self._streams.empty():
            following = self._streams.get()
            if following is None:
                return streams, True
            streams.append(following)
        return streams, False

    def _read(self) -> str | InflightError:
        try:
            return self._client.state(TIMEOUT_S)
        except InflightError as error:
            return error
        except Exception as error:
            _log.exception("the state could not be read")
            return StepFailed(f"the state could not be read: {error!r}")

    def _send(self, stream: ClientStream, answer: str | InflightError) -> None:
        try:
            # One response for each: Triton takes it over.
            if isinstance(answer, InflightError):
                stream.finish(self._responses.error(answer))
            else:
                stream.finish(self._responses.state(answer))
        except Exception as error:
            _log.debug("the state could not be sent: %r", error)
