"""A process beside each model's process that ends the server if the model's process is killed.

If a model's process is killed, tritonserver 2.51 neither answers its requests nor starts another process,
and still reports the model as ready. The class `Guard` is used in the model's process; the guard process
runs `python -m inflight.server.guard` and reads a pipe that only the model's process can write to. If the
model's process ends without dismissing the guard, stops sending heartbeats, or asks the guard to end the
server, the guard ends the server within seconds, with the processes of all models, the ranks, and all of
their shared memory. `scripts/serve` then starts the server again.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from inflight.processes import ProcessId, this_parent, words_of
from inflight.server.runtime_directory import UMASK, note_loss

_END, _DISMISS, _REST = b"end", b"dismiss", b"rest"
_RANKS, _FILES, _BEAT = b"ranks", b"files", b"beat"
_SHARED_MEMORY = Path("/dev/shm")
# Indices in a stub's arguments: the name of its shared memory, and the process id of its tritonserver.
_REGION, _SERVER = 2, 5
_STUB = b"triton_python_backend_stub"
_SERVER_GRACE_S = 2.0
_RANKS_GRACE_S = 1.0
_KILLED_S = 2.0
_DISMISSED_S = 10.0  # longer than it takes a guard that has just begun to end the server
SILENCE_S = 20.0
"""Largest number of seconds between heartbeats. They stop if a process is stopped, or native code holds the
GIL."""

_BEATS_PER_TIMEOUT = 5
_STOPPED = 1.5  # if a wait takes this many times its timeout, the guard itself was stopped


class Guard:
    """Starts and controls the guard of a model's process, whose parent is tritonserver. Any thread.

    A process must have only one.

    Args:
        python: The Python interpreter.
        model: The model's name, for the log.
        kept_open: File descriptors that the guard process keeps open.
    """

    def __init__(self, python: str, model: str, *kept_open: int) -> None:
        self._process = subprocess.Popen(
            # The name of this process's shared memory is passed to the guard, because the arguments of a
            # killed process cannot be read.
            [python, "-I", "-m", "inflight.server.guard", str(_server()), _region(os.getpid()), model],
            bufsize=0,  # so that a line is one write, from any thread
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=kept_open,
        )
        self._has_ended = threading.Event()

    def watch(self, launcher: ProcessId, folder: str) -> None:
        """When the server ends, end the ranks by killing `launcher`, and remove `folder`, their shared memory."""
        self._send(b"%s %s %s" % (_RANKS, str(launcher).encode(), os.fsencode(folder)))

    def remove_later(self, files: str) -> None:
        """After the server has ended, remove files whose paths start with `files`; "": no files."""
        if files:
            self._send(b"%s %s" % (_FILES, os.fsencode(files)))

    def beat(self, timeout_s: float) -> None:
        """Start a thread that sends heartbeats.

        After `timeout_s` seconds without one, this process counts as lost.
        """
        threading.Thread(target=self._beat, args=(timeout_s,), name="guard-beat", daemon=True).start()

    def end_server(self) -> None:
        """End the server and all of its processes, including this one."""
        self._send(_END)

    def dismiss(self) -> None:
        """End the guard process, because this process ends in order or another one replaces it. Idempotent."""
        self._has_ended.set()
        self._send(_DISMISS)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_DISMISSED_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()

    def rest(self) -> None:
        """End the supervision of this process, but keep the guard and its descriptors until the server ends."""
        self._has_ended.set()
        self._send(_REST)

    def _beat(self, timeout_s: float) -> None:
        while not self._has_ended.is_set():
            self._send(b"%s %g" % (_BEAT, timeout_s))
            self._has_ended.wait(timeout_s / _BEATS_PER_TIMEOUT)

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # the guard was killed or dismissed
            assert self._process.stdin is not None
            self._process.stdin.write(line + b"\n")


def keep_private() -> None:
    """Make this process's new files and its stub's shared memory readable for this user only.

    tritonserver makes a stub's shared memory readable for all users, whatever the umask is. Has no effect
    outside of a stub.
    """
    if name := _region(os.getpid()):
        os.umask(UMASK)
        (_SHARED_MEMORY / name).chmod(0o600)


def guard_in_server(model: str) -> Guard | None:
    """Start a guard for this process; return None if this process is not a stub of tritonserver."""
    return Guard(sys.executable, model) if _region(os.getpid()) else None


def guard_of_front_end(model: str) -> Guard | None:
    """Start a guard, with heartbeats, for a model without an engine; return None if this process is not a stub."""
    guard = guard_in_server(model)
    if guard is not None:
        guard.beat(SILENCE_S)
    return guard


class _NextAction(Enum):
    """The guard's next action after a message from the model's process, or after its end."""

    END = "end the server and its processes"
    DISMISS = "end the guard process"
    REST = "wait until the server ends, then end the guard process"


@dataclass(slots=True)
class _Leftovers:
    """The processes and files to end and remove with the server.

    Attributes:
        region: Name of the shared memory of the model's process.
        model: Name of the model.
        launcher: Process whose end makes the ranks end; None without ranks.
        folder: The ranks' folder in shared memory; "" without ranks.
        files: Prefix of the paths of other files to remove; "": no files.
        timeout_s: Seconds without a heartbeat after which the model's process counts as lost; None before
            its first heartbeat.
    """

    region: str
    model: str
    launcher: ProcessId | None = None
    folder: str = ""
    files: str = ""
    timeout_s: float | None = None

    def note(self, word: bytes, about: str) -> None:
        if word == _RANKS:
            launcher, self.folder = about.split(" ", 1)
            self.launcher = ProcessId.parse(launcher)
        elif word == _FILES:
            self.files = about
        elif word == _BEAT:
            self.timeout_s = float(about)


def main(server: ProcessId, region: str, model: str) -> None:
    """Run the guard process until it is dismissed or the server has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for the server
    leftovers = _Leftovers(region, model)
    with server.open_pidfd() as server_end:
        action = _NextAction.END if server_end is None else _listen(server_end, leftovers)
    if action is _NextAction.END:
        _end_all(server, leftovers)
    elif action is _NextAction.REST:
        server.wait()


