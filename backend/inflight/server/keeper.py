"""A process beside the launcher that ends the server and removes its folder if the launcher is killed.

It does nothing but read a pipe that only the launcher holds: the pipe ends when the launcher does, in whatever
way. `Keeper` is the launcher's side; `python -m inflight.server.keeper FOLDER` the other.
"""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from inflight.server import orphans, runtime_directory

_DONE = b"done\n"
_GRACE_S = 10.0


class Keeper:
    """The launcher's side; to be constructed before the server, so that the server is never without a keeper."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", "inflight.server.keeper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            umask=runtime_directory.UMASK,
        )
        orphans.claim(self._process)

    def dismiss(self) -> None:
        """End the keeper, as the server has ended and left nothing."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the keeper
            self._process.communicate(_DONE)
        self._process.wait()


def main(folder: Path) -> None:
    """Wait until the launcher says that it is done, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher
    if sys.stdin.buffer.read() == _DONE:
        return
    _ask_to_end(folder)
    runtime_directory.end_processes(folder)
    runtime_directory.remove(folder)


def _ask_to_end(folder: Path) -> None:
    pid = runtime_directory.read_pid(folder)
    for process in runtime_directory.find_processes(folder):  # another may have its number by now
        if process.pid == pid:
            process.signal(signal.SIGTERM)
            process.wait(_GRACE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
