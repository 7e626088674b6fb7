"""The machine's processes and threads, and the loop that lets one thread run at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Protocol

import greenlet

_SWITCHES = 0.15  # probability that another thread runs at a point where it may
_LONG_PAUSES = 0.005  # probability that all others run there for up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 0.5
_REFUSALS = 0.3  # probability that an allocation is refused while the machine is short of memory
_STEP_NS = 20_000  # largest time that passes between two switches
_MOST_SWITCHES = 300_000


class Closable(Protocol):
    """A resource of a process that ends with it."""

    def end_with_process(self) -> None:
        """Release the resource as the kernel does when its process is killed."""
        ...


class Process:
    """A process of the simulated machine.

    Attributes:
        pid: Its id, unique on the machine.
        is_alive: Whether it has not been killed.
        is_stopped: Whether its threads do not run, as after SIGSTOP.
        resources: Its open sockets.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.resources: dict[int, Closable] = {}


class _LoopOfThread:
    """The event loop that runs in a simulated thread: the interpreter has one for each real thread only."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hooks = tuple(sys.get_asyncgen_hooks())  # a tuple, which the collector of cycles looks into

    def resume(self) -> None:
        """Give the interpreter the thread's loop."""
        asyncio._set_running_loop(self._loop)
        sys.set_asyncgen_hooks(*self._hooks)

    def suspend(self) -> None:
        """Take the thread's loop from the interpreter."""
        self._loop, self._hooks = asyncio._get_running_loop(), tuple(sys.get_asyncgen_hooks())
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(None, None)


class Fiber:
    """A simulated thread: a greenlet, its process and what it waits for."""

    def __init__(
        self, number: int, process: Process, name: str, run: Callable[[], object], loop: greenlet.greenlet
    ) -> None:
        self.number = number
        self.process = process
        self.name = name
        self.has_ended = False
        self.thread: object = None
        self.waits = 0  # counts waits, so that timers of earlier ones are ignored
        self.is_waiting = False
        self.is_preempted = False  # it could run, but others run for a while
        self.timed_out = False
        self.event_loop = _LoopOfThread()
        self.greenlet = greenlet.greenlet(run, loop)


class Waiters:
    """Fibers that wait for something, in the order in which they began to."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._fibers: deque[Fiber] = deque()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the current fiber wait; return False if it was not woken within `timeout_s` seconds."""
        fiber = self._machine.current
        self._fibers.append(fiber)
        self._machine.sleep_until_woken(timeout_s)
        if fiber.timed_out and fiber in self._fibers:
            self._fibers.remove(fiber)
        return not fiber.timed_out

    def wake(self, count: int | None = None) -> None:
        """Wake the fibers that have waited longest: `count` of them, or all."""
        for _ in range(len(self._fibers) if count is None else min(count, len(self._fibers))):
            self._machine.wake(self._fibers.popleft())


class Deadlock(AssertionError):
    """Threads wait, and nothing will ever wake them."""


