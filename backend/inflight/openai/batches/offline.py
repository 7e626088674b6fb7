"""Answers a batch from outside of the server: requests are read from a file, and answers appended to another.

One event loop runs on the main thread, and each request waits for its answer on a thread of its own. Whatever the
process is interrupted by, the output has every answer that has come; the next run sends the other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import BinaryIO, TextIO

from inflight.errors import InflightError
from inflight.openai.batches.lines import (
    BadBatchLine,
    BatchAnswer,
    BatchRequest,
    answer_line,
    read_requests,
    resume_output,
)
from inflight.openai.batches.progress import BatchProgress
from inflight.openai.batches.sending import send_all, send_until_final

_FAILED, _INTERRUPTED = 1, 130
_CONNECT_TIMEOUT_S = 10.0
_SHOWN_FAILURES = 10
# A host that is gone is noticed after two minutes, although an answer may take hours.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


class BatchStopped(InflightError):
    """A batch that cannot go on now: the server does not answer, or refuses this client."""


def answer_batch(path: Path, output: Path, url: str, api_key: str, concurrency: int, retries: int) -> int:
    """Answer the requests of a file that have no answer in the output yet; write progress to stderr.

    Args:
        path: The requests, in OpenAI's batch format.
        output: File to which the answers are appended.
        url: The server's URL, without a path.
        api_key: API key that the requests get; "": none.
        concurrency: Number of requests in flight.
        retries: Number of further attempts after a failure that may be temporary.

    Returns:
        The exit status: 0 if every request of the file has succeeded, 130 after Ctrl-C, else 1.

    Raises:
        BadBatchLine: A line of either file is invalid. Nothing was sent.
        OSError: A file cannot be opened. Nothing was sent.
    """
    with path.open("rb") as file, _named(path):
        custom_ids = {request.custom_id for request in read_requests(file)}
    with output.open("ab") as answers:
        try:
            fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            error.filename, error.strerror = str(output), "another batch is writing to it"
            raise
        with _named(output):
            earlier = resume_output(output)
            for custom_id in earlier.keys() - custom_ids:
                message = (
                    f"it has an answer to {custom_id[:80]!r}, which is not in {path}: name another output"
                )
                raise BadBatchLine(None, None, message, "invalid_value")
        batch = _OfflineBatch(len(custom_ids), earlier, answers, sys.stderr)
        return batch.run(path, _ServerOfBatch(url, api_key), concurrency, retries)


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
    """Put the name of the file before the message of an error about one of its lines."""
    try:
        yield
    except BadBatchLine as error:
        raise BadBatchLine(None, error.field, f"{path}: {error}", error.error_code) from None


class _OfflineBatch:
    """One run of a batch.

    Args:
        num_requests: Number of requests in the input.
        earlier: The custom_ids that are answered, and for each whether the request succeeded.
        answers: The output, opened to append.
        log: Stream for progress and messages.
    """

    def __init__(self, num_requests: int, earlier: dict[str, bool], answers: BinaryIO, log: TextIO) -> None:
        self._num_requests = num_requests
        self._earlier = earlier.keys()
        self._answers = answers
        self._log = log
        self._num_answers = len(earlier)
        self._num_succeeded = sum(earlier.values())
        self._without_answer: list[str] = []
        self._is_away = False  # whether the last attempts failed because the server is away
        self._progress = BatchProgress(log, num_requests, len(earlier))

    def run(self, path: Path, server: _ServerOfBatch, concurrency: int, retries: int) -> int:
        """Send the requests; return the exit status."""
        if self._earlier:
            self._tell(f"{len(self._earlier)} of {self._num_requests} requests are already answered")
        try:
            if self._num_answers < self._num_requests:
                server.check()
                send = partial(self._send, server, retries)
                with path.open("rb") as file, self._progress:
                    left = (each for each in read_requests(file) if each.custom_id not in self._earlier)
                    asyncio.run(send_all(left, send, self._keep, concurrency))
        except (BatchStopped, BadBatchLine, OSError) as error:  # a file was changed, or the disk is full
            self._tell(str(error))
        except KeyboardInterrupt:
            self._summarize()
            self._log.flush()
            os._exit(_INTERRUPTED)  # at once, without the threads that wait for answers
        return self._summarize()

    async def _send(self, server: _ServerOfBatch, retries: int, request: BatchRequest) -> BatchAnswer:
        """Return the last answer; raise BatchStopped if no request was answered during all attempts."""
        num_answers = self._num_answers

        async def send_once(request: BatchRequest) -> BatchAnswer:
            return await _on_thread(partial(server.send, request))

        answer = await send_until_final(request, send_once, retries, self._retry)
        if answer.is_temporary and self._num_answers == num_answers:
            raise BatchStopped(f"the server answers no requests: {answer.message}")
        return answer

    def _retry(self, answer: BatchAnswer) -> None:
        if not self._is_away and answer.status != 429:  # a full queue is normal and is not reported
            self._is_away = True
            self._progress.write(f"batch: requests are sent again until the server answers: {answer.message}")

    def _keep(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Append a final answer to the output, unless the request may succeed if it is sent again later."""
        if answer.is_temporary:
            self._without_answer.append(f"{request.custom_id}: {answer.message}")
        else:
            self._answers.write(answer_line(request.custom_id, answer))
            self._answers.flush()
            self._is_away = False
            self._num_answers += 1
            self._num_succeeded += answer.is_success
        self._progress.add(answer.is_success)

    def _summarize(self) -> int:
        """Write how the run has ended; return the exit status."""
        for line in self._without_answer[:_SHOWN_FAILURES]:
            self._tell(f"no answer to {line}")
        num_failed, num_open = self._num_answers - self._num_succeeded, self._num_requests - self._num_answers
        self._tell(f"{self._num_succeeded} succeeded, {num_failed} failed: {self._answers.name}")
        if num_open:
            self._tell(f"{num_open} have no answer yet: run the same command again to send them")
        return _FAILED if num_failed or num_open else 0

    def _tell(self, message: str) -> None:
        self._log.write(f"batch: {message}\n")


