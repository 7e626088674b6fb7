"""Asyncio interface of an engine client: runs prompts and yields their outputs as they arrive.

Owns the threads for calls that may block: few threads for computation, so that the event loop gets processor
time, and more threads for calls that wait for another process. Each stream has its own delivery, in which
unsent responses wait and are merged; the event loop is woken once for all responses that have arrived.
Responses arrive on the engine client's thread; all else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TypeVar

from inflight.core.ports import EngineClient
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Origin
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason
from inflight.endpoint.delivery import Delivery
from inflight.errors import Cancelled, StepFailed
from inflight.prompt import Output, Prompt
from inflight.serving.reply import NewText, Repetition, Reply

_T = TypeVar("_T")
_DELTAS = Repetition(log_probs=False, max_bytes=0)  # a response repeats nothing of earlier ones
_COMPUTING, _WAITING = 4, 64  # largest numbers of threads, which are started on demand


class EngineSession:
    """Runner of prompts on an engine, for coroutines of one event loop."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._computing = ThreadPoolExecutor(_COMPUTING, "inflight-computing")
        self._waiting = ThreadPoolExecutor(_WAITING, "inflight-waiting")
        self._stopping = ThreadPoolExecutor(1, "inflight-stopping")  # never waits for a tokenization
        self._lock = threading.Lock()
        self._news: list[asyncio.Event] = []  # events of streams, to be set on the event loop
        self._loop: asyncio.AbstractEventLoop | None = None

    async def compute(self, function: Callable[[], _T]) -> _T:
        """Run a function that computes, on another thread; return its result or raise its error."""
        return await _run(self._computing, function)

    def compute_later(self, function: Callable[[], object]) -> None:
        """Run `function` on a thread for computation later; ignore its result."""
        with contextlib.suppress(RuntimeError):  # closed
            self._computing.submit(function)

    async def wait_for(self, function: Callable[[], _T]) -> _T:
        """Run a function that waits for another process, on another thread; return its result or raise its error.

        The function does not delay functions given to `compute`.
        """
        return await _run(self._waiting, function)

    def open(
        self, prompts: Sequence[tuple[Prompt, NewText | None]], origin: Origin | None = None
    ) -> OutputStream:
        """Return a stream of the outputs of `prompts`, which come from `origin`.

        The prompts run from the stream's `start` to its `close`.
        """
        self._loop = asyncio.get_running_loop()
        return OutputStream(self, prompts, origin)

    def close(self) -> None:
        """End the threads. Functions that still wait for a thread are not called. Idempotent."""
        for pool in (self._computing, self._waiting):
            pool.shutdown(wait=True, cancel_futures=True)
        self._stopping.shutdown(wait=True)

    def stop_later(
        self,
        handles: Sequence[RequestHandle],
        reason: StopReason = StopReason.CANCELLED,
        sequence_index: int | None = None,
    ) -> None:
        """Stop requests, or one sequence of each, without waiting for the connection to the engine."""

        def stop() -> None:
            for handle in handles:
                handle.stop(reason, sequence_index)

        with contextlib.suppress(RuntimeError):  # closed, and its requests with it
            self._stopping.submit(stop)

    def notify(self, has_news: asyncio.Event) -> None:
        """Set `has_news` on the event loop, which is woken once for all waiting events.

        Any thread; never blocks.
        """
        with self._lock:
            self._news.append(has_news)
            is_first = len(self._news) == 1
        if is_first and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._notify_all)

    def _notify_all(self) -> None:
        with self._lock:
            news, self._news = self._news, []
        for has_news in news:
            has_news.set()


async def _run(threads: ThreadPoolExecutor, function: Callable[[], _T]) -> _T:
    """Run a function on another thread in the caller's context, so that its log lines name the request."""
    run = partial(copy_context().run, function)
    return await asyncio.get_running_loop().run_in_executor(threads, run)


class OutputStream:
    """The outputs of one client's request: an asynchronous iterator of lists of outputs to send together.

    The iterator raises the engine's error if a prompt fails, and Cancelled after `cancel`.
    """

    def __init__(
        self,
        session: EngineSession,
        prompts: Sequence[tuple[Prompt, NewText | None]],
        origin: Origin | None = None,
    ) -> None:
        self._session = session
        self._requests = [replace(prompt.request, origin=origin) for prompt, _ in prompts]
        self._reply = Reply(prompts, in_one=False, repetition=_DELTAS)
        self._num_unfinished = len(prompts)
        self._has_news = asyncio.Event()
        self._delivery: Delivery[Response] = Delivery(on_news=partial(session.notify, self._has_news))
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._handles: dict[int, tuple[int, RequestHandle]] = {}  # (batch index, handle) by request id
        self._is_closed = False

    @property
    def is_submitted(self) -> bool:
        """Whether the engine has got at least one of the requests."""
        return bool(self._handles)

    def __aiter__(self) -> OutputStream:
        return self

    async def start(self) -> None:
        """Submit the requests, until `close` is called.

        Raises the engine client's errors; requests that were already submitted are then stopped.
        """
        try:
            await self._session.wait_for(self._submit)
        except BaseException:  # cancellation included: submitted requests must not run on
            self.close()
            raise

    async def __anext__(self) -> list[Output]:
        while self._num_unfinished:
            await self._has_news.wait()
            self._has_news.clear()
            if self._is_cancelled:
                raise Cancelled("the request was cancelled by its client")
            outputs = self._take()
            if outputs:
                return outputs
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Cancel the requests because the client has gone; the iterator raises Cancelled."""
        self._is_cancelled = True
        self._has_news.set()
        self.close()

    def close(self) -> None:
        """Cancel requests that still run. Idempotent; quick if all have ended."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            running = [handle for _, handle in self._handles.values()] if self._num_unfinished else []
        if running:
            self._session.stop_later(running)

    def _submit(self) -> None:
        """Submit the requests. Runs on a thread that may block."""
        client = self._session.client
        for batch_index, request in enumerate(self._requests):
            if self._is_closed:
                return
            handle = client.submit(request, self._on_response)
            with self._lock:
                self._handles[handle.request_id] = batch_index, handle
                is_closed = self._is_closed
            if is_closed:
                handle.stop()

    def _on_response(self, response: Response) -> None:
        """Queue one response, or drop it after `close`. Called on the engine client's thread; never blocks."""
        if not self._is_closed:
            self._delivery.put(response)

    def _take(self) -> list[Output]:
        outputs: list[Output] = []
        while responses := self._delivery.take(timeout_s=0):
            for response in responses:
                outputs += self._outputs_of(response)
        return outputs

    def _outputs_of(self, response: Response) -> Sequence[Output]:
        batch_index, handle = self._handles[response.request_id]
        result = response.result
        if result is None:
            self.close()
            self._num_unfinished = 0
            raise response.error or StepFailed("the engine gave no result")
        self._num_unfinished -= response.is_final
        outputs = self._reply.add(batch_index, result, is_last=False)
        if self._reply.has_just_stopped and not result.is_sequence_final:
            self._session.stop_later([handle], StopReason.STOP_WORDS, result.sequence_index)
        return outputs
