"""Keep a server running: if the server ends by itself, it is started again on the same ports.

If a model's process is killed, the guard ends the server (`guard`), and some requests make tritonserver 2.51
abort. In either case the connections of the requests in flight are closed. This module decides when to
restart and when to give up, kills a tritonserver that stays stopped (SIGSTOP), and handles the signals that end
this process. Runs on the main thread.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TextIO

from inflight.interrupts import INTERRUPTED
from inflight.processes import LOOK_S, StopDetector
from inflight.server import orphans
from inflight.server.errors import ServeError
from inflight.server.launch import ServerOptions, TritonServer, start_with_tries
from inflight.server.ports import reserve_ports, resolve_host

_PAUSES_S = (0.0, 0.5, 1.0, 2.0)
"""Seconds before a start, by the number of servers lost in a row. The last number is for all further starts."""

_PROVEN_S = 60.0
"""After a server was ready for this many seconds, the number of servers lost in a row is reset."""


def _wake(_: int, __: FrameType | None) -> None:
    """Do nothing: a handler must exist for the signal to put a byte into the pipe."""


class Signals:
    """The signals that end this process, and a wait that they interrupt.

    The handlers only record the signal. A byte in a pipe wakes the waiting thread; this also happens when a
    child process ends.
    """

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> "Signals":
        self._wakeup, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)
        signal.signal(signal.SIGCHLD, _wake)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the handlers installed, so that no late signal changes this process's exit status."""

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)

    def any(self) -> bool:
        """Return whether a signal to end has arrived."""
        return bool(self.received)

    def several(self) -> bool:
        """Return whether a second signal has arrived, which means to end at once."""
        return len(self.received) > 1

    def exit_status(self, has_served: bool) -> int:
        """Return the exit status of a server that signals have ended; `has_served`: whether it had been ready."""
        if self.several():
            return 128 + self.received[-1]
        return INTERRUPTED if self.received == [signal.SIGINT] and not has_served else 0

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until a signal arrives, or until `until` returns true, which is checked when a child process ends.

        Waits at most `timeout` seconds; None: no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.received and not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if select.select([self._wakeup], [], [], left)[0]:
                os.read(self._wakeup, 64)


class Supervisor:
    """Runs one server after another with the same options.

    Args:
        options: Options of every server.
        signals: The signals that end this process.
        echo: Stream for the servers' logs and the supervisor's own lines.
        on_ready: Called with each server when it is ready.
    """

    def __init__(
        self,
        options: ServerOptions,
        signals: Signals,
        echo: TextIO,
        on_ready: Callable[[TritonServer], None],
    ) -> None:
        self._options = options
        self._signals = signals
        self._echo = echo
        self._on_ready = on_ready
        self._has_served = False
        self._num_lost = 0  # in a row

    def run(self) -> int:
        """Serve until a signal ends this process; return the exit status.

        Raises ServeError if no server can be kept running.
        """
        orphans.adopt()
        options = self._options
        # Each server listens on the same ports, which no other program can choose while there is no server.
        with reserve_ports(resolve_host(options.host), options.ports) as ports:
            self._options = replace(options, ports=ports)
            return self._run()

    def _run(self) -> int:
        while (server := self._start()) is not None:
            try:
                with contextlib.closing(server):
                    loss = self._watch(server)
            finally:
                orphans.reap()
            if loss is None:
                break
            self._pause(loss)
        return self._signals.exit_status(self._has_served)

    def _start(self) -> TritonServer | None:
        """Start a server and return it when it is ready; return None if a signal to end arrives before."""
        return start_with_tries(
            self._start_once,
            self._options.restarts,
            after_any_failure=self._has_served,
            before_next=lambda error: self._pause(_first_line(error)),
        )

    def _start_once(self) -> TritonServer | None:
        if self._has_served and self._signals.any():
            return None
        try:
            return self._make_ready()
        except OSError as error:
            if not self._has_served:
                raise
            # The disk may have room again when the server is started again.
            raise ServeError(f"the server cannot be started: {error}") from error

    def _make_ready(self) -> TritonServer | None:
        server = TritonServer(self._options, self._echo)
        try:
            server.start()
            if server.wait_ready(interrupted=self._signals.any, report=self._write_line):
                return server
            server.shut_down(hurry=self._signals.several)
        except BaseException:  # also after Ctrl-C, the server must not stay behind
            server.close()
            raise
        server.close()
        return None

    def _watch(self, server: TritonServer) -> str | None:
        """Wait until a ready server ends; return how it was lost, or None after a signal to end.

        Raises ServeError if the server must not be restarted.
        """
        self._has_served = True
        ready_at = time.monotonic()
        self._on_ready(server)
        self._wait_for_end(server)
        is_replaceable = self._has_ended(server) and server.was_lost and self._options.restarts
        if self._signals.any():
            if not is_replaceable:  # a signal that arrives after the loss only prevents the next start
                self._shut_down(server)
            return None
        self._log_last_requests(server)
        if not is_replaceable:
            raise server.ended()
        if time.monotonic() - ready_at > _PROVEN_S:
            self._num_lost = 0
        return _first_line(server.ended())

    def _wait_for_end(self, server: TritonServer) -> None:
        """Wait until the server ends or a signal arrives. Kill a tritonserver that stays stopped (SIGSTOP)."""
        # The number is read once: something may remove its file later, such as a program that cleans up /tmp.
        pid, detector = server.pid, StopDetector()
        while not self._signals.any() and not self._has_ended(server):
            self._signals.wait(until=lambda: self._has_ended(server), timeout=LOOK_S)
            if not self._has_ended(server) and detector.look(pid):
                self._write_line(f"tritonserver was stopped by a signal for {LOOK_S:g} s, and is killed")
                server.kill()

    def _has_ended(self, server: TritonServer) -> bool:
        orphans.reap()
        return server.returncode is not None

    def _shut_down(self, server: TritonServer) -> None:
        if server.shut_down(hurry=self._signals.several) or self._signals.several():
            return
        if server.was_ended_by_guard:  # as if the guard had ended it before the signal
            self._write_line(
                "the process of a model was lost before the end, and the requests in flight with it"
            )
            return
        timeout = self._options.exit_timeout_s
        raise ServeError(f"tritonserver had not finished after {timeout} s and was ended")

    def _log_last_requests(self, server: TritonServer) -> None:
        """Log the last requests before the loss, one of which may have caused it."""
        for request in server.last_requests():
            self._write_line(f"one of the last requests before the end: {request}")

    def _pause(self, loss: str) -> None:
        pause_s = _PAUSES_S[min(self._num_lost, len(_PAUSES_S) - 1)]
        self._num_lost += 1
        when = f"in {pause_s:g} s" if pause_s else "now"
        lost = "what was in flight is lost, and " if self._has_served else ""
        self._write_line(f"{loss}; {lost}the server is started again {when}")
        self._signals.wait(until=lambda: False, timeout=pause_s)

    def _write_line(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            print(f"serve: {line}", file=self._echo, flush=True)


def _first_line(error: ServeError) -> str:
    return str(error).splitlines()[0].rstrip(":")
