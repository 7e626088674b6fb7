"""The machine's kernel: processes with parents, signals, exit statuses, descriptors and pipes.

A process that ends stays as a zombie until its parent waits for it. Its children go to the nearest ancestor
that adopts orphans, otherwise to the first process, which reaps them. Signals, pidfds and /proc are like those of
Linux, as far as the package uses them. `kernel_modules.py` makes Python's modules of it.
"""

from __future__ import annotations

import errno
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import FrameType

import greenlet

from .scheduler import Machine, Process, Waiters

Handler = Callable[[int, FrameType | None], object]
Program = Callable[["ProcessEntry"], int]
"""The main thread of a process; returns the exit status."""


class Watched(ABC):
    """Something that `select` and `poll` wait for."""

    def __init__(self) -> None:
        self._watchers: list[Waiters] = []

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a wait for it returns at once."""

    def watch(self, waiters: Waiters, is_watched: bool) -> None:
        """Begin or cease to wake these waiters when it becomes ready."""
        (self._watchers.append if is_watched else self._watchers.remove)(waiters)

    def wake(self) -> None:
        """Wake all who wait for it."""
        for waiters in list(self._watchers):
            waiters.wake()


class Pipe(Watched):
    """A pipe without a limit of its size.

    Attributes:
        content: Bytes that were written and not read.
        num_readers, num_writers: How many descriptors its ends have, in all processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.content = bytearray()
        self.num_readers = self.num_writers = 0

    def is_ready(self) -> bool:
        return bool(self.content) or not self.num_writers

    def write(self, content: bytes) -> None:
        """Append bytes; raises BrokenPipeError if nobody can read them."""
        if not self.num_readers:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.content += content
        self.wake()


class PipeEnd:
    """A descriptor of an end of a pipe."""

    def __init__(self, pipe: Pipe, is_writer: bool) -> None:
        self.pipe = pipe
        self.is_writer = is_writer
        self._count(1)

    def copy(self) -> PipeEnd:
        """Return another descriptor of the same end."""
        return PipeEnd(self.pipe, self.is_writer)

    def close(self) -> None:
        """Close this descriptor; the pipe's other end sees the end of file after the last one."""
        self._count(-1)

    def _count(self, change: int) -> None:
        if self.is_writer:
            self.pipe.num_writers += change
            if not self.pipe.num_writers:
                self.pipe.wake()
        else:
            self.pipe.num_readers += change


class PidDescriptor(Watched):
    """A pidfd: ready once its process has ended."""

    def __init__(self, task: ProcessEntry) -> None:
        super().__init__()
        self.task = task
        task.pid_descriptors.append(self)

    def is_ready(self) -> bool:
        return self.task.status is not None

    def close(self) -> None:
        """Close the descriptor, so that the end of the process wakes nobody through it."""
        self.task.pid_descriptors.remove(self)


@dataclass(eq=False)
class ProcessEntry:
    """A process as the kernel knows it.

    Attributes:
        process: The machine's process, with its threads.
        parent: The process that waits for it; None for the first one.
        arguments: Its command line.
        environment: Its environment variables.
        start_time: When it was started, in the unit of /proc.
        status: Its exit status, or the negative number of the signal that ended it; None while it runs.
        is_reaped: Whether its parent has waited for it.
        dies_with_parent: Whether it is killed when its parent ends.
        adopts: Whether it becomes the parent of descendants whose parents end.
        handlers: Its handlers of signals by number; `signal.SIG_IGN` ignores a signal.
        wakeup: The pipe that gets a byte for each handled signal.
        descriptors: Its descriptors by number.
        pid_descriptors: The pidfds of it that other processes have.
        pending: Signals that it gets when it is continued.
    """

    process: Process
    parent: ProcessEntry | None
    arguments: tuple[str, ...]
    environment: dict[str, str]
    start_time: int
    status: int | None = None
    is_reaped: bool = False
    dies_with_parent: bool = False
    adopts: bool = False
    handlers: dict[int, Handler | signal.Handlers] = field(
        default_factory=dict[int, "Handler | signal.Handlers"]
    )
    wakeup: Pipe | None = None
    descriptors: dict[int, PipeEnd | PidDescriptor] = field(
        default_factory=dict[int, "PipeEnd | PidDescriptor"]
    )
    pid_descriptors: list[PidDescriptor] = field(default_factory=list[PidDescriptor])
    pending: list[int] = field(default_factory=list[int])

    @property
    def pid(self) -> int:
        """The number of the process, by which signals and /proc name it."""
        return self.process.pid

    @property
    def state(self) -> str:
        """The letter of the process's state in /proc."""
        if self.status is not None:
            return "Z"
        return "T" if self.process.is_stopped else "S"

    def end_with_process(self) -> None:
        """Close the descriptors; called by the machine when the process is killed."""
        for descriptor in self.descriptors.values():
            descriptor.close()
        self.descriptors.clear()


