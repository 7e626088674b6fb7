"""The order in which the requests of a batch are sent: some at a time, each until its answer is final.

Runs on one event loop. The caller sends the requests, by HTTP or to the application itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus

from inflight.openai.batches import RETRIES
from inflight.openai.batches.lines import BatchAnswer, BatchRequest

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

Send = Callable[[BatchRequest], Awaitable[BatchAnswer]]
"""Sends a request once, and returns the answer."""


async def send_all(
    requests: Iterator[BatchRequest],
    send: Send,
    on_answer: Callable[[BatchRequest, BatchAnswer], None],
    concurrency: int,
) -> None:
    """Send all requests in their order; call `on_answer` as soon as each is answered.

    An error of `send` or `on_answer` is raised, and ends the requests in flight.

    Args:
        requests: The requests, which are read only when they are to be sent.
        send: Function that returns the final answer to a request.
        on_answer: Function that keeps an answer.
        concurrency: Number of requests in flight.
    """

    turn = asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                # On a thread, because after an interruption many lines are skipped before the first request.
                request = await asyncio.to_thread(next, requests, None)
            if request is None:
                return
            on_answer(request, await send(request))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def send_until_final(
    request: BatchRequest,
    send: Send,
    retries: int = RETRIES,
    on_retry: Callable[[BatchAnswer], None] = lambda answer: None,
    first_pause_s: float = _FIRST_PAUSE_S,
) -> BatchAnswer:
    """Send a request again while its failure may be temporary; return the last answer.

    Args:
        request: The request.
        send: Function that sends it once.
        retries: Number of further attempts. Those that found the queue full (429) do not count: the server
            answers other requests meanwhile.
        on_retry: Function that is called with each answer after which the request is sent again.
        first_pause_s: Seconds before the second attempt; each later pause is twice as long, up to 30 s.
    """
    pause_s = first_pause_s
    while True:
        answer = await send(request)
        is_full = answer.status == HTTPStatus.TOO_MANY_REQUESTS
        if not answer.is_temporary or (retries == 0 and not is_full):
            return answer
        retries -= not is_full
        on_retry(answer)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1))  # workers must not all come back at once
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
