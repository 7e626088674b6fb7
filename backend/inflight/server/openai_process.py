"""The process beside tritonserver that serves OpenAI's protocol.

It is started, restarted and ended with the server.

The process runs `python -m inflight.openai`. It listens before the engine exists, and connects to the engine
when the engine listens; so it is started while the models load, and keeps running when an engine is
unloaded. Like all of the server's processes it is found by the server's folder, so it ends with the server
even if this launcher is killed (`keeper`). Owns one thread, which waits until the process ends and restarts
it.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from inflight.openai.options import API_KEYS_VARIABLE, OpenAiOptions, to_arguments
from inflight.server import orphans
from inflight.server.log import ServerLog
from inflight.server.runtime_directory import FOLDER_VARIABLE, UMASK

_SOCKET_CHECK_S = 0.1
_POLL_S = 0.05
_PAUSES_S = (0.0, 0.5, 1.0, 2.0)
"""Seconds before a restart, by the number of processes lost in a row. The last number is for all further
restarts."""
_PROVEN_S = 60.0
"""After a process has run for this many seconds, the number of processes lost in a row is reset."""


class OpenAiProcess:
    """The process of an OpenAI endpoint, kept running from `start` to `end` or `kill`.

    Args:
        options: Options of the endpoint; its port must be free.
        find_socket: Function that returns the path of the engine's socket; None while it is not known.
        folder: The server's folder.
        exit_timeout_s: How many seconds requests in flight may continue at the end.
        echo: Stream for the process's output.

    Attributes:
        failure: Output of a process that ended before the endpoint ever listened; None if no process did.
    """

    def __init__(
        self,
        options: OpenAiOptions,
        find_socket: Callable[[], Path | None],
        folder: Path,
        exit_timeout_s: int,
        echo: TextIO | None,
    ) -> None:
        self.failure: str | None = None
        self._options = options
        self._find_socket = find_socket
        self._folder = folder
        self._exit_timeout_s = exit_timeout_s
        self._echo = echo
        self._was_up = False
        self._ending = threading.Event()
        self._lock = threading.Lock()  # no process may be started after the end has begun
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_up, name="openai-process", daemon=True)

    @property
    def url(self) -> str:
        """URL of the endpoint."""
        scheme = "http" if self._options.tls_certificate is None else "https"
        return f"{scheme}://{self._options.host}:{self._options.port}"

    def start(self) -> None:
        """Start the process, without waiting until it listens."""
        self._thread.start()

    def is_up(self) -> bool:
        """Return whether the endpoint has ever listened, even if the engine cannot be reached."""
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
        while (engine := self._find_socket()) is None:
            if self._ending.wait(_SOCKET_CHECK_S):
                return
        num_lost = 0
        while (process := self._start_one(engine)) is not None:
            begun_s = time.monotonic()
            assert process.stdout is not None and process.stderr is not None, "started without pipes"
            log = ServerLog(process.stderr, self._echo, has_gpu=True)
            # The process writes one line when it listens, and no line if it ends before.
            self._was_up |= bool(process.stdout.readline())
            status = process.wait()
            process.stdout.close()
            if self._ending.is_set():
                return
            log.join(timeout=2)
            if not self._was_up:
                self.failure = log.text().strip() or f"it ended with exit status {status}"
                return
            num_lost = 0 if time.monotonic() - begun_s > _PROVEN_S else num_lost
            pause_s = _PAUSES_S[min(num_lost, len(_PAUSES_S) - 1)]
            num_lost += 1
            when = f"in {pause_s:g} s" if pause_s else "now"
            self._write_line(f"the OpenAI endpoint ended (exit status {status}) and is started again {when}")
            self._ending.wait(pause_s)

    def _start_one(self, engine: Path) -> "subprocess.Popen[bytes] | None":
        """Start a process; return None if the end has begun."""
        place = ("--engine-endpoint", str(engine), "--exit-timeout", str(self._exit_timeout_s))
        keys = "\n".join(
            self._options.api_keys
        )  # passed by a pipe, because other users can read a command line or an environment
        key_file = ("--api-key-file", "/dev/stdin") if keys else ()
        environment = {name: value for name, value in os.environ.items() if name != API_KEYS_VARIABLE}
        with self._lock:
            if self._ending.is_set():
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "inflight.openai", *place, *to_arguments(self._options), *key_file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env={**environment, FOLDER_VARIABLE: str(self._folder)},
                start_new_session=True,
                umask=UMASK,
            )
            orphans.claim(self._process)
            assert self._process.stdin is not None, "started without a pipe"
            with (
                contextlib.suppress(BrokenPipeError),
                self._process.stdin as pipe,
            ):  # the process may have ended already
                pipe.write(keys.encode())
            return self._process

    def _write_line(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            print(f"serve: {line}", file=self._echo, flush=True)