class Kernel:
    """The processes of a machine.

    Args:
        machine: The machine.
        find_program: Function that returns the program that a command line runs, which knows its arguments;
            FileNotFoundError if there is none.

    Attributes:
        tasks: All processes that were started and are not reaped, by number.
        refuses_processes: Whether no process can be started now; a fault may change it.
        log: Starts, stops and ends: the time in seconds, the process and the event.
        init: The first process, which waits for its children at once.
    """

    def __init__(self, machine: Machine, find_program: Callable[[Sequence[str]], Program]) -> None:
        self.machine = machine
        self.tasks: dict[int, ProcessEntry] = {}
        self.refuses_processes = False
        self.log: list[tuple[float, ProcessEntry, str]] = []
        self._find_program = find_program
        self._numbers = count(1)
        self._is_frozen = False
        self._continued: list[ProcessEntry] = []  # that get SIGCONT when the machine goes on
        self.init = ProcessEntry(machine.start_process("init"), None, ("init",), {}, 0)
        self.tasks[self.init.pid] = self.init

    @property
    def this(self) -> ProcessEntry:
        """The process of the thread that runs now."""
        return self.tasks[self.machine.process.pid]

    # ---------------------------------------------------------------- start and end

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Mapping[int, PipeEnd] | None = None,
        program: Program | None = None,
        parent: ProcessEntry | None = None,
    ) -> ProcessEntry:
        """Start a process, whose program runs on a fiber of its own.

        Args:
            arguments: Its command line.
            environment: Its environment variables.
            descriptors: Its descriptors by number.
            program: Its main thread; None: the program that the command line names.
            parent: Its parent; None: the current process.
        """
        if self.refuses_processes:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        run = program or self._find_program(arguments)
        machine = self.machine
        if parent is None and machine.is_running_a_fiber:
            parent = self.tasks.get(machine.process.pid)
        parent = parent or self.init
        process = machine.start_process(" ".join(arguments))
        task = ProcessEntry(process, parent, tuple(arguments), dict(environment), machine.now_ns // 10**7)
        task.descriptors.update(descriptors or {})
        process.resources[id(task)] = task
        self.tasks[process.pid] = task
        self._note(task, "started")
        machine.spawn(process, lambda: self.exit(task, run(task)), "main")
        machine.pause()
        return task

    def exit(self, task: ProcessEntry, status: int) -> None:
        """End a process: with an exit status, or with the negative number of a signal."""
        if task.status is not None:
            return
        task.status = status
        self._note(task, f"ended with {status}")
        is_own = self.machine.is_running_a_fiber and self.machine.process is task.process
        heir = task.parent
        while heir is not None and heir is not self.init and not (heir.adopts and heir.status is None):
            heir = heir.parent
        for child in list(self.tasks.values()):
            if child.parent is task:
                child.parent = heir
                if child.status is not None:
                    self._report(child)
                elif child.dies_with_parent:
                    self.exit(child, -signal.SIGKILL)
        self.machine.kill(task.process)
        for descriptor in list(task.pid_descriptors):
            descriptor.wake()
        self._report(task)
        if is_own:
            raise greenlet.GreenletExit

    def _report(self, task: ProcessEntry) -> None:
        """Tell the parent of a process that has ended; the first process waits for it at once."""
        if task.parent is None or task.parent is self.init:
            self._reap(task)
        else:
            self.send(task.parent, signal.SIGCHLD)

    def wait_for(self, pid: int) -> int | None:
        """Reap a child of the current process, and return its status; None while it runs.

        Raises ChildProcessError if the current process has no such child.
        """
        task = self.tasks.get(pid)
        if task is None or task.parent is not self.this:
            raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
        if task.status is not None:
            self._reap(task)
        return task.status

    def _reap(self, task: ProcessEntry) -> None:
        task.is_reaped = True
        del self.tasks[task.pid]

    def _note(self, task: ProcessEntry, event: str) -> None:
        self.log.append((self.machine.now_ns / 1e9, task, event))

    # ---------------------------------------------------------------- signals

    def send(self, task: ProcessEntry, number: int) -> None:
        """Send a signal to a process, which does nothing if it has ended.

        A handler is run at once, as Python runs it when the main thread goes on.
        """
        if task.status is not None:
            return
        if number == signal.SIGKILL:
            self.exit(task, -signal.SIGKILL)
        elif number == signal.SIGSTOP:
            task.process.is_stopped = True
            self._note(task, "stopped")
            if task.parent is not None:
                self.send(task.parent, signal.SIGCHLD)
        elif number == signal.SIGCONT and self._is_frozen:
            self._continued.append(task)
        elif number == signal.SIGCONT:
            task.process.is_stopped = False
            pending, task.pending = task.pending, []
            for each in pending:
                self.send(task, each)
        elif task.process.is_stopped:
            task.pending.append(number)
        else:
            self._deliver(task, number)

    def freeze(self, seconds: float) -> None:
        """Let no process run for some seconds, as when the whole machine is suspended while its clock goes on."""
        frozen = [task for task in self.tasks.values() if not task.process.is_stopped]
        for task in frozen:
            task.process.is_stopped = True

        def thaw() -> None:
            self._is_frozen = False
            for task in frozen:
                task.process.is_stopped = False
            continued, self._continued = self._continued, []
            for task in continued:
                self.send(task, signal.SIGCONT)

        self._is_frozen = True

        self.machine.call_later(seconds, thaw)

    def _deliver(self, task: ProcessEntry, number: int) -> None:
        handler = task.handlers.get(number, signal.SIG_DFL)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            if task.wakeup is not None:
                task.wakeup.write(bytes([number]))
            handler(number, None)
        elif handler is signal.SIG_DFL and number != signal.SIGCHLD:
            self.exit(task, -number)

    # ---------------------------------------------------------------- descriptors

    def open(self, descriptor: PipeEnd | PidDescriptor) -> int:
        """Give the current process a descriptor, and return its number."""
        number = 1000 + next(self._numbers)
        self.this.descriptors[number] = descriptor
        return number

    def close(self, number: int) -> None:
        """Close a descriptor of the current process."""
        if not self.machine.is_over:
            self.this.descriptors.pop(number).close()

    def wait_for_any(self, numbers: Sequence[int], timeout_s: float | None) -> list[int]:
        """Return those descriptors of the current process that are ready; wait for one, at most `timeout_s`
        seconds."""
        machine = self.machine
        machine.pause()
        watched = {number: self._watched(number) for number in numbers}
        ready = [number for number, each in watched.items() if each.is_ready()]
        end_ns = None if timeout_s is None else machine.now_ns + int(timeout_s * 1e9)
        waiters = Waiters(machine)
        for each in watched.values():
            each.watch(waiters, True)
        try:
            while not ready:
                left_s = None if end_ns is None else (end_ns - machine.now_ns) / 1e9
                if left_s is not None and left_s <= 0:
                    break
                waiters.wait(left_s)
                ready = [number for number, each in watched.items() if each.is_ready()]
        finally:
            for each in watched.values():
                each.watch(waiters, False)
        return ready

    def _watched(self, number: int) -> Watched:
        descriptor = self.this.descriptors[number]
        return descriptor.pipe if isinstance(descriptor, PipeEnd) else descriptor

    def read(self, number: int, size: int) -> bytes:
        """Read from a pipe of the current process; b"" at its end."""
        self.wait_for_any([number], None)
        descriptor = self.this.descriptors[number]
        assert isinstance(descriptor, PipeEnd) and not descriptor.is_writer
        content = bytes(descriptor.pipe.content[:size])
        del descriptor.pipe.content[:size]
        return content
