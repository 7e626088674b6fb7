"""Code shared by the programs beside this one: their options, the clock, and the line with the figures.

Runs in a peer's environment, where only the standard library is certain to be there, as a script's neighbour and
not as a part of a package: it knows neither the peer nor this project. One thread, the process's main one.
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
    """Token ids of a prompt, and how many tokens to generate, greedily and past any end id."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that run together ("w") or one after the other ("lone")."""

    name: str
    requests: tuple[Request, ...]

    @property
    def is_together(self) -> bool:
        """Whether all requests are submitted at once."""
        return self.name == "w"


@dataclass(frozen=True)
class Setting:
    """The options that a program was started with. `kv_cache_tokens` is enough for all concurrent requests, each
    in whole blocks of up to 128 tokens."""

    model: str
    workloads: tuple[Workload, ...]
    dtype: str
    threads: int
    kv_cache_tokens: int

    @property
    def max_together(self) -> int:
        """Requests that run at a time."""
        return max(len(workload.requests) if workload.is_together else 1 for workload in self.workloads)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        requests = itertools.chain.from_iterable(workload.requests for workload in self.workloads)
        return max(len(request.prompt) + request.max_tokens for request in requests)

    def kv_cache_blocks(self, tokens_per_block: int) -> int:
        """`kv_cache_tokens` in blocks; a part of one counts."""
        return -(-self.kv_cache_tokens // tokens_per_block)

    def refuse_other_dtypes_than(self, *dtypes: str) -> None:
        """Raises SystemExit where the peer has no such weights."""
        if self.dtype not in dtypes:
            raise SystemExit(f"--dtype {self.dtype}: this peer runs {' and '.join(dtypes)}")


@dataclass(frozen=True)
class KvCache:
    """KV cache that a system was given: its room in tokens, and the bytes of a number in it without scales."""

    tokens: int
    value_bytes: int


class System(ABC):
    """A loaded peer.

    Attributes:
        kv_cache: What it has for keys and values.
    """

    kv_cache: KvCache

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        """Submits all requests at once and waits for them; for each, `time.perf_counter()` of every token."""

    def notes(self) -> Mapping[str, object]:
        """Return further values to print, by name."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Ends what would keep the process from ending."""


def main(load: Callable[[Setting], System], *packages: str) -> None:
    """Loads, then warms up for each workload and measures it, and prints a line of JSON.

    `packages` are those whose versions are told. Times are in milliseconds, or where the name says so in seconds:
    `load_s` without imports, `start_s` from the start of the process.
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
    except PackageNotFoundError:  # the same code may be installed under another name
        return None


def _warm_up_and_measure(system: System, workload: Workload) -> dict:
    system.run(warm_up(workload))
    return measure(system, workload)


def warm_up(workload: Workload) -> list[Request]:
    """Everything once, or one request if they come one by one: every shape of a batch has been seen then."""
    return list(workload.requests if workload.is_together else workload.requests[:1])


def measure(system: System, workload: Workload) -> dict:
    """Runs the requests, together or one after the other.

    Raises RuntimeError if a request ends with another number of tokens than it asked for: the work would differ.
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
    """`timelines`: for each request, seconds from its submission to each token. Gaps of all are one heap."""
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
    parser.add_argument("--model", required=True, help="a checkpoint, or what the peer made from one")
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
    """From the kernel's record, so that starting Python and importing count too."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    started_ticks = int(fields[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Most memory that a process has had resident so far."""
    # ru_maxrss would begin with what the parent held when it forked.
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) * 1024
