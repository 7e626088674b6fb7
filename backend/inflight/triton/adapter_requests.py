"""Answers requests that list, load or unload adapters: a command in, all adapters out, as JSON.

Owns the thread that waits for the engine meanwhile, since a command may take as long as files do, and the form of
the answer. Does not know what a command does.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from inflight.core.ports import EngineClient
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.errors import InflightError, unexpected
from inflight.triton.responses import ResponseBuilder, TritonStream

_log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
"""How long a command may take; a large adapter takes seconds to read."""


class AdapterRequests:
    """The commands of one model's clients, carried out one after another."""

    def __init__(self, client: EngineClient, responses: ResponseBuilder) -> None:
        self._client = client
        self._responses = responses
        self._thread = ThreadPoolExecutor(1, "inflight-adapters")

    def ask(self, stream: TritonStream, command: AdapterCommand) -> None:
        """Have a command carried out and `stream` answered, soon; never waits."""
        self._thread.submit(self._answer, stream, command)

    def close(self) -> None:
        """Answer what was asked and end the thread; quick where the client is closed already. Idempotent."""
        self._thread.shutdown()

    def _answer(self, stream: TritonStream, command: AdapterCommand) -> None:
        try:
            answer = self._carry_out(command)
            if isinstance(answer, InflightError):
                stream.fail(answer)
            else:
                stream.finish(self._responses.text("adapters", answer))
        except Exception as error:  # whatever Triton raises: nothing is left to tell this client
            _log.debug("the answer to a command could not be sent: %r", error)

    def _carry_out(self, command: AdapterCommand) -> str | InflightError:
        try:
            return as_json(self._client.adapters(command, _TIMEOUT_S))
        except InflightError as error:
            return error
        except Exception as error:  # a bug, and whoever asked waits for an answer
            _log.exception("a command could not be carried out")
            return unexpected("the command could not be carried out", error)


def as_json(adapters: Iterable[AdapterState]) -> str:
    """The answer: {"adapters": [{"name", "task_id", "path", "is_loaded", "rank", "num_bytes"}, …]}.

    Those that could not be loaded have a `problem` too.
    """
    told = [dataclasses.asdict(each) for each in adapters]
    return json.dumps({"adapters": [{k: v for k, v in each.items() if k != "problem" or v} for each in told]})
