"""`python -m inflight.server` as a child process, and the processes and files of a running server."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

LINE_TIMEOUT_S = 120.0
"""Most seconds until a program prints its next line, such as a server's READY line on a busy machine."""


class Command:
    """The command on free ports, started by construction; without an OpenAI endpoint unless given a port."""

    def __init__(self, repository: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "inflight.server", "--model-repository", str(repository), *arguments]
        for service in ("http", "grpc", "metrics"):
            if f"--{service}-port" not in arguments:
                command += [f"--{service}-port", "0"]
        if "--openai-port" not in arguments:
            command += ["--no-openai"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", bufsize=1
        )

    def ready_line(self) -> dict[str, str]:
        """Wait for the next READY line and parse it."""
        return read_ready_line(self.process)

    def server(self) -> int:
        """Process id of tritonserver."""
        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if "tritonserver" in child.exe())

    def folder(self) -> Path:
        """Private folder of the server."""
        return folder_of(self.process)


@contextlib.contextmanager
def command(repository: Path, *arguments: str) -> Iterator[Command]:
    """Yield a running command, which is killed at the end of the `with` block."""
    running = Command(repository, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate(timeout=LINE_TIMEOUT_S)


def read_ready_line(process: subprocess.Popen[str]) -> dict[str, str]:
    """Parse a command's next line, which must be a READY line."""
    addresses, _, model = read_line(process).rstrip("\n").partition(" model=")
    word, *pairs = addresses.split(" ")
    assert word == "READY"
    return dict(pair.split("=", 1) for pair in pairs) | {"model": model}


def read_line(process: subprocess.Popen, timeout_s: float = LINE_TIMEOUT_S) -> str:
    """Return the next line of the process's stdout; "" if it is closed.

    Reads the pipe byte by byte. `process.stdout` must not have been read before, because that reads ahead.

    Raises:
        AssertionError: No line came in time. The message has the states of the processes, and the text on
            stderr.
    """
    assert process.stdout is not None
    pipe, line, deadline = process.stdout.fileno(), b"", time.monotonic() + timeout_s
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    while not line.endswith(b"\n"):
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise AssertionError(f"no line in {timeout_s:g} s, only {line!r}\n{_describe(process)}")
        byte = os.read(pipe, 1)
        if not byte:
            break
        line += byte
    return line.decode()


def end(process: subprocess.Popen[str], timeout_s: float = 30.0) -> None:
    """End the process in order, or else kill it and its descendants."""
    process.terminate()
    try:
        process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.kill()
        process.communicate(timeout=timeout_s)
        raise


def _describe(process: subprocess.Popen) -> str:
    """Return a line for each descendant of `process`, and the end of its unread stderr."""
    lines = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())[:120]
            lines.append(f"{child.pid} {child.status()} {child.cpu_times().user:.1f} s of a core: {command}")
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            lines.append(os.read(process.stderr.fileno(), 1 << 16)[-4000:].decode(errors="replace"))
    return "\n".join(lines)


def children_running(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Return running children, of this process by default, whose command line contains `word`."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # the process ends meanwhile
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def folder_of(process: subprocess.Popen[str]) -> Path:
    """Return the private folder of a command's server, where tritonserver or mpirun runs."""
    folders = {Path(child.cwd()) for child in psutil.Process(process.pid).children()}
    return next(folder for folder in folders if folder != Path("/"))


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def group_members(group: int) -> list[int]:
    """Return the live processes of a process group."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and is_alive(pid):
                members.append(pid)
    return members


def shared_memory_of(server_folder: str) -> list[Path]:
    """Return the files in /dev/shm whose names contain the name of a server's folder."""
    return list(Path("/dev/shm").glob(server_folder + "*"))


def free_port() -> int:
    """Return a port of this machine that no socket has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def eventually(condition: Callable[[], bool], timeout: float = 60.0) -> bool:
    """Return whether the condition becomes true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true
