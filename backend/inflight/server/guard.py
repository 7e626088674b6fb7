"""A process beside that of every model: it ends the server if the model's process is killed.

tritonserver 2.51 neither answers the requests of a model whose process is gone nor starts another one, and takes
the model for ready all the while. `Guard` is the model's side; `python -m inflight.server.guard` the other. It
reads a pipe that only the model's process holds: one that ends without a goodbye, falls silent or asks for it has
the server ended within seconds, and with it the other models' processes, the ranks, and what all of them had in
shared memory. `scripts/serve` then starts the server again.
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

from inflight.processes import ProcessId, this_parent
from inflight.server.runtime_directory import UMASK, note_loss

_END, _DISMISS, _REST = b"end", b"dismiss", b"rest"
_RANKS, _FILES, _BEAT = b"ranks", b"files", b"beat"
_SHARED_MEMORY = Path("/dev/shm")
_REGION = 2  # of a stub's arguments: the name of its shared memory
_STUB = b"triton_python_backend_stub"
_SERVER_GRACE_S = 2.0
_RANKS_GRACE_S = 1.0
_KILLED_S = 2.0
SILENCE_S = 20.0
"""How long a model's process may be silent: one that is stopped, or whose native code holds Python's lock."""

_BEATS_PER_TIMEOUT = 5
_STOPPED = 1.5  # a wait that takes so many times as long: this process was stopped itself


class Guard:
    """The side of the model's process, whose parent is tritonserver; every such process has one. Any thread.

    Args:
        python: The interpreter.
        model: The model's name, for the log.
        kept_open: File descriptors that the guard holds as long as it lives.
    """

    def __init__(self, python: str, model: str, *kept_open: int) -> None:
        self._process = subprocess.Popen(
            # Its own region too, as the arguments of a process that has been killed cannot be read.
            [python, "-I", "-m", "inflight.server.guard", str(this_parent()), _region(os.getpid()), model],
            bufsize=0,  # so that a line is one write, from any thread
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=kept_open,
        )
        self._has_ended = threading.Event()

    def watch(self, launcher: ProcessId, folder: str) -> None:
        """End ranks with the server: `launcher` is what ends them, `folder` is theirs in shared memory."""
        self._tell(b"%s %s %s" % (_RANKS, str(launcher).encode(), os.fsencode(folder)))

    def remove_later(self, files: str) -> None:
        """Remove files whose paths start with `files` when the server has been ended; "" for none."""
        if files:
            self._tell(b"%s %s" % (_FILES, os.fsencode(files)))

    def beat(self, timeout_s: float) -> None:
        """Tell the guard regularly that this process lives; `timeout_s` seconds of silence count as its end."""
        threading.Thread(target=self._beat, args=(timeout_s,), name="guard-beat", daemon=True).start()

    def end_server(self) -> None:
        """End the server and everything that belongs to it, this process too."""
        self._tell(_END)

    def dismiss(self) -> None:
        """This process ends in order, or another takes its place. Idempotent."""
        self._has_ended.set()
        self._tell(_DISMISS)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def rest(self) -> None:
        """Do nothing any more, but live as long as the server, and hold what is to be held."""
        self._has_ended.set()
        self._tell(_REST)

    def _beat(self, timeout_s: float) -> None:
        while not self._has_ended.is_set():
            self._tell(b"%s %g" % (_BEAT, timeout_s))
            self._has_ended.wait(timeout_s / _BEATS_PER_TIMEOUT)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # somebody has killed the guard, or it is dismissed
            assert self._process.stdin is not None
            self._process.stdin.write(line + b"\n")


def keep_private() -> None:
    """Have nobody but this user read what this process makes, nor its shared memory; for a stub of tritonserver's.

    tritonserver lets everybody read a stub's shared memory, whatever the umask says.
    """
    if name := _region(os.getpid()):
        os.umask(UMASK)
        (_SHARED_MEMORY / name).chmod(0o600)


def guard_in_server(model: str) -> Guard | None:
    """A guard of this process; None where it is not a stub of tritonserver's, and so has no server to end."""
    return Guard(sys.executable, model) if _region(os.getpid()) else None


def guard_of_front_end(model: str) -> Guard | None:
    """The same for a model without an engine, whose silence counts as its end."""
    guard = guard_in_server(model)
    if guard is not None:
        guard.beat(SILENCE_S)
    return guard


class _NextAction(Enum):
    """The guard's next action after a message from the model's process, or after its end."""

    END = "the server is to be ended, or has ended"
    DISMISS = "there is nothing more to do"
    REST = "nor is there, but the server's end is waited for"


@dataclass(slots=True)
class _Leftovers:
    """The processes and files that have to be ended and removed beside the server.

    Attributes:
        region: The name of the shared memory of the model's process.
        model: The model's name.
        launcher: The process that ends the ranks.
        folder: The ranks' folder in shared memory; "" without ranks.
        files: The beginning of the paths of other files to remove; "" for none.
        timeout_s: Seconds of silence after which the model's process counts as lost; None before its first beat.
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
    """Wait until the model's process says something or ends, or until the server ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the server
    leftovers = _Leftovers(region, model)
    with server.opened() as server_end:
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
        _say(f"the process of the model {leftovers.model} {what}")
    return _NextAction.END


def _wait(pipe: int, server_end: int, timeout_s: float | None) -> list[int]:
    """The descriptors that can be read; none after `timeout_s` seconds in which this process was not stopped."""
    while True:
        begun_s = time.monotonic()
        ready = select.select([pipe, server_end], [], [], timeout_s)[0]
        if ready or timeout_s is None or time.monotonic() - begun_s < _STOPPED * timeout_s:
            return ready


def _say(what: str) -> None:
    """Write to the server's log as its own errors are written, so that this is found as the cause of the end."""
    when = time.strftime("E%m%d %H:%M:%S.000000")
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(f"{when} {os.getpid()} guard.py] {what}: the server ends", file=sys.stderr)


def _end_all(server: ProcessId, leftovers: _Leftovers) -> None:
    # Whether or not the server still runs: told by a guard, it may end as if somebody had wanted it to, and mpirun
    # may end with status 0 although its tritonserver was killed.
    note_loss()
    stubs = [child for child in server.children() if _STUB in _arguments(child.pid)[0]]
    # Exact names, as two servers may share a prefix.
    regions = {name for name in [leftovers.region, *(_region(stub.pid) for stub in stubs)] if name}
    launcher = leftovers.launcher
    server.signal(signal.SIGTERM)
    if launcher is not None:
        launcher.signal(signal.SIGTERM)
    server.wait(_SERVER_GRACE_S)
    for process in [server, *stubs]:
        process.signal(signal.SIGKILL)
    if launcher is not None and not launcher.wait(_RANKS_GRACE_S):
        launcher.signal(signal.SIGKILL)  # the ranks end with it
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


def _region(stub: int) -> str:
    """The name of a stub's shared memory; "" of any other process."""
    arguments = _arguments(stub)
    if _STUB not in arguments[0] or len(arguments) <= _REGION:
        return ""
    name = os.fsdecode(arguments[_REGION])
    return name if Path(name).name == name else ""


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


if __name__ == "__main__":
    main(ProcessId.parse(sys.argv[1]), *sys.argv[2:])
