"""Simulated `os`, `signal`, `select`, `subprocess`, `sys` and /proc for the machine's processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .kernel import Handler, Kernel, PidDescriptor, Pipe, PipeEnd, ProcessEntry
from .threads import SimulatedModule

_MODULES = ("inflight.processes", "inflight.server.", "inflight.ranks.orchestrator")
"""The beginnings of the names of the modules that start, watch and end processes."""


def names_for(kernel: Kernel, module: str) -> dict[Any, object]:
    """Return the simulated counterparts of the modules that `module` of the package uses for processes."""
    if not module.startswith(_MODULES):
        return {}
    return {
        os: _os(kernel),
        signal: _signal(kernel),
        select: _select(kernel),
        subprocess: _subprocess(kernel),
        sys: SimulatedModule(sys, {"stdin": _Standard(kernel, 0), "stderr": _Standard(kernel, 2)}),
    }


def _os(kernel: Kernel) -> SimulatedModule:
    def kill(pid: int, number: int) -> None:
        if pid not in kernel.tasks:
            raise ProcessLookupError
        kernel.send(kernel.tasks[pid], number)

    def pipe() -> tuple[int, int]:
        made = Pipe()
        return kernel.open(PipeEnd(made, False)), kernel.open(PipeEnd(made, True))

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        assert options == os.WNOHANG
        status = kernel.wait_for(pid)
        return (0, 0) if status is None else (pid, status)

    def pidfd_open(pid: int) -> int:
        kernel.machine.pause()
        if pid not in kernel.tasks:
            raise ProcessLookupError
        return kernel.open(PidDescriptor(kernel.tasks[pid]))

    def set_blocking(number: int, is_blocking: bool) -> None:
        """Do nothing: a pipe has no limit."""

    def umask(mask: int) -> int:
        return mask

    def getppid() -> int:
        assert kernel.this.parent is not None
        return kernel.this.parent.pid

    simulated: dict[str, object] = {
        "kill": kill,
        "pipe": pipe,
        "waitpid": waitpid,
        "pidfd_open": pidfd_open,
        "getpid": lambda: kernel.this.pid,
        "getppid": getppid,
        "read": kernel.read,
        "close": kernel.close,
        "set_blocking": set_blocking,
        "umask": umask,
        "environ": _Environment(kernel),
    }
    return SimulatedModule(os, simulated)


def _signal(kernel: Kernel) -> SimulatedModule:
    def set_handler(number: int, handler: Handler | signal.Handlers) -> None:
        kernel.this.handlers[number] = handler

    def set_wakeup_fd(number: int, warn_on_full_buffer: bool = True) -> None:
        descriptor = kernel.this.descriptors[number]
        assert isinstance(descriptor, PipeEnd)
        kernel.this.wakeup = descriptor.pipe

    def pidfd_send_signal(number: int, signal_number: int) -> None:
        descriptor = kernel.this.descriptors[number]
        assert isinstance(descriptor, PidDescriptor)
        if descriptor.task.is_reaped:
            raise ProcessLookupError
        kernel.send(descriptor.task, signal_number)

    return SimulatedModule(
        signal,
        {"signal": set_handler, "set_wakeup_fd": set_wakeup_fd, "pidfd_send_signal": pidfd_send_signal},
    )


def _select(kernel: Kernel) -> SimulatedModule:
    def wait(
        readable: Sequence[int], writable: Sequence[int], broken: Sequence[int], timeout: float | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        return kernel.wait_for_any(readable, timeout), [], []

    class Poll:
        def __init__(self) -> None:
            self._numbers: list[int] = []

        def register(self, number: int, events: int) -> None:
            self._numbers.append(number)

        def poll(self, timeout_ms: float | None = None) -> list[int]:
            return kernel.wait_for_any(self._numbers, None if timeout_ms is None else timeout_ms / 1000)

    return SimulatedModule(select, {"select": wait, "poll": Poll})


def _subprocess(kernel: Kernel) -> SimulatedModule:
    class MachinePopen(Popen):
        def __init__(self, arguments: Sequence[str], **options: Any) -> None:
            super().__init__(kernel, arguments, **options)

    return SimulatedModule(subprocess, {"Popen": MachinePopen})


class _Environment(Mapping[str, str]):
    """The environment variables of the process that runs now."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, name: str) -> str:
        return self._kernel.this.environment[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernel.this.environment)

    def __len__(self) -> int:
        return len(self._kernel.this.environment)


