"""The simulated sockets, locks and queues beside real ones: the same calls by two threads have the same results.

Hypothesis draws the calls. A call that returns in the simulation must return on the real object, with an equal
result; one that waits in the simulation must not return on the real object.
"""

from __future__ import annotations

import contextlib
import queue
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.testing.machine.scheduler import Machine, Waiters
from inflight.testing.machine.sockets import Network, Selector
from inflight.testing.machine.threads import SimpleQueue, on_machine, simulated_threading
from tests.tiers import examples

_SETTLED_S = 600.0  # simulated: no message is on its way any longer
_MUCH = 300_000  # bytes, more than any buffer has room for
_ENDS_S = 60.0  # real: after which a call is taken for one that does not return

Call = Callable[[], object]


class SimulatedWorkers:
    """Two threads of the machine that make calls; `start` returns when a call has returned, or waits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._calls: list[deque[Call]] = [deque(), deque()]
        self._results: list[object] = [None, None]
        self._wanted = [Waiters(machine), Waiters(machine)]
        process = machine.start_process("process")
        for thread in range(2):
            machine.spawn(process, lambda thread=thread: self._work(thread), f"thread {thread}")
        self.process = process

    def _work(self, thread: int) -> None:
        while True:
            while not self._calls[thread]:
                self._wanted[thread].wait()
            self._results[thread] = result_of(self._calls[thread].popleft())

    def start(self, thread: int, call: Call) -> None:
        self._results[thread] = None
        self._calls[thread].append(call)
        self._wanted[thread].wake()
        self.settle()

    def settle(self) -> None:
        end_ns = self._machine.now_ns + int(_SETTLED_S * 1e9)
        self._machine.call_later(2 * _SETTLED_S, lambda: None)
        self._machine.run_until(lambda: self._machine.now_ns >= end_ns, 3 * _SETTLED_S)

    def result(self, thread: int) -> object:
        return self._results[thread]


class RealWorkers:
    """Two threads of this process that make calls; `start` does not wait for them."""

    def __init__(self) -> None:
        self._calls: list[queue.SimpleQueue[Call]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._results: list[object] = [None, None]
        self._returned = threading.Condition()
        for thread in range(2):
            threading.Thread(target=self._work, args=(thread,), daemon=True).start()

    def _work(self, thread: int) -> None:
        while (call := self._calls[thread].get()) is not _END:
            result = result_of(call)
            with self._returned:
                self._results[thread] = result
                self._returned.notify_all()

    def start(self, thread: int, call: Call) -> None:
        self._results[thread] = None
        self._calls[thread].put(call)

    def wait(self, thread: int) -> object:
        """Return the result of a call that must return."""
        with self._returned:
            self._returned.wait_for(lambda: self._results[thread] is not None, _ENDS_S)
            return self._results[thread]

    def result(self, thread: int) -> object:
        return self._results[thread]

    def end(self) -> None:
        for calls in self._calls:
            calls.put(_END)


def _END() -> None: ...


def result_of(call: Call) -> object:
    """Return a call's result, or the name of its error; never None."""
    try:
        return "returned", call()
    except (OSError, queue.Empty) as error:
        return "raised", type(error).__name__


def _waits_or_ended(real: RealWorkers, thread: int, has_begun: Callable[[], bool]) -> bool:
    return has_begun() or real.result(thread) is not None


def wait_until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _ENDS_S
    while not is_true() and time.monotonic() < end_s:
        time.sleep(0.001)


def compare(
    calls: Sequence[tuple[int, Any]],
    simulated: SimulatedWorkers,
    real: RealWorkers,
    bind: Callable[[bool, int, Any], Call],
    has_begun: Callable[[int, Any], bool],
) -> None:
    """Make all calls on both sides, each as soon as its thread is free; those of a thread that waits are left out.

    Args:
        calls: The threads and their calls.
        simulated, real: The threads.
        bind: Returns the call of a side (whether it is the simulated one) and a thread.
        has_begun: Returns whether a call of a real thread that waits has done all that it does before it waits.
    """
    waits = [False, False]
    for thread, call in calls:
        if waits[thread]:
            continue
        simulated.start(thread, bind(True, thread, call))
        real.start(thread, bind(False, thread, call))
        for each in (thread, 1 - thread):
            if each != thread and not waits[each]:
                continue
            expected = simulated.result(each)
            if expected is None and not waits[each]:
                wait_until(partial(_waits_or_ended, real, each, partial(has_begun, each, call)))
            waits[each] = expected is None
            got = real.result(each) if expected is None else real.wait(each)
            assert expected == got, (
                f"{call} of thread {thread}: thread {each} has {got}, simulated {expected}"
            )
    # A call that waits must still wait after all later ones.
    for thread in range(2):
        assert not waits[thread] or real.result(thread) is None