class _ServerOfBatch:
    """Sends requests to a server, each over a connection of its own. Any thread.

    Args:
        url: The server's URL, without a path.
        api_key: API key that the requests get; "": none.
    """

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def check(self) -> None:
        """Raise BatchStopped if no server answers, or it refuses this client."""
        try:
            answer = self._ask("GET", "/v1/models", None)
        except (OSError, HTTPException) as error:
            raise BatchStopped(
                f"no server answers at {self._url}; inflight serve starts one ({error})"
            ) from None
        if answer.status in (401, 403, 404):
            raise BatchStopped(f"{self._url}/v1/models: {answer.message}")

    def send(self, request: BatchRequest) -> BatchAnswer:
        """Send one request and wait for its answer, however long that takes."""
        try:
            return self._ask("POST", request.url, request.encoded_body())
        except (OSError, HTTPException) as error:
            return BatchAnswer.none(f"no answer from {self._url} ({error})")

    def _ask(self, method: str, path: str, body: bytes | None) -> BatchAnswer:
        scheme, _, place = self._url.partition("://")
        kind = HTTPSConnection if scheme == "https" else HTTPConnection
        connection = kind(place, timeout=_CONNECT_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(None)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return BatchAnswer.read(
                response.status, response.headers.get("X-Request-Id", ""), response.read()
            )


async def _on_thread(work: Callable[[], BatchAnswer]) -> BatchAnswer:
    """Run a function on a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[BatchAnswer] = loop.create_future()

    def end(answer: BatchAnswer | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if answer is not None:
            done.set_result(answer)
        elif error is not None:
            done.set_exception(error)

    def run() -> None:
        answer, error = None, None
        try:
            answer = work()
        except Exception as caught:  # raised again on the loop's thread
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, answer, error)

    threading.Thread(target=run, name="batch-request", daemon=True).start()
    return await done
