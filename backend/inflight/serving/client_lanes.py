"""Threads for work that takes too long for `execute`. They keep the order of each client's requests.

Owns the threads and a queue for each client. Any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]
"""A job; it must not raise."""

NOBODY = 0
"""Client id of requests without a client id. They may be of different clients, so they run concurrently."""


class ClientLanes:
    """Pool of threads that runs the jobs of one client in order, one after the other.

    Args:
        num_threads: Largest number of jobs that run at a time. Threads are started on demand.
    """

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Job]] = {}  # by id of each client with a job
        self._pool = ThreadPoolExecutor(num_threads, "inflight-tokenizing")

    @property
    def are_idle(self) -> bool:
        """Return whether no client has a job. Jobs of NOBODY are ignored."""
        return not self._waiting

    def is_busy(self, client: int) -> bool:
        """Return whether the client has a job that has not ended."""
        return client in self._waiting

    def submit(self, client: int, job: Job) -> None:
        """Run `job` on one of the threads, after the client's previous jobs."""
        if client != NOBODY:
            with self._lock:
                if client in self._waiting:
                    self._waiting[client].append(job)
                    return
                self._waiting[client] = deque()
        self._pool.submit(self._run, client, job)

    def close(self) -> None:
        """Wait for the jobs that run, and drop the jobs that wait. `submit` raises RuntimeError afterwards."""
        with self._lock:
            for waiting in self._waiting.values():
                waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, client: int, job: Job) -> None:
        job()
        if client == NOBODY:
            return
        with self._lock:
            if not self._waiting[client]:
                del self._waiting[client]
                return
            following = self._waiting[client].popleft()
        self._pool.submit(self._run, client, following)
