"""Measure the time from a server's start to READY, and the peak memory of all its processes.

Starts the same server as `scripts/serve` several times with one checkpoint. With `--cold` (needs root) the
checkpoint's files are removed from the page cache before each start. With `--compile` layers are compiled at
each start instead of being reused from an earlier one. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from benchmarks.measuring.options import new_parser
from benchmarks.measuring.setup import cpu_name
from inflight.arguments import positive
from inflight.server.errors import ServeError
from inflight.server.option_types import setting

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LOOK_S = 0.25
_GIVE_UP_S = 300.0
_READY = "READY "
_EVENTS = {
    "compiler has begun": re.compile("compiling the decoder"),
    "weights are there": re.compile(r"Loading .* in [\d.]+ s|packed weights are mapped"),
    "KV cache is there": re.compile("KV cache: "),
}


@dataclass(frozen=True, slots=True)
class Process:
    """Resources of one of a server's processes.

    Attributes:
        name: The model that the process runs, or its program.
        cpu_s: Processor seconds, including those of its children that have ended.
        pss_bytes: Proportional set size: a page that n processes share counts as an n-th for each.
        peak_rss_bytes: Peak resident memory, including all shared pages.
    """

    name: str
    cpu_s: float
    pss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """Measurements of one start.

    Attributes:
        ready_s: Seconds from the launcher's start to its READY line.
        events_s: Seconds from the launcher's start to certain lines of the log, by name.
        cpu_s: Processor seconds of all processes, including compilers.
        peak_pss_bytes: Peak of the total memory of all processes, sampled four times a second.
        processes: The processes at READY.
    """

    ready_s: float
    events_s: dict[str, float]
    cpu_s: float
    peak_pss_bytes: int
    processes: tuple[Process, ...]


def main() -> None:
    """Measure, and print one line of JSON last."""
    given = _arguments()
    command = _command(given)
    starts = []
    for _ in range(given.starts):
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as empty:
            environment = dict(os.environ) | ({"XDG_CACHE_HOME": empty} if given.compile else {})
            if given.cold:
                os.sync()
                _DROP_CACHES.write_text("3\n")
            starts.append(_start(command, environment))
        print(f"{starts[-1].ready_s:.2f} s", file=sys.stderr)
    print(json.dumps(_report(given, starts)))


def _command(given: argparse.Namespace) -> list[str]:
    """Return the command that starts the server at any free ports."""
    command = [sys.executable, "-m", "inflight.serve_command", "--model", str(given.model), "--openai-port=0"]
    of_triton = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    command += ["--no-triton"] if given.no_triton else of_triton
    command += ["--dtype", given.dtype] if given.dtype else []
    for key, value in given.set:
        command += ["--set", f"{key}={value}"]
    return command


def _arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser("startup", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    add("--dtype", help="default: the checkpoint's")
    add("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="as for scripts/serve")
    add("--no-triton", action="store_true", help="as for scripts/serve")
    add("--starts", type=positive, default=3, help="starts; figures are their medians (default: %(default)s)")
    add("--cold", action="store_true", help="empty the machine's page cache before each start")
    add("--compile", action="store_true", help="keep no compiled layers from one start to the next")
    return parser.parse_args(arguments)


def _report(given: argparse.Namespace, starts: list[Start]) -> dict[str, object]:
    return {
        "bench": "startup",
        "ready_s": statistics.median(start.ready_s for start in starts),
        "cpu_s": statistics.median(start.cpu_s for start in starts),
        "peak_pss_bytes": max(start.peak_pss_bytes for start in starts),
        "weights_bytes": sum(file.stat().st_size for file in given.model.glob("*.safetensors")),
        "setup": {
            "model": given.model.resolve().name,
            "dtype": given.dtype,
            "set": given.set,
            "triton": not given.no_triton,
            "cold": given.cold,
            "compile": given.compile,
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "starts": [asdict(start) for start in starts],
    }


def _start(command: list[str], environment: dict[str, str]) -> Start:
    """Start a server, wait until READY, and end it. Raises ServeError with the log if it does not get READY."""
    begin = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as server:
        log = _Log(begin)
        streams = (server.stdout, server.stderr)
        readers = [threading.Thread(target=log.copy, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        peak = 0
        try:
            while not log.ready.wait(_LOOK_S) and server.poll() is None and not log.is_late():
                peak = max(peak, sum(process.pss_bytes for process in _processes(server.pid)))
            processes = _processes(server.pid)
        finally:
            server.terminate()
            for reader in readers:
                reader.join()
    if log.ready_s is None:
        ended = f"ended with status {server.returncode}"
        state = f"was not READY after {_GIVE_UP_S:g} s" if log.is_late() else ended
        raise ServeError(f"{''.join(log.lines)}the server {state}; its log is above")
    return Start(
        ready_s=log.ready_s,
        events_s=log.events_s,
        cpu_s=round(sum(process.cpu_s for process in processes), 2),
        peak_pss_bytes=max(peak, sum(process.pss_bytes for process in processes)),
        processes=processes,
    )


class _Log:
    """Lines of a server's log with their times of arrival. A thread for each output stream reads them."""

    def __init__(self, begin: float) -> None:
        self.lines: list[str] = []
        self.events_s: dict[str, float] = {}
        self.ready_s: float | None = None
        self.ready = threading.Event()
        self._begin = begin

    def is_late(self) -> bool:
        """Return whether the server has taken too long to start."""
        return time.monotonic() - self._begin > _GIVE_UP_S

    def copy(self, stream: IO[str]) -> None:
        """Read the lines of a stream until it ends."""
        for line in stream:
            after_s = round(time.monotonic() - self._begin, 2)
            self.lines.append(line)
            for name, pattern in _EVENTS.items():
                if pattern.search(line):
                    self.events_s.setdefault(name, after_s)
            if line.startswith(_READY):
                self.ready_s = after_s
                self.ready.set()


def _processes(root: int) -> tuple[Process, ...]:
    """Return a process and all of its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        server = psutil.Process(root)
        found = map(_describe, [server, *server.children(recursive=True)])
        return tuple(process for process in found if process is not None)
    return ()


def _describe(process: psutil.Process) -> Process | None:
    """Describe the resources of a process; None if it has ended meanwhile."""
    try:
        words = process.cmdline()
        peak = _kilobytes(Path(f"/proc/{process.pid}/status"), "VmHWM:")
        pss = process.memory_full_info().pss
        cpu_s = sum(process.cpu_times()[:4])  # user and system time, its own and of children that have ended
    except (OSError, StopIteration, psutil.Error):
        return None
    return Process(_name(words), cpu_s, pss, peak * 1024) if words else None


def _kilobytes(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))


def _name(words: list[str]) -> str:
    module = next((word for word in words if word.startswith("inflight.")), None)
    model = next((Path(word).parts[-3] for word in words if word.endswith("/1/model.py")), None)
    return model or module or Path(words[0]).name


if __name__ == "__main__":
    main()
