"""`python -m inflight.server` as a child process, and which processes and files belong to a running server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


class Command:
    """The command with free ports, started by construction."""

    def __init__(self, repository: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "inflight.server", "--model-repository", str(repository), *arguments]
        for service in ("http", "grpc", "metrics"):
            if f"--{service}-port" not in arguments:
                command += [f"--{service}-port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", bufsize=1
        )

    def ready_line(self) -> dict[str, str]:
        """What the next READY line says; waits for it."""
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
        running.process.communicate()


def read_ready_line(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    word, *pairs = process.stdout.readline().rstrip("\n").split(" ", 4)
    assert word == "READY"
    return dict(pair.split("=", 1) for pair in pairs)


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


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    """Whether the condition becomes true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
