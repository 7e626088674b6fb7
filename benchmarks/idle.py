"""Measure how many seconds of processor time each process of an idle server takes.

Starts the same server as `scripts/serve`, with ranks if `--tp` is given, sends one request, and then reads
the processor time of all of the server's processes twice, `--seconds` apart. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.measuring.options import duration, new_parser
from inflight.arguments import positive
from inflight.server import runtime_directory
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight_client import Client


def main() -> None:
    """Measure, and print one line of JSON last."""
    parser = new_parser("idle", __doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; the demo model without one")
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=duration, default=10.0, help="time to measure (default: %(default)s)"
    )
    given = parser.parse_args()
    options = ServerOptions(tp=given.tp, mode="orchestrator") if given.tp > 1 else ServerOptions()
    with serve(model=given.model, options=options) as server:
        with contextlib.closing(Client(server.grpc)) as client:
            client.generate("a", max_tokens=2)
        time.sleep(1.0)  # wait for work after the request
        print(json.dumps(report(given, processor_time(lambda: _processes(server), given.seconds))))


def report(given: argparse.Namespace, used_s: dict[str, float]) -> dict[str, object]:
    """Return the line of JSON.

    Args:
        given: The command line.
        used_s: Processor time in seconds of each process.
    """
    return {
        "bench": "idle",
        "cores": round(sum(used_s.values()) / given.seconds, 5),
        "processes_s": {name: round(used, 3) for name, used in used_s.items()},
        "setup": {"tp": given.tp, "seconds": given.seconds, "model": given.model and given.model.name},
    }


def processor_time(find: Callable[[], Iterator[psutil.Process]], seconds: float) -> dict[str, float]:
    """Return the processor time in seconds that the present processes use within `seconds`, by name and number."""
    before = {process: _used_s(process) for process in find()}
    time.sleep(seconds)
    return {f"{process.name()} {process.pid}": _used_s(process) - used for process, used in before.items()}


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _processes(server: TritonServer) -> Iterator[psutil.Process]:
    """Yield tritonserver, its models' processes, guards and ranks."""
    pids = {
        server.pid,
        *(each.pid for each in runtime_directory.find_processes(server.repository.path.parent)),
    }
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(pid)


if __name__ == "__main__":
    main()
