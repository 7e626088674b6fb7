"""A world whose ranks are threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
PATIENCE_S = 30.0


class ThreadWorld:
    """A replacement of `inflight.ranks.mpi.MpiWorld` for one rank."""

    def __init__(self, rank: int, size: int, messages: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self.num_broadcasts = 0
        self._messages = messages
        self._barrier = barrier

    def broadcast(self, message: bytes = b"") -> bytes:
        self.num_broadcasts += 1
        return self.all_gather(message)[0]

    def broadcast_buffer(self, buffer: memoryview) -> None:
        sent = self.all_gather(bytes(buffer))[0]
        if self.rank:
            buffer[:] = sent

    def all_gather(self, message: bytes) -> list[bytes]:
        self._messages[self.rank] = message
        self._barrier.wait(PATIENCE_S)
        everybody = list(self._messages)
        self._barrier.wait(PATIENCE_S)
        return everybody


def make_worlds(size: int) -> list[ThreadWorld]:
    """Make a world for each rank."""
    messages, barrier = [b""] * size, threading.Barrier(size)
    return [ThreadWorld(rank, size, messages, barrier) for rank in range(size)]


def on_all(size: int, work: Callable[[int], _T]) -> list[_T]:
    """Run `work(rank)` in a thread for every rank and return the results, by rank."""
    with ThreadPoolExecutor(size) as threads:
        return [future.result(PATIENCE_S) for future in [threads.submit(work, rank) for rank in range(size)]]
