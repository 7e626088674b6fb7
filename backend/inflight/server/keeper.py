"""A process beside the launcher that ends the server and removes its folder if the launcher is killed.

It does nothing but read a pipe that only the launcher holds: the pipe ends when the launcher does, in whatever
way. `Keeper` is the launcher's side; `python -m inflight.server.keeper FOLDER` the other.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from inflight.server import runtime_directory

_DONE = b"done\n"
_GRACE_S = 10.0
_POLL_INTERVAL_S = 0.1


class Keeper:
    """Started before the server, so that there is no moment at which nobody would end it."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", "inflight.server.keeper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Tell it which process group is the server's."""
        self._tell(b"%d\n" % group)

    def dismiss(self) -> None:
        """The server has ended and left nothing; so does the keeper."""
        self._tell(_DONE)
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: bytes) -> None:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):  # somebody has killed the keeper
                self._process.stdin.write(line)
                self._process.stdin.flush()


def main(folder: Path) -> None:
    """Wait for the launcher's word or its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher
    lines = sys.stdin.buffer.readlines()
    if _DONE in lines:
        return
    for line in lines:
        _end_group(int(line))
    runtime_directory.remove(folder)


def _end_group(group: int) -> None:
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(_POLL_INTERVAL_S)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