# ---------------------------------------------------------------- sockets


def receive(end: Any, count: int, settle: Callable[[], object] = lambda: None) -> bytes:
    """Wait for bytes, and return all that have arrived, at most `count`: a kernel may give them in pieces."""
    received = end.recv(count)
    while received and len(received) < count:
        settle()
        try:
            end.settimeout(0)
            more = end.recv(count - len(received))
        except BlockingIOError:
            break
        finally:
            with contextlib.suppress(OSError):
                end.settimeout(None)
        if not more:
            break
        received += more
    return received


def receive_exactly(end: Any, count: int) -> tuple[bool, bytes]:
    """Return whether all bytes came before the end, and a few of them."""
    received = b""
    while len(received) < count:
        part = end.recv(count - len(received))
        if not part:
            return False, b""  # how much came depends on the size of the buffer
        received += part
    return True, received[:50]


def receive_at_once(end: Any, count: int) -> bytes:
    end.settimeout(0)
    try:
        return end.recv(count)
    finally:
        end.settimeout(None)


def receive_soon(end: Any, count: int) -> bytes:
    end.settimeout(0.01)
    try:
        return end.recv(count)
    finally:
        end.settimeout(None)


SOCKET_CALLS = st.one_of(
    st.tuples(st.just("send"), st.binary(max_size=40)),
    st.tuples(st.sampled_from(["receive", "receive_exactly"]), st.integers(1, 60)),
    st.tuples(st.just("receive_exactly"), st.just(_MUCH)),
    st.tuples(st.sampled_from(["receive_at_once", "receive_soon"]), st.just(1)),
    st.tuples(st.sampled_from(["send_much", "is_readable", "is_readable", "shut", "close"]), st.none()),
)


@contextlib.contextmanager
def workers(seed: int = 0) -> Generator[tuple[Machine, SimulatedWorkers, RealWorkers]]:
    machine = Machine(seed)
    real = RealWorkers()
    try:
        yield machine, SimulatedWorkers(machine), real
    finally:
        real.end()
        machine.end()


@settings(max_examples=examples(100, 1500), deadline=None)
@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 1), SOCKET_CALLS), max_size=14))
def test_sockets_are_like_those_of_the_kernel(seed: int, calls: list[tuple[int, tuple[str, Any]]]) -> None:
    with workers(seed) as (machine, simulated, real):
        process = simulated.process
        simulated_ends: tuple[Any, Any] = Network(machine).pair(process, process)
        real_ends: tuple[Any, Any] = socket.socketpair(socket.AF_UNIX)

        def is_readable(end: Any, is_simulated: bool) -> bool:
            if end.fileno() < 0 if not is_simulated else end._is_closed:
                return False
            if not is_simulated:
                return bool(select.select([end], [], [], 0)[0])
            with Selector(machine) as selector:
                selector.register(end, selectors.EVENT_READ)
                return bool(selector.select(0))

        def bind(is_simulated: bool, thread: int, call: tuple[str, Any]) -> Call:
            end = (simulated_ends if is_simulated else real_ends)[thread]
            name, value = call
            made: dict[str, Call] = {
                "send": lambda: end.sendall(value),
                "send_much": lambda: end.sendall(bytes(_MUCH)),
                "receive": lambda: receive(
                    end, value, (lambda: machine.sleep(10)) if is_simulated else (lambda: None)
                ),
                "receive_exactly": lambda: receive_exactly(end, value),
                "receive_at_once": lambda: receive_at_once(end, value),
                "receive_soon": lambda: receive_soon(end, value),
                "is_readable": lambda: is_readable(end, is_simulated),
                "shut": lambda: end.shutdown(socket.SHUT_RDWR),
                "close": lambda: end.close(),
            }
            return made[name]

        def has_begun(thread: int, call: tuple[str, Any]) -> bool:
            return call[0] != "send_much" or not select.select([], [real_ends[thread]], [], 0)[1]

        try:
            compare(calls, simulated, real, bind, has_begun)
        finally:
            for end in real_ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


