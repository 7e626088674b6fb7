"""A process beside the launcher that ends the server and removes its folder if the launcher is killed.

It only reads a pipe whose other end the launcher holds: the pipe closes when the launcher ends, for whatever
reason. The class `Keeper` is used in the launcher; the keeper process runs `python -m inflight.server.keeper
FOLDER`.
"""

import signal
import subprocess
import sys
from pathlib import Path

from inflight.server import orphans, runtime_directory

_GRACE_S = 10.0


class Keeper:
    """Starts and controls the keeper process.

    Constructed before the server is started, which thus always has one.
    """

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
        """End the keeper process, also a stopped one, after the server has ended and its files are removed."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "started without a pipe"
        self._process.stdin.close()


def main(folder: Path) -> None:
    """Wait until the launcher ends, and then end the server. The launcher kills a keeper that it no longer
    needs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for the launcher
    sys.stdin.buffer.read()
    _ask_to_end(folder)
    runtime_directory.end_processes(folder)
    runtime_directory.remove(folder)


def _ask_to_end(folder: Path) -> None:
    pid = runtime_directory.read_pid(folder)
    for process in runtime_directory.find_processes(folder):  # the process id may have been reused
        if process.pid == pid:
            process.signal(signal.SIGTERM)
            process.wait(_GRACE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
