"""Simulated counterparts of the modules `threading`, `time` and `queue`, as far as the package uses them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from .scheduler import Fiber, Machine, Waiters

_T = TypeVar("_T")


class SimulatedModule(threading.local):
    """A module in which some names are simulated, and all others are the real module's.

    Names are simulated only for the thread that makes it, on which the machine runs. Other threads of the test
    process, for example those that watch a real server, use the real module.
    """

    __slots__ = ("_owner",)  # slots are the same for all threads

    def __new__(cls, real: object, simulated: Mapping[str, object]) -> SimulatedModule:
        base: Any = super()  # whose stub has no arguments
        made: SimulatedModule = base.__new__(cls, real, simulated)
        made._owner = threading.get_ident()
        return made

    def __init__(self, real: object, simulated: Mapping[str, object]) -> None:
        self._real = real  # `threading.local` calls this once in each thread that uses the module
        if threading.get_ident() == self._owner:
            self.__dict__.update(simulated)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Lock:
    """A mutex with the methods of `threading.Lock`, for the machine's threads."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.owner: Fiber | None = None
        self._waiters = Waiters(machine)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        machine = self.machine
        if machine.is_over:
            return True
        machine.pause()
        while self.owner is not None:
            if not blocking or not self._waiters.wait(None if timeout < 0 else timeout):
                return False
        self.owner = machine.current
        return True

    def release(self) -> None:
        if self.machine.is_over:
            return
        assert self.owner is not None, "released a lock that is not held"
        self.owner = None
        self._waiters.wake(1)
        self.machine.pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A mutex that its owner may acquire again, with the methods of `threading.RLock`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self.machine.is_over and self.owner is self.machine.current:
            self._depth += 1
            return True
        if super().acquire(blocking, timeout):
            self._depth = 1
            return True
        return False

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class Condition:
    """A condition variable with the methods of `threading.Condition`, for the machine's threads."""

    def __init__(self, machine: Machine, lock: Lock | None = None) -> None:
        self._machine = machine
        self._lock = lock or RLock(machine)
        self._waiters = Waiters(machine)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock.owner is self._machine.current or self._machine.is_over, "waits without the lock"
        self._lock.owner = None
        self._lock._waiters.wake(1)  # pyright: ignore[reportPrivateUsage]
        try:
            return self._waiters.wait(timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        machine = self._machine
        end_ns = None if timeout is None else machine.now_ns + int(timeout * 1e9)
        while not (result := predicate()):
            left_s = None if end_ns is None else (end_ns - machine.now_ns) / 1e9
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class MachineEvent:
    """A flag that the machine's threads wait for, with the methods of `threading.Event`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._is_set = False
        self._waiters = Waiters(machine)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()
        self._machine.pause()

    def clear(self) -> None:
        self._machine.pause()
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._machine.pause()
        if not self._is_set:
            self._waiters.wait(timeout)
        return self._is_set


class Thread:
    """A thread of the machine, with the methods of `threading.Thread`; it belongs to the process that makes it."""

    def __init__(
        self,
        machine: Machine,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool = False,
    ) -> None:
        self._machine = machine
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name, daemon
        self.ident: int | None = None
        self._fiber: Fiber | None = None
        self._ended = MachineEvent(machine)

    def start(self) -> None:
        assert self._fiber is None, "threads can only be started once"
        self._fiber = self._machine.spawn(self._machine.process, self._run, self.name)
        self._fiber.thread = self
        self.ident = self._fiber.number
        self._machine.pause()

    def _run(self) -> None:
        try:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        assert self._fiber is not None, "cannot join a thread before it is started"
        if self._fiber is self._machine.current:
            raise RuntimeError("cannot join current thread")
        if not self._fiber.has_ended:
            self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._ended.is_set()


class SimpleQueue(Generic[_T]):
    """An unbounded first-in-first-out queue with the methods of `queue.SimpleQueue`."""

    def __init__(self, machine: Machine) -> None:
        self._items: deque[_T] = deque()
        self._waiters = Waiters(machine)
        self._machine = machine

    def put(self, item: _T) -> None:
        self._items.append(item)
        self._waiters.wake(1)
        self._machine.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        while not self._items:
            if not block or not self._waiters.wait(timeout):
                raise queue.Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


def simulated_threading(machine: Machine) -> SimulatedModule:
    """Return the machine's module `threading`."""

    def current_thread() -> object:
        return machine.current.thread or machine.current

    kinds = {"Lock": Lock, "RLock": RLock, "Condition": Condition, "Event": MachineEvent, "Thread": Thread}
    return SimulatedModule(
        threading,
        {name: on_machine(machine, kind) for name, kind in kinds.items()}
        | {"current_thread": current_thread, "get_ident": lambda: machine.current.number},
    )


def on_machine(machine: Machine, kind: type[_T]) -> type[_T]:
    """Return a subclass whose constructor does not take the machine, like the real class."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, machine, *args, **kwargs)

    constructor: Any = kind.__init__
    made: Any = type(kind.__name__, (kind,), {"__init__": init})
    return made


def simulated_time(machine: Machine) -> SimulatedModule:
    """Return the machine's module `time`."""
    return SimulatedModule(
        time,
        {
            "monotonic": lambda: machine.now_ns / 1e9,
            "monotonic_ns": lambda: machine.now_ns,
            "perf_counter": lambda: machine.now_ns / 1e9,
            "perf_counter_ns": lambda: machine.now_ns,
            "time": lambda: (machine.now_ns + machine.wall_ns) / 1e9,
            "time_ns": lambda: machine.now_ns + machine.wall_ns,
            "sleep": machine.sleep,
        },
    )
