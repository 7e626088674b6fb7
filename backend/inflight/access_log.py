"""The access log: one line for each request, of Triton's endpoints as well as of /v1.

    I1127 11:49:05.678794 8790 access] request_id=7f3a front=openai model=tiny-1b client=127.0.0.1:4711
        prompt_tokens=12 output_tokens=40 finish_reason=LENGTH first_token_ms=12.3 total_ms=345.6

(in the log this is one line). The engine client writes it when it passes on the final response; a front end
writes it for a request that it refuses itself. Lines contain no prompts and no output, and no error messages,
because these may quote them.

`leave` and `refuse` only put a few values into a queue. One thread per AccessLog takes them out, makes the
lines and writes them, so that a slow log delays no request. If too many lines wait, further ones are
dropped and counted. The thread is started by the first request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TextIO

from inflight.core.ports import SendResponseCallback
from inflight.core.request.request import Origin, Request
from inflight.core.request.response import RequestEnding, Response
from inflight.core.request.stop import FinishReason
from inflight.log_lines import ACCESS, ACCESS_LOG_VARIABLE, LineFormatter, Value, format_fields
from inflight.tracing import EndedRequest, Tracer

LOGGER = logging.getLogger("inflight.access")
"""The logger of all access lines; a record's attribute `fields` has the values by name."""

_MAX_WAITING = 10_000
_END_S = 1.0
_NS_PER_MS = 1e6


def write_access_lines(stream: TextIO) -> None:
    """Let this process write access lines to `stream`, unless the environment switches them off. Idempotent.

    A program that does not call this, such as one that uses the Executor, gets the lines from `LOGGER` at the
    level INFO, as it has configured logging.
    """
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO if os.environ.get(ACCESS_LOG_VARIABLE) != "0" else logging.CRITICAL)
    if not LOGGER.handlers:
        handler = _Handler(stream)
        handler.setFormatter(LineFormatter(ACCESS))
        LOGGER.addHandler(handler)


def random_id() -> str:
    """Return an id for a request whose client gave none."""
    return uuid.uuid4().hex