# ---------------------------------------------------------------- locks, events, conditions and queues


class Things:
    """One object of each kind, real or simulated, and their calls by name."""

    def __init__(self, module: Any, make_queue: Callable[[], Any]) -> None:
        self.lock, self.rlock, self.event = module.Lock(), module.RLock(), module.Event()
        self.condition = module.Condition()
        self.other_lock = module.Lock()
        self.on_a_lock = module.Condition(self.other_lock)
        self.queue = make_queue()
        self.is_true = False
        self.holds = [0, 0]  # how often each thread has acquired rlock

    def calls(self, thread: int) -> dict[str, Call]:
        return {
            "acquire": self.lock.acquire,
            "acquire at once": lambda: self.lock.acquire(blocking=False),
            "acquire soon": lambda: self.lock.acquire(timeout=0.01),
            "release": lambda: self._release(self.lock),
            "acquire again": lambda: self._acquire_again(thread),
            "release again": lambda: self._release_again(thread),
            "set": self.event.set,
            "clear": self.event.clear,
            "is set": self.event.is_set,
            "wait": self.event.wait,
            "wait a little": lambda: self.event.wait(0.01),
            "wait for a notice": lambda: self._wait(self.condition, None),
            "wait a little for a notice": lambda: self._wait(self.condition, 0.01),
            "wait until it is true": lambda: self._wait_for(None),
            "wait a little until it is true": lambda: self._wait_for(0.01),
            "make it true": lambda: self._make(True),
            "make it false": lambda: self._make(False),
            "notify": lambda: self._notify(self.condition),
            "wait on a lock": lambda: self._wait(self.on_a_lock, None),
            "notify on a lock": lambda: self._notify(self.on_a_lock),
            "put": lambda: self.queue.put(thread),
            "get": self.queue.get,
            "get at once": lambda: self.queue.get(block=False),
            "get soon": lambda: self.queue.get(timeout=0.01),
            "size": self.queue.qsize,
        }

    def waits_as_asked(self, name: str) -> bool:
        """Return whether a real thread waits for a notice, if the call of this name does."""
        conditions = {
            "wait for a notice": self.condition,
            "wait until it is true": self.condition,
            "wait on a lock": self.on_a_lock,
        }
        return name not in conditions or bool(conditions[name]._waiters)

    def _release(self, lock: Any) -> bool:
        if lock.acquire(blocking=False):  # nobody holds it
            lock.release()
            return False
        lock.release()
        return True

    def _acquire_again(self, thread: int) -> bool:
        got = self.rlock.acquire(timeout=0.01)
        self.holds[thread] += got
        return got

    def _release_again(self, thread: int) -> None:
        if self.holds[thread]:
            self.holds[thread] -= 1
            self.rlock.release()

    def _wait(self, condition: Any, timeout_s: float | None) -> bool:
        with condition:
            return condition.wait(timeout_s)

    def _wait_for(self, timeout_s: float | None) -> bool:
        with self.condition:
            return self.condition.wait_for(lambda: self.is_true, timeout_s)

    def _make(self, is_true: bool) -> None:
        with self.condition:
            self.is_true = is_true
            self.condition.notify_all()

    def _notify(self, condition: Any) -> None:
        with condition:
            condition.notify()

    def free(self) -> None:
        """Let everybody who waits go on."""
        for _ in range(20):
            with contextlib.suppress(RuntimeError):  # another thread has just released it
                self._release(self.lock)
            self.event.set()
            self._make(True)
            for condition in (self.condition, self.on_a_lock):
                with condition:
                    condition.notify_all()
            self.queue.put(None)


NAMES = sorted(Things(threading, queue.SimpleQueue).calls(0))


@settings(max_examples=examples(100, 1500), deadline=None)
@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 1), st.sampled_from(NAMES)), max_size=25))
def test_locks_events_conditions_and_queues_are_like_those_of_python(
    seed: int, calls: list[tuple[int, str]]
) -> None:
    with workers(seed) as (machine, simulated, real):
        sides = (
            Things(threading, queue.SimpleQueue),
            Things(simulated_threading(machine), on_machine(machine, SimpleQueue)),
        )
        try:
            compare(
                calls,
                simulated,
                real,
                lambda is_simulated, thread, name: sides[is_simulated].calls(thread)[name],
                lambda thread, name: sides[0].waits_as_asked(name),
            )
        finally:
            sides[0].free()
