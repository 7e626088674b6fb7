"""Code shared by the peers' programs in this folder: options, clock, and the line of figures.

It is imported in a peer's environment, from the same folder and not from a package, and imports only the
standard library. Runs on the process's main thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, and the number of tokens to generate. Generation is greedy and ignores end ids."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that run together ("w") or one after the other ("lone")."""

    name: str
    requests: tuple[Request, ...]

    @property
    def is_together(self) -> bool:
        """Return whether all requests are submitted at once."""
        return self.name == "w"


@dataclass(frozen=True)
class Setting:
    """The options of a program.

    `kv_cache_tokens` is large enough for all concurrent requests, each in whole blocks of up to 128 tokens.
    """

    model: str
    workloads: tuple[Workload, ...]
    dtype: str
    threads: int
    kv_cache_tokens: int

    @property
    def max_together(self) -> int:
        """Return the largest number of requests that run at a time."""
        return max(len(workload.requests) if workload.is_together else 1 for workload in self.workloads)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest request, prompt and output together."""
        requests = itertools.chain.from_iterable(workload.requests for workload in self.workloads)
        return max(len(request.prompt) + request.max_tokens for request in requests)

    def kv_cache_blocks(self, tokens_per_block: int) -> int:
        """Return the number of blocks for `kv_cache_tokens`, rounded up."""
        return -(-self.kv_cache_tokens // tokens_per_block)

    def refuse_other_dtypes_than(self, *dtypes: str) -> None:
        """Raise SystemExit if the dtype is not among those that the peer supports."""
        if self.dtype not in dtypes:
            raise SystemExit(f"--dtype {self.dtype}: this peer runs {' and '.join(dtypes)}")


@dataclass(frozen=True)
class KvCache:
    """A system's KV cache: its size in tokens, and the bytes of each stored value, without scales."""

    tokens: int
    value_bytes: int


class System(ABC):
    """A loaded peer.

    Attributes:
        kv_cache: The system's KV cache.
    """

    kv_cache: KvCache

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        """Submit all requests and wait until they end.

        Returns the `time.perf_counter()` of every token, per request.
        """

    def notes(self) -> Mapping[str, object]:
        """Return further values to print, by name."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End threads and processes that would keep this process from ending."""


def main(load: Callable[[Setting], System], *packages: str) -> None:
    """Load the system, warm up and measure each workload, and print a line of JSON.

    The versions of `packages` are printed, too. Times are in milliseconds, or in seconds if the name ends in
    `_s`. `load_s` is without imports; `start_s` is measured from the start of the process.
    """
    setting = _parse()
    begun = time.perf_counter()
    system = load(setting)
    loaded, start_s = time.perf_counter(), seconds_since_process_start()
    measured = {workload.name: _warm_up_and_measure(system, workload) for workload in setting.workloads}
    resources = {
        "peak_rss_bytes": peak_rss_bytes(),
        "kv_cache": asdict(system.kv_cache),
        "load_s": round(loaded - begun, 3),
        "start_s": round(start_s, 3),
    }
    versions = {"versions": {package: _version(package) for package in packages}}
    print(json.dumps({**measured, **resources, **versions, **system.notes()}), flush=True)
    system.close()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # the package may be installed under another name
        return None


def _warm_up_and_measure(system: System, workload: Workload) -> dict:
    system.run(warm_up(workload))
    return measure(system, workload)


def warm_up(workload: Workload) -> list[Request]:
    """Return the requests to run before timing, so that every batch shape occurs.

    These are all requests if they run together, otherwise the first one.
    """
    return list(workload.requests if workload.is_together else workload.requests[:1])


def measure(system: System, workload: Workload) -> dict:
    """Run the requests, together or one after the other, and return the figures.

    Raises RuntimeError if a request returns more or fewer tokens than requested, because the work would then
    differ.
    """
    requests = list(workload.requests)
    groups = [requests] if workload.is_together else [[request] for request in requests]
    timelines: list[list[float]] = []
    seconds = 0.0
    for group in groups:
        begun = time.perf_counter()
        moments = system.run(group)
        _check_lengths(group, moments)
        timelines += [[moment - begun for moment in row] for row in moments]
        seconds += max(row[-1] for row in moments) - begun
    return figures(timelines, seconds)


def _check_lengths(requests: list[Request], moments: list[list[float]]) -> None:
    for number, (request, row) in enumerate(zip(requests, moments)):
        if len(row) != request.max_tokens:
            raise RuntimeError(
                f"request {number} ended with {len(row)} tokens, expected {request.max_tokens}"
            )


def figures(timelines: list[list[float]], seconds: float) -> dict:
    """Return the figures. `timelines` has, for each request, the seconds from submission to each token."""
    first = [row[0] for row in timelines]
    gaps = [later - earlier for row in timelines for earlier, later in itertools.pairwise(row)]
    return {
        "output_tokens_per_s": round(sum(map(len, timelines)) / seconds, 2),
        "ttft_ms": _percentiles_ms(first),
        "itl_ms": _percentiles_ms(gaps),
    }


def _percentiles_ms(values: list[float]) -> dict | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: round(1e3 * ordered[round(part * last)], 3) for name, part in (("p50", 0.5), ("p99", 0.99))}


def _parse() -> Setting:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint, or the peer's conversion of it")
    parser.add_argument(
        "--requests",
        type=Path,
        required=True,
        help='JSON: {"w": [{"prompt": [ids], "max_tokens": n}, …], "lone": […]}; one or both, in this order',
    )
    parser.add_argument("--dtype", choices=("bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-cache-tokens", type=int, required=True)
    options = parser.parse_args()
    workloads = tuple(
        Workload(name, tuple(Request(**fields) for fields in requests))
        for name, requests in json.loads(options.requests.read_text()).items()
    )
    return Setting(options.model, workloads, options.dtype, options.threads, options.kv_cache_tokens)


def seconds_since_process_start() -> float:
    """Return the process's age by the kernel's record, which includes starting Python and importing."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    started_ticks = int(fields[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Return the peak resident memory of a process in bytes."""
    # ru_maxrss is not used, because it would include the memory of the parent at the fork.
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) * 1024