def _listen(server_end: int, leftovers: _Leftovers) -> _NextAction:
    pipe, unread = sys.stdin.fileno(), b""
    while pipe in (ready := _wait(pipe, server_end, leftovers.timeout_s)):
        part = os.read(pipe, 4096)
        if not part:
            break
        *lines, unread = (unread + part).split(b"\n")
        for line in lines:
            word, _, about = line.partition(b" ")
            if word == _END:
                return _NextAction.END
            if word in (_DISMISS, _REST):
                return _NextAction.DISMISS if word == _DISMISS else _NextAction.REST
            leftovers.note(word, os.fsdecode(about))
    if server_end not in ready:
        what = "has ended" if ready else f"has been silent for {leftovers.timeout_s:g} s"
        _log_error(f"the process of the model {leftovers.model} {what}")
    return _NextAction.END


def _wait(pipe: int, server_end: int, timeout_s: float | None) -> list[int]:
    """Return the readable descriptors; [] after `timeout_s` seconds. Time in which this process is stopped is not
    counted."""
    while True:
        begun_s = time.monotonic()
        ready = select.select([pipe, server_end], [], [], timeout_s)[0]
        if ready or timeout_s is None or time.monotonic() - begun_s < _STOPPED * timeout_s:
            return ready


def _log_error(what: str) -> None:
    """Write to the server's log in the format of its errors, so that `find_cause` finds the line."""
    when = time.strftime("E%m%d %H:%M:%S.000000", time.gmtime())  # Triton logs UTC
    with contextlib.suppress(OSError):  # stderr is closed
        print(f"{when} {os.getpid()} guard.py] {what}: the server ends", file=sys.stderr)


def _end_all(server: ProcessId, leftovers: _Leftovers) -> None:
    # The loss is recorded even if the server has already ended. When a guard ends tritonserver,
    # tritonserver's exit status may be that of an ordinary end, and mpirun's may be 0 although tritonserver
    # was killed.
    note_loss()
    stubs = [child for child in server.children() if _STUB in words_of(child.pid, "cmdline")[0]]
    # The names must match exactly, because one server's prefix may be the beginning of another server's.
    regions = {name for name in [leftovers.region, *(_region(stub.pid) for stub in stubs)] if name}
    launcher = leftovers.launcher
    server.signal(signal.SIGTERM)
    if launcher is not None:
        launcher.signal(signal.SIGTERM)
    server.wait(_SERVER_GRACE_S)
    for process in [server, *stubs]:
        process.signal(signal.SIGKILL)
    if launcher is not None and not launcher.wait(_RANKS_GRACE_S):
        launcher.signal(signal.SIGKILL)  # the ranks end with this process
        launcher.wait(_KILLED_S)
    for process in [server, *stubs]:
        process.wait(_KILLED_S)
    for name in regions:
        (_SHARED_MEMORY / name).unlink(missing_ok=True)
    if leftovers.folder:
        shutil.rmtree(leftovers.folder, ignore_errors=True)
    if leftovers.files:
        for path in Path(leftovers.files).parent.glob(f"{Path(leftovers.files).name}*"):
            path.unlink(missing_ok=True)


def _server() -> ProcessId:
    """Return the tritonserver of this stub, also if it has ended, and this process has got another parent."""
    parent, arguments = this_parent(), words_of(os.getpid(), "cmdline")
    started_by = (
        int(arguments[_SERVER]) if _region(os.getpid()) and len(arguments) > _SERVER + 1 else parent.pid
    )
    return parent if parent.pid == started_by else ProcessId(started_by, start_time=0)  # which has ended


def _region(stub: int) -> str:
    """Return the name of a stub's shared memory; "" for any other process."""
    arguments = words_of(stub, "cmdline")
    if _STUB not in arguments[0] or len(arguments) <= _REGION:
        return ""
    name = os.fsdecode(arguments[_REGION])
    return name if Path(name).name == name else ""


if __name__ == "__main__":
    main(ProcessId.parse(sys.argv[1]), *sys.argv[2:])
