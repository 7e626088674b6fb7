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

_PooledJob = tuple[ThreadPoolExecutor, Job]

NOBODY = 0
"""Client id of requests without a client id. They may be of different clients, so they run concurrently."""


class ClientLanes:
    """Two pools of threads that run the jobs of one client in order, one after the other.

    Args:
        num_threads: Largest number of jobs that compute at a time. Threads are started on demand.
        num_waiting_threads: Largest number of jobs that wait for another process at a time.
    """

    def __init__(self, num_threads: int, num_waiting_threads: int = 1) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[_PooledJob]] = {}  # by id of each client with a job
        self._pool = ThreadPoolExecutor(num_threads, "inflight-tokenizing")
        self._pool_of_waits = ThreadPoolExecutor(num_waiting_threads, "inflight-waiting")

    @property
    def are_idle(self) -> bool:
        """Return whether no client has a job. Jobs of NOBODY are ignored."""
        return not self._waiting

    def is_busy(self, client: int) -> bool:
        """Return whether the client has a job that has not ended."""
        return client in self._waiting

    def submit(self, client: int, job: Job, waits: bool = False) -> None:
        """Run `job` on one of the threads, after the client's previous jobs.

        `waits`: whether it waits for another process, instead of computing here.
        """
        pooled = (self._pool_of_waits if waits else self._pool, job)
        if client != NOBODY:
            with self._lock:
                if client in self._waiting:
                    self._waiting[client].append(pooled)
                    return
                self._waiting[client] = deque()
        self._start(client, pooled)

    def close(self) -> None:
        """Wait for the jobs that run, and drop the jobs that wait. `submit` raises RuntimeError afterwards."""
        with self._lock:
            for waiting in self._waiting.values():
                waiting.clear()
        for pool in (self._pool, self._pool_of_waits):
            pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, client: int, pooled: _PooledJob) -> None:
        pool, job = pooled
        pool.submit(self._run, client, job)

    def _run(self, client: int, job: Job) -> None:
        job()
        if client == NOBODY:
            return
        with self._lock:
            if not self._waiting[client]:
                del self._waiting[client]
                return
            following = self._waiting[client].popleft()
        self._start(client, following)
