"""Threads for work that takes too long for execute, which keep the order of each client's requests.

Owns the threads and the clients' queues. Does not know what the jobs do. Any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]
"""A job; it must not raise."""

NOBODY = 0
"""Client id of requests without one. They may be of different clients, so they run concurrently."""


class ClientLanes:
    """Pool of threads that runs the jobs of one client in order, one after the other.

    Args:
        num_threads: Most jobs at a time. Threads start with the first jobs.
    """

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Job]] = {}  # by client, for all clients with a job
        self._pool = ThreadPoolExecutor(num_threads, "inflight-tokenizing")

    @property
    def are_idle(self) -> bool:
        """Return whether no client with an id has a job."""
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
        """Wait for jobs that have begun; drop the others. `submit` raises RuntimeError afterwards."""
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
