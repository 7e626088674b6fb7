"""Threads for what takes too long for execute, and the order of each client's requests all the same.

Owns the threads and who waits behind whom. Does not know what the jobs are. Any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]
"""Must not raise."""

NOBODY = 0
"""A client without a name. Such clients may be anybody, so they do not wait for each other."""


class ClientLanes:
    """Runs jobs on a few threads: those of one client one after the other, in the order in which they came.

    Args:
        num_threads: Most jobs at a time. Threads start with the first jobs.
    """

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Job]] = {}  # by client, of all that have a job
        self._pool = ThreadPoolExecutor(num_threads, "inflight-tokenizing")

    @property
    def are_idle(self) -> bool:
        """Whether no client with a name has a job."""
        return not self._waiting

    def is_busy(self, client: int) -> bool:
        """Whether the client has a job that has not ended."""
        return client in self._waiting

    def submit(self, client: int, job: Job) -> None:
        """Run `job` on one of the threads, after those that came before it for the same client."""
        if client != NOBODY:
            with self._lock:
                if client in self._waiting:
                    self._waiting[client].append(job)
                    return
                self._waiting[client] = deque()
        self._pool.submit(self._run, client, job)

    def close(self) -> None:
        """Wait for the jobs that have begun; the others never run. `submit` raises RuntimeError afterwards."""
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