class Machine:
    """The machine: it runs fibers one at a time, and time passes when all of them wait.

    Args:
        seed: Chooses which of the fibers that can run does, how long steps take, and all faults.

    Attributes:
        rng: The random numbers of the machine and of the faults.
        now_ns: The monotonic clock in nanoseconds.
        wall_ns: Difference of the wall clock to the monotonic one; a fault may change it.
        failure: The first exception that ended a fiber, with its traceback.
        num_switches: How often a fiber was run.
        is_short_of_memory: Whether some allocations are refused; a fault may change it.
        when_all_wait: Called before the clock moves because no fiber can run.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 1_000_000_000
        self.wall_ns = 1_700_000_000 * 10**9
        self.failure: tuple[Fiber, BaseException, str] | None = None
        self.num_switches = 0
        self.is_over = self.is_short_of_memory = False
        self.when_all_wait: Callable[[], None] = lambda: None
        self.processes: list[Process] = []
        self.fibers: list[Fiber] = []
        self._numbers = itertools.count(1)
        self._ready: list[Fiber] = []
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._main = greenlet.getcurrent()
        self._current: Fiber | None = None

    # ---------------------------------------------------------------- processes and threads

    def start_process(self, name: str) -> Process:
        """Return a new process without threads."""
        process = Process(next(self._numbers), name)
        self.processes.append(process)
        return process

    def spawn(self, process: Process, function: Callable[[], object], name: str) -> Fiber:
        """Start a thread of a process that runs `function`."""

        def run() -> None:
            try:
                function()
            except greenlet.GreenletExit:
                pass
            except BaseException as error:
                if self.failure is None:
                    self.failure = fiber, error, traceback.format_exc()
            finally:
                fiber.has_ended = True

        fiber = Fiber(next(self._numbers), process, name, run, self._main)
        self.fibers.append(fiber)
        self._ready.append(fiber)
        return fiber

    def kill(self, process: Process) -> None:
        """End a process at once: its threads never run again, and its sockets are closed by the kernel."""
        process.is_alive = False
        self._ready = [fiber for fiber in self._ready if fiber.process is not process]
        for resource in list(process.resources.values()):
            resource.end_with_process()
        process.resources.clear()

    def stop(self, process: Process, seconds: float) -> None:
        """Stop all threads of a process for some seconds."""
        process.is_stopped = True
        self.call_later(seconds, lambda: setattr(process, "is_stopped", False))

    def is_amid_steps(self, process: Process) -> bool:
        """Return whether a process is stopped, or one of its threads is preempted, perhaps inside a step."""
        return process.is_stopped or any(
            fiber.is_preempted for fiber in self.fibers if fiber.process is process
        )

    # ---------------------------------------------------------------- for the current fiber

    @property
    def current(self) -> Fiber:
        """The fiber that runs now."""
        assert self._current is not None, "no simulated thread runs: this call would block"
        return self._current

    @property
    def is_running_a_fiber(self) -> bool:
        """Whether a fiber runs now, and not the loop of the machine."""
        return self._current is not None

    @property
    def process(self) -> Process:
        """The process of the fiber that runs now."""
        return self.current.process

    def pause(self) -> None:
        """Let other fibers run first, sometimes for long, if the seed wants it. Called where real threads may be
        preempted."""
        if self._current is None or self.is_over:
            return
        drawn = self.rng.random()
        if drawn < _LONG_PAUSES:
            fiber = self._current
            fiber.is_preempted = True
            self.sleep(self.rng.random() * _LONGEST_PAUSE_S)
            fiber.is_preempted = False
        elif drawn < _SWITCHES:
            self._ready.append(self._current)
            self._main.switch()

    def sleep_until_woken(self, timeout_s: float | None) -> None:
        """Wait until `wake` is called for the current fiber, which sets `timed_out` to False, or the timeout."""
        if self.is_over:
            raise greenlet.GreenletExit
        fiber = self.current
        fiber.waits += 1
        fiber.is_waiting, fiber.timed_out = True, False
        if timeout_s is not None:
            number = fiber.waits

            def time_out() -> None:
                if fiber.is_waiting and fiber.waits == number:
                    fiber.timed_out = True
                    self.wake(fiber)

            self.call_later(timeout_s, time_out)
        self._main.switch()

    def sleep(self, seconds: float) -> None:
        """Let the current fiber wait."""
        self.sleep_until_woken(max(0.0, seconds))

    def wait_until(self, condition: Callable[[], bool], longest_s: float, every_s: float = 0.1) -> bool:
        """Let the current fiber wait until a condition is true, for at most `longest_s` seconds.

        Args:
            condition: Checked every `every_s` seconds.
            longest_s: Maximum time in seconds.
            every_s: Time between two checks in seconds.

        Returns:
            Whether the condition is true.
        """
        deadline_ns = self.now_ns + int(longest_s * 1e9)
        while not (is_true := condition()) and self.now_ns < deadline_ns:
            self.sleep(every_s)
        return is_true

    # ---------------------------------------------------------------- for everyone

    def refuses_memory(self) -> bool:
        """Return whether an allocation is refused now."""
        return self.is_short_of_memory and self.rng.random() < _REFUSALS

    def wake(self, fiber: Fiber) -> None:
        """Let a waiting fiber go on."""
        if fiber.is_waiting and fiber.process.is_alive:
            fiber.is_waiting = False
            self._ready.append(fiber)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function, which must not wait, after some seconds."""
        at_ns = self.now_ns + max(0, int(seconds * 1e9))
        heapq.heappush(self._timers, (at_ns, next(self._numbers), function))

    # ---------------------------------------------------------------- the loop

    def run_until(self, is_done: Callable[[], bool], longest_s: float) -> None:
        """Run threads, one at a time, until `is_done` returns true.

        Raises:
            Deadlock: Nothing can run before it is done, or it takes longer than `longest_s` simulated seconds.
            AssertionError: A fiber was ended by an exception.
        """
        end_ns = self.now_ns + int(longest_s * 1e9)
        while not is_done():
            self._fire_timers()
            runnable = [fiber for fiber in self._ready if not fiber.process.is_stopped]
            if runnable:
                self._run(self.rng.choice(runnable))
            elif self._timers:
                self.when_all_wait()
                self.now_ns = max(self.now_ns, self._timers[0][0])
            else:
                raise Deadlock(f"nothing can run any more\n{self.stacks()}")
            if self.now_ns > end_ns:
                raise Deadlock(f"not done after {longest_s:g} s\n{self.stacks()}")

    def _run(self, fiber: Fiber) -> None:
        self._ready.remove(fiber)
        self.num_switches += 1
        assert self.num_switches < _MOST_SWITCHES, f"threads make no progress\n{self.stacks()}"
        self.now_ns += self.rng.randrange(_STEP_NS)
        self._current = fiber
        fiber.event_loop.resume()
        try:
            fiber.greenlet.switch()
        finally:
            fiber.event_loop.suspend()
            self._current = None
        if self.failure is not None:
            failed, error, text = self.failure
            raise AssertionError(f"thread {failed.name} of {failed.process.name} raised:\n{text}") from error

    def _fire_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now_ns:
            heapq.heappop(self._timers)[2]()

    def stacks(self) -> str:
        """Return where each thread that has not ended waits."""
        lines: list[str] = []
        for fiber in self.fibers:
            frame = fiber.greenlet.gr_frame
            if fiber.has_ended or not fiber.process.is_alive or frame is None:
                continue
            lines.append(f"--- {fiber.name} of {fiber.process.name}")
            lines += [line.rstrip() for line in traceback.format_stack(frame)[-6:-2]]
        return "\n".join(lines)

    def end(self) -> None:
        """End all fibers that are left. Their `finally` blocks run, without any effect on the results."""
        self.is_over = True
        for fiber in self.fibers:
            while not fiber.greenlet.dead and fiber.greenlet:
                self._current = fiber
                fiber.event_loop.resume()
                fiber.greenlet.throw()
                fiber.event_loop.suspend()
                self._current = None
