"""A Python process beside the server that is kept running: restarted when it is lost, ended with the server.

Like all of the server's processes it is found by the server's folder, so it ends with the server even if this
launcher is killed (`keeper`). Owns one thread, which waits until the process ends and restarts it, also after
it was stopped for a while (SIGSTOP), and one that waits until the process listens.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, TextIO

from inflight.processes import LOOK_S, ProcessId, StopDetector
from inflight.server import orphans
from inflight.server.log import ServerLog
from inflight.server.runtime_directory import FOLDER_VARIABLE, UMASK

_START_CHECK_S = 0.1
_POLL_S = 0.05
_PAUSES_S = (0.0, 0.5, 1.0, 2.0)
"""Seconds before a restart, by the number of processes lost in a row. The last number is for all further
restarts."""
_PROVEN_S = 60.0
"""After a process has run for this many seconds, the number of processes lost in a row is reset."""


class KeptProcess(ABC):
    """A process that is kept running from `start` to `end` or `kill`. It prints a line when it listens.

    Args:
        name: Its name in the log.
        folder: The server's folder.
        echo: Stream for the process's output.

    Attributes:
        failure: Output of a process that ended before any process ever listened; None if none did.
    """

    def __init__(self, name: str, folder: Path, echo: TextIO | None) -> None:
        self.failure: str | None = None
        self._name = name
        self._folder = folder
        self._echo = echo
        self._was_up = False
        self._ending = threading.Event()
        self._lock = threading.Lock()  # no process may be started after the end has begun
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_up, name=name, daemon=True)

    @abstractmethod
    def _arguments(self) -> tuple[str, ...] | None:
        """Return the arguments of Python's interpreter; None while they are not known."""

    def _secret(self) -> str:
        """Return what the process reads from its standard input."""
        return ""

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        """Start the process, without waiting until it listens."""
        self._thread.start()

    def is_up(self) -> bool:
        """Return whether the process has ever listened."""
        return self._was_up

    def end(self, hurry: Callable[[], bool], timeout_s: float) -> bool:
        """Refuse new connections, let requests in flight finish, and end the process; return whether it has ended.

        Args:
            hurry: Function that returns true to stop waiting.
            timeout_s: How many seconds to wait at most.
        """
        with self._lock:
            self._ending.set()
            if self._process is not None:
                self._process.terminate()
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and not hurry() and time.monotonic() < deadline:
            self._thread.join(_POLL_S)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End the process without waiting for its requests. Idempotent."""
        with self._lock:
            self._ending.set()
            if self._process is not None:
                self._process.kill()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep_up(self) -> None:
        while (arguments := self._arguments()) is None:
            if self._ending.wait(_START_CHECK_S):
                return
        num_lost = 0
        while True:
            begun_s = time.monotonic()
            try:
                loss = self._run_one(arguments)
            except OSError as error:  # no process can be started now, or there are no descriptors
                loss = f"cannot be started ({error.strerror})"
                self.failure = None if self._was_up else loss
            if loss is None or self.failure is not None or self._ending.is_set():
                return
            num_lost = 0 if time.monotonic() - begun_s > _PROVEN_S else num_lost
            pause_s = _PAUSES_S[min(num_lost, len(_PAUSES_S) - 1)]
            num_lost += 1
            when = f"in {pause_s:g} s" if pause_s else "now"
            self._write_line(f"{self._name} {loss} and is started again {when}")
            self._ending.wait(pause_s)

    def _run_one(self, arguments: tuple[str, ...]) -> str | None:
        """Start a process and wait until it ends; return how it was lost, or None if the end had begun before."""
        process = self._start_one(arguments)
        if process is None:
            return None
        assert process.stdout is not None and process.stderr is not None, "started without pipes"
        log = ServerLog(process.stderr, self._echo, has_gpu=True)
        reading = threading.Thread(target=self._note_listening, args=(process.stdout,), daemon=True)
        reading.start()
        status = self._wait(process)
        reading.join()
        if self._ending.is_set():
            return None
        log.join(timeout=2)
        if not self._was_up:
            self.failure = log.text().strip() or f"it ended with exit status {status}"
        return f"ended (exit status {status})"

    def _note_listening(self, output: IO[bytes]) -> None:
        """Read the line that the process writes when it listens. It writes no line if it ends before."""
        with output:
            self._was_up |= bool(output.readline())

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait until a process ends, and return its exit status. Kill it if it stays stopped."""
        running = ProcessId.of(process.pid)
        detector = StopDetector()
        while running is not None and not running.wait(LOOK_S):
            if detector.look(process.pid):
                self._write_line(f"{self._name} was stopped by a signal for {LOOK_S:g} s, and is killed")
                process.kill()
        return process.wait()

    def _start_one(self, arguments: tuple[str, ...]) -> "subprocess.Popen[bytes] | None":
        """Start a process; return None if the end has begun."""
        with self._lock:
            if self._ending.is_set():
                return None
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env={**self._environment(), FOLDER_VARIABLE: str(self._folder)},
                start_new_session=True,
                umask=UMASK,
            )
            orphans.claim(self._process)
            assert self._process.stdin is not None, "started without a pipe"
            with (
                contextlib.suppress(BrokenPipeError),
                self._process.stdin as pipe,
            ):  # the process may have ended already
                pipe.write(self._secret().encode())
            return self._process

    def _write_line(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            print(f"serve: {line}", file=self._echo, flush=True)
