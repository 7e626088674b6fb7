"""`python -m inflight.server` as a child process, and which processes and files belong to a running server."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

LINE_TIMEOUT_S = 120.0
"""How long a program may take to print its next line: a server, to be ready on a machine that is busy."""


class Command:
    """The command with free ports, started by construction; without an OpenAI endpoint unless it gets a port."""

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
        """The tritonserver's process id."""
        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if "tritonserver" in child.exe())

    def folder(self) -> Path:
        """The server's private folder."""
        return folder_of(self.process)


@contextlib.contextmanager
def command(repository: Path, *arguments: str) -> Iterator[Command]:
    """A running command, killed at the end of the `with`."""
    running = Command(repository, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate(timeout=LINE_TIMEOUT_S)


def read_ready_line(process: subprocess.Popen[str]) -> dict[str, str]:
    """Parse the next line of a command, which has to be a READY line."""
    addresses, _, model = read_line(process).rstrip("\n").partition(" model=")
    word, *pairs = addresses.split(" ")
    assert word == "READY"
    return dict(pair.split("=", 1) for pair in pairs) | {"model": model}


def read_line(process: subprocess.Popen, timeout_s: float = LINE_TIMEOUT_S) -> str:
    """The next line of the process's stdout; empty if it has closed it.

    It is read from the pipe byte by byte, so `process.stdout` must not have been read from, as that reads ahead.

    Raises:
        AssertionError: None came in time. The message has its processes' states, and what it wrote to stderr.
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
    """Have the process end in order, or else kill it with all that it has started."""
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
    """A line for each process below this one, and the last of what stderr holds unread."""
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
    """The children of a process (this one, if no id is given) that run and whose command line holds ``word``."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended, or ends meanwhile
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def folder_of(process: subprocess.Popen[str]) -> Path:
    """The private folder of a command's server, which is where tritonserver or mpirun runs."""
    folders = {Path(child.cwd()) for child in psutil.Process(process.pid).children()}
    return next(folder for folder in folders if folder != Path("/"))


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def group_members(group: int) -> list[int]:
    """Live processes of a process group."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and is_alive(pid):
                members.append(pid)
    return members


def shared_memory_of(server_folder: str) -> list[Path]:
    """The files in /dev/shm that carry the name of a server's folder."""
    return list(Path("/dev/shm").glob(server_folder + "*"))


def eventually(condition: Callable[[], bool], timeout: float = 60.0) -> bool:
    """Whether the condition becomes true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
