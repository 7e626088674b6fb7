"""The machine's processes and threads, and the loop that lets one thread run at a time."""

from __future__ import annotations

import heapq
import itertools
import random
import traceback
from collections import deque
from collections.abc import Callable
from typing import Protocol

import greenlet

_SWITCHES = 0.15  # probability that another thread runs at a point where it may
_LONG_PAUSES = 0.005  # probability that all others run there for up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 0.5
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
        self.current: object = None  # the running thread, as `threading.current_thread` returns it


class Fiber:
    """A simulated thread: a greenlet, its process and what it waits for."""

    def __init__(
        self, number: int, process: Process, name: str, run: Callable[[], object], loop: greenlet.greenlet
    ) -> None:
        self.number = number
        self.process = process
        self.name = name
        self.has_ended = False
        self.locals: dict[int, dict[str, object]] = {}  # of `threading.local`, by the object
        self.thread: object = None
        self.waits = 0  # counts waits, so that timers of earlier ones are ignored
        self.is_waiting = False
        self.timed_out = False
        self.greenlet = greenlet.greenlet(run, loop)


class Waiters:
    """Tasks that wait for something, in the order in which they began to."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._tasks: deque[Fiber] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the current task wait; return False if it was not woken within `timeout_s` seconds."""
        task = self._machine.current
        self._tasks.append(task)
        self._machine.sleep_until_woken(timeout_s)
        if task.timed_out and task in self._tasks:
            self._tasks.remove(task)
        return not task.timed_out

    def wake(self, count: int | None = None) -> None:
        """Wake the tasks that have waited longest: `count` of them, or all."""
        for _ in range(len(self._tasks) if count is None else min(count, len(self._tasks))):
            self._machine.wake(self._tasks.popleft())


class Deadlock(AssertionError):
    """Threads wait, and nothing will ever wake them."""


class Machine:
    """The machine: it runs tasks one at a time, and time passes when all of them wait.

    Args:
        seed: Chooses which of the tasks that can run does, how long steps take, and all faults.

    Attributes:
        rng: The random numbers of the machine and of the faults.
        now_ns: The monotonic clock in nanoseconds.
        wall_ns: Difference of the wall clock to the monotonic one; a fault may change it.
        failure: The first exception that ended a task, with its traceback.
        num_switches: How often a task was run.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 1_000_000_000
        self.wall_ns = 1_700_000_000 * 10**9
        self.failure: tuple[Fiber, BaseException, str] | None = None
        self.num_switches = 0
        self.is_over = False
        self.processes: list[Process] = []
        self.tasks: list[Fiber] = []
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
                    self.failure = task, error, traceback.format_exc()
            finally:
                task.has_ended = True

        task = Fiber(next(self._numbers), process, name, run, self._main)
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def kill(self, process: Process) -> None:
        """End a process at once: its threads never run again, and its sockets are closed by the kernel."""
        process.is_alive = False
        self._ready = [task for task in self._ready if task.process is not process]
        for resource in list(process.resources.values()):
            resource.end_with_process()
        process.resources.clear()

    def stop(self, process: Process, seconds: float) -> None:
        """Stop all threads of a process for some seconds."""
        process.is_stopped = True
        self.call_later(seconds, lambda: setattr(process, "is_stopped", False))

    # ---------------------------------------------------------------- for the current task

    @property
    def current(self) -> Fiber:
        """The task that runs now."""
        assert self._current is not None, "no simulated thread runs: this call would block"
        return self._current

    @property
    def process(self) -> Process:
        """The process of the task that runs now."""
        return self.current.process

    def pause(self) -> None:
        """Let other tasks run first, sometimes for long, if the seed wants it. Called where real threads may be
        preempted."""
        if self._current is None or self.is_over:
            return
        drawn = self.rng.random()
        if drawn < _LONG_PAUSES:
            self.sleep(self.rng.random() * _LONGEST_PAUSE_S)
        elif drawn < _SWITCHES:
            self._ready.append(self._current)
            self._main.switch()

    def sleep_until_woken(self, timeout_s: float | None) -> None:
        """Wait until `wake` is called for the current task, which sets `timed_out` to False, or the timeout."""
        if self.is_over:
            raise greenlet.GreenletExit
        task = self.current
        task.waits += 1
        task.is_waiting, task.timed_out = True, False
        if timeout_s is not None:
            number = task.waits

            def time_out() -> None:
                if task.is_waiting and task.waits == number:
                    task.timed_out = True
                    self.wake(task)

            self.call_later(timeout_s, time_out)
        self._main.switch()

    def sleep(self, seconds: float) -> None:
        """Let the current task wait."""
        self.sleep_until_woken(max(0.0, seconds))

    # ---------------------------------------------------------------- for everyone

    def wake(self, task: Fiber) -> None:
        """Let a waiting task go on."""
        if task.is_waiting and task.process.is_alive:
            task.is_waiting = False
            self._ready.append(task)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function, which must not wait, after some seconds."""
        at_ns = self.now_ns + max(0, int(seconds * 1e9))
        heapq.heappush(self._timers, (at_ns, next(self._numbers), function))

    # ---------------------------------------------------------------- the loop

    def run_until(self, is_done: Callable[[], bool], longest_s: float) -> None:
        """Run tasks until `is_done`.

        Raises:
            Deadlock: Nothing can run before it is done, or it takes longer than `longest_s` simulated seconds.
            AssertionError: A task was ended by an exception.
        """
        end_ns = self.now_ns + int(longest_s * 1e9)
        while not is_done():
            self._fire_timers()
            runnable = [task for task in self._ready if not task.process.is_stopped]
            if runnable:
                self._run(self.rng.choice(runnable))
            elif self._timers:
                self.now_ns = max(self.now_ns, self._timers[0][0])
            else:
                raise Deadlock(f"nothing can run any more\n{self.stacks()}")
            if self.now_ns > end_ns:
                raise Deadlock(f"not done after {longest_s:g} s\n{self.stacks()}")

    def _run(self, task: Fiber) -> None:
        self._ready.remove(task)
        self.num_switches += 1
        assert self.num_switches < _MOST_SWITCHES, f"threads make no progress\n{self.stacks()}"
        self.now_ns += self.rng.randrange(_STEP_NS)
        self._current = task
        try:
            task.greenlet.switch()
        finally:
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
        for task in self.tasks:
            frame = task.greenlet.gr_frame
            if task.has_ended or not task.process.is_alive or frame is None:
                continue
            lines.append(f"--- {task.name} of {task.process.name}")
            lines += [line.rstrip() for line in traceback.format_stack(frame)[-6:-2]]
        return "\n".join(lines)

    def end(self) -> None:
        """End all tasks that are left. Their `finally` blocks run, without any effect on the results."""
        self.is_over = True
        for task in self.tasks:
            while not task.greenlet.dead and task.greenlet:
                self._current = task
                task.greenlet.throw()
                self._current = None
