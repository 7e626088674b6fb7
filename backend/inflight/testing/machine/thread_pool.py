"""The machine's `concurrent.futures.ThreadPoolExecutor`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import greenlet

from .scheduler import Machine
from .threads import SimpleQueue, Thread

_Job = tuple["Future[Any]", Callable[[], object]]


class ThreadPool:
    """Threads that run functions, with the methods of `ThreadPoolExecutor`; they are started on demand.

    Args:
        machine: The machine.
        max_workers: Largest number of threads.
        thread_name_prefix: Name of the threads.
    """

    def __init__(self, machine: Machine, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._machine = machine
        self._max_workers, self._name = max_workers, thread_name_prefix
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue(machine)
        self._threads: list[Thread] = []
        self._num_idle = 0
        self._is_shut = False

    def submit(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._is_shut or self._machine.is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        needs_thread = self._jobs.qsize() >= self._num_idle and len(self._threads) < self._max_workers
        started = [Thread(self._machine, target=self._work, name=self._name)] if needs_thread else []
        self._threads += started
        self._jobs.put((future, partial(function, *args, **kwargs)))
        for thread in started:
            thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        while cancel_futures and self._jobs.qsize():
            if job := self._jobs.get():
                job[0].cancel()
        threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while True:
            self._num_idle += 1
            job = self._jobs.get()
            self._num_idle -= 1
            if job is None:
                return
            future, function = job
            if future.set_running_or_notify_cancel():
                _fill(future, function)


def _fill(future: Future[Any], function: Callable[[], object]) -> None:
    """Call a function, and give its result or its error to a future."""
    try:
        result = function()
    except greenlet.GreenletExit:
        raise
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