class _Handler(logging.Handler):
    """A handler that writes each line in one call, so that lines of several processes do not mix."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            self._stream.write(f"{self.format(record)}\n")
            self._stream.flush()


@dataclass(frozen=True, slots=True)
class AccessEntry:
    """A request that has been accepted.

    Attributes:
        origin: The request's origin.
        num_prompt_tokens: Number of its prompt tokens.
        begun_ns: When it was received, in monotonic nanoseconds.
    """

    origin: Origin
    num_prompt_tokens: int
    begun_ns: int

    @property
    def log_extra(self) -> dict[str, str]:
        """The argument `extra` of other log lines about the request."""
        return self.origin.log_extra


@dataclass(frozen=True, slots=True)
class _Line:
    """The values that the thread needs for one line."""

    entry: AccessEntry
    fields: Mapping[str, Value]
    ending: RequestEnding
    wall_s: float
    end_ns: int


class AccessLog:
    """Writer of access lines, on a thread of its own. All methods may be called on any thread.

    Args:
        tracer: Records the spans of requests that reached the engine; None: no spans are recorded.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        # An event is set when the lines before it are written; None ends the thread.
        self._lines: SimpleQueue[_Line | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_dropped = 0

    @staticmethod
    def enter(request: Request, request_id: int) -> AccessEntry | None:
        """Return the entry of an accepted request; None if it gets no line.

        Args:
            request: The request. Without an origin it gets no line.
            request_id: The engine's id, used if the client's is unknown.
        """
        origin = request.origin
        if origin is None:
            return None
        if not origin.request_id:
            origin = replace(origin, request_id=str(request_id))
        return AccessEntry(origin, request.prompt_length, origin.received_ns or time.monotonic_ns())

    def leave(self, entry: AccessEntry | None, response: Response) -> None:
        """Write the line of a request whose final response is `response`. Never blocks."""
        if entry is None or not (self._tracer or LOGGER.isEnabledFor(logging.INFO)):
            return
        ending = response.ending or _ending_of(response)
        fields: dict[str, Value] = {} if response.error is None else {"code": response.error.code}
        self._put(_Line(entry, fields, ending, time.time(), time.monotonic_ns()))

    def refuse(self, origin: Origin | None, **fields: Value) -> None:
        """Write the line of a request that did not reach the engine. Never blocks.

        Args:
            origin: The request's origin; None: no line.
            fields: The reason for the refusal.
        """
        if origin is not None and LOGGER.isEnabledFor(logging.INFO):
            entry = AccessEntry(origin, 0, origin.received_ns or time.monotonic_ns())
            self._put(_Line(entry, fields, RequestEnding(), time.time(), time.monotonic_ns()))

    def follow(
        self, request: Request, request_id: int, on_response: SendResponseCallback
    ) -> SendResponseCallback:
        """Return `on_response`, wrapped so that the request gets its line from its responses alone."""
        entry = self.enter(request, request_id)
        if entry is None:
            return on_response
        count = _ResponseCount()

        def count_and_pass_on(response: Response) -> None:
            count.add(response)
            try:
                on_response(response)
            finally:
                if response.is_final:
                    self.leave(entry, replace(response, ending=count.ending()))

        return count_and_pass_on

    def flush(self) -> None:
        """Write the waiting lines and send their spans, for at most three seconds."""
        if self._thread is not None:
            are_written = threading.Event()
            self._lines.put(are_written)
            are_written.wait(_END_S)
        if self._tracer is not None:
            self._tracer.flush()

    def close(self) -> None:
        """Write the waiting lines, for at most a second, and end the thread. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._lines.put(None)
            thread.join(_END_S)
        if self._tracer is not None:
            self._tracer.close()

    def _put(self, line: _Line) -> None:
        if self._lines.qsize() >= _MAX_WAITING:
            self._num_dropped += 1
            return
        self._lines.put(line)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                LOGGER.info(format_fields({"dropped_lines": dropped}))
            if LOGGER.isEnabledFor(logging.INFO):
                _write(line)
            if self._tracer is not None:
                self._tracer.record(_ended(line))


class _ResponseCount:
    """Counts a request's tokens in its responses."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._first_token_ns = 0

    def add(self, response: Response) -> None:
        """Add a response's tokens and finish reason to the counts."""
        result = response.result
        if result is None:
            return
        before = 0 if result.is_cumulative else self._tokens.get(result.sequence_index, 0)
        self._tokens[result.sequence_index] = before + sum(result.num_output_tokens)
        self._reasons[result.sequence_index] = result.finish_reasons[0]
        if not self._first_token_ns and not result.is_sequence_final and sum(result.num_output_tokens):
            self._first_token_ns = time.monotonic_ns()

    def ending(self) -> RequestEnding:
        """Return the counts so far."""
        return RequestEnding(sum(self._tokens.values()), tuple(self._reasons.values()), self._first_token_ns)


def _ending_of(response: Response) -> RequestEnding:
    """Return the ending of a request that ended before it started."""
    return RequestEnding() if response.result is None else RequestEnding(0, response.result.finish_reasons)


def _ended(line: _Line) -> EndedRequest:
    """Return the request of a line, for its spans."""
    ended_ns = round(line.wall_s * 1e9)
    clock_ns = ended_ns - line.end_ns
    return EndedRequest(
        line.entry.origin,
        line.ending,
        line.entry.num_prompt_tokens,
        str(line.fields.get("code", "")),
        line.entry.begun_ns + clock_ns,
        ended_ns,
        clock_ns,
    )


def _write(line: _Line) -> None:
    origin, ending = line.entry.origin, line.ending
    reasons = dict.fromkeys(reason.name for reason in ending.finish_reasons)
    has_failed = "code" in line.fields or "status" in line.fields
    fields: dict[str, Value] = {"request_id": origin.request_id, "front": origin.front}
    fields |= {"model": origin.model} if origin.model else {}
    fields |= {"client": origin.client} if origin.client else {}
    fields |= {
        "prompt_tokens": line.entry.num_prompt_tokens,
        "output_tokens": ending.num_output_tokens,
        "finish_reason": "ERROR" if has_failed else ",".join(reasons) or "ERROR",
        **line.fields,
    }
    if ending.first_token_ns:
        fields["first_token_ms"] = _milliseconds(ending.first_token_ns - line.entry.begun_ns)
    fields["total_ms"] = _milliseconds(line.end_ns - line.entry.begun_ns)
    record = LOGGER.makeRecord(
        LOGGER.name, logging.INFO, "", 0, format_fields(fields), (), None, extra={"fields": fields}
    )
    record.created = line.wall_s
    LOGGER.handle(record)


def _milliseconds(duration_ns: int) -> float:
    return round(max(0, duration_ns) / _NS_PER_MS, 1)