class _Standard:
    """`sys.stdin` or `sys.stderr` of the process that runs now."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        self._kernel = kernel
        self._number = number

    def fileno(self) -> int:
        return self._number

    @property
    def buffer(self) -> PipeFile:
        return PipeFile(self._kernel, self._number)

    def write(self, text: str) -> None:
        self.buffer.write(text.encode())

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


class PipeFile:
    """A binary file of a pipe, with the methods of Python's files."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        self._kernel = kernel
        self._number = number
        self._read = bytearray()
        self._is_closed = False

    def __enter__(self) -> PipeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._number

    def write(self, content: bytes) -> None:
        self._kernel.machine.pause()
        if self._is_closed:
            raise ValueError("write to closed file")
        end = self._kernel.this.descriptors.get(self._number)
        if isinstance(end, PipeEnd):
            end.pipe.write(content)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def readline(self) -> bytes:
        while b"\n" not in self._read and (part := self._kernel.read(self._number, 65536)):
            self._read += part
        length = self._read.find(b"\n") + 1 or len(self._read)
        line = bytes(self._read[:length])
        del self._read[:length]
        return line

    def read(self) -> bytes:
        while part := self._kernel.read(self._number, 65536):
            self._read += part
        return bytes(self._read)

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._kernel.close(self._number)


class Popen:
    """A child process with the methods of `subprocess.Popen`."""

    def __init__(
        self,
        kernel: Kernel,
        arguments: Sequence[str],
        bufsize: int = -1,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        cwd: object = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        umask: int = -1,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._kernel = kernel
        self.returncode: int | None = None
        self.stdin: PipeFile | None = None
        self.stdout: PipeFile | None = None
        self.stderr: PipeFile | None = None
        this = kernel.this
        theirs: dict[int, PipeEnd] = {}
        mine: dict[str, PipeEnd] = {}
        for number, name, wanted in ((0, "stdin", stdin), (1, "stdout", stdout), (2, "stderr", stderr)):
            inherited = this.descriptors.get(number)
            if wanted == subprocess.PIPE:
                pipe = Pipe()
                theirs[number] = PipeEnd(pipe, is_writer=number > 0)
                mine[name] = PipeEnd(pipe, is_writer=number == 0)
            elif wanted == subprocess.STDOUT:
                theirs[number] = theirs[1].copy()
            elif wanted is None and isinstance(inherited, PipeEnd):
                theirs[number] = inherited.copy()
        try:
            self._task: ProcessEntry = kernel.start(
                arguments, this.environment if env is None else env, theirs
            )
        except OSError:
            for end in (*theirs.values(), *mine.values()):
                end.close()
            raise
        for name, end in mine.items():
            setattr(self, name, PipeFile(kernel, kernel.open(end)))
        self.pid = self._task.pid

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._kernel.wait_for(self.pid)
            except ChildProcessError:  # somebody else has waited for it
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        machine = self._kernel.machine
        machine.pause()
        if self.poll() is None:
            descriptor = PidDescriptor(self._task)
            number = self._kernel.open(descriptor)
            try:
                self._kernel.wait_for_any([number], timeout)
            finally:
                self._kernel.close(number)
        status = self.poll()
        if status is None:
            assert timeout is not None or machine.is_over
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return status

    def communicate(self, content: bytes) -> tuple[None, None]:
        assert self.stdin is not None
        with self.stdin as pipe:
            pipe.write(content)
        self.wait()
        return None, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._kernel.send(self._task, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ProcFolder:
    """The folder /proc, with the methods of `pathlib.Path` that the package uses.

    Like a simulated module, it is the real one in threads that have not made it.
    """

    def __init__(self, kernel: Kernel, *place: str) -> None:
        self._kernel = kernel
        self._place = place
        self._owner = threading.get_ident()

    @property
    def name(self) -> str:
        return self._place[-1]

    def __truediv__(self, name: str) -> ProcFolder | Path:
        if threading.get_ident() != self._owner:
            return Path("/proc", *self._place, name)
        return ProcFolder(self._kernel, *self._place, name)

    def glob(self, pattern: str) -> list[ProcFolder] | list[Path]:
        if threading.get_ident() != self._owner:
            return list(Path("/proc", *self._place).glob(pattern))
        assert pattern == "[0-9]*" and not self._place
        return [ProcFolder(self._kernel, str(pid)) for pid in self._kernel.tasks]

    def read_text(self, errors: str = "strict") -> str:
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        self._kernel.machine.pause()
        pid, file = self._place
        task = self._kernel.tasks.get(int(pid))
        if task is None:
            raise FileNotFoundError(pid)
        if file == "stat":
            parent = 0 if task.parent is None else task.parent.pid
            fields = [task.state, str(parent), *["0"] * 17, str(task.start_time)]
            return f"{pid} ({task.process.name}) {' '.join(fields)}".encode()
        if task.status is not None:
            return b""
        words = task.arguments if file == "cmdline" else [f"{k}={v}" for k, v in task.environment.items()]
        return "".join(f"{word}\0" for word in words).encode()
