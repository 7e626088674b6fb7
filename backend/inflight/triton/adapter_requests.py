"""Answer requests that list, load or unload adapters with the state of all adapters, as JSON.

Owns the thread that waits for the engine, because reading an adapter's files can take seconds, and the JSON
format of the answer. The engine executes the commands.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from inflight.core.ports import EngineClient
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.errors import InflightError, unexpected
from inflight.triton.responses import ResponseBuilder, TritonStream

_log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
"""Timeout of a command in seconds. Reading a large adapter takes several seconds."""


class AdapterRequests:
    """Runs the adapter commands of one model's clients, one after another, on its own thread."""

    def __init__(self, client: EngineClient, responses: ResponseBuilder) -> None:
        self._client = client
        self._responses = responses
        self._thread = ThreadPoolExecutor(1, "inflight-adapters")

    def ask(self, stream: TritonStream, command: AdapterCommand) -> None:
        """Queue a command, and answer `stream` when it is done. Never blocks."""
        # In the caller's context, so that log lines name the request.
        self._thread.submit(copy_context().run, self._answer, stream, command)

    def close(self) -> None:
        """Answer all queued commands and end the thread, quickly if the client is closed. Idempotent."""
        self._thread.shutdown()

    def _answer(self, stream: TritonStream, command: AdapterCommand) -> None:
        try:
            answer = self._carry_out(command)
            if isinstance(answer, InflightError):
                stream.fail(answer)
            else:
                stream.finish(self._responses.text("adapters", answer))
        except Exception as error:  # Triton may raise anything, and this client can no longer be answered
            _log.debug("the answer to a command could not be sent: %r", error)

    def _carry_out(self, command: AdapterCommand) -> str | InflightError:
        try:
            return as_json(self._client.adapters(command, _TIMEOUT_S))
        except InflightError as error:
            return error
        except Exception as error:  # a bug; the client still needs an answer
            _log.exception("a command could not be carried out")
            return unexpected("the command could not be carried out", error)


def as_json(adapters: Iterable[AdapterState]) -> str:
    """Return the answer as JSON: {"adapters": [{"name", "task_id", "path", "is_loaded", "rank", "num_bytes"}, …]}.

    The entry of an adapter that could not be loaded also has the error message, as `problem`.
    """
    told = [dataclasses.asdict(each) for each in adapters]
    return json.dumps({"adapters": [{k: v for k, v in each.items() if k != "problem" or v} for each in told]})
