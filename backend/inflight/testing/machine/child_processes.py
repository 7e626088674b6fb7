"""The machine's `subprocess.Popen`: a process with pipes, which is killed when its parent ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import greenlet

from .scheduler import Process, Waiters
from .sockets import Network, Socket

_KILLED = -9
_LONGEST_START_S = 1.0


class _ChildPipe:
    """One end of a pipe, with the methods of a binary file."""

    def __init__(self, end: Socket) -> None:
        self._end = end

    def read(self, count: int) -> bytes:
        """Read until there are `count` bytes, or the pipe ends."""
        received = b""
        try:
            while len(received) < count and (part := self._end.recv(count - len(received))):
                received += part
        except OSError:
            pass  # the other process has ended within its message
        return received

    def write(self, data: bytes) -> int:
        try:
            self._end.sendall(data)
        except OSError as error:
            raise BrokenPipeError(*error.args) from None
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._end.close()


Program = Callable[[Sequence[str], Any, Any], None]
"""The function that a process runs; its arguments are the command, the input and the output."""


class ChildProcess:
    """A process that a process of the machine starts, with the methods of `subprocess.Popen`.

    Args:
        network: The machine's sockets.
        program: The function that the process runs.
        command: Its command line.
        options: The options of `Popen`, which have no effect.

    Attributes:
        process: The process.
        returncode: Its exit status; None: it has not ended.
    """

    def __init__(self, network: Network, program: Program, command: Sequence[str], **options: object) -> None:
        machine = self._machine = network.machine
        self._parent = machine.process
        self.process: Process = machine.start_process("child")
        jobs, answers = (network.pair(self._parent, self.process) for _ in range(2))
        self.stdin, self.stdout = _ChildPipe(jobs[0]), _ChildPipe(answers[0])
        self.returncode: int | None = None
        self._ended = Waiters(machine)
        self._parent.resources[id(self)] = self

        def run() -> None:
            machine.sleep(machine.rng.random() * _LONGEST_START_S)
            try:
                program(command, _ChildPipe(jobs[1]), _ChildPipe(answers[1]))
            except greenlet.GreenletExit:
                raise
            except SystemExit as error:
                self._end(int(error.code or 0))
            except BaseException:  # as an interpreter ends
                self._end(1)
            else:
                self._end(0)

        machine.spawn(self.process, run, "main")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        self._end(_KILLED)

    def end_with_process(self) -> None:
        """End with the process that started this one."""
        self.kill()

    def _end(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
            self._machine.kill(self.process)
            self._parent.resources.pop(id(self), None)
            self._ended.wake()
