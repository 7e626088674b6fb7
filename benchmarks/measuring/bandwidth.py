"""Measure the present memory bandwidth, as a reference for a model's latencies on a CPU.

The memory bandwidth of a shared machine changes within seconds. `Probe` measures in a process of its own, so
that its array is not part of the caller's memory, and its threads are not pinned like the caller's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_ARRAY_BYTES = 1 << 28  # far beyond any cache
_CHUNK_BYTES = 1 << 20
_PASSES = 3


def read_gb_per_s(num_threads: int) -> float:
    """Read a large array in chunks of 1 MB by parallel threads; return the best of three passes, in GB/s."""
    # The array is filled with ones, because pages that were never written may all be the same physical page.
    chunks = np.ones((_ARRAY_BYTES // _CHUNK_BYTES, _CHUNK_BYTES // 8), np.int64)
    parts = np.array_split(chunks, num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        seconds = [_time_pass(threads, parts) for _ in range(_PASSES)]
    return _ARRAY_BYTES / min(seconds) / 1e9


def _time_pass(threads: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    begun = time.perf_counter()
    list(threads.map(_read, parts))
    return time.perf_counter() - begun


def _read(part: np.ndarray) -> None:
    for chunk in part:
        np.bitwise_or.reduce(chunk)


class Probe:
    """A context manager that measures on request. It must be created before the caller's threads are pinned."""

    def __init__(self, num_threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measuring.bandwidth", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[2],  # where Python finds the package `benchmarks`
        )

    def gb_per_s(self) -> float:
        """Return the bandwidth in GB/s like `read_gb_per_s`. Takes about half a second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        return float(self._process.stdout.readline())

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main() -> None:
    """Run the process: measure and print a figure for each line of standard input."""
    for _ in sys.stdin:
        print(read_gb_per_s(int(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
